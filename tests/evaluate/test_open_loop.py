from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drivetrain.evaluate.open_loop import open_loop_errors
from drivetrain.types import DrivetrainError, FeatureStatistics


def statistics(rows: np.ndarray) -> FeatureStatistics:
    quantiles = {f"q{q:02d}": np.quantile(rows, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    ends = {"min": rows.min(axis=0), "max": rows.max(axis=0)}
    return FeatureStatistics(len(rows), rows.mean(axis=0), rows.std(axis=0), **ends, **quantiles)


@pytest.fixture
def data():
    random = np.random.default_rng(0)
    demonstrated = random.normal([1, -5, 2], [0.1, 20, 0], (400, 8, 3))
    return {
        "predicted": demonstrated.copy(),
        "demonstrated": demonstrated,
        "valid": np.ones((400, 8), bool),
        "state": demonstrated[:, 0],
        "training": statistics(demonstrated.reshape(-1, 3)),
        "state_names": ["a", "b", "c"],
        "action_names": ["a", "b", "c"],
    }


def test_dimensions_count_alike_and_constant_ones_are_left_out(data) -> None:
    data["predicted"] += data["training"].std * [1.0, 0.5, 0.0] + [0, 0, 3.0]
    errors = open_loop_errors(**data)
    assert errors.policy == pytest.approx(0.75) and errors.per_dimension == pytest.approx({"a": 1.0, "b": 0.5})
    assert errors.left_out == ["c"] and errors.per_step == pytest.approx([0.75] * 8)


def test_baselines_are_what_they_say(data) -> None:
    errors = open_loop_errors(**data)
    assert errors.policy == 0.0
    assert errors.mean_action == pytest.approx(np.sqrt(2 / np.pi), abs=0.02), "mean |z| of a Gaussian"
    # Two independent Gaussians differ by sqrt(2) times as much, except in the first step, where state is the action.
    assert errors.repeat_state == pytest.approx(7 / 8 * np.sqrt(4 / np.pi), abs=0.02)
    assert open_loop_errors(**data | {"state_names": ["x", "y", "z"]}).repeat_state is None


def test_what_lies_past_the_end_does_not_count(data) -> None:
    data["valid"][:, 5:] = False
    data["predicted"][:, 5:] = np.nan
    data["predicted"][:, :5] += data["training"].std
    errors = open_loop_errors(**data)
    assert errors.policy == pytest.approx(1.0) and len(errors.per_step) == 5


def test_data_without_movement_is_an_error(data) -> None:
    still = replace(data["training"], std=np.zeros(3))
    with pytest.raises(DrivetrainError, match="actions that change"):
        open_loop_errors(**data | {"training": still})
