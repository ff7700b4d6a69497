"""GR00T's data side: a step of the lake becomes a sample, and the policy's answer becomes a motion of the robot."""

from __future__ import annotations

import numpy as np

from drivetrain.data.draws import groot_time, stream
from drivetrain.data.image import observed_images, stored_images
from drivetrain.data.normalise import Scaler, scaler
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.prompt import Prompt
from drivetrain.types import DatasetInfo, DrivetrainError, Observation, Sample, Step


class GrootProcessor:
    """Implements `types.Processor`.

    datasets: every data set that is trained on or acted for, by name, with its statistics.
    draws:    K, the flow draws per sample.
    """

    def __init__(self, config: GrootConfig, datasets: dict[str, DatasetInfo], draws: int = 1) -> None:
        self.config, self.datasets, self.draws = config, datasets, draws
        self.prompt = Prompt(config)
        self.states: dict[str, Scaler] = {}
        self.actions: dict[str, Scaler] = {}
        self.slots: dict[str, int] = {}
        for name, info in datasets.items():
            self.states[name] = scaler(info, "observation.state", config.state_width)
            self.actions[name] = scaler(info, "action", config.action_width)
            self.slots[name] = embodiment_slot(config, name)

    def __reduce__(self):
        # worker processes build their own: tokenizers do not travel
        return GrootProcessor, (self.config, self.datasets, self.draws)

    def token_count(self, cameras: int, task: str) -> int:
        return self.prompt.length(cameras, task)

    def sample(self, step: Step, *, id: int, epoch: int, seed: int) -> Sample:
        info = self._info(step.dataset)
        pictures = stored_images(step, info, self.config.vision.image_size)
        actions = self.actions[step.dataset].normalise(step.actions, self.config.action_width)
        if len(actions) != self.config.horizon:
            raise DrivetrainError(
                f"{step.dataset} episode {step.episode} frame {step.frame}: {len(actions)} actions, "
                f"the policy's horizon is {self.config.horizon}"
            )
        return self._sample(info, step.task, pictures, step.state, actions, (id, epoch, seed))

    def observe(self, observation: Observation, *, dataset: str, seed: int) -> Sample:
        info = self._info(dataset)
        pictures = observed_images(observation, info, self.config.vision.image_size)
        actions = np.zeros((self.config.horizon, self.config.action_width), np.float32)
        return self._sample(info, observation.task, pictures, observation.state, actions, (0, 0, seed))

    def physical_actions(self, actions: np.ndarray, *, dataset: str) -> np.ndarray:
        self._info(dataset)
        return self.actions[dataset].restore(actions)

    def _info(self, dataset: str) -> DatasetInfo:
        if dataset not in self.datasets:
            known = ", ".join(sorted(self.datasets)) or "none"
            raise DrivetrainError(f"the policy was not given the data set {dataset!r}; it knows: {known}")
        return self.datasets[dataset]

    def _sample(
        self,
        info: DatasetInfo,
        task: str,
        pictures: np.ndarray,
        state: np.ndarray,
        actions: np.ndarray,
        drawn_for: tuple[int, int, int],
    ) -> Sample:
        config, (id, epoch, seed) = self.config, drawn_for
        tokens, image_tokens = self.prompt.tokens(len(pictures), task)
        mask = np.zeros(actions.shape, np.bool_)
        mask[:, : self.actions[info.name].dimensions] = True
        streams = [stream(seed, epoch, id, draw) for draw in range(self.draws)]
        times = [groot_time(g, alpha=config.beta_alpha, beta=config.beta_beta, s=config.noise_s) for g in streams]
        return Sample(
            id=id,
            epoch=epoch,
            embodiment=self.slots[info.name],
            weight=1.0,
            tokens=tokens,
            image_tokens=image_tokens,
            images=pictures,
            state=self.states[info.name].normalise(state, config.state_width),
            actions=actions,
            action_mask=mask,
            noise=np.stack([g.standard_normal(actions.shape, np.float32) for g in streams]),
            time=np.array(times, np.float32),
        )


def make_processor(config: GrootConfig, datasets: dict[str, DatasetInfo], draws: int) -> GrootProcessor:
    """The entry of this room; see `drivetrain.policies`."""
    return GrootProcessor(config, datasets, draws)


def embodiment_slot(config: GrootConfig, dataset: str) -> int:
    """Which of the per-embodiment weights a data set uses."""
    slot = config.embodiments.get(dataset, config.new_embodiment)
    if not 0 <= slot < config.head.embodiments:
        raise DrivetrainError(
            f"{dataset}: embodiment slot {slot}; the policy has slots 0 to {config.head.embodiments - 1}"
        )
    return slot
