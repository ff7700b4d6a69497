"""Time of a whole training step (forward, backward, clip, optimizer) of a full-size policy on this machine's GPU.

    python bench/policy_step.py --policy groot --cameras 2 --samples 64
    python bench/policy_step.py --policy pi05 --cameras 3 --samples 16 --who lerobot
    python bench/policy_step.py --table            # every case, each in a process of its own

Random weights and data of real shapes; the code is the trainer's own: the recipe, `parallelize`, the loop's `update`. Prints
one JSON line per case: the median over the steps after warm-up, issued without waiting for the device, as in training. MFU is
the work that the mathematics asks for against the bf16 GEMM rate of an H200, 790 TFLOP/s, in FP8 too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from drivetrain.data.pack import pack
from drivetrain.parallel.mesh import world
from drivetrain.policies import flops
from drivetrain.recipes import RECIPES
from drivetrain.run import Run
from drivetrain.train.loop import update
from drivetrain.train.main import sharded_model
from drivetrain.train.optimizer import clipped_step, make_optimizer
from drivetrain.train.stop import StopRequest
from drivetrain.types import PackShape, Sample, StepPacks

WARM_UP = 6
PEAK = 790e12
IMAGE_TOKENS, TEMPLATE_TOKENS = 256, 19
WORDS = {"groot": 15, "pi05": 45}  # of a real instruction; pi-0.5's holds the state of a robot of some 8 joints


def sample(policy: str, cameras: int, words: int, config, draws: int, rng: np.random.Generator) -> Sample:
    """One sample with real token counts; words and images are noise."""
    if policy == "groot":
        length, image = TEMPLATE_TOKENS + words + cameras * 263, [TEMPLATE_TOKENS + c * 263 for c in range(cameras)]
    else:
        length, image = cameras * IMAGE_TOKENS + words, [c * IMAGE_TOKENS for c in range(cameras)]
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
        actions=(rng.standard_normal(shape) * real).astype(np.float32),
        action_mask=real,
        noise=rng.standard_normal((draws, *shape)).astype(np.float32),
        time=rng.random(draws).astype(np.float32),
    )


@contextmanager
def drivetrain_step(run: Run, samples: list[Sample]) -> Iterator[Callable[[], torch.Tensor]]:
    """One update of the trainer on a pack of these samples."""
    tokens, images = sum(len(s.tokens) for s in samples), sum(len(s.images) for s in samples)
    batch = pack(samples, PackShape(-(-tokens // 128) * 128, len(samples), images)).pin_memory()
    number = itertools.count()
    with world() as here:
        model = sharded_model(run, here)
        model.train()
        optimizer = make_optimizer(model, run.optimizer)

        def step() -> torch.Tensor:
            losses, _ = update(run, model, StepPacks(next(number), [batch]), here, StopRequest())
            clipped_step(optimizer, run.optimizer.learning_rate, run.optimizer.clip_norm)
            return losses.sum()

        yield step


def measure(given: argparse.Namespace) -> dict:
    """One case, in this process."""
    run = replace(RECIPES[f"{given.policy}_finetune"](), weights="", precision=given.precision)
    rng = np.random.default_rng(0)
    words = given.words or WORDS[given.policy]
    cameras = list(itertools.islice(itertools.cycle(given.cameras), given.samples))
    samples = [sample(given.policy, c, words, run.policy, given.draws, rng) for c in cameras]
    if given.who == "drivetrain":
        with drivetrain_step(run, samples) as step:
            timed = {"who": "drivetrain", **clock(step, given.steps, given.profile)}
    else:
        from peers import lerobot_pi05

        assert given.policy == "pi05", "of LeRobot, only pi05 can be timed here"
        checkpointing, compiled = "checkpointing" in given.who, "compiled" in given.who
        who, step = lerobot_pi05(samples, checkpointing=checkpointing, compiled=compiled)
        timed = {"who": who + given.who.removeprefix("lerobot"), **clock(step, given.steps, given.profile)}
    rate = given.samples / timed["step_ms"] * 1e3
    work = flops(run.policy, [len(s.tokens) for s in samples], sum(cameras), given.draws)
    seen = "+".join(map(str, given.cameras))
    case = f"{given.policy}_finetune, {seen} cameras, {words} words, {given.samples} samples, {given.draws} draws"
    flags = f"--policy {given.policy} --cameras {' '.join(map(str, given.cameras))} --words {words}"
    flags += "".join(f" --{k} {getattr(given, k)}" for k in ("samples", "draws", "precision", "who"))
    return {
        "bench": "policy_step",
        "case": f"{case}, {given.precision if given.who == 'drivetrain' else 'bfloat16'}",
        "metric": "samples_per_second",
        "value": round(rate, 1),
        "unit": "samples/s",
        "mfu": round(work.total / timed["step_ms"] * 1e3 / PEAK, 3),
        **timed,
        "hardware": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/policy_step.py {flags}",
    }


def clock(step: Callable[[], torch.Tensor], steps: int, profile: bool) -> dict:
    """step_ms: median time of a step on the device.   issue_ms: of the CPU, to issue one."""
    started = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    warm_up = time.perf_counter() - started
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    issuing, loss = [], torch.zeros(())
    for k in range(steps):
        began = time.perf_counter()
        loss = step()
        issuing.append(time.perf_counter() - began)
        marks[k + 1].record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if profile:
        print_profile(step)
    return {
        "step_ms": round(float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])), 1),
        "issue_ms": round(float(np.median(issuing)) * 1e3, 1),
        "peak_gib": round(peak / 2**30, 1),
        "warm_up_seconds": round(warm_up, 1),
        "loss": round(float(loss), 4),
    }


def print_profile(step: Callable[[], object], rows: int = 60) -> None:
    """The kernels of one step by their time on the device, to standard error."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    print(f"kernels of one step: {sum(e.self_device_time_total for e in kernels) / 1e3:.1f} ms", file=sys.stderr)
    for e in kernels[:rows]:
        print(f"{e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x  {e.key[:110]}", file=sys.stderr)


