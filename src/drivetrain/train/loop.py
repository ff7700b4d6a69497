"""The training loop.

One update: every rank takes its packs of the step, each pack is one forward and backward pass, gradients are summed
over packs and ranks, and the loss is divided once, by the global count. So accumulation, packing and the number of
processes do not change what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.save import Checkpoints
from drivetrain.data.permutation import key
from drivetrain.parallel.mesh import World
from drivetrain.run import Run
from drivetrain.train.meters import Meters
from drivetrain.train.optimizer import learning_rate
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
) -> None:
    """Updates first_step..run.steps-1; `batches` yields their packs in order."""
    model.train()
    for step in range(first_step, run.steps):
        waited = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - waited
        assert batch.step == step, f"the loader gave step {batch.step} for step {step}"

        rate = learning_rate(run.optimizer, step, run.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate

        loss = update(run, model, batch, world)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

        meters.interval.add(batch.packs, waited)
        done = step + 1
        if done % run.log_every == 0 or done == run.steps:
            meters.log(done, world.sum(loss), rate, full(grad_norm))
        if done % run.save_every == 0 or done == run.steps:
            checkpoints.save(done, model, optimizer)
    checkpoints.wait()


def update(run: Run, model: nn.Module, batch: StepPacks, world: World) -> torch.Tensor:
    """Accumulate the gradients of one step. Returns this rank's part of the loss; the parts of all ranks sum to it."""
    packs = [p.to(world.device) for p in batch.packs]
    count = world.sum(torch.stack([p.loss_count() for p in packs]).sum())
    loss = torch.zeros((), device=world.device)
    for slot, pack in enumerate(packs):
        # dropout depends on the pack, not on the rank that happens to compute it, nor on what was computed before
        torch.manual_seed(key(run.seed, batch.step, slot * world.size + world.rank) >> 1)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(slot == len(packs) - 1)
        part = model(pack).total / count
        part.backward()
        loss += part.detach()
    return loss


def full(value: torch.Tensor) -> torch.Tensor:
    """A scalar that may be spread over ranks, as a plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
