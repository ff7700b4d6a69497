"""What a run tells of itself: one JSON line and one plain line per interval, from the slowest rank's point of view."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from drivetrain.data.permutation import mix
from drivetrain.parallel.mesh import World
from drivetrain.types import PackedBatch


@dataclass
class Interval:
    """Sums over the updates since the last line. Tensors stay on the device until the line is written."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    token_slots: int = 0
    data_wait_seconds: float = 0.0
    data_digest: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, packs: list[PackedBatch], waited: float) -> None:
        self.steps += 1
        self.data_wait_seconds += waited
        for p in packs:
            self.samples += int((p.weight > 0).sum())
            self.tokens += int(p.cu_tokens[-2])
            self.token_slots += p.tokens.numel()
            self.data_digest += digest(p.sample, p.epoch)


def digest(sample: torch.Tensor, epoch: torch.Tensor) -> int:
    """A number that names which samples (int64 [B], -1 in empty slots) were seen in which epochs, in any order.

    Digests of packs add up, so equal digests of an interval mean equal data, whatever the ranks and packs.
    """
    real = sample >= 0
    terms = mix(sample[real].numpy().astype(np.uint64) ^ mix(epoch[real].numpy().astype(np.uint64)))
    return int(terms.sum(dtype=np.uint64))


class Meters:
    """Writes `metrics.jsonl`; rank 0 alone writes and prints, after the ranks have been compared."""

    def __init__(self, folder: Path, world: World, steps: int):
        self.world, self.steps = world, steps
        self.file = folder / "metrics.jsonl"
        self.interval = Interval()
        self.updates_skipped = 0

    def event(self, event: str, **values: object) -> None:
        """One line about something that happened, such as a start, a resume, a saved checkpoint."""
        if self.world.main:
            self._write({"event": event, **values})

    def skipped(self, step: int, samples: list[str]) -> None:
        """Say that update `step` (0-based) was skipped, and on which samples its loss was not finite."""
        self.updates_skipped += 1
        self.event("skipped", step=step, samples=samples, skipped=self.updates_skipped)
        if self.world.main:
            where = f" on {'; '.join(samples)}" if samples else ""
            print(f"step {step} skipped: loss or gradient not finite{where}", file=sys.stderr, flush=True)

    def log(self, step: int, loss: torch.Tensor, learning_rate: float, grad_norm: torch.Tensor) -> None:
        """Close the interval that ends with update `step` (1-based). Called on every rank."""
        loss_value, norm_value = float(loss), float(grad_norm)  # the one host synchronisation of the interval
        now = self.interval
        seconds = time.perf_counter() - now.started
        sums = self.world.sum(torch.tensor([now.samples, now.tokens, now.token_slots], dtype=torch.float64))
        waits, digests = zip(*self.world.gather((now.data_wait_seconds, now.data_digest)), strict=True)
        self.interval = Interval()
        if not self.world.main:
            return
        samples, tokens, slots = sums.tolist()
        slowest = max(range(len(waits)), key=waits.__getitem__)
        line = {
            "step": step,
            "loss": loss_value,
            "learning_rate": learning_rate,
            "grad_norm": norm_value,
            "skipped": self.updates_skipped,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / now.steps,
            "data_wait_seconds": waits[slowest] / now.steps,
            "data_wait_rank": slowest,
            "compute_seconds": (seconds - waits[slowest]) / now.steps,
            "fill": tokens / slots,
            "data_digest": f"{sum(digests) % 2**64:016x}",
        }
        self._write(line)
        print(
            f"step {step}/{self.steps} loss {loss_value:.4f} lr {learning_rate:.2e} grad {norm_value:.2f} "
            f"{line['samples_per_second']:.1f} samples/s {line['step_seconds'] * 1e3:.0f} ms/step "
            f"data wait {line['data_wait_seconds'] / line['step_seconds']:.1%} fill {line['fill']:.1%}",
            file=sys.stderr,
            flush=True,
        )

    def _write(self, line: dict) -> None:
        text = json.dumps({name: _plain(value) for name, value in line.items()} | {"time": time.time()}) + "\n"
        try:
            with self.file.open("a") as out:
                out.write(text)
        except OSError as fault:  # a full disk must not end the run
            print(f"{self.file} cannot be written: {fault.strerror}", file=sys.stderr, flush=True)


def _plain(value: object) -> object:
    """What JSON cannot say as a number is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
