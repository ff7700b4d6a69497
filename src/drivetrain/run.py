"""A run is one frozen dataclass. It is saved beside every checkpoint, and a recipe is a function that returns one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.types import DrivetrainError, PackShape

PolicyConfig = GrootConfig | Pi05Config


@dataclass(frozen=True)
class Mixture:
    """Which samples are drawn, and how often.

    weights:  data set name -> share of the samples drawn; shares are normalised. Empty: every data set by its steps.
    changes:  step -> the weights from that step on.
    held_out: the last so many episodes of each data set are never drawn.
    window:   0 shuffles each data set as a whole; otherwise so many storage fragments are shuffled together, which
              reads storage nearly in sequence.
    fragment: samples per storage fragment.
    """

    weights: dict[str, float] = field(default_factory=dict)
    changes: dict[int, dict[str, float]] = field(default_factory=dict)
    held_out: int = 0
    window: int = 0
    fragment: int = 4096


@dataclass(frozen=True)
class Batch:
    """The global batch of one optimizer update, whatever the number of processes.

    samples: observations per update.   packs: into how many packs they are laid; a process takes every W-th.
    draws:   flow-matching draws (noise, time) per observation.
    shape:   the fixed shape of a pack; None: the smallest that fits, measured from the plan when the run starts.
    """

    samples: int = 64
    packs: int = 2
    draws: int = 1
    shape: PackShape | None = None


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up and cosine decay, counted in optimizer updates."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.95, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-5
    clip_norm: float = 1.0
    warmup_steps: int = 500
    final_learning_rate: float = 0.0


@dataclass(frozen=True)
class Run:
    """Everything that decides what a run computes.

    steps:      optimizer updates.
    weights: folder or hub name of the weights to start from; empty: random ones.
    lake, lake_version: filled in when the run starts; a resumed run reads the same version.
    save_every: updates between checkpoints.   log_every: updates between lines of metrics.
    keep_checkpoints: how many of the newest checkpoints are kept.
    skip_limit: so many updates in a row with a loss or gradient that is not finite are skipped; then the run stops.
    grace: seconds from SIGTERM or Ctrl-C in which the update is finished and saved; torchrun kills after 30.
    precision:  of the forward and backward pass; weights and optimizer state stay float32. "float8" is bfloat16 with the
                large matrix products in FP8.
    workers:    loader processes per training process; 0 loads in a thread.
    threads:    CPU threads per training process; 0 leaves torch's default.
    """

    recipe: str
    policy: PolicyConfig
    steps: int
    seed: int = 0
    weights: str = ""
    lake: str = ""
    lake_version: int = 0
    mixture: Mixture = Mixture()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    precision: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    save_every: int = 1000
    log_every: int = 10
    keep_checkpoints: int = 2
    skip_limit: int = 10
    grace: float = 25.0
    workers: int = 4
    threads: int = 0
    shard: int = 0


def to_json(value: Any) -> str:
    """Dataclasses, and dictionaries of them, as JSON text; stable under re-saving. Arrays become lists.

    A dataclass that has a class attribute `kind` is written with it, so that a union of such classes can be read back.
    """
    return json.dumps(value, indent=2, sort_keys=True, default=_plain)


def from_json[T](kind: type[T], text: str) -> T:
    """What `to_json` wrote. Fields that `kind` does not know are errors that name the field."""
    return _build(kind, json.loads(text), getattr(kind, "__name__", str(kind)))


def policy_from_json(text: str) -> PolicyConfig:
    """The dimensions of whichever policy `to_json` wrote."""
    return _build(PolicyConfig, json.loads(text), "policy")


def fingerprint(run: Run) -> str:
    """A short hash of everything that decides what the run computes; equal on all processes of one run."""
    return hashlib.sha256(to_json(run).encode()).hexdigest()[:16]


def read_run(folder: Path) -> Run:
    """The Run saved as `run.json` in a run's or checkpoint's folder."""
    file = folder / "run.json"
    if not file.is_file():
        raise DrivetrainError(
            f"{folder} holds no run.json: it is not a drivetrain run. Give the folder that --out named."
        )
    return from_json(Run, file.read_text())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    kind = {"kind": value.kind} if hasattr(type(value), "kind") else {}
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} | kind


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value`, as json.loads gives it, as an instance of the annotated type `kind`; `where` names it in errors."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        value = {k: v for k, v in value.items() if k != "kind" or not hasattr(kind, "kind")}
        known = {f.name for f in dataclasses.fields(kind)}
        if unknown := set(value) - known:
            raise DrivetrainError(
                f"{where} has no field {sorted(unknown)[0]!r}; it was written by another version of drivetrain."
            )
        return kind(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in value.items()})  # type: ignore[operator]
    if kind is np.ndarray:
        return np.array(value, dtype=np.float64)
    if origin is tuple:
        items = arguments[:1] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
        return tuple(_build(t, v, where) for t, v in zip(items, value, strict=True))
    if origin is dict:
        return {arguments[0](k): _build(arguments[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(_member(arguments, value, where), value, where)
    return value


def _member(union: tuple[Any, ...], value: Any, where: str) -> Any:
    """Which class of a union `value` was written from."""
    kinds = [a for a in union if a is not type(None)]
    if len(kinds) == 1:
        return kinds[0]
    named = {k.kind: k for k in kinds}
    written = value.get("kind")
    if written not in named:
        raise DrivetrainError(
            f"{where} is of kind {written!r}, which is none of {', '.join(named)}; it was written by another version of "
            "drivetrain."
        )
    return named[written]
