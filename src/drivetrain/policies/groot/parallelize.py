"""How GR00T is sharded. The model itself knows nothing of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.parallel.sharding import shard
from drivetrain.policies.groot.model import Groot


def parallelize(model: Groot, mesh: DeviceMesh, precision: str) -> None:
    """Shard `model` in place; see `drivetrain.parallel.sharding`."""
    shard(model, blocks(model), mesh, precision)


def blocks(model: Groot) -> list[nn.Module]:
    """The repeated blocks, in the order in which a forward pass meets them."""
    return [*model.vision.blocks, *model.language.blocks, *model.features_blocks, *model.diffusion.blocks]
