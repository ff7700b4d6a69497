"""A lake as one HTML page without scripts or outside files: numbers, film strips, the motion of some episodes, faults."""

from __future__ import annotations

import base64
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.lake.lake import Lake
from drivetrain.lake.sources import ACTION, STATE

if TYPE_CHECKING:
    from drivetrain.lake.inspect import DatasetSummary, Inspection

EPISODES = 6  # shown of each data set, spread over it
FRAMES = 8  # of a film strip
WIDTH, HEIGHT = 880, 120  # of a plot, in pixels

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child, table.text td, table.text th { text-align: left; }
.strip { display: flex; gap: 2px; margin: .3rem 0; } .strip img { width: 12%; }
h3 { margin-bottom: .2rem; } small { color: #5a6675; } svg { background: #f6f8fa; display: block; margin: .3rem 0; }
.error { color: #a3192a; }
"""


def write_page(file: Path, lake: Lake, inspection: Inspection) -> None:
    """Write the page; an older one stays whole until the new one is."""
    body = [f"<h1>{escape(inspection.target)}</h1>", f"<p>version {inspection.version}</p>", _findings(inspection)]
    for summary in inspection.datasets:
        body += _dataset(lake, summary)
    text = f'<!doctype html><meta charset="utf-8"><title>{escape(inspection.target)}</title><style>{STYLE}</style>'
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text + "\n".join(body), encoding="utf-8")
    os.replace(temporary, file)


def _findings(inspection: Inspection) -> str:
    if not inspection.findings:
        return "<p>No faults and no notices.</p>"
    rows = [
        (
            f.severity,
            f.source,
            "" if f.episode < 0 else f.episode,
            "" if f.frame < 0 else f.frame,
            f.check,
            f.found,
            f.remedy,
        )
        for f in sorted(inspection.findings, key=lambda f: f.severity)
    ]
    return _table(("", "source", "episode", "frame", "check", "found", "what to do"), rows, "text")


def _dataset(lake: Lake, s: DatasetSummary) -> list[str]:
    info = s.info
    facts = {
        "robot": info.robot,
        "episodes": f"{info.episodes}, of {s.shortest} to {s.longest} steps",
        "steps": f"{info.steps}, {s.hours:.2f} hours at {info.fps:g} fps",
        "cameras": f"{', '.join(info.cameras)}, kept at {info.image_size} pixels",
        "tasks": "; ".join(f"{task} ({n})" for task, n in s.tasks.items()),
        "lag from action to motion": "unknown" if s.action_lag is None else f"{s.action_lag} steps",
        "source": f"{info.source} ({s.format})",
    }
    parts = [f"<h2>{escape(info.name)}</h2>", _table(("", ""), facts.items(), "text")]
    for feature, names in ((STATE, info.state_names), (ACTION, info.action_names)):
        v = info.statistics[feature]
        rows = [
            (name, *(f"{x:.4g}" for x in values))
            for name, *values in zip(names, v.mean, v.std, v.min, v.q01, v.q50, v.q99, v.max, strict=True)
        ]
        parts.append(_table((feature, "mean", "std", "min", "q01", "q50", "q99", "max"), rows))
    spans = lake.spans([info.name])
    firsts = np.unique(spans.last_row, return_index=True)[1]
    for i in firsts[np.linspace(0, len(firsts) - 1, min(EPISODES, len(firsts))).astype(int)]:
        task = spans.tasks[spans.task[i]]
        episode, first, last = (int(a[i]) for a in (spans.episode, spans.first_row, spans.last_row))
        parts += _episode(lake, info.cameras, episode, first, last, task)
    return parts


def _episode(lake: Lake, cameras: tuple[str, ...], episode: int, first: int, last: int, task: str) -> list[str]:
    parts = [f"<h3>episode {episode}</h3><small>{escape(task)}, {last - first + 1} steps</small>"]
    shown = np.linspace(first, last, FRAMES).astype(np.int64)
    images = lake.read(shown, ["images"])["images"].to_pylist()
    for camera, name in enumerate(cameras):
        frames = [
            f'<img alt="{escape(name)}, step {row - first}" src="{_inline(step[camera])}">'
            for row, step in zip(shown, images, strict=True)
        ]
        parts.append(f'<div class="strip">{"".join(frames)}</div>')
    table = lake.read(np.arange(first, last + 1), ["state", "action"])
    for column in ("state", "action"):
        parts.append(f"<small>{column}</small>{_plot(np.array(table[column].to_pylist()))}")
    return parts


def _plot(values: np.ndarray) -> str:
    """Every dimension of [steps, dimensions] as a line, scaled to its own range."""
    low, high = values.min(axis=0), values.max(axis=0)
    scaled = (values - low) / np.where(high > low, high - low, 1)
    x = np.linspace(2, WIDTH - 2, len(values))
    lines = []
    for d in range(values.shape[1]):
        y = HEIGHT - 4 - scaled[:, d] * (HEIGHT - 8)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        hue = 360 * d // values.shape[1]
        lines.append(f'<polyline fill="none" stroke="hsl({hue} 60% 45%)" points="{points}"/>')
    return f'<svg width="100%" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{"".join(lines)}</svg>'


def _table(head: tuple[str, ...], rows, kind: str = "") -> str:
    def cells(tag: str, row) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(c))}</{tag}>" for c in row) + "</tr>"

    return f'<table class="{kind}">{cells("th", head)}{"".join(cells("td", row) for row in rows)}</table>'


def _inline(image: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
