"""Attention over segments that lie end to end: one function, three back ends that agree.

| back end | where                       | what it is for                                                      |
| -------- | --------------------------- | ------------------------------------------------------------------- |
| `flash`  | CUDA, bfloat16 and float16  | training on GPUs: torch's own variable-length flash kernel          |
| `flex`   | CUDA; CPU without gradients | cross-check, and GPUs or head sizes that the flash kernel lacks     |
| `loop`   | everywhere, every dtype     | CPUs, and the oracle: torch's dense attention, segment by segment   |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Backend = Literal["flash", "flex", "loop"]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    scale: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention in which the queries of segment i see the keys of segment i and no others.

    q:          [Tq, heads, d].   k, v: [Tk, kv_heads, d]; each key head serves heads / kv_heads query heads.
    cu_q, cu_k: int32 [segments + 1], from 0; segment i of q is q[cu_q[i]:cu_q[i+1]]. They must end at Tq and Tk, so
                that every row belongs to a segment and every gradient is written. Segments may be empty.
    max_q, max_k: no segment is longer; Python ints, so that no kernel launch waits for the device.
    causal:     query j of a segment sees the keys 0..j; cu_q and cu_k must then be equal.
    scale:      of the scores; 1/sqrt(d) when None.
    Returns [Tq, heads, d]; zeros for queries of a segment without keys.
    """
    assert q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[2] == k.shape[2], (q.shape, k.shape, v.shape)
    assert q.shape[1] % k.shape[1] == 0 and cu_q.shape == cu_k.shape, (q.shape, k.shape, cu_q.shape, cu_k.shape)
    if backend is None:
        backend = "loop" if on_host(q) else "flash" if q.dtype.itemsize == 2 or not q.is_cuda else "flex"
    if backend == "flash":
        return _flash(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)
    if backend == "flex":
        return _flex(q, k, v, cu_q, cu_k, causal, scale)
    return _loop(q, k, v, tuple(cu_q.tolist()), tuple(cu_k.tolist()), causal, scale)


def on_host(x: Tensor) -> bool:
    """Whether the values of `x` can be read at no cost: they are not on a device, and not the shapes of a dry run."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unmasked attention of sequences of one length: q [B, Nq, heads, d], k and v [B, Nk, heads, d] -> as q."""
    attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return attended.transpose(1, 2)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # fewer key heads than query heads need no copies: the kernel itself shares them
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window)
    assert isinstance(out, Tensor)
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """The mask is a function of segment numbers, compiled into the kernel on CUDA."""
    from torch.nn.attention.flex_attention import create_block_mask

    segment_q, segment_k = _segment_of(cu_q, q.shape[0]), _segment_of(cu_k, k.shape[0])

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = segment_q[i] == segment_k[j]
        return same & (i >= j) if causal else same

    mask = create_block_mask(visible, None, None, q.shape[0], k.shape[0], device=q.device.type)
    attend = _compiled_flex() if q.is_cuda else _eager_flex()
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(out, Tensor)
    return out.squeeze(0).transpose(0, 1)


def _eager_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


_flex_kernel = None


def _compiled_flex():
    global _flex_kernel
    if _flex_kernel is None:
        _flex_kernel = torch.compile(_eager_flex(), dynamic=False)
    return _flex_kernel


def _segment_of(cu: Tensor, rows: int) -> Tensor:
    """int64 [rows]: the segment that each row belongs to."""
    return torch.searchsorted(cu[1:], torch.arange(rows, device=cu.device, dtype=cu.dtype), right=True)


@dataclass(frozen=True)
class _Groups:
    """Segments sorted by shape. shapes: (queries, keys, segments) of each group; forth, back: row orders, or None."""

    shapes: tuple[tuple[int, int, int], ...]
    forth_q: Tensor | None
    back_q: Tensor | None
    forth_k: Tensor | None
    back_k: Tensor | None


@functools.lru_cache(maxsize=64)  # every layer of a pack asks for the same few
def _group(cu_q: tuple[int, ...], cu_k: tuple[int, ...], device: torch.device) -> _Groups:
    alike: dict[tuple[int, int], list[int]] = {}
    for i in range(len(cu_q) - 1):
        alike.setdefault((cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]), []).append(i)
    groups = [(shape, members) for shape, members in alike.items() if shape != (0, 0)]
    members = [i for _, group in groups for i in group]
    shapes = tuple((*shape, len(group)) for shape, group in groups)
    return _Groups(shapes, *_order(cu_q, members, device), *_order(cu_k, members, device))


def _order(cu: tuple[int, ...], members: list[int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The row order that lays these segments end to end, and the order back; None where nothing moves."""
    rows = [torch.arange(cu[i], cu[i + 1]) for i in members if cu[i] != cu[i + 1]]
    forth = torch.cat(rows) if rows else torch.arange(0)
    if torch.equal(forth, torch.arange(len(forth))):
        return None, None
    return forth.to(device), torch.argsort(forth).to(device)


def _loop(
    q: Tensor, k: Tensor, v: Tensor, cu_q: tuple[int, ...], cu_k: tuple[int, ...], causal: bool, scale: float | None
) -> Tensor:
    """Segments of equal length share one batched call: a few calls per pack, not one per sample."""
    assert cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0], (cu_q[-1], q.shape, cu_k[-1], k.shape)
    assert not causal or cu_q == cu_k, "causal attention needs the same segments in queries and keys"
    groups = _group(cu_q, cu_k, q.device)
    q, k, v = _permute(q, groups.forth_q, groups.back_q), *(_permute(x, groups.forth_k, groups.back_k) for x in (k, v))
    parts_q = q.split([queries * count for queries, _, count in groups.shapes])
    parts_k, parts_v = (x.split([keys * count for _, keys, count in groups.shapes]) for x in (k, v))
    outs = []
    for (queries, keys, count), pq, pk, pv in zip(groups.shapes, parts_q, parts_k, parts_v, strict=True):
        if queries == 0 or keys == 0:
            outs.append(pq * 0.0)
            continue
        dq, dk, dv = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (pq, pk, pv))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(dq, dk, dv, is_causal=causal, scale=scale, enable_gqa=grouped)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outs[0] if len(outs) == 1 else torch.cat([*outs, q[:0]])
    return _permute(joined, groups.back_q, groups.forth_q)


def _permute(x: Tensor, forth: Tensor | None, back: Tensor | None) -> Tensor:
    return x if forth is None else _Permute.apply(x, forth, back)  # type: ignore[return-value]


class _Permute(torch.autograd.Function):
    """x[forth], whose gradient is a gather too: far faster on a CPU than the scatter that autograd would use."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(forth, back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        forth, back = ctx.saved_tensors
        return _Permute.apply(grads[0], back, forth), None, None  # type: ignore[return-value]
