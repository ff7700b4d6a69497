"""Reading and writing GR00T-N1.5 weights: the published folder, LeRobot's fine-tunes, and our own names.

Reading is strict. Every tensor of the model is filled from a tensor of the same shape or the load stops and names what
is missing, left over or misshaped. What no forward pass reads (the tied word head, the pooling head) is known by rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.policies.blocks.checkpoint import Part, Stored, fill, open_tensors, published
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import POOLING, WORDS, WORDS_TIED, parts, pooling_head

LEROBOT_PREFIX = "_groot_model."

# Widths that follow the robot and not the architecture: parameter -> the dimension that may differ from the checkpoint.
RESIZABLE = {
    "state_encoder.layer1.W": 1,
    "action_encoder.W1.W": 1,
    "action_decoder.layer2.W": 2,
    "action_decoder.layer2.b": 1,
}
PER_EMBODIMENT = ("state_encoder.", "action_encoder.", "action_decoder.")


@dataclass(frozen=True)
class LoadReport:
    """loaded: tensors read.  unused: names set aside by rule.  resized: partly fresh parameters.  fresh: slots."""

    loaded: int
    unused: tuple[str, ...]
    resized: tuple[str, ...]
    fresh: tuple[int, ...]


def build(config: GrootConfig, folder: Path, device: torch.device | str = "cpu", **options: Any) -> Groot:
    """The model with the weights of `folder`, built without ever holding random ones. `options` as for `load`."""
    with torch.device("meta"):
        model = Groot(config)
    model.to_empty(device=device)
    load(model, folder, **options)
    return model


def load(
    model: Groot, folder: Path, *, fresh_slots: Sequence[int] = (), resize: bool = False, seed: int = 0
) -> LoadReport:
    """Fill every parameter of `model`, one by one, from a folder or file of safetensors.

    Parameters may be sharded (DTensor): each process keeps its shard and holds one whole parameter at a time.
    fresh_slots: embodiment slots that start anew, for a robot that the checkpoint does not know.
    resize:      let state and action widths differ: shared dimensions are copied, further ones start anew.
    seed:        of what starts anew.
    Raises DrivetrainError that names every missing, extra or misshaped tensor.
    """
    generator, resized = torch.Generator().manual_seed(seed), []

    def adapt(name: str, whole: Tensor) -> Tensor:
        shape, bias = model.get_parameter(name).shape, name.endswith(".b")
        if whole.shape != shape:
            whole = _resize(whole, shape, bias, generator)
            resized.append(name)
        if name.startswith(PER_EMBODIMENT):
            for slot in fresh_slots:
                whole[slot] = _fresh(whole[slot].shape, bias, generator)
        return whole

    with ExitStack() as stack:
        tensors, unused = _recognise(open_tensors(folder, stack))
        wanted = parts(model.config) if unused is not None else {n: (Part(n),) for n in parts(model.config)}
        read = fill(model, wanted, tensors, folder, resizable=RESIZABLE, resize=resize, adapt=adapt)
    return LoadReport(read, tuple(unused or ()), tuple(resized), tuple(fresh_slots))


def published_tensors(model: Groot, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a published checkpoint, on the CPU, one parameter in memory at a time.

    The word embedding comes under both of its names, and the pooling head, which is not in the model, as zeros. With
    sharded parameters every process must run through it.
    """
    for name, tensor in published(model, parts(model.config), dtype):
        yield name, tensor
        if name == WORDS:
            yield WORDS_TIED, tensor.clone()
    for name, shape in pooling_head(model.config).items():
        yield name, torch.zeros(shape, dtype=dtype or torch.float32)


def save(
    model: Groot,
    folder: Path,
    style: Literal["published", "lerobot"],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write the weights so that NVIDIA's code ("published": shards and an index) or LeRobot's ("lerobot") reads them.

    dtype: of the written tensors; as they are when None.   shard_bytes: a published shard holds at most so much.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if style == "lerobot":
        save_file({LEROBOT_PREFIX + n: t for n, t in published_tensors(model, dtype)}, folder / "model.safetensors")
        return
    shards: list[dict[str, Tensor]] = [{}]
    files: list[Path] = []
    weight_map, held, total = {}, 0, 0
    for name, tensor in published_tensors(model, dtype):
        if held and held + tensor.nbytes > shard_bytes:
            files.append(_save_shard(shards.pop(), folder, len(files)))
            shards, held = [{}], 0
        shards[-1][name] = tensor
        weight_map[name] = len(files)
        held, total = held + tensor.nbytes, total + tensor.nbytes
    files.append(_save_shard(shards.pop(), folder, len(files)))
    final = [folder / f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, final, strict=True):
        file.replace(name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: final[i].name for n, i in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _save_shard(tensors: dict[str, Tensor], folder: Path, number: int) -> Path:
    """Shards get their final names when their number is known."""
    file = folder / f".part-{number}.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def _recognise(source: dict[str, Stored]) -> tuple[dict[str, Stored], list[str] | None]:
    """The tensors by their published names, and those set aside by rule; None instead where the names are our own."""
    if "language.embedding.weight" in source and not any(n.startswith(("backbone.", LEROBOT_PREFIX)) for n in source):
        return source, None
    stored = {n.removeprefix(LEROBOT_PREFIX): tensor for n, tensor in source.items()}
    if WORDS not in stored and WORDS_TIED in stored:
        stored[WORDS] = stored.pop(WORDS_TIED)
    unused = [n for n in stored if n.startswith(POOLING) or n == WORDS_TIED]
    return {n: s for n, s in stored.items() if n not in unused}, unused


def _fresh(shape: Sequence[int], bias: bool, generator: torch.Generator) -> Tensor:
    """As EmbodimentLinear starts: weights [..., in, out] of deviation 1/sqrt(in), biases 0."""
    return torch.zeros(shape) if bias else torch.empty(shape).normal_(0.0, shape[-2] ** -0.5, generator=generator)


def _resize(whole: Tensor, shape: torch.Size, bias: bool, generator: torch.Generator) -> Tensor:
    made = _fresh(shape, bias, generator).to(whole.dtype)
    shared = tuple(slice(min(a, b)) for a, b in zip(whole.shape, shape, strict=True))
    made[shared] = whole[shared]
    return made
