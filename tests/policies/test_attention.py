"""The back ends of varlen_attention agree with attention written out, in values and in gradients."""

from __future__ import annotations

import pytest
import torch

from drivetrain.policies.blocks.attention import varlen_attention

CASES = {
    "self": ([5, 3, 5, 7], [5, 3, 5, 7], False),
    "causal": ([5, 3, 5, 7], [5, 3, 5, 7], True),
    "causal, empty segments": ([5, 0, 5, 0, 2], [5, 0, 5, 0, 2], True),
    "cross": ([4, 4, 4], [6, 2, 9], False),
    "cross, no keys and no queries": ([4, 4, 4, 0], [6, 0, 2, 5], False),
    "nothing": ([0, 0], [0, 0], False),
}


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def written_out(q, k, v, cu_q, cu_k, causal, scale):
    """softmax(q k^T) v with a dense mask over the whole stream."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    rows_q, rows_k = torch.arange(len(q)), torch.arange(len(k))
    segment = [torch.searchsorted(cu[1:].long(), r, right=True) for cu, r in ((cu_q, rows_q), (cu_k, rows_k))]
    visible = segment[0][:, None] == segment[1][None]
    if causal:
        visible &= rows_q[:, None] >= rows_k[None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.exp() * visible
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_loop_equals_attention_written_out(case, kv_heads):
    lengths_q, lengths_k, causal = CASES[case]
    cu_q, cu_k = bounds(lengths_q), bounds(lengths_k)
    torch.manual_seed(0)
    q = torch.randn(sum(lengths_q), 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = varlen_attention(q, k, v, cu_q, cu_k, 9, 9, causal=causal, scale=0.3)
    expected = written_out(q, k, v, cu_q, cu_k, causal, 0.3)
    assert torch.allclose(out, expected, atol=1e-12)
    if not len(q):
        return
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), cotangent)
    wanted = torch.autograd.grad(expected, (q, k, v), cotangent)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_loop_passes_gradcheck():
    cu_q, cu_k = bounds([2, 3, 2]), bounds([3, 1, 3])
    q = torch.randn(7, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(7, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda *x: varlen_attention(*x, cu_q, cu_k, 3, 3, causal=False, scale=None), (q, k, v)
    )


@pytest.mark.parametrize("case", [c for c in CASES if c != "nothing"])
def test_flex_agrees_with_the_loop(case):
    lengths_q, lengths_k, causal = CASES[case]
    q = torch.randn(sum(lengths_q), 4, 16)
    k, v = (torch.randn(sum(lengths_k), 2, 16) for _ in range(2))
    made = [
        varlen_attention(q, k, v, bounds(lengths_q), bounds(lengths_k), 9, 9, causal=causal, backend=backend)
        for backend in ("flex", "loop")
    ]
    assert torch.allclose(*made, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernel runs on CUDA alone")
@pytest.mark.parametrize("case", [c for c in CASES if c != "nothing"])
@pytest.mark.parametrize("width", [48, 64, 72, 128])
@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_cuda_kernels_agree_with_the_loop(case, width, backend):
    lengths_q, lengths_k, causal = CASES[case]
    if backend == "flex" and width & (width - 1):
        pytest.skip("flex on CUDA takes head sizes that are powers of two")
    dtype = torch.bfloat16
    q = torch.randn(sum(lengths_q), 4, width, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(lengths_k), 2, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    cu_q, cu_k = bounds(lengths_q).cuda(), bounds(lengths_k).cuda()
    found = varlen_attention(q, k, v, cu_q, cu_k, 64, 64, causal=causal, backend=backend)
    cotangent = torch.randn_like(found)
    grads = torch.autograd.grad(found, (q, k, v), cotangent)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = varlen_attention(*exact, cu_q, cu_k, 64, 64, causal=causal, backend="loop")
    wanted_grads = torch.autograd.grad(wanted, exact, cotangent.double())
    for a, b in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        assert torch.allclose(a.double(), b, atol=3e-2, rtol=3e-2)
