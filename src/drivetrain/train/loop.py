"""The training loop.

One update: every rank takes its packs of the step, each pack is one forward and backward pass, gradients are summed
over packs and ranks, and the loss is divided once, by the global count. So accumulation, packing and the number of
processes do not change what is computed. The host never waits for the update it has just queued: whether a rank was asked
to stop, and whether an update was skipped, is read one update later, by all ranks alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drivetrain.checkpoint.restore import training_state
from drivetrain.checkpoint.save import Checkpoints
from drivetrain.data.permutation import key
from drivetrain.parallel.mesh import World
from drivetrain.run import Run
from drivetrain.train.late import Late
from drivetrain.train.meters import Meters
from drivetrain.train.optimizer import clipped_step, learning_rate
from drivetrain.train.skips import Skips
from drivetrain.train.stop import StopRequest
from drivetrain.types import StepPacks


def train_steps(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[StepPacks],
    first_step: int,
    world: World,
    meters: Meters,
    checkpoints: Checkpoints,
    skips: Skips,
    stop: StopRequest,
) -> int:
    """Updates first_step..run.steps-1; `batches` yields their packs in order. Returns the number of updates done.

    It is smaller than run.steps where a rank was asked to stop; what was done is saved in either case.
    """
    model.train()
    late = Late()
    done = first_step
    for step in range(first_step, run.steps):
        waited = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - waited
        assert batch.step == step, f"the loader gave step {batch.step} for step {step}"

        rate = learning_rate(run.optimizer, step, run.steps)
        losses, stopping = update(run, model, batch, world, stop)
        grad_norm, skipped = clipped_step(optimizer, rate, run.optimizer.clip_norm)
        asked_to_stop = skips.heed(late.swap(torch.stack([stopping, skipped])))
        skips.remember(batch, losses)

        done = step + 1
        last = done == run.steps or asked_to_stop
        meters.interval.add(batch.packs, waited)
        if done % run.log_every == 0 or last:
            meters.log(done, world.sum(losses.sum()), rate, grad_norm)
        if done % run.save_every == 0 or last:
            checkpoints.save(done, training_state(model, optimizer))
        if last:
            break
    skips.heed(late.swap(None))
    checkpoints.finish()
    return done


def update(
    run: Run, model: nn.Module, batch: StepPacks, world: World, stop: StopRequest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulate the gradients of one step.

    Returns the parts of the loss of this rank's packs, float32 [packs], which sum to the loss over all ranks; and how
    many ranks were asked to stop, a scalar that travels with the count that is exchanged anyway.
    """
    packs = [p.to(world.device) for p in batch.packs]
    asked = torch.full((), float(stop.signal > 0), device=world.device)
    count, stopping = world.sum(torch.stack([torch.stack([p.loss_count() for p in packs]).sum(), asked])).unbind()
    losses = []
    for slot, pack in enumerate(packs):
        # dropout depends on the pack, not on the rank that happens to compute it, nor on what was computed before
        torch.manual_seed(key(run.seed, batch.step, slot * world.size + world.rank) >> 1)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(slot == len(packs) - 1)
        part = model(pack).total / count
        part.backward()
        losses.append(part.detach().float())
    return torch.stack(losses), stopping
