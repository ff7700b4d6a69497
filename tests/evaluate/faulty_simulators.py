"""Meta-World with faults put in, for tests: which fault strikes depends on the initial state."""

from __future__ import annotations

import os
import time

import numpy as np

from drivetrain.evaluate.metaworld import MetaworldSimulator
from drivetrain.evaluate.simulator import Progress
from drivetrain.types import Observation

PROCESS_DIES, RAISES, HANGS = 1, 2, 3


class FaultySimulator(MetaworldSimulator):
    """Strikes in the third step of an episode."""

    def reset(self, state_id: int) -> Observation:
        self.state_id, self.steps = state_id, 0
        return super().reset(state_id)

    def step(self, action: np.ndarray) -> Progress:
        self.steps += 1
        if self.steps == 3 and self.state_id == PROCESS_DIES:
            os._exit(7)
        if self.steps == 3 and self.state_id == RAISES:
            raise FloatingPointError("the simulation became unstable")
        if self.steps == 3 and self.state_id == HANGS:
            time.sleep(3600)
        return super().step(action)


def open_faulty(task: str, image_size: int) -> FaultySimulator:
    return FaultySimulator(task, image_size)


class BlindSimulator(MetaworldSimulator):
    """Cannot draw: the process ends at the first picture, as a broken graphics driver ends it."""

    def render(self, size: int) -> np.ndarray:
        os._exit(11)


def open_blind(task: str, image_size: int) -> BlindSimulator:
    return BlindSimulator(task, image_size)
