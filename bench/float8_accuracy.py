"""Does FP8 train as well as bfloat16? The same data and seeds, both precisions, next to what another seed changes.

    python bench/float8_accuracy.py --steps 1200

A pi-0.5 of some 170 million parameters learns from nothing to reach: an image shows a gripper and a red and a blue square, a
word names one of them, and the actions are the path there. Whoever does not see, or does not read, cannot do it. Compared are the
training loss by flow time over the last fifth of the run, and the error of sampled actions on held-out scenes. FP8 passes
where, averaged over seeds, it is no further from bfloat16 than two bfloat16 seeds are from each other. Prints one JSON line per
run, and the verdict.
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
from drivetrain.policies.pi05.config import GemmaConfig, Pi05Config, VisionConfig
from drivetrain.recipes import RECIPES
from drivetrain.run import Optimizer, Run
from drivetrain.train.loop import update
from drivetrain.train.main import sharded_model
from drivetrain.train.optimizer import clipped_step, learning_rate, make_optimizer
from drivetrain.train.stop import StopRequest
from drivetrain.types import PackedBatch, PackShape, Sample, StepPacks

SIZE, PATCH, SAMPLES, DRAWS, BUCKETS = 112, 14, 64, 4, 5
IMAGE_TOKENS = (SIZE // PATCH) ** 2
CONFIG = Pi05Config(
    vision=VisionConfig(image_size=SIZE, patch_size=PATCH, layers=6, width=512, heads=8, mlp=2048),
    gemma=GemmaConfig(
        layers=10, heads=8, head_dim=64, prefix_width=1024, prefix_mlp=4096, suffix_width=512, suffix_mlp=2048,
        vocabulary=512, begin_token=2, image_token=0, tokenizer="bytes",
    ),
    horizon=16,
)  # fmt: skip


def scene(number: int, seed: int) -> Sample:
    """Scene `number`; which flow times and noise it is trained with depends on the seed too."""
    rng, draws = np.random.default_rng(number), np.random.default_rng((number, seed))
    image = rng.integers(0, 60, (SIZE, SIZE, 3), np.uint8)
    places = rng.uniform(-1, 1, (3, 2))  # gripper, red, blue
    for (x, y), colour in zip(places, ((255, 255, 255), (255, 40, 40), (40, 40, 255)), strict=True):
        column, row = (int((v + 1) / 2 * (SIZE - 12)) for v in (x, y))
        image[row : row + 12, column : column + 12] = colour
    wanted = int(rng.integers(2))
    start, goal = places[0], places[1 + wanted]
    share = np.linspace(0, 1, CONFIG.horizon)[:, None]
    path = start + (goal - start) * (10 * share**3 - 15 * share**4 + 6 * share**5)  # minimum jerk
    turn = np.concatenate([np.sin(3 * path), np.cos(3 * path)], axis=1)
    grip = np.where(share > 0.8, 1.0, -1.0)
    actions = np.zeros((CONFIG.horizon, CONFIG.action_width), np.float32)
    actions[:, :7] = np.concatenate([path, turn, grip], axis=1)
    mask = np.zeros_like(actions, dtype=np.bool_)
    mask[:, :7] = True
    words = np.array([2, 100, 101, 110 + wanted, 102])
    return Sample(
        id=number,
        epoch=0,
        embodiment=0,
        weight=1.0,
        tokens=np.concatenate([np.zeros(IMAGE_TOKENS, np.int64), words]),
        image_tokens=np.arange(IMAGE_TOKENS),
        images=image[None],
        state=np.zeros(CONFIG.state_width, np.float32),
        actions=actions,
        action_mask=mask,
        noise=draws.standard_normal((DRAWS, *actions.shape)).astype(np.float32),
        time=(0.999 * draws.beta(1.5, 1.0, DRAWS) + 0.001).astype(np.float32),
    )


def scenes(first: int, seed: int) -> PackedBatch:
    samples = [scene(first + i, seed) for i in range(SAMPLES)]
    tokens = sum(len(s.tokens) for s in samples)
    return pack(samples, PackShape(-(-tokens // 128) * 128, SAMPLES, SAMPLES))


@torch.no_grad()
def loss_by_time(model: torch.nn.Module, batches: list[PackedBatch]) -> list[float]:
    """Mean squared error of the velocity, by fifths of the flow time."""
    sums = torch.zeros(2, BUCKETS, dtype=torch.float64)
    for batch in batches:
        time_, mask = batch.time[..., None, None], batch.action_mask[:, None]
        noised = time_ * batch.noise + (1 - time_) * batch.actions[:, None]
        layout = model._layout(batch, DRAWS)
        velocity = model._velocity(noised, batch.time, layout, model._prefix(batch))
        error = ((velocity - (batch.noise - batch.actions[:, None])) ** 2 * mask).sum((2, 3)) / mask.sum((2, 3))
        bucket = (batch.time * BUCKETS).long().clamp(max=BUCKETS - 1)
        sums[0].index_add_(0, bucket.flatten().cpu(), error.flatten().double().cpu())
        sums[1].index_add_(0, bucket.flatten().cpu(), torch.ones(bucket.numel(), dtype=torch.float64))
    return (sums[0] / sums[1]).tolist()


def train(precision: str, seed: int, steps: int) -> dict:
    """One run, in this process."""
    run: Run = replace(
        RECIPES["pi05_finetune_tiny"](),
        policy=CONFIG,
        precision=precision,
        seed=seed,
        steps=steps,
        optimizer=Optimizer(learning_rate=3e-4, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=100),
    )
    began = time.perf_counter()
    with world() as here:
        model = sharded_model(run, here)
        model.train()
        optimizer = make_optimizer(model, run.optimizer)
        device, losses = here.device, []
        for step in range(steps):
            batch = StepPacks(step, [scenes((seed + 1) * 10**7 + step * SAMPLES, seed)])
            losses.append(update(run, model, batch, here, StopRequest())[0].sum())
            clipped_step(optimizer, learning_rate(run.optimizer, step, steps), run.optimizer.clip_norm)
        model.eval()
        held_out = [scenes(10**6 + i * SAMPLES, 0).to(device) for i in range(4)]
        by_time = loss_by_time(model, held_out)
        errors = [(model.act(b) - b.actions).abs()[b.action_mask].mean() for b in held_out]
    return {
        "bench": "float8_accuracy",
        "case": f"{precision}, seed {seed}, {steps} steps",
        "who": "drivetrain",
        "metric": "held_out_action_error",
        "value": round(float(torch.stack(errors).mean()), 5),
        "unit": "mean absolute, normalised",
        "training_loss": round(float(torch.stack(losses[-steps // 5 :]).mean()), 5),
        "held_out_loss_by_time": [round(v, 5) for v in by_time],
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(time.perf_counter() - began, 1),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": f"torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/float8_accuracy.py --steps {steps}",
    }


def verdict(lines: list[dict]) -> str:
    """Whether FP8 is within what a seed changes, for every figure compared."""
    figures = {}
    for line in lines:
        precision = line["case"].split(",")[0]
        figures.setdefault(precision, []).append(
            np.array([line["value"], line["training_loss"], *line["held_out_loss_by_time"]])
        )
    half, eight = (np.stack(figures[p]) for p in ("bfloat16", "float8"))
    spread, apart = np.ptp(half, axis=0), eight.mean(axis=0) - half.mean(axis=0)
    names = ["action error", "training loss", *(f"loss at t {i / BUCKETS:.1f}" for i in range(BUCKETS))]
    rows = [
        f"{name:16} bfloat16 {h:.5f}  float8 {e:.5f}  apart {a:+.5f}  seeds apart {s:.5f}"
        for name, h, e, a, s in zip(names, half.mean(0), eight.mean(0), apart, spread, strict=True)
    ]
    passed = bool((apart <= spread).all())
    return "\n".join(
        [*rows, "float8 is within the spread of seeds" if passed else "float8 is outside the spread of seeds"]
    )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=1200)
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--one", nargs=2, metavar=("PRECISION", "SEED"), help="a single run, in this process")
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(train(given.one[0], int(given.one[1]), given.steps)), flush=True)
        return
    lines = []
    for seed in range(given.seeds):
        for precision in ("bfloat16", "float8"):
            one = ["--one", precision, str(seed), "--steps", str(given.steps)]
            done = subprocess.run([sys.executable, __file__, *one], check=True, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            lines.append(json.loads(done.stdout.splitlines()[-1]))
    print(verdict(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
