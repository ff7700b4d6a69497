"""`drivetrain train`: a run from its first step, or from its latest checkpoint, alone or under torchrun."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from drivetrain.checkpoint.save import Checkpoints, latest, restore
from drivetrain.data.loader import PlannedSteps, load
from drivetrain.data.plan import PackPlan, make_plan
from drivetrain.parallel.mesh import World, world
from drivetrain.policies import load_weights, make_model, make_processor, parallelize
from drivetrain.run import Run, fingerprint, read_run, to_json
from drivetrain.train.loop import train_steps
from drivetrain.train.meters import Meters
from drivetrain.train.optimizer import make_optimizer
from drivetrain.types import DrivetrainError, Processor

if TYPE_CHECKING:
    from drivetrain.lake.lake import Lake


def train(run: Run, lake: str, out: Path, *, resume: Literal["auto", "never"] = "never") -> None:
    """Train `run` on `lake` into `out`: `run.json`, `metrics.jsonl` and `checkpoints/`.

    resume: "auto" continues from the newest complete checkpoint in `out`, or starts where there is none;
            "never" refuses a folder that already holds a run.
    """
    with world(run.shard, run.threads) as here:
        start = here.gather(_starting_point(out, resume) if here.main else None)[0]
        if isinstance(start, DrivetrainError):
            raise start
        _train(run, lake, out, start, here)


def _starting_point(out: Path, resume: str) -> Path | DrivetrainError | None:
    """The checkpoint to go on from. An error is returned, so that every rank can raise it."""
    if resume == "never" and (out / "run.json").exists():
        return DrivetrainError(f"{out} already holds a run. Add --resume auto to continue it, or give another --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        return DrivetrainError(f"cannot write to {out}: {fault.strerror}. Give an --out that you may write to.")
    return latest(out)


def _train(run: Run, lake_uri: str, out: Path, start: Path | None, here: World) -> None:
    from drivetrain.lake.lake import open_lake  # the rest of this room runs without Lance

    version = run.lake_version or (read_run(start).lake_version if start else None)
    lake = open_lake(lake_uri, version)
    run = replace(run, lake=lake.uri, lake_version=lake.version)
    processor = make_processor(run.policy, lake.datasets, run.batch.draws)
    plan = plan_of(run, lake, processor)
    run = replace(run, batch=replace(run.batch, shape=plan.shape))
    if len(set(here.gather(fingerprint(run)))) > 1:
        raise DrivetrainError("the processes do not agree on the run: their code, settings or lake differ.")

    model = sharded_model(run, here, fill=start is None)
    optimizer = make_optimizer(model, run.optimizer)

    meters = Meters(out, here, run.steps)
    checkpoints = Checkpoints(out, run, lake.datasets, meters.event)
    first = restore(start, run, model, optimizer) if start else 0
    if here.main:
        (out / "run.json").write_text(to_json(run))
    meters.event("resumed" if start else "started", step=first, processes=here.size, pids=here.gather(os.getpid()))

    steps = PlannedSteps(lake.uri, lake.version, plan, processor, run.policy.horizon, here.rank, here.size)
    batches = load(steps, first, run.steps, workers=run.workers, pin_memory=here.device.type == "cuda")
    train_steps(run, model, optimizer, batches, first, here, meters, checkpoints)
    meters.event("finished", step=run.steps)


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
