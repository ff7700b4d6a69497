"""Reading published weights strictly, into parameters that stack several published tensors along their first dimension.

Every tensor of the model is filled from a tensor of the same shape, or the load stops and names what is missing, left
over or misshaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.types import DrivetrainError

SHOWN_FAULTS = 40


@dataclass(frozen=True)
class Part:
    """A published tensor and how many rows of our parameter it fills; None: all of them."""

    name: str
    rows: int | None = None


Parts = dict[str, tuple[Part, ...]]  # our parameter's name -> the published tensors it consists of, in order of rows


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file, under the name that the file gives it."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Stored]:
    """Every tensor of a safetensors file, of `folder`/model.safetensors, or of the shards that an index names."""
    index = folder / "model.safetensors.index.json"
    if folder.is_file():
        files = [folder]
    elif index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        if bad := [n for n in names if Path(n).name != n]:
            raise DrivetrainError(f"{index} points out of its folder: {bad[0]!r}")
        files = [folder / n for n in sorted(names)]
    else:
        files = [folder / "model.safetensors"]
    found: dict[str, Stored] = {}
    for file in files:
        if not file.is_file():
            raise DrivetrainError(f"there are no weights at {file}; give a folder with model.safetensors or its shards")
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # the library's own error type is not exported
            raise DrivetrainError(
                f"{file} is not a readable safetensors file ({error}); copy or download it again"
            ) from error
        found.update({name: Stored(opened, name) for name in opened.keys()})  # noqa: SIM118 - it is no dict
    return found


def fill(
    model: nn.Module,
    wanted: Parts,
    tensors: dict[str, Stored],
    folder: Path,
    *,
    resizable: Mapping[str, int] | None = None,
    resize: bool = False,
    adapt: Callable[[str, Tensor], Tensor] | None = None,
) -> int:
    """Fill every parameter of `model`, one by one. Returns how many tensors were read.

    Parameters may be sharded (DTensor): each process keeps its shard and holds one whole parameter at a time.
    resizable: parameter -> the dimension in which a checkpoint may differ, if `resize` says so.
    adapt:     (parameter's name, whole tensor as read) -> the tensor, of the parameter's shape, that goes into it.
    Raises DrivetrainError that names every missing, extra or misshaped tensor.
    """
    parameters = dict(model.named_parameters())
    assert parameters.keys() == wanted.keys(), parameters.keys() ^ wanted.keys()
    if faults := _faults(parameters, wanted, tensors, resizable or {}, resize):
        more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
        shown = "\n  ".join(faults[:SHOWN_FAULTS] + more)
        raise DrivetrainError(f"{folder} does not hold the weights of this model ({len(faults)} faults):\n  {shown}")
    for name, parameter in parameters.items():
        read = [tensors[part.name].read() for part in wanted[name]]
        whole = read[0] if len(read) == 1 else torch.cat(read)
        _fill(parameter, adapt(name, whole) if adapt else whole)
    return sum(map(len, wanted.values()))


def published(model: nn.Module, split: Parts, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as published tensors, on the CPU, one parameter in memory at a time.

    With sharded parameters every process must run through it.
    """
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", dtype)
        rows = [part.rows or len(whole) for part in split[name]]
        for part, piece in zip(split[name], whole.split(rows), strict=True):
            yield part.name, piece.clone()


def siglip_parts(layers: int, width: int, tower: str) -> Parts:
    """The names of a SigLIP tower's tensors as Hugging Face has them, under `tower`; ours under `vision`."""
    made: Parts = {"vision.positions": (Part(f"{tower}.embeddings.position_embedding.weight"),)}
    pairs = [("patch", ["embeddings.patch_embedding"]), ("norm", ["post_layernorm"])]
    for i in range(layers):
        theirs = f"encoder.layers.{i}"
        pairs += [
            (f"blocks.{i}.norm1", [f"{theirs}.layer_norm1"]),
            (f"blocks.{i}.norm2", [f"{theirs}.layer_norm2"]),
            (f"blocks.{i}.qkv", [f"{theirs}.self_attn.{p}_proj" for p in "qkv"]),
            (f"blocks.{i}.out", [f"{theirs}.self_attn.out_proj"]),
            (f"blocks.{i}.up", [f"{theirs}.mlp.fc1"]),
            (f"blocks.{i}.down", [f"{theirs}.mlp.fc2"]),
        ]
    for ours, names in pairs:
        rows = width if len(names) > 1 else None
        for kind in ("weight", "bias"):
            made[f"vision.{ours}.{kind}"] = tuple(Part(f"{tower}.{name}.{kind}", rows) for name in names)
    return made


def _faults(
    parameters: dict[str, nn.Parameter],
    wanted: Parts,
    tensors: dict[str, Stored],
    resizable: Mapping[str, int],
    resize: bool,
) -> list[str]:
    """All that is wrong with a checkpoint."""
    faults = []
    for ours, pieces in wanted.items():
        if parameters[ours].is_meta:
            raise DrivetrainError(f"{ours} has no memory yet: call to_empty(device=...) before loading")
        for part in pieces:
            if part.name not in tensors:
                faults.append(f"missing: {part.name}")
                continue
            expected = [part.rows or parameters[ours].shape[0], *parameters[ours].shape[1:]]
            found = list(tensors[part.name].shape)
            if resize and ours in resizable and len(found) == len(expected):
                expected[resizable[ours]] = found[resizable[ours]]
            if found != expected:
                hint = " (pass resize=True to keep the shared dimensions)" if ours in resizable else ""
                faults.append(f"shape of {part.name}: {found} in the file, {expected} in the model{hint}")
    known = {part.name for pieces in wanted.values() for part in pieces}
    return faults + [f"not known: {name}" for name in sorted(tensors.keys() - known)]


@torch.no_grad()
def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy a whole tensor, equal on all processes, into a parameter or into this process's shard of it."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    local = parameter.to_local()
    whole = whole.to(local.device, local.dtype)
    # no process sends anything: each has read the file itself
    shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local.copy_(shard.to_local())
