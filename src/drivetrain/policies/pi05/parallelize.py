"""How pi-0.5 is sharded and compiled. The model itself knows nothing of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from drivetrain.policies.pi05.model import Pi05


def parallelize(model: Pi05, mesh: DeviceMesh, precision: str) -> None:
    """Shard `model` in place: blocks as units, root last; gradients are summed in float32, never averaged.

    The flow time and the action projections stay in float32, as published. The word embedding is a unit of its own, so
    that its 527 million parameters are whole only while words are looked up.
    The loss is divided once, by the global count, so no reduction may divide again.
    """
    half = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks(model):
        if mesh.device_type == "cuda":
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
    for part in (model.conditioning, model.action_in, model.action_out):
        fully_shard(part, mesh=mesh, mp_policy=exact)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "act")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def blocks(model: Pi05) -> list[nn.Module]:
    """The repeated blocks, in the order in which a forward pass meets them."""
    return [*model.vision.blocks, *model.layers]
