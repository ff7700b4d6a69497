"""FP8 products against exact ones; the emulation runs the code that trains on GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from drivetrain.parallel.float8 import BACKWARD, FORWARD, Float8Linear, quantise, use_float8


@pytest.mark.parametrize(("dtype", "step"), [(FORWARD, 2**-4), (BACKWARD, 2**-3)])
def test_rounding_is_relative_and_nothing_saturates(dtype, step):
    torch.manual_seed(0)
    x = torch.randn(64, 64) * torch.logspace(-2, 2, 64)
    rounded, scale = quantise(x, dtype)
    back = rounded.float() * scale
    top = x.abs().max()
    assert torch.allclose(back.abs().max(), top)
    normal = x.abs() > top * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
    assert ((back - x).abs() <= step * x.abs() * 1.001)[normal].all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    rounded, scale = quantise(torch.zeros(16, 16), FORWARD)
    assert torch.equal(rounded.float() * scale, torch.zeros(16, 16))
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 5] = bad
        rounded, scale = quantise(x, FORWARD)
        assert not (rounded.float() * scale).isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_and_its_gradients(dtype, compiled):
    torch.manual_seed(0)
    exact = nn.Linear(64, 128)
    rough = copy.deepcopy(exact)
    assert use_float8([rough]) == [rough] and type(rough) is Float8Linear
    x, grad = torch.randn(4, 16, 64), torch.randn(4, 16, 128)
    inputs = [x.clone().to(dtype).requires_grad_(), x.clone().requires_grad_()]
    run = torch.compile(rough, backend="aot_eager") if compiled else rough
    made, wanted = run(inputs[0]), exact(inputs[1])
    made.backward(grad.to(dtype))
    wanted.backward(grad)
    assert made.dtype == dtype and rough.weight.grad.dtype == torch.float32

    def error(a, b):
        return float((a.float() - b).norm() / b.norm())

    # e4m3 rounds by up to 1/16, evenly spread: about 0.026 an operand, 0.037 a product; e5m2 by twice that
    assert 0.02 < error(made.detach(), wanted.detach()) < 0.05
    assert 0.03 < error(inputs[0].grad, inputs[1].grad) < 0.08
    assert 0.03 < error(rough.weight.grad, exact.weight.grad) < 0.08
    assert error(rough.bias.grad, exact.bias.grad) < 0.01


def test_a_frozen_linear_passes_gradients_on_and_takes_none():
    torch.manual_seed(0)
    linear = nn.Linear(32, 32).requires_grad_(False)
    use_float8([linear])
    x = torch.randn(16, 32, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad.norm() > 0
    with torch.no_grad():
        assert linear(x).shape == (16, 32)


def test_shapes_that_the_kernels_cannot_take_stay_as_they_are():
    linears = [nn.Linear(30, 32), nn.Linear(32, 30), nn.Linear(32, 48)]
    assert use_float8(linears) == linears[2:]
    assert type(linears[0]) is nn.Linear


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU's FP8 kernels with the emulation")
def test_the_kernels_agree_with_the_emulation():
    torch.manual_seed(0)
    here = nn.Linear(256, 512)
    use_float8([here])
    there = copy.deepcopy(here).cuda()
    x, grad = torch.randn(128, 256).bfloat16(), torch.randn(128, 512).bfloat16()
    a, b = x.clone().requires_grad_(), x.cuda().requires_grad_()
    made, wanted = there(b), here(a)
    made.backward(grad.cuda())
    wanted.backward(grad)
    for found, true in ((made, wanted), (b.grad, a.grad), (there.weight.grad, here.weight.grad)):
        assert (found.detach().cpu().float() - true.detach().float()).norm() <= 5e-3 * true.detach().float().norm()
