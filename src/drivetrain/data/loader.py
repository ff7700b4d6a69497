"""From the plan to packs that are ready for the device. All of it runs off the training thread.

The loader's whole state is the step number: item k is what this rank trains on in step k, whoever asks and whenever.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.data.pack import pack
from drivetrain.data.plan import PackPlan
from drivetrain.data.read import read_steps
from drivetrain.types import DrivetrainError, PackedBatch, Processor, StepPacks

if TYPE_CHECKING:
    from drivetrain.lake.lake import Lake

PREFETCH_STEPS = 2


class PlannedSteps(Dataset):
    """step -> StepPacks of one rank. Pickles small, so that spawned workers can open the lake themselves."""

    def __init__(
        self,
        lake_uri: str,
        lake_version: int,
        plan: PackPlan,
        processor: Processor,
        horizon: int,
        rank: int,
        world: int,
    ):
        if plan.packs < world:
            raise DrivetrainError(
                f"{world} processes cannot share {plan.packs} packs a step. Use at most {plan.packs} processes, "
                f"or raise --batch.packs to {world} (the same samples are trained on in every step)."
            )
        self.lake_uri, self.lake_version = lake_uri, lake_version
        self.plan, self.processor, self.horizon = plan, processor, horizon
        self.rank, self.world = rank, world

    @cached_property
    def lake(self) -> Lake:
        """Opened by whichever process reads."""
        from drivetrain.lake.lake import open_lake  # Lance is needed where the lake is read, and nowhere else

        return open_lake(self.lake_uri, self.lake_version)

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "lake"}

    def __getitem__(self, step: int) -> StepPacks:
        planned = self.plan.step(step)
        packs = []
        for p in planned[self.rank :: self.world]:
            steps = read_steps(self.lake, self.plan.spans, p, self.horizon)
            samples = [
                self.processor.sample(s, id=int(i), epoch=int(e), seed=self.plan.seed)
                for s, i, e in zip(steps, p.sample, p.epoch, strict=True)
            ]
            packs.append(pack(samples, self.plan.shape))
        slots = -(-len(planned) // self.world)
        packs += [emptied(packs[0])] * (slots - len(packs))
        return StepPacks(step, packs)


def emptied(batch: PackedBatch) -> PackedBatch:
    """A pack of the same shapes that counts for nothing: it keeps the collectives of all ranks in step."""
    return replace(
        batch,
        action_mask=torch.zeros_like(batch.action_mask),
        weight=torch.zeros_like(batch.weight),
        sample=torch.full_like(batch.sample, -1),
        epoch=torch.full_like(batch.epoch, -1),
    )


def load(steps: PlannedSteps, first: int, end: int, *, workers: int, pin_memory: bool) -> Iterator[StepPacks]:
    """StepPacks for steps first..end-1, in order, prepared ahead: in a thread, or in `workers` spawned processes.

    Processes are spawned, not forked: Lance and video decoders do not survive a fork.
    """
    if workers == 0:
        yield from _ahead(steps, first, end, pin_memory)
        return
    yield from DataLoader(
        steps,
        sampler=range(first, end),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn",
        prefetch_factor=PREFETCH_STEPS,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_the_trainer,
    )


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A trainer that is asked to stop needs its workers for one more update; they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _ahead(steps: PlannedSteps, first: int, end: int, pin_memory: bool) -> Iterator[StepPacks]:
    ready: queue.Queue[StepPacks | BaseException] = queue.Queue(maxsize=PREFETCH_STEPS)
    stopped = threading.Event()

    def work() -> None:
        try:
            for k in range(first, end):
                item = steps[k].pin_memory() if pin_memory else steps[k]
                if not _put(ready, item, stopped):
                    return
        except BaseException as fault:  # handed to the training thread, which raises it
            _put(ready, fault, stopped)

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        for _ in range(first, end):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()


def _put(ready: queue.Queue, item: object, stopped: threading.Event) -> bool:
    """Put, unless the reader has gone; False then."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=0.2)
            return True
        except queue.Full:
            continue
    return False
