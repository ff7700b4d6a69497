"""The doctor's report as one HTML file: verdict, heat maps of the links, curves of the collectives, every check."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from html import escape
from pathlib import Path

from drivetrain.cluster.doctor_links import SHARE
from drivetrain.cluster.doctor_network import Collective, Pairs
from drivetrain.cluster.doctor_report import AREAS, Check, Report, size

STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1c2024; --soft: #60646c; --line: #e3e4e8;
  --c1: #2f6fde; --c2: #e07b28; --c3: #2b9a66; --bad: #c8463c; }
@media (prefers-color-scheme: dark) { :root { --paper: #111214; --card: #191b1f; --ink: #e8eaed; --soft: #9ba1a8;
  --line: #2d3036; --c1: #6ea3ff; --c2: #f2a15c; --c3: #5cc596; --bad: #f0857c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 20px 48px; max-width: 1160px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; font-weight: 650; margin: 0; } h2 { font-size: 1.2rem; font-weight: 650; margin: 40px 0 8px; }
p { margin: 4px 0 16px; max-width: 90ch; } .soft, footer { color: var(--soft); } .scroll { overflow-x: auto; }
.fit { color: var(--c3); } .unfit { color: var(--bad); } .warning { color: var(--c2); } .ok { color: var(--c3); }
.here { color: var(--soft); }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); margin: 20px 0 0; }
.card, figure, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 16px; overflow-wrap: anywhere; } .card b { display: block; font-weight: 650; }
.card span { color: var(--soft); font-size: 0.85rem; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 12px 14px; } figcaption { font-size: 0.86rem; font-weight: 600; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .frame { stroke: var(--line); } svg .cell { fill: var(--c1); } svg .slow { fill: var(--bad); }
svg text.value { fill: var(--ink); text-anchor: middle; } svg text.row { text-anchor: end; }
.line { fill: none; stroke-width: 1.8; } .c0 { stroke: var(--c1); } .c1 { stroke: var(--c2); } .c2 { stroke: var(--c3); }
svg text.c0 { fill: var(--c1); stroke: none; } svg text.c1 { fill: var(--c2); stroke: none; }
svg text.c2 { fill: var(--c3); stroke: none; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td { overflow-wrap: break-word; } td:first-child { white-space: nowrap; font-weight: 600; }
footer { padding-top: 40px; font-size: 0.82rem; }
"""

NUMBERED = 12  # rows up to which a heat map's cells hold their figures
NAMED = 48  # rows up to which they have names
EDGE, CORNER = 360, 84  # of a heat map and its labels, in units of the drawing


