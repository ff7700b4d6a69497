"""Checkpoints for resuming: sharded, written in the background, visible only when complete on all ranks.

OUT/checkpoints/step_00000100/       model and optimizer (torch DCP), run.json, datasets.json
OUT/checkpoints/latest               the name of the newest complete one, replaced atomically
OUT/checkpoints/step_00000150.partial   being written, or left by a process that died; removed at the next start
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from drivetrain.run import Run, read_run, to_json
from drivetrain.types import DatasetInfo, DrivetrainError


class Checkpoints:
    """The checkpoints of one run. All methods are called on every rank."""

    def __init__(self, folder: Path, run: Run, datasets: dict[str, DatasetInfo], notify: Callable[..., None]):
        """folder: the run's output folder.
        datasets: saved with the weights, which mean nothing without their statistics.
        notify: called on rank 0 as notify("checkpoint", step=..., seconds=...).
        """
        self.folder, self.run, self.datasets, self.notify = folder / "checkpoints", run, datasets, notify
        self.main = dist.get_rank() == 0
        # background writes must not interleave with the training thread's collectives: they have their own group
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.pending: Future | None = None
        self.published = threading.Event()
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.partial"):
                shutil.rmtree(leftover)
        dist.barrier()

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state after `step` updates, then write it in the background. Waits for the previous one first."""
        self.wait()
        started = time.perf_counter()
        final = self.folder / f"step_{step:08d}"
        if final.exists():  # an earlier life of this run got as far and wrote the same state
            return
        partial = final.with_suffix(".partial")
        self.published.clear()
        written = async_save(_state(model, optimizer), checkpoint_id=partial, process_group=self.group)
        self.pending = cast(Future, written)
        if self.main:
            # DCP's coordinator finishes last: its metadata file is written once every rank has written its part
            self.pending.add_done_callback(lambda done: self._publish(done, partial, final, step, started))

    def wait(self) -> None:
        """Return when the last save is complete; raise what made it fail."""
        if self.pending is None:
            return
        self.pending.result()
        if self.main:
            self.published.wait()
        self.pending = None

    def _publish(self, done: Future, partial: Path, final: Path, step: int, started: float) -> None:
        try:
            if done.exception() is not None:
                return
            (partial / "run.json").write_text(to_json(self.run))
            (partial / "datasets.json").write_text(to_json(self.datasets))
            os.replace(partial, final)
            _write_atomically(self.folder / "latest", final.name)
            complete = sorted(p for p in self.folder.glob("step_*") if p.suffix != ".partial")
            for old in complete[: -self.run.keep_checkpoints]:
                shutil.rmtree(old)
            self.notify("checkpoint", step=step, seconds=time.perf_counter() - started)
        finally:
            self.published.set()


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run's output folder, or None."""
    pointer = folder / "checkpoints" / "latest"
    return pointer.parent / pointer.read_text().strip() if pointer.is_file() else None


def find(path: Path) -> Path:
    """The checkpoint that a user means by `path`: itself, or the latest of a run's folder."""
    found = path if (path / ".metadata").is_file() else latest(path)
    if found is None or not (found / ".metadata").is_file():
        raise DrivetrainError(f"{path} holds no complete checkpoint. Give a folder made by `drivetrain train --out`.")
    return found


def step_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen."""
    return int(checkpoint.name.removeprefix("step_"))


def restore(checkpoint: Path, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint in place, on any number of processes; returns its number of updates.

    Settings that would bend the run must not have changed since; those that only steer the machine may.
    """
    saved = read_run(checkpoint)
    if changed := differences(saved, run):
        listed = "; ".join(f"{name} was {before!r}, is {now!r}" for name, before, now in changed)
        raise DrivetrainError(
            f"{checkpoint} belongs to another run: {listed}. Resume with the saved settings, or give another --out."
        )
    state = _state(model, optimizer)
    load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step_of(checkpoint)


FREE_TO_CHANGE = {"lake", "workers", "threads", "shard", "log_every", "save_every", "keep_checkpoints"}


def differences(saved: Run, run: Run) -> list[tuple[str, object, object]]:
    """(field, saved value, new value) of the settings that decide what a run computes."""
    names = [n for n in run.__dataclass_fields__ if n not in FREE_TO_CHANGE]
    return [(n, getattr(saved, n), getattr(run, n)) for n in names if getattr(saved, n) != getattr(run, n)]


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load only the weights, in one process, into a model that is not sharded."""
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists is what no_dist says
        load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, file)
