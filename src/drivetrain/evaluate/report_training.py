"""The training part of a report: loss, learning rate, throughput, and where the time of a step goes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from drivetrain.evaluate.charts import Series, line_chart, stacked_chart


def read_metrics(file: Path) -> tuple[list[dict], list[dict]]:
    """(metrics by step, events) of a metrics.jsonl. A line cut short by a kill is skipped.

    A resumed run logs the steps after its checkpoint again; the later line counts.
    """
    by_step: dict[int, dict] = {}
    events = []
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "event" in entry:
            events.append(entry)
        elif "loss" in entry:
            by_step[entry["step"]] = entry
    return [by_step[step] for step in sorted(by_step)], events


def training_charts(metrics: list[dict], events: list[dict]) -> str:
    """The charts of a run's log, or nothing for an empty log."""
    if not metrics:
        return ""
    steps = [m["step"] for m in metrics]
    marks = [(float(e["step"]), "resumed") for e in events if e["event"] == "resumed" and e["step"] >= steps[0]]
    loss = [m["loss"] for m in metrics]
    positive = [v for v in loss if v > 0 and math.isfinite(v)]
    spread = max(positive, default=1) / min(positive, default=1)
    wait = [1000 * m["data_wait_seconds"] for m in metrics]
    compute = [1000 * m["compute_seconds"] for m in metrics]
    charts = [
        line_chart(
            "Loss",
            [Series("logged", steps, loss, "faint"), Series("smoothed", steps, _smoothed(loss))],
            x_label="step",
            y_label="loss (log scale)" if spread > 5 else "loss",
            log_y=spread > 5,
            marks=marks,
        ),
        line_chart(
            "Throughput",
            [Series("samples/s", steps, [m["samples_per_second"] for m in metrics])],
            x_label="step",
            y_label="samples per second",
            marks=marks,
        ),
        stacked_chart(
            "Time per step",
            [Series("compute", steps, compute, "c1"), Series("waiting for data", steps, wait, "c2")],
            x_label="step",
            y_label="milliseconds",
        ),
        line_chart(
            "Learning rate",
            [Series("learning rate", steps, [m["learning_rate"] for m in metrics])],
            x_label="step",
            y_label="learning rate",
        ),
        line_chart(
            "Gradient norm",
            [Series("norm", steps, [m["grad_norm"] for m in metrics])],
            x_label="step",
            y_label="norm before clipping",
        ),
        line_chart(
            "Packing",
            [Series("share of the token budget", steps, [100 * m["fill"] for m in metrics])],
            x_label="step",
            y_label="token budget used, %",
        ),
    ]
    return f'<div class="grid">{"".join(charts)}</div>'


def _smoothed(values: list[float], keep: float = 0.85) -> list[float]:
    """Exponential average without the pull of its start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(average / weight if weight else value)
    return out
