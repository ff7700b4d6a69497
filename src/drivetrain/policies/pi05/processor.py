"""pi-0.5's data side: a step of the lake becomes a sample, and the policy's answer becomes a motion of the robot."""

from __future__ import annotations

import numpy as np

from drivetrain.data.draws import pi05_time, stream
from drivetrain.data.image import observed_images, stored_images
from drivetrain.data.normalise import Scaler, scaler
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.policies.pi05.prompt import Prompt
from drivetrain.types import DatasetInfo, DrivetrainError, Observation, Sample, Step


class Pi05Processor:
    """Implements `types.Processor`. States and actions are scaled by their 1st and 99th percentiles.

    datasets: every data set that is trained on or acted for, by name, with its statistics.
    draws:    K, the flow draws per sample.
    """

    def __init__(self, config: Pi05Config, datasets: dict[str, DatasetInfo], draws: int = 1) -> None:
        self.config, self.datasets, self.draws = config, datasets, draws
        self.prompt = Prompt(config)
        self.states: dict[str, Scaler] = {}
        self.actions: dict[str, Scaler] = {}
        for name, info in datasets.items():
            self.states[name] = _scaler(info, "observation.state", config.state_width)
            self.actions[name] = _scaler(info, "action", config.action_width)

    def __reduce__(self):
        # worker processes build their own: tokenizers do not travel
        return Pi05Processor, (self.config, self.datasets, self.draws)

    def token_count(self, cameras: int, task: str) -> int:
        """An upper bound, over all states and over all data sets with so many cameras; see `prompt`."""
        robots = {self.states[n].dimensions for n, info in self.datasets.items() if len(info.cameras) == cameras}
        robots = robots or {scaler.dimensions for scaler in self.states.values()}
        return max(self.prompt.bound(cameras, task, dimensions) for dimensions in robots)

    def sample(self, step: Step, *, id: int, epoch: int, seed: int) -> Sample:
        info = self._info(step.dataset)
        pictures = stored_images(step, info, self.config.vision.image_size)
        actions = self.actions[step.dataset].normalise(step.actions, self.config.action_width)
        if len(actions) != self.config.horizon:
            raise DrivetrainError(
                f"{step.dataset} episode {step.episode} frame {step.frame}: {len(actions)} actions, "
                f"the policy's horizon is {self.config.horizon}"
            )
        mask = np.zeros(actions.shape, np.bool_)
        mask[:, : None if self.config.loss_over == "all" else self.actions[info.name].dimensions] = True
        return self._sample(info, step.task, pictures, step.state, actions, mask, (id, epoch, seed))

    def observe(self, observation: Observation, *, dataset: str, seed: int) -> Sample:
        info = self._info(dataset)
        pictures = observed_images(observation, info, self.config.vision.image_size)
        actions = np.zeros((self.config.horizon, self.config.action_width), np.float32)
        mask = np.zeros(actions.shape, np.bool_)
        mask[:, : self.actions[dataset].dimensions] = True
        return self._sample(info, observation.task, pictures, observation.state, actions, mask, (0, 0, seed))

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
        mask: np.ndarray,
        drawn_for: tuple[int, int, int],
    ) -> Sample:
        config, (id, epoch, seed) = self.config, drawn_for
        scaled = self.states[info.name].normalise(state, config.state_width)
        tokens, image_tokens = self.prompt.tokens(len(pictures), task, scaled[: self.states[info.name].dimensions])
        streams = [stream(seed, epoch, id, draw) for draw in range(self.draws)]
        times = [
            pi05_time(
                g, alpha=config.beta_alpha, beta=config.beta_beta, scale=config.time_scale, offset=config.time_offset
            )
            for g in streams
        ]
        return Sample(
            id=id,
            epoch=epoch,
            embodiment=0,
            weight=1.0,
            tokens=tokens,
            image_tokens=image_tokens,
            images=pictures,
            state=scaled,
            actions=actions,
            action_mask=mask,
            noise=np.stack([g.standard_normal(actions.shape, np.float32) for g in streams]),
            time=np.array(times, np.float32),
        )


def make_processor(config: Pi05Config, datasets: dict[str, DatasetInfo], draws: int) -> Pi05Processor:
    """The entry of this room; see `drivetrain.policies`."""
    return Pi05Processor(config, datasets, draws)


def _scaler(info: DatasetInfo, feature: str, width: int) -> Scaler:
    """The Scaler by quantiles; statistics that lack them are an error that says so."""
    if (found := info.statistics.get(feature)) is not None:
        dimensions = len(info.state_names if feature == "observation.state" else info.action_names)
        for name, values in (("q01", found.q01), ("q99", found.q99)):
            if np.shape(values) != (dimensions,) or np.isnan(np.asarray(values, np.float64)).any():
                raise DrivetrainError(
                    f"data set {info.name!r}: the statistics of {feature!r} lack {name}, which pi-0.5 normalises by; "
                    "ingest it again"
                )
    return scaler(info, feature, width, "quantiles")
