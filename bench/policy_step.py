"""Time of a whole training step (forward, backward, clip, optimizer) of a full-size policy on this machine's GPU.

    python bench/policy_step.py --policy groot --cameras 2 --samples 64
    python bench/policy_step.py --ladder        # every case, each in a process of its own

Random weights and data of real shapes; the code is the trainer's own: the recipe, `parallelize`, the loop's `update`. Prints
one JSON line per case. Medians over the steps after warm-up; MFU is against the bf16 GEMM rate of an H200, 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from drivetrain.data.pack import pack
from drivetrain.parallel.mesh import world
from drivetrain.recipes import RECIPES
from drivetrain.train.loop import update
from drivetrain.train.main import sharded_model
from drivetrain.train.optimizer import make_optimizer
from drivetrain.types import PackShape, Sample, StepPacks

IMAGE_TOKENS, TEMPLATE_TOKENS, TEXT_TOKENS = 256, 26, 15
PI05_TEXT_TOKENS = 45

# whole training step, TFLOP per sample: GR00T default fine-tune and pi-0.5 full fine-tune, by cameras
TFLOP = {
    ("groot", 1): 1.17,
    ("groot", 2): 2.14,
    ("groot", 3): 3.13,
    ("pi05", 1): 4.18,
    ("pi05", 2): 7.82,
    ("pi05", 3): 11.4,
}
LADDER = [("groot", 1, 64), ("groot", 2, 64), ("groot", 3, 64), ("pi05", 2, 32), ("pi05", 3, 32)]


def sample(policy: str, cameras: int, config, draws: int, rng: np.random.Generator) -> Sample:
    """One sample with real token counts; text and images are noise."""
    if policy == "groot":
        length, image = TEMPLATE_TOKENS - 7 + TEXT_TOKENS + cameras * 263, [19 + c * 263 + 7 for c in range(cameras)]
    else:
        length, image = cameras * IMAGE_TOKENS + PI05_TEXT_TOKENS, [c * IMAGE_TOKENS for c in range(cameras)]
    places = np.concatenate([np.arange(start, start + IMAGE_TOKENS) for start in image])
    size = config.vision.image_size
    shape = (config.horizon, config.action_width)
    real = np.zeros(shape, np.bool_)
    real[:, :7] = True
    return Sample(
        id=int(rng.integers(1 << 40)),
        epoch=0,
        embodiment=31 if policy == "groot" else 0,
        weight=1.0,
        tokens=rng.integers(0, 1000, length),
        image_tokens=places,
        images=rng.integers(0, 255, (cameras, size, size, 3), dtype=np.uint8),
        state=rng.standard_normal(getattr(config, "state_width", 32)).astype(np.float32),
        actions=rng.standard_normal(shape).astype(np.float32),
        action_mask=real,
        noise=rng.standard_normal((draws, *shape)).astype(np.float32),
        time=rng.random(draws).astype(np.float32),
    )


def measure(policy: str, cameras: int, samples: int, draws: int, steps: int) -> dict:
    """One case, in this process."""
    run = replace(RECIPES[f"{policy}_finetune"](), weights="")
    rng = np.random.default_rng(0)
    with world() as here:
        model = sharded_model(run, here)
        model.train()
        optimizer = make_optimizer(model, run.optimizer)
        made = [sample(policy, cameras, run.policy, draws, rng) for _ in range(samples)]
        tokens = -(-sum(len(s.tokens) for s in made) // 128) * 128
        batch = pack(made, PackShape(tokens, samples, samples * cameras)).pin_memory()
        seconds, loss, started = [], torch.zeros(()), time.perf_counter()
        for k in range(steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = update(run, model, StepPacks(k, [batch]), here)
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rate = samples / float(np.median(seconds[steps // 2 :]))
    return {
        "bench": "policy_step",
        "case": f"{policy}_finetune, {cameras} cameras, {samples} samples, {draws} draws",
        "who": "drivetrain",
        "metric": "samples_per_second",
        "value": round(rate, 1),
        "unit": "samples/s",
        "mfu": round(rate * TFLOP[policy, cameras] / 790, 3) if draws == 1 else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(float(loss), 4),
        "first_steps_seconds": round(time.perf_counter() - started - sum(seconds[1:]), 1),
        "hardware": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/policy_step.py --policy {policy} --cameras {cameras} --samples {samples} --draws {draws}",
    }


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--policy", choices=["groot", "pi05"], default="groot")
    arguments.add_argument("--cameras", type=int, default=1)
    arguments.add_argument("--samples", type=int, default=64)
    arguments.add_argument("--draws", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--ladder", action="store_true")
    given = arguments.parse_args()
    if not given.ladder:
        print(json.dumps(measure(given.policy, given.cameras, given.samples, given.draws, given.steps)), flush=True)
        return
    for policy, cameras, samples in LADDER:
        case = ["--policy", policy, "--cameras", str(cameras), "--samples", str(samples)]
        subprocess.run([sys.executable, __file__, *case], check=False)


if __name__ == "__main__":
    main()