def write_page(file: Path, report: Report) -> None:
    """Write the page; an older one stays whole until the new one is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(page(report), encoding="utf-8")
    os.replace(temporary, file)


def page(report: Report) -> str:
    """A complete HTML document that fetches nothing."""
    word = "fit" if report.fit else "unfit"
    nodes = dict.fromkeys(m.node for m in report.nodes)
    title = f"drivetrain doctor: {word}"
    cards = {
        "nodes": f"{len(nodes)}, {len(report.nodes)} process(es)",
        "GPUs": f"{len(report.gpus)} x {report.gpus[0].name}" if report.gpus else "not here",
        **{f"slowest {kind}": name for kind, name in report.slowest.items()},
    }
    tiles = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for what, value in cards.items()
    )
    body = [
        f'<h1 class="{word}">{"Fit" if report.fit else "Unfit"} to train</h1><p>{escape(report.verdict)}</p>',
        f'<div class="cards">{tiles}</div>',
        _maps(report.pairs),
        _curves(report.collectives),
        _gpus(report),
        _disks(report),
        _checks(report.checks),
        f"<footer>{escape(report.date)}, examined in {report.seconds:.0f} s. "
        "Bus and algorithm bandwidth as nccl-tests define them.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


# --- heat maps --------------------------------------------------------------------------------------------------------


def _maps(pairs: tuple[Pairs, ...]) -> str:
    if not pairs:
        return ""
    figures = []
    for p in pairs:
        figures.append(heat_map(f"Bandwidth {_scope(p)}, by {p.backend}", p.names, p.bandwidth, _rate))
        figures.append(heat_map(f"Latency {_scope(p)}, one way", p.names, p.latency, _microseconds, high_is_bad=True))
    text = "From the row to the column, each link measured by itself. Red: less than half as good as the median."
    return f'<h2>Links</h2><p class="soft">{text}</p><div class="grid">{"".join(figures)}</div>'


def heat_map(
    title: str,
    names: tuple[str, ...],
    values: tuple[tuple[float | None, ...], ...],
    say: Callable[[float], str],
    high_is_bad: bool = False,
) -> str:
    """A square of cells, row to column; red where a figure is far worse than the median."""
    known = [v for row in values for v in row if v is not None]
    middle, top, cell = statistics.median(known), max(known), EDGE / len(names)
    parts = []
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is None:
                continue
            slow = value > middle / SHARE if high_is_bad else value < SHARE * middle
            strength = 0.85 if slow else 0.2 + 0.6 * value / top
            x, y = CORNER + j * cell, 24 + i * cell
            parts.append(
                f'<rect class="{"slow" if slow else "cell"}" x="{x:.1f}" y="{y:.1f}" width="{cell * 0.96:.1f}" '
                f'height="{cell * 0.96:.1f}" opacity="{strength:.2f}">'
                f"<title>{escape(names[i])} to {escape(names[j])}: {say(value)}</title></rect>"
            )
            if len(names) <= NUMBERED and cell >= 30:
                parts.append(
                    f'<text class="value" x="{x + cell / 2:.1f}" y="{y + cell / 2 + 4:.1f}">{say(value)}</text>'
                )
    if len(names) <= NAMED:
        for i, name in enumerate(names):
            short = escape(name if len(name) <= 12 else f"…{name[-11:]}")
            parts.append(f'<text class="row" x="{CORNER - 6}" y="{24 + (i + 0.5) * cell + 4:.1f}">{short}</text>')
            if cell >= 70 or len(names) <= 4:
                parts.append(f'<text class="value" x="{CORNER + (i + 0.5) * cell:.1f}" y="16">{short}</text>')
    drawing = f'<svg viewBox="0 0 {CORNER + EDGE + 4} {EDGE + 28}" role="img" aria-label="{escape(title)}">'
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{''.join(parts)}</svg></figure>"


def _scope(p: Pairs) -> str:
    return p.scope if p.scope.startswith("between") else f"within {p.scope}"


def _rate(value: float) -> str:
    return f"{size(value)}/s"


def _microseconds(value: float) -> str:
    return f"{value * 1e6:.0f} us"


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(found: tuple[Collective, ...]) -> str:
    """Bandwidths over message size, both axes logarithmic."""
    if not found:
        return ""
    figures = [
        _chart("Bus bandwidth", found, lambda c: c.bus),
        _chart("Algorithm bandwidth", found, lambda c: c.algorithm),
    ]
    return f'<h2>Collectives</h2><div class="grid">{"".join(figures)}</div>'


def _chart(title: str, found: tuple[Collective, ...], value: Callable[[Collective], float]) -> str:
    left, right, top, bottom = 64, 440, 14, 220
    x_range = _range([c.bytes for c in found])
    y_range = _range([value(c) for c in found])

    def place(v: float, span: tuple[int, int], low: float, high: float) -> float:
        return low + (math.log10(max(v, 1e-9)) - span[0]) / (span[1] - span[0]) * (high - low)

    parts = []
    for e in range(x_range[0], x_range[1] + 1):
        x = place(10**e, x_range, left, right)
        parts.append(f'<line class="frame" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{size(10**e)}</text>')
    for e in range(y_range[0], y_range[1] + 1):
        y = place(10**e, y_range, bottom, top)
        parts.append(f'<line class="frame" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="row" x="{left - 6}" y="{y + 4:.1f}">{size(10**e)}/s</text>')
    for k, kind in enumerate(dict.fromkeys(c.kind for c in found)):
        mine = [c for c in found if c.kind == kind]
        points = " ".join(
            f"{place(c.bytes, x_range, left, right):.1f},{place(value(c), y_range, bottom, top):.1f}" for c in mine
        )
        parts.append(f'<polyline class="line c{k}" points="{points}"/>')
        parts.append(f'<text class="c{k}" x="{left + 8 + 110 * k}" y="{bottom + 34}">{kind}</text>')
    return (
        f"<figure><figcaption>{title} by message size</figcaption>"
        f'<svg viewBox="0 0 470 262" role="img" aria-label="{title}">{"".join(parts)}</svg></figure>'
    )


def _range(values: list[float] | list[int]) -> tuple[int, int]:
    """The decades that hold the values; one at least."""
    low, high = math.floor(math.log10(max(min(values), 1))), math.ceil(math.log10(max(*values, 10)))
    return low, max(high, low + 1)


# --- tables -----------------------------------------------------------------------------------------------------------


def _gpus(report: Report) -> str:
    rows = [
        [
            g.label, g.name, f"{g.flops / 1e12:.0f} TFLOP/s", f"{g.copied / 1e12:.2f} TB/s", f"{g.to_device / 1e9:.1f} GB/s",
            f"{d.sm_clock} MHz" if (d := g.driver) and d.sm_clock else "not here",
            f"{d.temperature} C" if d and d.temperature else "not here",
        ]
        for g in report.gpus
    ]  # fmt: skip
    return _table("GPUs", ["GPU", "kind", "bf16", "copy", "from the host", "SM clock", "temperature"], rows)


def _disks(report: Report) -> str:
    rows = [
        [d.label, d.kind, f"{size(d.write)}/s", f"{size(d.read)}/s", f"{size(d.random)}/s", f"{d.files:.0f}"]
        for d in report.disks
    ]
    head = ["disk", "file system", "write with fsync", "sequential read", "random read", "small files a second"]
    lakes = [
        [x.node, x.uri, f"{x.samples:.0f}", f"{x.rows:.0f}", size(x.bytes), f"{x.pack[0] * 1e3:.0f} ms"]
        for x in report.lakes
    ]
    lake_head = ["node", "lake", "samples/s at random", "rows/s in order", "bytes a sample", "median pack"]
    return _table("Storage", head, rows) + _table("Lake", lake_head, lakes)


def _checks(checks: tuple[Check, ...]) -> str:
    parts = []
    for area in AREAS:
        rows = [
            [
                f'<span class="{c.status.split()[-1]}">{c.status}</span>',
                *map(escape, (c.what, c.where, c.found, c.remedy)),
            ]
            for c in checks
            if c.area == area
        ]
        parts.append(_rows(f"Checks: {area}", ["", "what", "where", "found", "what to do"], rows))
    return "".join(parts)


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    return _rows(title, head, [[escape(cell) for cell in row] for row in rows])


def _rows(title: str, head: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already; nothing where there are no rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="scroll"><table><tr>{top}</tr>{lines}</table></div>'
