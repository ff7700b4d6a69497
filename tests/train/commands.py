"""The command line that trains, alone or under torchrun."""

import os
import subprocess
import sys
from pathlib import Path


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
