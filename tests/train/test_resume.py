"""A run that was killed and resumed ends where an undisturbed one ends, on the same and on another number of processes."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from commands import start_training, train
from runs import data, events, lines, wait_for_step, weights

from drivetrain.checkpoint.folder import complete


def kill_one_rank(lake: Path, out: Path, after_step: int) -> None:
    """Train on two processes and SIGKILL one of them once `after_step` has been logged."""
    started = start_training(lake, out, processes=2)
    wait_for_step(out, after_step, started)
    os.kill(random.choice(started.pids), signal.SIGKILL)
    assert all(trace for _, trace in started.outcomes())


@pytest.fixture(scope="module")
def undisturbed(lake, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(lake, out, processes=2)
    return out


def test_resumed_on_two_processes_is_bit_for_bit_the_same(lake, undisturbed, tmp_path):
    out = tmp_path / "run"
    kill_one_rank(lake, out, after_step=random.randint(2, 6))
    train(lake, out, resume="auto", processes=2)
    assert torch.equal(weights(out), weights(undisturbed))
    assert data(out) == data(undisturbed)


def test_resumed_on_one_process_is_the_same(lake, undisturbed, tmp_path):
    out = tmp_path / "run"
    kill_one_rank(lake, out, after_step=random.randint(2, 6))
    train(lake, out, resume="auto", processes=1)
    a, b = weights(out), weights(undisturbed)
    assert (a - b).norm() <= 1e-6 * b.norm()
    assert data(out) == data(undisturbed)


def test_resumed_behind_a_damaged_checkpoint_is_the_same(lake, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed, tmp_path / "run")
    damaged, before = complete(out)
    os.truncate(next(damaged.glob("__1_*.distcp")), 100)
    (out / "checkpoints/latest").unlink()
    train(lake, out, resume="auto", processes=2)
    assert before.name == "step_00000006" and events(out, "resumed")[0]["step"] == 6
    assert torch.equal(weights(out), weights(undisturbed))


def test_sigterm_to_one_rank_stops_all_at_one_step_and_saves(lake, undisturbed, tmp_path):
    out = tmp_path / "run"
    started = start_training(lake, out, processes=2, save_every=100)
    wait_for_step(out, 2, started)
    os.kill(started.pids[1], signal.SIGTERM)
    sent = time.monotonic()
    assert started.results() == [143, 143]
    assert time.monotonic() - sent < 30
    (stopped,) = events(out, "stopped")
    assert [line["step"] for line in events(out, "checkpoint")] == [stopped["step"]]
    assert 2 < stopped["step"] < 8
    train(lake, out, processes=2, resume="auto", save_every=100)
    assert torch.equal(weights(out), weights(undisturbed))
    assert data(out) == data(undisturbed)


def test_ctrl_c_saves_alone(lake, tmp_path):
    out = tmp_path / "run"
    started = start_training(lake, out, processes=1, save_every=100)
    wait_for_step(out, 2, started)
    os.kill(started.pids[0], signal.SIGINT)
    assert started.results() == [130]
    assert complete(out)[0].name == f"step_{events(out, 'stopped')[0]['step']:08d}"


def test_other_settings_are_listed_and_refused_unless_confirmed(lake, undisturbed):
    with pytest.raises(AssertionError) as caught:
        train(lake, undisturbed, resume="auto", optimizer_learning_rate=0.5)
    assert "DrivetrainError" in str(caught.value) and "optimizer.learning_rate was 0.0001, is 0.5" in str(caught.value)
    assert "eps" not in str(caught.value).rpartition("DrivetrainError")[2]
    train(lake, undisturbed, resume="changed", optimizer_learning_rate=0.5)
    assert lines(undisturbed)[-1]["event"] == "finished"


def test_a_folder_that_holds_a_run_is_not_overwritten(lake, undisturbed):
    with pytest.raises(AssertionError, match="--resume auto"):
        train(lake, undisturbed)
