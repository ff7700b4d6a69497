"""Policies. Each lives in a folder of its own and is found through its config class, so there is no list to extend.

A policy's folder holds `config.py` (dimensions), `model.py` (`make_model`), `processor.py` (`make_processor`),
`parallelize.py` (`parallelize`), `weights.py` (`load`) and `cost.py` (`flops`, `sample_tokens`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.types import DrivetrainError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from drivetrain.policies.blocks.cost import Flops
    from drivetrain.types import DatasetInfo, Processor


def make_model(config: Any) -> nn.Module:
    """A policy with fresh weights, drawn from torch's global generator; a `types.Policy` whose forward is its loss."""
    return _room(config, "model").make_model(config)


def make_processor(config: Any, datasets: dict[str, DatasetInfo], draws: int = 1) -> Processor:
    """The data side of a policy. draws: K, flow draws per observation."""
    return _room(config, "processor").make_processor(config, datasets, draws)


def load_weights(config: Any, model: nn.Module, weights: str) -> None:
    """Fill every parameter of `model`, sharded or not, from a folder of safetensors, or from a model hub by its name.

    Raises DrivetrainError that names every missing, surplus or misshapen tensor.
    """
    _room(config, "weights").load(model, _folder_of(weights))


def _folder_of(weights: str) -> Path:
    if Path(weights).exists():
        return Path(weights)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(weights, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as fault:
        raise DrivetrainError(
            f"the weights {weights!r} are no folder here, and could not be fetched from the hub ({type(fault).__name__}). "
            "Give --weights FOLDER, or --weights '' to start from random ones."
        ) from fault


def parallelize(config: Any, model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard and compile `model` in place."""
    _room(config, "parallelize").parallelize(model, mesh, precision)


def flops(config: Any, tokens: Sequence[int], images: int, draws: int = 1) -> Flops:
    """What training on some samples computes, forward and backward: the sum of `flops_by_part`."""
    parts = flops_by_part(config, tokens, images, draws)
    return sum(parts.values(), start=type(next(iter(parts.values())))())


def flops_by_part(config: Any, tokens: Sequence[int], images: int, draws: int = 1) -> dict[str, Flops]:
    """Part of the policy -> what training on some samples computes there, by what `config` trains.

    tokens: length of each sample, in tokens, image tokens included.   images: of all samples together.
    draws:  K, flow draws per sample.   Recomputation is not counted, nor are padding and empty slots of a pack.
    """
    return _room(config, "cost").flops(config, tokens, images, draws)


def sample_tokens(config: Any, cameras: int) -> int:
    """Tokens of a sample with so many cameras and an instruction of usual length, where no data set is at hand."""
    return _room(config, "cost").sample_tokens(config, cameras)


def tokens_per_image(config: Any) -> int:
    return (config.vision.image_size // config.vision.patch_size) ** 2


def _room(config: Any, name: str) -> ModuleType:
    return importlib.import_module(f"{type(config).__module__.rpartition('.')[0]}.{name}")
