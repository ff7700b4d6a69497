"""The types that cross a wall between rooms: the map of the house.

Shape letters used in every docstring of the project:

    B  sample slots of a pack       T  token budget of a pack      S  tokens of one sample
    I  image slots of a pack        N  tokens of one image         K  flow draws per sample
    H  action horizon               A  padded action width         D  padded state width
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # importing torch takes seconds; `drivetrain train --help` and the readers of errors need none of it
    import torch
    from torch import Tensor


class DrivetrainError(Exception):
    """A fault that the user can act on: what is wrong, where, and what to type. Shown without a stack trace."""

    exit_code = 1


class UsageError(DrivetrainError):
    """A bad argument (a folder that does not exist, a name that is not known)."""

    exit_code = 2


class Interrupted(DrivetrainError):
    """Stopped by a signal, with what was done until then saved. The exit code is 128 + the signal, as a shell has it."""

    def __init__(self, message: str, signal: int):
        super().__init__(message, signal)
        self.message, self.exit_code = message, 128 + signal

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one numeric feature over all its rows, float64 [dimensions] each.

    q01 ... q99: quantiles; so large a share of the rows lies below.
    """

    count: int
    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray
    q10: np.ndarray
    q50: np.ndarray
    q90: np.ndarray
    q99: np.ndarray


@dataclass(frozen=True)
class DatasetInfo:
    """One ingested data set as the lake describes it.

    cameras:     names in the order in which `Step.images` holds them.
    image_size:  the square size, in pixels, at which the lake stores images.
    statistics:  feature name (`observation.state`, `action`) -> FeatureStatistics.
    """

    name: str
    source: str
    robot: str
    fps: float
    cameras: tuple[str, ...]
    image_size: int
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    episodes: int
    steps: int
    statistics: dict[str, FeatureStatistics]


@dataclass(frozen=True)
class Spans:
    """Where the samples are: runs of consecutive steps of one episode with one instruction. The plan's only input.

    A sample is one step of one span; sample ids count through the spans in this order, so that
    `offsets[i] + k` is step k of span i. All arrays are int64 [number of spans].
    first_row: row of the span's first step in the lake's `steps` table, at the lake version it was read from.
    last_row:  row of the *episode's* last step, where action chunks end.
    dataset, task: indices into `datasets` and `tasks`.
    """

    datasets: tuple[str, ...]
    tasks: tuple[str, ...]
    dataset: np.ndarray
    task: np.ndarray
    episode: np.ndarray
    first_row: np.ndarray
    length: np.ndarray
    last_row: np.ndarray


@dataclass(frozen=True)
class Observation:
    """What a robot or a simulator shows a policy at one moment, in physical units.

    images: camera name -> uint8 [height, width, 3], RGB, upright.
    state:  float32 [state dimensions of the robot], in the order of the data set the policy was trained on.
    task:   the instruction in words.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    task: str


@dataclass(frozen=True)
class Step:
    """One time step as the lake stores it, with the actions that follow it, in physical units.

    images:  encoded images, one per camera, in the data set's camera order.
    state:   float32 [state dimensions].
    actions: float32 [H, action dimensions]; past the episode's end the last action is repeated.
    valid:   bool [H]; False where the row of `actions` lies past the episode's end.
    """

    dataset: str
    episode: int
    frame: int
    task: str
    images: tuple[bytes, ...]
    state: np.ndarray
    actions: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One training sample, decoded, normalised and tokenised: ready to be packed.

    tokens:         int64 [S]; the positions of image tokens hold the image placeholder id.
    image_tokens:   int64 [V * N]; where in `tokens` the image tokens stand, in camera order.
    images:         uint8 [V, size, size, 3].
    state:          float32 [D], normalised, zero beyond the robot's own dimensions.
    actions:        float32 [H, A], normalised, zero beyond the robot's own dimensions.
    action_mask:    bool [H, A]; the entries that count in the loss.
    noise, time:    float32 [K, H, A] and [K]; drawn from the stream of (seed, epoch, sample), never of a rank.
    """

    id: int
    epoch: int
    embodiment: int
    weight: float
    tokens: np.ndarray
    image_tokens: np.ndarray
    images: np.ndarray
    state: np.ndarray
    actions: np.ndarray
    action_mask: np.ndarray
    noise: np.ndarray
    time: np.ndarray


