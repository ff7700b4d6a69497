"""FP8 matrix products, applied to a model's Linears from outside.

Scaling is dynamic and per tensor: every operand is divided by its own largest magnitude in the very step that uses it, so
nothing saturates, there is no history to save, and a run resumes exactly. Activations and weights are rounded to e4m3,
gradients, whose range is wider, to e5m2; products accumulate in float32. All three products of a trained Linear are in FP8;
what is kept for the backward pass is the FP8 copy of the input, half the bytes of a bfloat16 one.

The products want one operand in row order and the other in column order, which is why both orders of an operand are made
where both are used. On a CPU the operands are rounded in the same way and multiplied in float32: slow, and the same numbers
up to the order of summation, so that the code that trains on GPUs is the code that is tested.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the FP8 kernels take no other number of rows or columns


class Float8Linear(nn.Linear):
    """A Linear whose products are in FP8. Parameters, their names and the results' dtype are those of the Linear."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2)
        learns = torch.is_grad_enabled()
        made = _Float8Product.apply(
            rows, self.weight, learns and rows.requires_grad, learns and self.weight.requires_grad
        )
        assert isinstance(made, Tensor)
        if self.bias is not None:
            made = made + self.bias.to(made.dtype)
        return made.unflatten(0, input.shape[:-1])


def use_float8(linears: Iterable[nn.Module]) -> list[nn.Module]:
    """Turn these Linears into Float8Linears, in place, where their shape allows it; returns those it turned."""
    turned: list[nn.Module] = []
    for linear in linears:
        assert type(linear) is nn.Linear, f"{type(linear).__name__} is no plain Linear"
        if linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0:
            linear.__class__ = Float8Linear
            turned.append(linear)
    return turned


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x rounded to `dtype` after scaling, float32 scalar that scales it back). Zeros stay zeros; a value that is not
    finite makes the scale, and so the whole product, not finite: it is seen, not clipped."""
    top = torch.finfo(dtype).max
    largest = x.abs().amax().float()
    scale = torch.where(largest > 0, top / largest.clamp(min=1e-30), 1.0)
    return (x.float() * scale).clamp(-top, top).to(dtype), (largest / top).where(largest > 0, 1.0)


def scaled_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 a [M, K], in row order, times b [K, N], in column order -> [M, N] in `dtype`."""
    if a.is_cuda:
        # fast accumulation skips the promotion of partial sums to float32: kept for the forward pass, as is usual
        fast = BACKWARD not in (a.dtype, b.dtype)
        return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)  # type: ignore[reportPrivateImportUsage]
    product = (a.float() @ b.float()) * (a_scale * b_scale)
    # a cast that casts nothing returns its input, and compiling would then lose the gradient
    return product if dtype == product.dtype else product.to(dtype)


class _Float8Product(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed -> [M, N] in x's dtype; the weight's gradient has the weight's dtype.

    x_learns, weight_learns: whether either needs a gradient; plain arguments, because compiling does not know it in here.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, x_learns: bool, weight_learns: bool
    ) -> Tensor:
        x8, x_scale = quantise(x, FORWARD)
        w8, w_scale = quantise(weight, FORWARD)
        # [K, M] and [K, N] in row order: what the backward products want in column order
        x8_columns = x8.t().contiguous() if weight_learns else None
        w8_columns = w8.t().contiguous() if x_learns else None
        ctx.save_for_backward(x8_columns, x_scale, w8_columns, w_scale)  # type: ignore[arg-type]
        ctx.weight_dtype = weight.dtype  # type: ignore[attr-defined]
        return scaled_product(x8, w8.t(), x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        x8_columns, x_scale, w8_columns, w_scale = ctx.saved_tensors
        grad8, grad_scale = quantise(grad, BACKWARD)
        dx = dw = None
        if w8_columns is not None:
            dx = scaled_product(grad8, w8_columns.t(), grad_scale, w_scale, grad.dtype)
        if x8_columns is not None:
            rows = grad8.t().contiguous()
            dw = scaled_product(rows, x8_columns.t(), grad_scale, x_scale, ctx.weight_dtype)
        return dx, dw, None, None
