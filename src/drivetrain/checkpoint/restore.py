"""From a checkpoint back to a model and an optimizer, on any number of processes."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from drivetrain.checkpoint.folder import step_of
from drivetrain.checkpoint.writer import causes
from drivetrain.run import Run, read_run
from drivetrain.types import DrivetrainError

FREE_TO_CHANGE = {
    "lake", "workers", "threads", "shard", "log_every", "save_every", "keep_checkpoints", "skip_limit", "grace",
}  # fmt: skip


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, by name; its tensors are those of the model and the optimizer, not copies."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint in place; returns its number of updates."""
    state = training_state(model, optimizer)
    try:
        load(state, checkpoint_id=checkpoint)
    except CheckpointException as fault:
        raise DrivetrainError(f"{checkpoint} cannot be loaded: {causes(fault)}.") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step_of(checkpoint)


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load only the weights, in one process, into a model that is not sharded."""
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists is what no_dist says
        try:
            load(state, checkpoint_id=checkpoint, no_dist=True)
        except CheckpointException as fault:
            raise DrivetrainError(f"{checkpoint} cannot be loaded: {causes(fault)}.") from None
    model.load_state_dict(state["model"])


def changed_settings(checkpoint: Path, run: Run, *, accept: bool = False) -> list[str]:
    """`run` against the run that a checkpoint was written by: what has changed, as `field was x, is y`.

    Settings that only steer the machine may change. Those that would bend the run are refused unless `accept`; another
    policy does not fit the weights and is always refused. Raises DrivetrainError that lists the fields that differ.
    """
    changes = differences(read_run(checkpoint), run)
    bending = [(name, text) for name, text in changes if name.partition(".")[0] not in FREE_TO_CHANGE]
    if any(name.startswith("policy") for name, _ in bending):
        remedy = "Another policy does not fit these weights: give the saved settings, or another --out."
    elif bending and not accept:
        remedy = "Give the saved settings, or confirm these with --resume changed, or give another --out."
    else:
        return [text for _, text in changes]
    raise DrivetrainError(f"{checkpoint} was trained with other settings: {'; '.join(t for _, t in bending)}. {remedy}")


def differences(saved: Any, new: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(field, `field was x, is y`) of the innermost fields in which two dataclasses of settings differ."""
    found = []
    for name in (f.name for f in dataclasses.fields(saved)):
        before, now = getattr(saved, name), getattr(new, name)
        if dataclasses.is_dataclass(before) and type(before) is type(now):
            found += differences(before, now, f"{prefix}{name}.")
        elif before != now:
            was, is_now = (type(v).__name__ if dataclasses.is_dataclass(v) else repr(v) for v in (before, now))
            found.append((f"{prefix}{name}", f"{prefix}{name} was {was}, is {is_now}"))
    return found