@dataclass(frozen=True)
class PackShape:
    """The fixed shape of every pack of a run, so that kernels compile once.

    tokens: T, samples: B, images: I; each the most that one pack may hold.
    """

    tokens: int
    samples: int
    images: int


@dataclass
class PackedBatch:
    """Variable-length samples laid end to end. No batch-shaped padding; every shape is fixed by `PackShape`.

    tokens:         int64 [T]; the samples' tokens, then the dummy tail (token 0).
    positions:      int64 [T]; 0..S_i-1 within each sample, and within the tail.
    cu_tokens:      int32 [B+2]; sample i owns tokens[cu_tokens[i]:cu_tokens[i+1]]. Empty sample slots own none;
                    the last segment, B, is the dummy tail that fills the budget (it may be empty).
    images:         uint8 [I, size, size, 3]; the samples' images in token order, then zeros.
    image_tokens:   int64 [I*N]; the place in `tokens` of each image token; T (one past the end) for empty image slots.
    state:          float32 [B, D].
    actions:        float32 [B, H, A].
    action_mask:    bool [B, H, A]; all False in empty slots.
    noise, time:    float32 [B, K, H, A] and [B, K].
    embodiment:     int64 [B]; an empty slot repeats the embodiment of the first sample.
    weight:         float32 [B]; 0 in empty slots.
    sample, epoch:  int64 [B]; which sample, on which pass over its data set; -1 in empty slots.
    max_tokens:     no segment is longer; a Python int, so that kernels need no synchronisation, and one of few values,
                    so that they need no recompiling.
    """

    tokens: Tensor
    positions: Tensor
    cu_tokens: Tensor
    images: Tensor
    image_tokens: Tensor
    state: Tensor
    actions: Tensor
    action_mask: Tensor
    noise: Tensor
    time: Tensor
    embodiment: Tensor
    weight: Tensor
    sample: Tensor
    epoch: Tensor
    max_tokens: int

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same pack on `device`, copied without waiting where the memory is pinned."""
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors()})

    def pin_memory(self) -> PackedBatch:
        """The same pack in page-locked memory (torch's DataLoader calls this by name)."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "max_tokens"]

    def loss_count(self) -> Tensor:
        """float32 scalar: the weight of this pack in the global mean, known before any forward pass."""
        return (self.action_mask.sum(dim=(1, 2)) * self.weight).sum() * self.time.shape[1]


@dataclass
class StepPacks:
    """What one rank trains on in one step.

    packs: as many on every rank; where the plan has fewer, the last are empty (weight 0).
    """

    step: int
    packs: list[PackedBatch]

    def pin_memory(self) -> StepPacks:
        return replace(self, packs=[p.pin_memory() for p in self.packs])


@dataclass
class LossSum:
    """A loss that has not been divided yet. `total / count`, summed over all packs of a step, is the objective.

    total: scalar with a graph.   count: scalar, equal to `PackedBatch.loss_count()`.
    """

    total: Tensor
    count: Tensor


class Policy(Protocol):
    """What the trainer and the evaluation know of a model. Single-device code; sharding is applied from outside."""

    def loss(self, batch: PackedBatch) -> LossSum:
        """The un-normalised training loss of a pack."""
        ...

    def act(self, batch: PackedBatch) -> Tensor:
        """Normalised action chunks, float32 [B, H, A], from `batch.noise[:, 0]`; `batch.actions` is not read."""
        ...


class Processor(Protocol):
    """The data side of a policy: steps to samples, normalised actions back to physical ones. Runs in workers."""

    def token_count(self, cameras: int, task: str) -> int:
        """How many tokens a sample with so many cameras and this instruction takes; known without reading it."""
        ...

    def sample(self, step: Step, *, id: int, epoch: int, seed: int) -> Sample:
        """Decode, normalise and tokenise one step of the lake."""
        ...

    def observe(self, observation: Observation, *, dataset: str, seed: int) -> Sample:
        """The same for a live observation; `actions` are zero and `action_mask` marks the robot's own dimensions."""
        ...

    def physical_actions(self, actions: np.ndarray, *, dataset: str) -> np.ndarray:
        """float32 [H, A] normalised -> float32 [H, action dimensions of the data set], in physical units."""
        ...
