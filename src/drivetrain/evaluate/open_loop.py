"""How far predicted actions are from the demonstrated ones, on episodes that were not trained on.

The error is the mean, over all samples, future steps and action dimensions, of |predicted - demonstrated| divided by the
standard deviation of that dimension in the training data. So it has no unit, every dimension counts alike, and predicting
the mean action scores about 0.8 on Gaussian actions. Dimensions that never changed in training are left out and named.
A small open-loop error does not prove that a robot succeeds; one above the baselines proves that nothing was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from drivetrain.checkpoint.export import ExportedPolicy
from drivetrain.data.plan import Pack
from drivetrain.data.read import read_steps
from drivetrain.lake.images import decode_image
from drivetrain.lake.lake import Lake
from drivetrain.types import DatasetInfo, DrivetrainError, FeatureStatistics, Observation, Spans, Step

CONSTANT = 1e-6
"""A dimension whose standard deviation is below this share of its largest magnitude has not changed."""

DEFINITION = "mean |predicted - demonstrated| / standard deviation of the dimension in training"


@dataclass(frozen=True)
class OpenLoopErrors:
    """Errors as this module defines them; lower is better.

    policy, mean_action, repeat_state: of the policy and of two baselines. repeat_state (hold the present position) exists
    only where actions are positions, that is, where action and state dimensions have the same names.
    per_dimension: action name -> the policy's error.   per_step: the policy's error for each future step, [H].
    left_out:      dimensions that were constant in training.
    """

    definition: str
    samples: int
    episodes: int
    policy: float
    mean_action: float
    repeat_state: float | None
    per_dimension: dict[str, float]
    per_step: list[float]
    left_out: list[str]


def open_loop_errors(
    predicted: np.ndarray,
    demonstrated: np.ndarray,
    valid: np.ndarray,
    state: np.ndarray,
    *,
    training: FeatureStatistics,
    state_names: Sequence[str],
    action_names: Sequence[str],
    episodes: int = 1,
) -> OpenLoopErrors:
    """Errors of predictions and of both baselines, all in physical units.

    predicted, demonstrated: float [n, H, A].   valid: bool [n, H], False past an episode's end.   state: float [n, D].
    training: statistics of the training actions.   Errors: shapes that differ, nothing valid, no dimension that moves.
    """
    n, _, width = demonstrated.shape
    assert predicted.shape == demonstrated.shape and valid.shape == demonstrated.shape[:2], (
        predicted.shape,
        valid.shape,
    )
    assert state.shape[0] == n and len(action_names) == width, (state.shape, action_names)
    largest = np.maximum(np.abs(training.min), np.abs(training.max))
    moves = training.std > CONSTANT * np.maximum(largest, 1e-12)
    if not valid.any() or not moves.any():
        raise DrivetrainError("open-loop error needs steps to compare and actions that change; this data has none.")
    scale = np.where(moves, training.std, np.inf)

    def normalised(guess: np.ndarray) -> np.ndarray:
        return np.where(valid[..., None], np.abs(guess - demonstrated) / scale, np.nan)[..., moves]

    errors = normalised(predicted)
    held = None
    if list(state_names) == list(action_names):
        held = float(np.nanmean(normalised(np.broadcast_to(state[:, None, :], demonstrated.shape))))
    moving = [name for name, m in zip(action_names, moves, strict=True) if m]
    return OpenLoopErrors(
        definition=DEFINITION,
        samples=n,
        episodes=episodes,
        policy=float(np.nanmean(errors)),
        mean_action=float(np.nanmean(normalised(np.broadcast_to(training.mean, demonstrated.shape)))),
        repeat_state=held,
        per_dimension=dict(zip(moving, np.nanmean(errors, axis=(0, 1)).tolist(), strict=True)),
        per_step=np.nanmean(errors[:, valid.any(axis=0)], axis=(0, 2)).tolist(),
        left_out=[name for name, m in zip(action_names, moves, strict=True) if not m],
    )


def open_loop(
    policy: ExportedPolicy, lake: Lake, *, held_out: int, samples: int = 256, batch: int = 16, seed: int = 0
) -> dict:
    """Errors on the last `held_out` episodes of the policy's data set in the lake, as a dict for JSON.

    At most `samples` steps are asked, evenly spread. The baselines use the statistics that the policy was trained with.
    Errors: the data set is not in the lake, or no episodes are held out.
    """
    if held_out < 1:
        raise DrivetrainError("open-loop error needs episodes that were not trained on. Give --mixture.held-out 2.")
    info = policy.info
    spans = lake.spans([info.name], held_out=held_out, only_held_out=True)
    steps = _spread(lake, spans, policy.config.horizon, samples)
    predicted = []
    for start in range(0, len(steps), batch):
        asked = steps[start : start + batch]
        observations = [_observation(step, info) for step in asked]
        predicted += policy.act(observations, [seed + start + i for i in range(len(asked))])
    errors = open_loop_errors(
        np.stack(predicted),
        np.stack([s.actions for s in steps]),
        np.stack([s.valid for s in steps]),
        np.stack([s.state for s in steps]),
        training=info.statistics["action"],
        state_names=info.state_names,
        action_names=info.action_names,
        episodes=len({s.episode for s in steps}),
    )
    return asdict(errors)


def _spread(lake: Lake, spans: Spans, horizon: int, samples: int) -> list[Step]:
    """At most `samples` steps of the spans, evenly spaced."""
    total = int(spans.length.sum())
    picked = np.unique(np.linspace(0, total - 1, min(samples, total)).round().astype(np.int64))
    ends = np.cumsum(spans.length)
    span = np.searchsorted(ends, picked, side="right")
    row = spans.first_row[span] + picked - (ends - spans.length)[span]
    zeros = np.zeros(len(picked), np.int64)
    pack = Pack(sample=picked, epoch=zeros, span=span, row=row, last_row=spans.last_row[span])
    return read_steps(lake, spans, pack, horizon)


def _observation(step: Step, dataset: DatasetInfo) -> Observation:
    images = {c: decode_image(i) for c, i in zip(dataset.cameras, step.images, strict=True)}
    return Observation(images, step.state, step.task)
