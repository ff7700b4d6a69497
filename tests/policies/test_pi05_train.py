"""pi-0.5 through the whole house on a CPU: a lake, a run, a checkpoint, an exported policy that acts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures import Tiny, write_v21, write_v30

from drivetrain.checkpoint.export import ExportedPolicy, export
from drivetrain.lake.ingest import ingest
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.run import read_run
from drivetrain.types import Observation


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on two robots, one with one camera and one with two."""
    folder = tmp_path_factory.mktemp("pi05")
    one = write_v21(folder / "one", Tiny(lengths=(12, 20), sizes={"observation.images.front": (64, 64)}))
    two = write_v30(folder / "two", Tiny(lengths=(18, 9)))
    ingest([str(one), str(two)], str(folder / "lake"), image_size=64)
    command = [
        sys.executable, "-m", "drivetrain", "train", "pi05_finetune_tiny", "--lake", str(folder / "lake"),
        "--out", str(folder / "run"), "--steps", "6", "--save-every", "3", "--batch.draws", "2",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_a_run_of_two_robots_is_saved_exported_and_acts(trained, tmp_path):
    run = read_run(trained)
    assert isinstance(run.policy, Pi05Config) and run.recipe == "pi05_finetune_tiny"
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6 and np.isfinite(losses).all()
    folder = export(trained, tmp_path / "policy")
    policy = ExportedPolicy(folder, dataset="two")
    assert isinstance(policy.config, Pi05Config)
    looks = {camera: np.zeros((48, 64, 3), np.uint8) for camera in policy.info.cameras}
    seen = [Observation(looks, np.full(7, 0.1 * i, np.float32), "open the drawer") for i in range(2)]
    first, other = policy.act(seen, [0, 1])
    assert first.shape == other.shape == (16, 7) and np.isfinite([first, other]).all()
    assert not np.allclose(first, other)
    assert np.array_equal(policy.act(seen[:1], [0])[0].round(3), first.round(3)), "it depends on its neighbours"
