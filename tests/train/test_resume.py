"""A run that was killed and resumed ends where an undisturbed one ends, on the same and on another number of processes."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from commands import environment, train, train_command

from drivetrain.checkpoint.save import find, load_model
from drivetrain.policies import make_model
from drivetrain.run import read_run


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> torch.Tensor:
    """All weights of the latest checkpoint, in one vector."""
    checkpoint = find(out)
    assert checkpoint.name == "step_00000008"
    model = make_model(read_run(checkpoint).policy)
    load_model(checkpoint, model)
    return torch.cat([p.flatten() for p in model.state_dict().values()])


def data(out: Path) -> dict[int, str]:
    """step -> which samples were trained on; every line of a step must tell the same."""
    seen: dict[int, str] = {}
    for line in lines(out):
        if "data_digest" in line:
            assert seen.setdefault(line["step"], line["data_digest"]) == line["data_digest"]
    assert sorted(seen) == list(range(1, 9))
    return seen


def kill_one_rank(lake: Path, out: Path, after_step: int) -> None:
    """Train on two processes and SIGKILL one of them once `after_step` has been logged."""
    child = subprocess.Popen(
        train_command(lake, out, processes=2), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = out / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and f'"step": {after_step}, "loss"' in metrics.read_text()):
        time.sleep(0.01)
    pids = next(line["pids"] for line in lines(out) if line.get("event") == "started")
    os.kill(random.choice(pids), signal.SIGKILL)
    assert child.wait() != 0


@pytest.fixture(scope="module")
def undisturbed(lake, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(lake, out, processes=2)
    return out


def test_resumed_on_two_processes_is_bit_for_bit_the_same(lake, undisturbed, tmp_path):
    out = tmp_path / "run"
    kill_one_rank(lake, out, after_step=random.randint(2, 6))
    train(lake, out, "--resume", "auto", processes=2)
    assert torch.equal(weights(out), weights(undisturbed))
    assert data(out) == data(undisturbed)


def test_resumed_on_one_process_is_the_same(lake, undisturbed, tmp_path):
    out = tmp_path / "run"
    kill_one_rank(lake, out, after_step=random.randint(2, 6))
    train(lake, out, "--resume", "auto", processes=1)
    a, b = weights(out), weights(undisturbed)
    assert (a - b).norm() <= 1e-6 * b.norm()
    assert data(out) == data(undisturbed)


def test_other_settings_are_listed_and_refused(lake, undisturbed):
    command = train_command(lake, undisturbed, "--resume", "auto", "--optimizer.learning-rate", "0.5")
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert "optimizer" in done.stderr and "0.5" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_holds_a_run_is_not_overwritten(lake, undisturbed):
    done = subprocess.run(train_command(lake, undisturbed), capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert "--resume auto" in done.stderr
