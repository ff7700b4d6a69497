"""What the evaluation asks of a simulator, and how a suite's name leads to one.

A suite is named `family/task`, as in `metaworld/button-press-topdown`. A simulator of one's own needs no registration:
`my_package.my_module:function/task` calls `function(task, image_size)`, which returns a `Simulator`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from drivetrain.types import DrivetrainError, Observation

LARGEST_IMAGE = 512
"""Pixels: the largest square a simulator is asked to render."""


@dataclass(frozen=True)
class SuiteInfo:
    """What is known of a task before any episode runs.

    suite:       the name it was opened by.        instruction: the task in words, as the policy reads it.
    fps:         control steps per second.         max_steps:   the simulator's own limit on an episode.
    cameras:     camera names, without any prefix. The names of state and action dimensions are in their order.
    """

    suite: str
    instruction: str
    robot: str
    fps: int
    cameras: tuple[str, ...]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    max_steps: int


@dataclass(frozen=True)
class Progress:
    """What one simulation step led to. `done`: the episode is over, by success or by the simulator's own limit."""

    reward: float
    success: bool
    done: bool


class Simulator(Protocol):
    """One task in simulation. Images are made only when asked for: rendering costs far more than physics."""

    info: SuiteInfo

    def reset(self, state_id: int) -> Observation:
        """Start from this initial state, which the id alone decides: not history, order or process. state_id >= 0."""
        ...

    def step(self, action: np.ndarray) -> Progress:
        """Apply one action, float32 [action dimensions], in physical units."""
        ...

    def observe(self) -> Observation:
        """The present observation, with images of the size the simulator was opened with."""
        ...

    def render(self, size: int) -> np.ndarray:
        """The first camera's picture for a video, uint8 [size, size, 3], RGB, upright."""
        ...

    def expert_action(self) -> np.ndarray:
        """What the suite's scripted expert would do now, float32 [action dimensions]."""
        ...

    def close(self) -> None:
        """Free the renderer."""
        ...


def check_suite(suite: str) -> None:
    """Raise DrivetrainError, naming the closest suites, unless `open_simulator` knows this name. Starts nothing."""
    _opener(suite)


def open_simulator(suite: str, image_size: int) -> Simulator:
    """The simulator of a suite, showing images of `image_size` x `image_size` pixels. Errors: unknown suite or size."""
    if not 16 <= image_size <= LARGEST_IMAGE:
        raise DrivetrainError(f"images of {image_size} pixels are outside 16..{LARGEST_IMAGE}. Give --image-size 96.")
    opener, task = _opener(suite)
    return opener(task, image_size)


def _opener(suite: str) -> tuple[Callable[[str, int], Simulator], str]:
    family, _, task = suite.partition("/")
    if ":" in family:
        return _imported(family), task
    from drivetrain.evaluate.metaworld import INSTRUCTIONS, open_metaworld

    if family == "metaworld" and task in INSTRUCTIONS:
        return open_metaworld, task
    known = [f"metaworld/{name}" for name in INSTRUCTIONS]
    closest = difflib.get_close_matches(suite, known, n=3, cutoff=0.3) or ["metaworld/button-press-topdown"]
    raise DrivetrainError(f"there is no suite {suite!r}. Closest: {', '.join(closest)}. Give --suite {closest[0]}.")


def _imported(path: str) -> Callable[[str, int], Simulator]:
    module_name, _, function_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise DrivetrainError(
            f"suite {path!r} does not lead to a function: {error}. "
            f"Give --suite package.module:function/task, with the package on PYTHONPATH."
        ) from error
