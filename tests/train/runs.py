"""What a run's folder tells of itself."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from processes import Started

from drivetrain.checkpoint.folder import find
from drivetrain.checkpoint.restore import load_model
from drivetrain.policies import make_model
from drivetrain.run import read_run


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(out: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines(out) if line.get("event") in names]


def weights(out: Path, step: int = 8) -> torch.Tensor:
    """All weights of the newest checkpoint, in one vector."""
    checkpoint = find(out)
    assert checkpoint.name == f"step_{step:08d}"
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


def wait_for_step(out: Path, step: int, started: Started) -> None:
    """Return once a line of update `step` or a later one is in the metrics, or a process has ended."""
    while all(child.is_alive() for child, _ in started.started):
        if (out / "metrics.jsonl").exists() and any(
            line.get("step", 0) >= step and "loss" in line for line in whole_lines(out)
        ):
            return
        time.sleep(0.01)


def whole_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().split("\n")[:-1]]
