"""Training of the smallest recipe, on processes of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import Started, run_on, start_on


def smallest(**settings: Any):
    """8 updates of the smallest recipe, with a checkpoint after every second one. `batch_samples=4` reaches into `batch`."""
    from drivetrain.recipes import groot_finetune_tiny

    run = replace(groot_finetune_tiny(), steps=8, save_every=2)
    for name, value in settings.items():
        room, _, inner = name.partition("_")
        if name not in run.__dataclass_fields__ and room in run.__dataclass_fields__:
            value = replace(getattr(run, room), **{inner: value})
            name = room
        run = replace(run, **{name: value})
    return run


def train_here(lake: Path, out: Path, resume: str, settings: dict[str, Any]) -> int:
    """Train in this process. Returns the exit code that the command line would have."""
    from drivetrain.train.main import train
    from drivetrain.types import Interrupted

    try:
        train(smallest(**settings), str(lake), out, resume=resume)  # type: ignore[arg-type]
    except Interrupted as stopped:
        return stopped.exit_code
    return 0


def train(lake: Path, out: Path, *, processes: int = 1, resume: str = "never", **settings: Any) -> list[int]:
    """Train until every process has ended; fails where one raised. Returns exit codes."""
    return run_on(processes, train_here, lake, out, resume, settings)


def start_training(lake: Path, out: Path, *, processes: int, resume: str = "never", **settings: Any) -> Started:
    return start_on(processes, train_here, lake, out, resume, settings)
