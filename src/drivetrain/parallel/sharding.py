"""FSDP2 and compilation, applied to a policy from outside."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    precision: str,
    *,
    whole: Iterable[nn.Module] = (),
    exact: Iterable[nn.Module] = (),
) -> None:
    """Shard `model` in place along `mesh`: each block a unit, the root last. Blocks are compiled on CUDA.

    precision: "bfloat16" computes in bfloat16 from float32 weights; gradients are always reduced in float32.
    whole: further units, which are gathered only while they are used.   exact: units that compute in float32.
    Gradients are summed, never averaged: the loss is divided once, by the global count.
    """
    half = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if mesh.device_type == "cuda":
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for unit in whole:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for unit in exact:
        fully_shard(unit, mesh=mesh, mp_policy=float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "act")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