TABLE = [
    *(("pi05", cameras, 16, "bfloat16", who) for cameras in (3, 2) for who in ("lerobot",)),
    ("pi05", 3, 32, "bfloat16", "drivetrain"),
    ("pi05", 3, 32, "float8", "drivetrain"),
    ("pi05", 2, 48, "bfloat16", "drivetrain"),
    ("pi05", 2, 48, "float8", "drivetrain"),
    *(("groot", cameras, 128, p, "drivetrain") for cameras in (1, 2, 3) for p in ("bfloat16", "float8")),
]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--policy", choices=["groot", "pi05"], default="groot")
    arguments.add_argument("--cameras", type=int, nargs="+", default=[1], help="several: a mixture, in turn")
    arguments.add_argument("--words", type=int, default=0, help="tokens of the instruction; 0: of a real one")
    arguments.add_argument("--samples", type=int, default=64)
    arguments.add_argument("--draws", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--precision", choices=["bfloat16", "float8"], default="bfloat16")
    peers = ["lerobot", "lerobot+checkpointing", "lerobot+compiled"]
    arguments.add_argument("--who", choices=["drivetrain", *peers], default="drivetrain")
    arguments.add_argument("--profile", action="store_true", help="the kernels of one step, to standard error")
    arguments.add_argument("--table", action="store_true")
    given = arguments.parse_args()
    if not given.table:
        print(json.dumps(measure(given)), flush=True)
        return
    for policy, cameras, samples, precision, who in TABLE:
        case = ["--policy", policy, "--cameras", str(cameras), "--samples", str(samples)]
        subprocess.run([sys.executable, __file__, *case, "--precision", precision, "--who", who], check=False)


if __name__ == "__main__":
    main()
