"""`drivetrain evaluate`: success of a checkpoint in simulation."""

from __future__ import annotations

import tempfile
from pathlib import Path

from drivetrain.checkpoint.export import ExportedPolicy, export
from drivetrain.evaluate.results import count_successes, success_text, wilson_interval
from drivetrain.evaluate.rollout import evaluate
from drivetrain.evaluate.simulator import check_suite

MAX_STEPS = 150


def evaluate_checkpoint(
    checkpoint: Path,
    suite: str,
    episodes: int,
    out: Path,
    *,
    first_state: int = 0,
    dataset: str | None = None,
    blind: bool = False,
    max_steps: int = MAX_STEPS,
    execute: int = 0,
    workers: int = 2,
    seed: int = 0,
) -> dict:
    """Evaluate a run, a checkpoint or an exported policy into the folder `out`; returns what `--json` prints.

    dataset: which of the data sets it was trained on has this robot; may be left out where there is only one.
    execute: actions of a chunk that are carried out before the policy is asked again; 0 takes half of the chunk.
    Images have the size at which the training data were stored. Errors: as in `evaluate`, and a folder without a policy.
    """
    check_suite(suite)
    policy = _load(checkpoint, dataset)
    execute = execute or max(1, policy.config.horizon // 2)
    states = range(first_state, first_state + episodes)
    results = evaluate(
        policy.act,
        suite,
        states,
        max_steps=max_steps,
        execute=execute,
        image_size=policy.info.image_size,
        workers=workers,
        seed=seed,
        out=out,
        blind=blind,
    )
    successes = count_successes(results)
    return {
        "suite": suite,
        "successes": successes,
        "episodes": len(results),
        "interval_95": list(wilson_interval(successes, len(results))),
        "text": success_text(successes, len(results)),
        "crashes": sum(r.outcome == "crash" for r in results),
        "first_state": first_state,
        "max_steps": max_steps,
        "execute": execute,
        "out": str(out),
    }


def _load(folder: Path, dataset: str | None) -> ExportedPolicy:
    """The policy of an exported folder, or of a run or checkpoint, which is exported aside first."""
    if (folder / "config.json").is_file():
        return ExportedPolicy(folder, dataset=dataset)
    with tempfile.TemporaryDirectory() as aside:
        return ExportedPolicy(export(folder, Path(aside) / "policy"), dataset=dataset)
