"""`drivetrain evaluate`: a checkpoint or policy folder in closed loop, from listed initial states."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint.export import ExportedPolicy, export
from drivetrain.evaluate.results import count_successes, success_text, wilson_interval, write_results
from drivetrain.evaluate.rollout import evaluate


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_checkpoint` found. interval: bounds of the success rate, 95 %, Wilson."""

    suite: str
    successes: int
    episodes: int
    interval: tuple[float, float]
    text: str
    out: str
    seconds: float


def evaluate_checkpoint(
    checkpoint: Path,
    suite: str,
    episodes: int,
    *,
    first_state: int,
    out: Path,
    blind: bool = False,
    max_steps: int = 150,
    execute: int = 4,
    seed: int = 0,
    workers: int = 2,
) -> Evaluation:
    """Run one episode from each initial state first_state .. first_state + episodes - 1; results and films go to `out`.

    checkpoint: a run's folder, one of its checkpoints, or an exported policy.
    Raises what `ExportedPolicy` and `evaluate` raise.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        is_policy = (checkpoint / "config.json").is_file()
        policy = ExportedPolicy(checkpoint if is_policy else export(checkpoint, Path(temporary) / "policy"))
        results = evaluate(
            policy.act,
            suite,
            range(first_state, first_state + episodes),
            max_steps=max_steps,
            execute=execute,
            image_size=policy.info.image_size,
            workers=workers,
            seed=seed,
            videos_dir=out,
            blind=blind,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    seconds = time.perf_counter() - began
    write_results(out, results, seconds)
    successes = count_successes(results)
    interval, text = wilson_interval(successes, episodes), success_text(successes, episodes)
    return Evaluation(suite, successes, episodes, interval, text, str(out), round(seconds, 1))
