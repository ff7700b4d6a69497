from __future__ import annotations

import json

import numpy as np
import pytest

from drivetrain.evaluate.record import demonstrate, record
from drivetrain.evaluate.rollout import replay
from drivetrain.evaluate.simulator import open_simulator
from drivetrain.types import DrivetrainError

SUITE = "metaworld/reach"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded") / "reach"
    lines: list[str] = []
    report = record(SUITE, 3, out, first_state=5, image_size=64, workers=2, progress=lines.append)
    return out, report, lines


def test_lerobot_reads_what_was_recorded(recorded) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    out, report, lines = recorded
    dataset = LeRobotDataset("drivetrain/reach", root=out)
    assert report.states == (5, 6, 7) and not report.failed and len(dataset) == report.steps
    assert dataset.num_episodes == 3 and dataset.fps == 80
    simulator = open_simulator(SUITE, 64)
    first = simulator.reset(5)
    row = dataset[0]
    assert np.allclose(row["observation.state"].numpy(), first.state)
    assert row["task"] == first.task
    stored = row["observation.images.corner2"].numpy().transpose(1, 2, 0) * 255
    error = np.abs(stored - first.images["corner2"].astype(float)).mean()
    assert error < 6, f"the first picture differs by {error:.1f} of 255 on average"
    for name in ("hand_x", "gripper_opening"):
        assert name in dataset.meta.features["observation.state"]["names"]
    assert json.loads((out / "recording.json").read_text())["states"] == [5, 6, 7]
    assert lines[-1].startswith("3 episodes")
    simulator.close()


def test_nothing_is_left_beside_the_data_set(recorded) -> None:
    out, _, _ = recorded
    assert [path.name for path in out.parent.iterdir()] == ["reach"]


def test_an_existing_folder_is_not_touched(recorded) -> None:
    out, _, _ = recorded
    with pytest.raises(DrivetrainError, match=r"exists already.*rm -r"):
        record(SUITE, 1, out)


def test_a_failing_recording_leaves_nothing(tmp_path) -> None:
    with pytest.raises(DrivetrainError, match=r"initial state 1 failed.*exit code 7"):
        record("faulty_simulators:open_faulty/reach", 2, tmp_path / "d", image_size=64, progress=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_an_expert_without_time_to_succeed_is_not_stored(tmp_path) -> None:
    with pytest.raises(DrivetrainError, match="failed from all 1 initial states"):
        record(SUITE, 1, tmp_path / "d", image_size=64, max_steps=3, progress=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_noise_is_executed_and_the_clean_action_stored() -> None:
    simulator = open_simulator(SUITE, 64)
    noisy = demonstrate(simulator, 0, 0.7, 0, 250)
    clean = demonstrate(simulator, 0, 0.0, 0, 250)
    assert noisy is not None and clean is not None
    assert replay(simulator, 0, clean.actions), "without noise the stored actions are the executed ones"
    assert not np.allclose(noisy.states[5:20], clean.states[5:20], atol=0.005), "the noise moved the hand"
    simulator.reset(0)
    assert np.array_equal(noisy.actions[0], simulator.expert_action()), "the stored action is the expert's own"
    assert demonstrate(simulator, 0, 0.7, 0, 250).states.tobytes() == noisy.states.tobytes()
    simulator.close()
