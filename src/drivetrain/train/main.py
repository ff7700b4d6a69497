"""`drivetrain train`: a run from its first step, or from its latest checkpoint, alone or under torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from drivetrain.checkpoint.folder import complete, faults, locked, newest_whole, write_atomically
from drivetrain.checkpoint.restore import changed_settings, restore
from drivetrain.checkpoint.save import Checkpoints
from drivetrain.data.loader import PlannedSteps, load
from drivetrain.data.plan import PackPlan, make_plan
from drivetrain.parallel.mesh import World, world
from drivetrain.policies import load_weights, make_model, make_processor, parallelize
from drivetrain.run import Run, fingerprint, read_run, to_json
from drivetrain.train.loop import train_steps
from drivetrain.train.meters import Meters
from drivetrain.train.optimizer import make_optimizer
from drivetrain.train.skips import Skips
from drivetrain.train.stop import StopRequest, stop_on_signal
from drivetrain.types import DrivetrainError, Interrupted, Processor

if TYPE_CHECKING:
    from drivetrain.cluster.dry_run import DryRun
    from drivetrain.lake.lake import Lake


def train(
    run: Run,
    lake: str,
    out: Path,
    *,
    resume: Literal["auto", "changed", "never"] = "never",
    dry_run: bool = False,
    gpus: int = 1,
    rank: int = 0,
    cameras: int = 2,
) -> DryRun | None:
    """Train `run` on `lake` into `out`: `run.json`, `metrics.jsonl` and `checkpoints/`.

    resume: "auto" continues from the newest checkpoint in `out` that is whole, or starts where there is none;
            "changed" does so with settings that bend the run; "never" refuses a folder that already holds a run.
    dry_run: train nothing; return what one step of rank `rank` of `gpus` takes, for samples of `cameras` images.
    Raises Interrupted where SIGTERM or SIGINT came: after the update at hand, with a checkpoint of it, within run.grace.
    """
    if dry_run:
        from drivetrain.cluster import dry_run as rehearsal

        return rehearsal.dry_run(run, gpus, rank, cameras)
    with world(run.shard, run.threads) as here, stop_on_signal(run.grace) as stop, contextlib.ExitStack() as held:
        candidates = here.first(lambda: _enter(out, resume, held))
        _train(run, lake, out, resume, candidates, here, stop)
    return None


def _enter(out: Path, resume: str, held: contextlib.ExitStack) -> list[Path]:
    """Make and lock the run's folder, until `held` is closed. Returns its complete checkpoints, newest first."""
    if resume == "never" and (out / "run.json").exists():
        raise DrivetrainError(f"{out} already holds a run. Add --resume auto to continue it, or give another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(out))
    except OSError as fault:
        raise DrivetrainError(
            f"cannot write to {out}: {fault.strerror}. Give an --out that you may write to."
        ) from None
    return complete(out)


def _train(
    run: Run, lake_uri: str, out: Path, resume: str, candidates: list[Path], here: World, stop: StopRequest
) -> None:
    from drivetrain.lake.lake import open_lake  # the rest of this room runs without Lance

    def check(checkpoint: Path) -> list[str]:  # every process reads a part of it
        return [fault for found in here.gather(faults(checkpoint, here.rank, here.size)) for fault in found]

    start = newest_whole(candidates, here.say, check)
    version = run.lake_version or (read_run(start).lake_version if start else None)
    lake = open_lake(lake_uri, version)
    run = replace(run, lake=lake.uri, lake_version=lake.version)
    processor = make_processor(run.policy, lake.datasets, run.batch.draws)
    plan = plan_of(run, lake, processor)
    run = replace(run, batch=replace(run.batch, shape=plan.shape))
    if len(set(here.gather(fingerprint(run)))) > 1:
        raise DrivetrainError("the processes do not agree on the run: their code, settings or lake differ.")
    changed = changed_settings(start, run, accept=resume == "changed") if start else []

    model = sharded_model(run, here, fill=start is None)
    optimizer = make_optimizer(model, run.optimizer)

    meters = Meters(out, here, run.steps)
    checkpoints = Checkpoints(out, run, lake.datasets, meters.event)
    first = restore(start, model, optimizer) if start else 0
    here.first(lambda: write_atomically(out / "run.json", to_json(run)))
    for line in changed:
        here.say(f"changed since {start.name}: {line}")  # type: ignore[union-attr]
    pids = here.gather(os.getpid())
    meters.event("resumed" if start else "started", step=first, processes=here.size, pids=pids, changed=changed)

    skips = Skips(run.skip_limit, here, meters, lambda sample: name_sample(plan, lake, sample))
    steps = PlannedSteps(lake.uri, lake.version, plan, processor, run.policy.horizon, here.rank, here.size)
    batches = load(steps, first, run.steps, workers=run.workers, pin_memory=here.device.type == "cuda")
    done = train_steps(run, model, optimizer, batches, first, here, meters, checkpoints, skips, stop)
    if done < run.steps:
        by = max(here.gather(stop.signal))
        meters.event("stopped", step=done, signal=by)
        raise Interrupted(
            f"stopped by {signal.Signals(by).name} after step {done} of {run.steps}; it is saved. "
            "Continue with --resume auto.",
            by,
        )
    meters.event("finished", step=run.steps)


def name_sample(plan: PackPlan, lake: Lake, sample: int) -> str:
    """A sample id in words."""
    span = int(np.searchsorted(plan.offsets, sample, side="right")) - 1
    row = int(plan.spans.first_row[span] + sample - plan.offsets[span])
    frame = lake.read(np.array([row]), ["frame"])["frame"][0].as_py()
    dataset = plan.spans.datasets[plan.spans.dataset[span]]
    return f"data set {dataset!r}, episode {plan.spans.episode[span]}, frame {frame}"


def sharded_model(run: Run, here: World, *, fill: bool = True) -> nn.Module:
    """The run's policy, sharded; with its first weights, read or random, unless a checkpoint is about to fill it.

    Weights that are read go straight into the shards: no process ever holds random ones beside them.
    """
    torch.manual_seed(run.seed)
    if not run.weights:
        with here.device:
            model = make_model(run.policy)
        parallelize(run.policy, model, here.mesh, run.precision)
        return model
    with torch.device("meta"):
        model = make_model(run.policy)
    parallelize(run.policy, model, here.mesh, run.precision)
    model.to_empty(device=here.device)
    if fill:
        load_weights(run.policy, model, run.weights)
    return model


def plan_of(run: Run, lake: Lake, processor: Processor) -> PackPlan:
    """The run's pack plan; a pure function of the run and of the lake version."""
    named = {name for weights in (run.mixture.weights, *run.mixture.changes.values()) for name in weights}
    spans = lake.spans(sorted(named) or None, held_out=run.mixture.held_out)
    cameras = np.array([len(lake.datasets[name].cameras) for name in spans.datasets], dtype=np.int64)[spans.dataset]
    kinds, of_kind = np.unique(np.stack([cameras, spans.task]), axis=1, return_inverse=True)
    tokens = np.array([processor.token_count(int(c), spans.tasks[t]) for c, t in kinds.T], dtype=np.int64)
    return make_plan(
        spans,
        tokens[of_kind],
        cameras,
        samples=run.batch.samples,
        packs=run.batch.packs,
        seed=run.seed,
        weights=run.mixture.weights or None,
        changes=run.mixture.changes,
        fragment=run.mixture.fragment,
        window=run.mixture.window,
        shape=run.batch.shape,
    )
