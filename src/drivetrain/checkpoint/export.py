"""From a checkpoint to a policy folder, and from a policy folder to something that acts.

OUT/config.json         the policy's dimensions, the recipe and the update count
OUT/datasets.json       the data sets it was trained on, with the statistics its inputs and outputs are scaled by
OUT/model.safetensors   the weights, float32
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from drivetrain.checkpoint.folder import find, step_of
from drivetrain.checkpoint.restore import load_model
from drivetrain.data.pack import pack
from drivetrain.data.plan import ROUND_TOKENS
from drivetrain.policies import make_model, make_processor
from drivetrain.run import from_json, policy_from_json, read_run, to_json
from drivetrain.types import DatasetInfo, DrivetrainError, Observation, PackShape, Policy


def export(checkpoint: Path, out: Path) -> Path:
    """Write the policy folder `out` from a checkpoint, or from the latest checkpoint of a run's folder."""
    found = find(checkpoint)
    run = read_run(found)
    model = make_model(run.policy)
    load_model(found, model)
    datasets = from_json(dict[str, DatasetInfo], (found / "datasets.json").read_text())
    return write_policy(model, run.policy, datasets, out, recipe=run.recipe, step=step_of(found))


def write_policy(
    model: torch.nn.Module, config: Any, datasets: dict[str, DatasetInfo], out: Path, *, recipe: str, step: int
) -> Path:
    """A complete policy folder, or none: it is written beside `out` and renamed."""
    if out.exists():
        raise DrivetrainError(f"{out} exists. Remove it, or give another --out.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as fault:
        raise DrivetrainError(
            f"cannot write to {out.parent}: {fault.strerror}. Give an --out that you may write to."
        ) from None
    about = {"recipe": recipe, "step": step, "policy": json.loads(to_json(config))}
    (partial / "config.json").write_text(json.dumps(about, indent=2, sort_keys=True))
    (partial / "datasets.json").write_text(to_json(datasets))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, partial / "model.safetensors")
    os.replace(partial, out)
    return out


class ExportedPolicy:
    """A policy folder, loaded: observations in, action chunks out, both in physical units."""

    def __init__(self, folder: Path, *, dataset: str | None = None, device: str = "cpu"):
        """dataset: whose robot it drives; may be left out where the policy was trained on one data set only."""
        if not (folder / "config.json").is_file():
            raise DrivetrainError(
                f"{folder} is no policy folder. Make one with `drivetrain export CHECKPOINT --out {folder}`."
            )
        about = json.loads((folder / "config.json").read_text())
        self.config = policy_from_json(json.dumps(about["policy"]))
        datasets = from_json(dict[str, DatasetInfo], (folder / "datasets.json").read_text())
        if dataset is None and len(datasets) > 1:
            raise DrivetrainError(
                f"{folder} was trained on {', '.join(datasets)}. Say with --dataset which of these robots it drives."
            )
        self.dataset = dataset or next(iter(datasets))
        if self.dataset not in datasets:
            raise DrivetrainError(f"{folder} was trained on {', '.join(datasets)}, not on {self.dataset!r}.")
        self.info, self.device = datasets[self.dataset], torch.device(device)
        self.processor = make_processor(self.config, datasets)
        model = make_model(self.config)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        self.model = cast(Policy, model.to(self.device).eval())

    def act(self, observations: Sequence[Observation], seeds: Sequence[int]) -> list[np.ndarray]:
        """One action chunk per observation, float32 [H, action dimensions], in physical units.

        seeds: name the noise that each chunk is integrated from; the same seed gives the same noise.
        """
        for o in observations:
            if o.state.shape != (len(self.info.state_names),):
                raise DrivetrainError(
                    f"the policy's state is {list(self.info.state_names)}; "
                    f"the observation's state has shape {o.state.shape}."
                )
        samples = [
            self.processor.observe(o, dataset=self.dataset, seed=s) for o, s in zip(observations, seeds, strict=True)
        ]
        tokens = sum(len(s.tokens) for s in samples)
        shape = PackShape(
            tokens=-(-tokens // ROUND_TOKENS) * ROUND_TOKENS,
            samples=len(samples),
            images=sum(len(s.images) for s in samples),
        )
        with torch.inference_mode():
            chunks = self.model.act(pack(samples, shape).to(self.device)).cpu().numpy()
        return [self.processor.physical_actions(c, dataset=self.dataset) for c in chunks]
