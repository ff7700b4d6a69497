"""Reading and writing pi-0.5 weights: `lerobot/pi05_base`, LeRobot's fine-tunes, openpi's torch files, our own names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.policies.blocks.checkpoint import Part, Stored, fill, open_tensors, published
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.policies.pi05.model import Pi05
from drivetrain.policies.pi05.names import UNUSED_HEAD, WORDS, WORDS_TIED, canonical, parts
from drivetrain.types import DrivetrainError

LEROBOT_PREFIX = "model."


@dataclass(frozen=True)
class LoadReport:
    """loaded: tensors read.  unused: names set aside by rule: the expert's word head, a second copy of the embedding."""

    loaded: int
    unused: tuple[str, ...]


def build(config: Pi05Config, folder: Path, device: torch.device | str = "cpu") -> Pi05:
    """The model with the weights of `folder`, built without ever holding random ones."""
    with torch.device("meta"):
        model = Pi05(config)
    model.to_empty(device=device)
    load(model, folder)
    return model


def load(model: Pi05, folder: Path) -> LoadReport:
    """Fill every parameter of `model` from a folder or file of safetensors; parameters may be sharded.

    Raises DrivetrainError that names every missing, extra or misshaped tensor.
    """
    with ExitStack() as stack:
        source = open_tensors(folder, stack)
        if "embedding.weight" in source:  # our own names
            return LoadReport(fill(model, {n: (Part(n),) for n in parts(model.config)}, source, folder), ())
        tensors, unused = _recognise(source, folder)
        return LoadReport(fill(model, parts(model.config), tensors, folder), tuple(unused))


def published_tensors(model: Pi05, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a published checkpoint, on the CPU, one parameter in memory at a time.

    The word embedding comes once, under the name of the tied head, as in `lerobot/pi05_base`; the expert's word head,
    which is not in the model, as zeros, without which LeRobot refuses the file. With sharded parameters every process
    must run through it.
    """
    yield from published(model, parts(model.config), dtype)
    gemma = model.config.gemma
    yield UNUSED_HEAD, torch.zeros(gemma.vocabulary, gemma.suffix_width, dtype=dtype or torch.float32)


def save(model: Pi05, folder: Path, *, dtype: torch.dtype | None = None, unused_head: bool = True) -> None:
    """Write `folder`/model.safetensors so that LeRobot reads it.

    dtype:       of the written tensors; as they are when None.
    unused_head: write the expert's word head, zeros (1 GB at full size in float32); openpi does not ask for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {LEROBOT_PREFIX + n: t for n, t in published_tensors(model, dtype) if unused_head or n != UNUSED_HEAD}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _recognise(source: dict[str, Stored], folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors by the names that `parts` uses, and the names of those set aside by rule."""
    stored: dict[str, Stored] = {}
    for name, tensor in source.items():
        if canonical(name) in stored:
            twice = stored[canonical(name)].name
            raise DrivetrainError(f"{folder} holds one tensor under two names: {twice} and {name}")
        stored[canonical(name)] = tensor
    # where both copies of the embedding are stored, this is the one that LeRobot's forward pass reads and trains
    unused = [n for n in (UNUSED_HEAD, WORDS if WORDS_TIED in stored else "") if n in stored]
    aside = [stored.pop(n).name for n in unused]
    if WORDS_TIED in stored:
        stored[WORDS] = stored.pop(WORDS_TIED)
    return stored, aside
