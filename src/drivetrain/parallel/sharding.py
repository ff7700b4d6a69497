"""FSDP2, mixed precision and compilation, applied to a policy from outside."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from drivetrain.parallel.float8 import use_float8
from drivetrain.parallel.precision import compute_in, hold_frozen


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    precision: str,
    *,
    whole: Iterable[nn.Module] = (),
    exact: Iterable[nn.Module] = (),
    float8: Iterable[nn.Module] = (),
) -> None:
    """Shard `model` in place along `mesh`: each block a unit, the root last. Blocks are compiled on CUDA.

    precision: "bfloat16" computes in bfloat16 from float32 weights; gradients are always reduced in float32. What does not
               train is held in bfloat16. "float8" is the same, with the products of the Linears in `float8` in FP8.
    whole: further units, which are gathered only while they are used.   exact: units that compute in float32.
    Gradients are summed, never averaged: the loss is divided once, by the global count.

    A mesh of one process has nothing to gather: there FSDP2 would copy every weight three times a step, so the precision
    is applied alone.
    """
    exact, blocks = list(exact), list(blocks)
    half = None if precision == "float32" else torch.bfloat16
    quantised = use_float8(float8) if precision == "float8" else []
    if half:
        hold_frozen(model, half, exact)
    if mesh.device_type == "cuda":
        for block in blocks:
            block.compile(dynamic=False)
    if mesh.size() == 1:
        if half:
            compute_in(
                model, half, [*exact, *quantised]
            )  # FP8 is rounded to from the float32 weights, not from bfloat16
        return
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*blocks, *whole):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for unit in exact:
        fully_shard(unit, mesh=mesh, mp_policy=float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "act")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
