"""Mixed precision, applied to a model from outside: computed in one dtype, trained in float32."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def hold_frozen(model: nn.Module, dtype: torch.dtype, exact: Iterable[nn.Module] = ()) -> None:
    """Hold every parameter that does not train in `dtype`, in place, but those of the modules in `exact`.

    It is computed with in that dtype anyway; a float32 copy would cost memory, and a cast in every step.
    """
    for module in _others(model, exact):
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)


def compute_in(model: nn.Module, dtype: torch.dtype, exact: Iterable[nn.Module] = ()) -> None:
    """Let the forward pass of `model` read its parameters as `dtype`, but those of the modules in `exact`.

    The parameters themselves, their names and the dtype of their gradients do not change. Fully sharded modules bring the
    same about when they gather; this is for a process that has its parameters whole. The cast stands inside each block, where
    compiling fuses it, and is part of the graph, so that gradients return in the parameters' own dtype.
    """
    for module in _others(model, exact):
        if isinstance(module, nn.Embedding):  # rows are cast, not the table
            module.register_forward_hook(functools.partial(_cast_output, dtype))
        elif names := tuple(n for n, p in module._parameters.items() if p is not None and p.dtype != dtype):
            module.__class__ = _casting(type(module), names, dtype)


def _others(model: nn.Module, exact: Iterable[nn.Module]) -> list[nn.Module]:
    left_out = {id(m) for unit in exact for m in unit.modules()}
    return [m for m in model.modules() if id(m) not in left_out]


def _cast_output(dtype: torch.dtype, _module: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
    return output.to(dtype)


@functools.cache
def _casting(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """`kind` with these parameters read through a cast. A property stands before nn.Module's own look-up."""

    def reader(name: str) -> property:
        return property(lambda self: self._parameters[name].to(dtype))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})
