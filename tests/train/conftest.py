"""A lake of watermarked episodes from two robots, and the command line that trains on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import Tiny, write_v21, write_v30

from drivetrain.lake.ingest import ingest


@pytest.fixture(scope="session")
def lake(tmp_path_factory) -> Path:
    """Two data sets: one with one camera, one with two."""
    folder = tmp_path_factory.mktemp("train")
    one = write_v21(folder / "one", Tiny(lengths=(12, 20, 16), sizes={"observation.images.front": (64, 64)}))
    two = write_v30(folder / "two", Tiny(lengths=(18, 9)))
    ingest([str(one), str(two)], str(folder / "lake"), image_size=64)
    return folder / "lake"


def train_command(lake: Path, out: Path, *more: str, processes: int = 1) -> list[str]:
    """`drivetrain train` of the smallest recipe, alone or under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [
        sys.executable, *launcher, "-m", "drivetrain", "train", "groot_finetune_tiny", "--lake", str(lake),
        "--out", str(out), "--steps", "8", "--save-every", "2", *more,
    ]  # fmt: skip


def train(lake: Path, out: Path, *more: str, processes: int = 1) -> None:
    """Train to the end; fails with the output."""
    command = train_command(lake, out, *more, processes=processes)
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
