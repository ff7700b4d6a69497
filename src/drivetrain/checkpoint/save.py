"""Checkpoints for resuming: sharded, written in the background, visible only when complete on all ranks.

What lies where is told in folder.py, how it is written in writer.py, how it is read back in restore.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint.folder import complete, step_of
from drivetrain.checkpoint.writer import Writer, causes
from drivetrain.run import Run, to_json
from drivetrain.types import DatasetInfo, DrivetrainError


class Checkpoints:
    """The checkpoints of one run. All methods are called on every rank, in the same order."""

    def __init__(self, folder: Path, run: Run, datasets: dict[str, DatasetInfo], notify: Callable[..., None]):
        """folder: the run's output folder.
        datasets: saved with the weights, which mean nothing without their statistics.
        notify: called on rank 0 as notify("checkpoint", step=..., seconds=..., held_seconds=..., bytes=...), or as
                notify("checkpoint failed", step=..., reason=...).
        """
        self.folder, self.run, self.datasets, self.notify = folder / "checkpoints", run, datasets, notify
        self.main = dist.get_rank() == 0
        # background writes must not interleave with the training thread's collectives: they have their own group
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.pending: Future | None = None
        self.reported = threading.Event()
        self.asked: int | None = None  # the step of the last save
        self.failure: str | None = None  # why the last save is not there
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("*.partial", "*.replaced"):
                for leftover in self.folder.glob(pattern):
                    shutil.rmtree(leftover)
        dist.barrier()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy `state`, after `step` updates, then write it in the background. Waits for the previous save first.

        A save that fails is reported as soon as it does, on rank 0; the run goes on, with the checkpoint before it.
        """
        started = time.perf_counter()
        self.wait()
        self.asked = step
        self.reported.clear()
        final = self.folder / f"step_{step:08d}"
        held = 0.0

        def published() -> None:
            size = sum(file.stat().st_size for file in final.iterdir())
            self._retain(step)
            seconds = time.perf_counter() - started
            self.notify("checkpoint", step=step, seconds=seconds, held_seconds=held, bytes=size)

        tensors = list(_tensors(state))
        size = sum(t.numel() * t.element_size() + 2048 for _, t in tensors)  # an archive's frame is below 2 kB
        texts = {"run.json": to_json(self.run), "datasets.json": to_json(self.datasets)}
        writer = Writer(final, size, texts, published, refusal=_not_finite(tensors))
        self.pending = cast(Future, async_save(state, storage_writer=writer, process_group=self.group))
        held = time.perf_counter() - started
        self.pending.add_done_callback(lambda done: self._report(done, final))

    def wait(self) -> None:
        """Return when the last save has ended, well or not. Raises what is no fault of writing: a rank that has gone."""
        if self.pending is None:
            return
        try:
            self.pending.result()
            self.failure = None
        except CheckpointException as fault:
            self.failure = causes(fault)
        self.reported.wait()
        self.pending = None

    def finish(self) -> None:
        """Wait for the last save; raise DrivetrainError if it failed."""
        self.wait()
        if self.failure:
            kept = complete(self.folder.parent)
            there = f"The newest complete one is {kept[0]}" if kept else "There is none"
            raise DrivetrainError(
                f"the checkpoint of step {self.asked} could not be written: {self.failure}. {there}. "
                "Make room, and continue with --resume auto."
            )

    def _report(self, done: Future, final: Path) -> None:
        try:
            fault = done.exception()
            if self.main and isinstance(fault, CheckpointException):
                shutil.rmtree(final.with_suffix(".partial"), ignore_errors=True)
                reason, step = causes(fault), step_of(final)
                print(f"checkpoint of step {step} failed: {reason}; the run goes on", file=sys.stderr, flush=True)
                self.notify("checkpoint failed", step=step, reason=reason)
        finally:
            self.reported.set()

    def _retain(self, step: int) -> None:
        """Remove what is older than the newest few up to `step`, which was just published and stays whatever is asked."""
        older = [c for c in complete(self.folder.parent) if step_of(c) < step]
        for old in older[max(0, self.run.keep_checkpoints - 1) :]:
            going = old.with_suffix(".partial")  # never half a folder under the name of a whole one
            os.replace(old, going)
            shutil.rmtree(going, ignore_errors=True)


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _not_finite(tensors: list[tuple[str, Tensor]]) -> str:
    """A sentence that names this rank's tensors with values that are not finite; empty if there are none."""
    local = [(n, t.to_local() if isinstance(t, DTensor) else t) for n, t in tensors]
    local = [(n, t) for n, t in local if t.numel() and t.is_floating_point()]
    bad: list[str] = []
    for device in {t.device for _, t in local}:
        here = [(n, t) for n, t in local if t.device == device]
        largest = torch.stack([torch.linalg.vector_norm(t, torch.inf).float() for _, t in here])
        bad += [n for (n, _), finite in zip(here, largest.isfinite().tolist(), strict=True) if not finite]
    if not bad:
        return ""
    return f"{bad[0]}{f' and {len(bad) - 1} other tensors' if bad[1:] else ''} hold NaN or infinite values"
