"""GR00T's data side: a step of the lake becomes a sample, and the policy's answer becomes a motion of the robot."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
from PIL import Image

from drivetrain.data.draws import groot_time, stream
from drivetrain.data.image import fit
from drivetrain.data.normalise import Scaler, scaler
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.prompt import Prompt
from drivetrain.types import DatasetInfo, DrivetrainError, FeatureStatistics, Observation, Sample, Step


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
        where = f"{step.dataset} episode {step.episode} frame {step.frame}"
        if len(step.images) != len(info.cameras):
            raise DrivetrainError(
                f"{where}: {len(step.images)} images, {len(info.cameras)} cameras {info.cameras} expected"
            )
        pictures = [self._decode(data, info, where) for data in step.images]
        actions = self.actions[step.dataset].normalise(step.actions, self.config.action_width)
        if len(actions) != self.config.horizon:
            raise DrivetrainError(f"{where}: {len(actions)} actions, the policy's horizon is {self.config.horizon}")
        return self._sample(info, step.task, pictures, step.state, actions, (id, epoch, seed))

    def observe(self, observation: Observation, *, dataset: str, seed: int) -> Sample:
        info, size = self._info(dataset), self.config.vision.image_size
        if missing := [camera for camera in info.cameras if camera not in observation.images]:
            raise DrivetrainError(
                f"the policy looks through {', '.join(info.cameras)}; the observation lacks {', '.join(missing)} "
                f"and has {', '.join(observation.images) or 'no images'}"
            )
        if surplus := sorted(set(observation.images) - set(info.cameras)):
            raise DrivetrainError(
                f"the policy knows no camera {', '.join(surplus)}; it was trained with {info.cameras}"
            )
        # the lake's size first: a live image goes through the same two steps as a stored one
        pictures = [_resize(fit(observation.images[camera], info.image_size), size) for camera in info.cameras]
        actions = np.zeros((self.config.horizon, self.config.action_width), np.float32)
        return self._sample(info, observation.task, pictures, observation.state, actions, (0, 0, seed))

    def physical_actions(self, actions: np.ndarray, *, dataset: str) -> np.ndarray:
        self._info(dataset)
        return self.actions[dataset].restore(actions)

    def to_dict(self) -> dict[str, Any]:
        """Everything that `from_dict` needs, of JSON's types; the config is not in it."""
        return {"draws": self.draws, "datasets": {name: info_to_dict(info) for name, info in self.datasets.items()}}

    @staticmethod
    def from_dict(config: GrootConfig, value: dict[str, Any]) -> GrootProcessor:
        datasets = {name: info_from_dict(info) for name, info in value["datasets"].items()}
        return GrootProcessor(config, datasets, value["draws"])

    def _info(self, dataset: str) -> DatasetInfo:
        if dataset not in self.datasets:
            known = ", ".join(sorted(self.datasets)) or "none"
            raise DrivetrainError(f"the policy was not given the data set {dataset!r}; it knows: {known}")
        return self.datasets[dataset]

    def _decode(self, data: bytes, info: DatasetInfo, where: str) -> np.ndarray:
        """One tile per image, of the lake's size: uint8 [size, size, 3] at the policy's size."""
        with Image.open(io.BytesIO(data)) as image:
            if image.size != (info.image_size, info.image_size):
                raise DrivetrainError(f"{where}: an image of {image.size}, the lake stores {info.image_size} squared")
            picture = np.asarray(image.convert("RGB"))
        return _resize(picture, self.config.vision.image_size)

    def _sample(
        self,
        info: DatasetInfo,
        task: str,
        pictures: list[np.ndarray],
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
        size = config.vision.image_size
        return Sample(
            id=id,
            epoch=epoch,
            embodiment=self.slots[info.name],
            weight=1.0,
            tokens=tokens,
            image_tokens=image_tokens,
            images=np.stack(pictures) if pictures else np.zeros((0, size, size, 3), np.uint8),
            state=self.states[info.name].normalise(state, config.state_width),
            actions=actions,
            action_mask=mask,
            noise=np.stack([g.standard_normal(actions.shape, np.float32) for g in streams]),
            time=np.array(times, np.float32),
        )


def embodiment_slot(config: GrootConfig, dataset: str) -> int:
    """Which of the per-embodiment weights a data set uses."""
    slot = config.embodiments.get(dataset, config.new_embodiment)
    if not 0 <= slot < config.head.embodiments:
        raise DrivetrainError(
            f"{dataset}: embodiment slot {slot}; the policy has slots 0 to {config.head.embodiments - 1}"
        )
    return slot


def info_to_dict(info: DatasetInfo) -> dict[str, Any]:
    """A DatasetInfo as JSON's types; float64 values survive exactly."""
    value = dataclasses.asdict(info)
    for statistics in value["statistics"].values():
        statistics.update({k: v.tolist() for k, v in statistics.items() if isinstance(v, np.ndarray)})
    return value


def info_from_dict(value: dict[str, Any]) -> DatasetInfo:
    """The inverse of `info_to_dict`."""
    statistics = {
        feature: FeatureStatistics(
            count=fields["count"], **{k: np.array(v, np.float64) for k, v in fields.items() if k != "count"}
        )
        for feature, fields in value["statistics"].items()
    }
    tuples = {k: tuple(value[k]) for k in ("cameras", "state_names", "action_names")}
    return DatasetInfo(**{**value, **tuples, "statistics": statistics})


def _resize(picture: np.ndarray, size: int) -> np.ndarray:
    if picture.shape[0] == size:
        return picture
    return np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC))
