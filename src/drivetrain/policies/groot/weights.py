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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import POOLING, WORDS, WORDS_TIED, Part, parts, pooling_head
from drivetrain.types import DrivetrainError

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
    with ExitStack() as stack:
        source = _open(folder, stack)
        tensors, unused = _recognise(source)
        wanted = parts(model.config) if unused is not None else {n: (Part(n),) for n in parts(model.config)}
        parameters = dict(model.named_parameters())
        assert parameters.keys() == wanted.keys(), parameters.keys() ^ wanted.keys()
        _check(parameters, wanted, tensors, resize, folder)
        generator = torch.Generator().manual_seed(seed)
        resized = []
        for name, parameter in parameters.items():
            whole = _read(wanted[name], tensors)
            if whole.shape != parameter.shape:
                whole = _resize(whole, parameter.shape, name.endswith(".b"), generator)
                resized.append(name)
            if name.startswith(PER_EMBODIMENT):
                for slot in fresh_slots:
                    whole[slot] = _fresh(whole[slot].shape, name.endswith(".b"), generator)
            _fill(parameter, whole)
        read = sum(len(p) for p in wanted.values())
    return LoadReport(read, tuple(unused or ()), tuple(resized), tuple(fresh_slots))


def published_tensors(model: Groot, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a published checkpoint, on the CPU, one parameter in memory at a time.

    The word embedding comes under both of its names, and the pooling head, which is not in the model, as zeros. With
    sharded parameters every process must run through it.
    """
    split = parts(model.config)
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", dtype)
        rows = [part.rows or len(whole) for part in split[name]]
        for part, piece in zip(split[name], whole.split(rows), strict=True):
            yield part.name, piece.clone()
            if part.name == WORDS:
                yield WORDS_TIED, piece.clone()
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


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open safetensors file that holds it."""
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
    found: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise DrivetrainError(f"there are no weights at {file}; give a folder with model.safetensors or its shards")
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # the library's own error type is not exported
            raise DrivetrainError(
                f"{file} is not a readable safetensors file ({error}); copy or download it again"
            ) from error
        found.update(dict.fromkeys(opened.keys(), opened))
    return found


@dataclass(frozen=True)
class _Stored:
    """A tensor in an open file, under the name that the file gives it."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


def _recognise(source: dict[str, Any]) -> tuple[dict[str, _Stored], list[str] | None]:
    """The tensors by their published names, and those set aside by rule; None instead where the names are our own."""
    if "language.embedding.weight" in source and not any(n.startswith(("backbone.", LEROBOT_PREFIX)) for n in source):
        return {n: _Stored(f, n) for n, f in source.items()}, None
    stored = {n.removeprefix(LEROBOT_PREFIX): _Stored(f, n) for n, f in source.items()}
    if WORDS not in stored and WORDS_TIED in stored:
        stored[WORDS] = stored.pop(WORDS_TIED)
    unused = [n for n in stored if n.startswith(POOLING) or n == WORDS_TIED]
    return {n: s for n, s in stored.items() if n not in unused}, unused


def _check(
    parameters: dict[str, nn.Parameter],
    wanted: dict[str, tuple[Part, ...]],
    tensors: dict[str, _Stored],
    resize: bool,
    folder: Path,
) -> None:
    """All that is wrong with a checkpoint, in one error."""
    faults = []
    for ours, pieces in wanted.items():
        if parameters[ours].is_meta:
            raise DrivetrainError(f"{ours} has no memory yet: call to_empty(device=...) before loading")
        for part in pieces:
            if part.name not in tensors:
                faults.append(f"missing: {part.name}")
                continue
            expected = list(parameters[ours].shape)
            expected[0] = part.rows or expected[0]
            found = list(tensors[part.name].shape)
            if resize and ours in RESIZABLE and len(found) == len(expected):
                free = RESIZABLE[ours]
                expected[free] = found[free]
            if found != expected:
                hint = " (pass resize=True to keep the shared dimensions)" if ours in RESIZABLE else ""
                faults.append(f"shape of {part.name}: {found} in the file, {expected} in the model{hint}")
    known = {part.name for pieces in wanted.values() for part in pieces}
    faults += [f"not known: {name}" for name in sorted(tensors.keys() - known)]
    if faults:
        shown = "\n  ".join(faults[:40]) + (f"\n  and {len(faults) - 40} more" if len(faults) > 40 else "")
        raise DrivetrainError(f"{folder} does not hold the weights of this model ({len(faults)} faults):\n  {shown}")


def _read(pieces: tuple[Part, ...], tensors: dict[str, _Stored]) -> Tensor:
    read = [tensors[part.name].read() for part in pieces]
    return read[0] if len(read) == 1 else torch.cat(read)


def _fresh(shape: Sequence[int], bias: bool, generator: torch.Generator) -> Tensor:
    """As EmbodimentLinear starts: weights [..., in, out] of deviation 1/sqrt(in), biases 0."""
    return torch.zeros(shape) if bias else torch.empty(shape).normal_(0.0, shape[-2] ** -0.5, generator=generator)


def _resize(whole: Tensor, shape: torch.Size, bias: bool, generator: torch.Generator) -> Tensor:
    made = _fresh(shape, bias, generator).to(whole.dtype)
    shared = tuple(slice(min(a, b)) for a, b in zip(whole.shape, shape, strict=True))
    made[shared] = whole[shared]
    return made


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
