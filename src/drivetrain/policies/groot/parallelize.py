"""How GR00T is sharded. The model itself knows nothing of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.parallel.sharding import shard
from drivetrain.policies.groot.model import Groot


def parallelize(model: Groot, mesh: DeviceMesh, precision: str) -> None:
    """Shard `model` in place; see `drivetrain.parallel.sharding`."""
    shard(model, blocks(model), mesh, precision, float8=large_products(model))


def blocks(model: Groot) -> list[nn.Module]:
    """The repeated blocks, in the order in which a forward pass meets them."""
    return [*model.vision.blocks, *model.language.blocks, *model.features_blocks, *model.diffusion.blocks]


def large_products(model: Groot) -> list[nn.Module]:
    """The Linears that `precision="float8"` multiplies in FP8: those of the language tower, the MLPs of the features'
    blocks, and the keys and values of the diffusion transformer, which itself stays in bfloat16."""
    language = [b.get_submodule(name) for b in model.language.blocks for name in ("qkv", "out", "gate_up", "down")]
    features = [b.get_submodule(f"feed_forward.{name}") for b in model.features_blocks for name in ("up", "down")]
    return [*language, *features, model.diffusion.keys_values.project]
