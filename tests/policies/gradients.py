"""When two computations of one gradient agree in float32, on any processor and with any number of threads."""

from __future__ import annotations

import re

import torch

from drivetrain.policies.blocks.checkpoint import Parts

# The bias of a key adds the same number to every score of a query, and softmax is blind to that: its gradient is zero
# by mathematics, and whatever is computed for it is the rounding of that machine. Of the rest
# of a tensor in which it is stacked (queries, values) this is not true, so gradients are compared by published tensor.
ZERO_BY_MATHEMATICS = re.compile(r"\.(k_proj|to_k)\.bias$")

# Shares of a tensor's own norm, and of the norm of the whole gradient. Measured with the instruction sets default, AVX2
# and AVX-512 and with one and two threads: rounding moves a tensor by at most 2.3e-6 of its norm, and tensors without a
# gradient hold at most 2e-8 of the whole; the smallest of the others holds 4e-5 of it.
RELATIVE = 1e-4
OF_THE_WHOLE = 2e-9
ZERO = 1e-6


def by_part(gradients: dict[str, torch.Tensor], parts: Parts) -> dict[str, torch.Tensor]:
    """Gradients of our parameters -> those of the published tensors that are stacked in them."""
    made = {}
    for name, gradient in gradients.items():
        rows = [part.rows or len(gradient) for part in parts[name]]
        made |= {p.name: g for p, g in zip(parts[name], gradient.split(rows), strict=True)}
    return made


def whole_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(sum(g.double().square().sum() for g in gradients.values()) ** 0.5)


def disagreements(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float = RELATIVE
) -> dict[str, str]:
    """Names of published tensors -> how their gradients differ, for those that do."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    whole, wrong = whole_norm(wanted), {}
    for name, gradient in wanted.items():
        error, size = (float(x.double().norm()) for x in (found[name].double() - gradient.double(), gradient))
        if ZERO_BY_MATHEMATICS.search(name):
            if not max(size, float(found[name].double().norm())) <= ZERO * whole:
                wrong[name] = f"has no gradient by mathematics, but norm {size:.1e} where the whole has {whole:.1e}"
        elif not error <= relative * size + OF_THE_WHOLE * whole:
            wrong[name] = f"differs by {error:.1e}; its norm is {size:.1e}, that of the whole {whole:.1e}"
    return wrong


def assert_sees_an_error_in_every_gradient(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float = RELATIVE
) -> None:
    """The bounds bite: each gradient made wrong by a thousandth, or a zero one by a thousandth of the others', is named."""
    for name, gradient in found.items():
        if ZERO_BY_MATHEMATICS.search(name):
            changed = gradient + whole_norm(wanted) * 1e-3 / gradient.numel() ** 0.5
        else:
            changed = gradient * 1.001
        assert disagreements(found | {name: changed}, wanted, relative).keys() == {name}
