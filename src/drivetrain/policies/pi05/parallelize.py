"""How pi-0.5 is sharded. The model itself knows nothing of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.parallel.sharding import shard
from drivetrain.policies.pi05.model import Pi05


def parallelize(model: Pi05, mesh: DeviceMesh, precision: str) -> None:
    """Shard `model` in place; see `drivetrain.parallel.sharding`.

    The flow time and the action projections stay in float32, as published. The word embedding is a unit of its own, so
    that its 527 million parameters are whole only while words are looked up.
    """
    exact = (model.conditioning, model.action_in, model.action_out)
    shard(model, blocks(model), mesh, precision, whole=(model.embedding,), exact=exact, float8=large_products(model))


def blocks(model: Pi05) -> list[nn.Module]:
    """The repeated blocks, in the order in which a forward pass meets them."""
    return [*model.vision.blocks, *model.layers]


def large_products(model: Pi05) -> list[nn.Module]:
    """The Linears that `precision="float8"` multiplies in FP8: the MLPs of the prefix stream, three quarters of all work.

    The suffix stream, the last layer (whose prefix MLP never runs) and everything that meets actions stay in bfloat16.
    """
    return [layer.get_submodule(name) for layer in model.layers[:-1] for name in ("prefix.gate_up", "prefix.down")]
