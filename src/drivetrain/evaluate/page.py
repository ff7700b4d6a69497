"""The frame of a report: one HTML file with its style and script inside, and nothing fetched from anywhere."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfbfa; --card: #fff; --ink: #1c2024; --soft: #60646c; --line: #e3e4e8;
  --c1: #2f6fde; --c2: #e07b28; --c3: #2b9a66; --bad: #c8463c; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #111214; --card: #191b1f; --ink: #e8eaed; --soft: #9ba1a8; --line: #2d3036;
  --c1: #6ea3ff; --c2: #f2a15c; --c3: #5cc596; --bad: #f0857c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main, header, footer { max-width: 1160px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 40px; }
h1 { font-size: 1.7rem; font-weight: 650; letter-spacing: -0.01em; margin: 0; }
h2 { font-size: 1.2rem; font-weight: 650; margin: 48px 0 4px; }
h3 { font-size: 1rem; font-weight: 650; margin: 28px 0 8px; }
p { margin: 4px 0 16px; max-width: 72ch; }
.soft, header p, section > p, footer { color: var(--soft); }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); margin: 24px 0 0; }
.card, figure, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 16px; }
.card b { display: block; font-size: 1.25rem; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.3; }
.card span { color: var(--soft); font-size: 0.85rem; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
@media (min-width: 900px) { .grid.uneven { grid-template-columns: minmax(300px, 2fr) 3fr; } }
.films { display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(46%, 210px), 1fr)); }
figure { margin: 0; padding: 12px 14px; min-width: 0; }
figcaption { font-size: 0.86rem; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; }
.films figure { padding: 0; overflow: hidden; }
.films figcaption { padding: 8px 12px 10px; display: block; }
.films video, .films img { display: block; width: 100%; aspect-ratio: 1; background: #000; }
.strip { display: grid; gap: 4px; grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); margin: 8px 0 20px; }
.strip img { width: 100%; display: block; border-radius: 6px; }
.tag { font-weight: 600; } .success { color: var(--c3); } .time-out { color: var(--soft); } .crash { color: var(--bad); }
svg.chart { display: block; width: 100%; height: auto; margin-top: 6px; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--soft); } svg .cursor { stroke: var(--soft); }
svg line.mark { stroke: var(--bad); stroke-dasharray: 3 3; } svg text.mark { fill: var(--bad); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .area { opacity: 0.75; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
.line.faint { stroke: var(--c1); opacity: 0.3; stroke-width: 1; }
rect.c1, .area.c1 { fill: var(--c1); } rect.c2, .area.c2 { fill: var(--c2); } .area.c3 { fill: var(--c3); }
.key { color: var(--soft); white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; background: var(--c1); }
.key i.c2 { background: var(--c2); } .key i.c3 { background: var(--c3); } .key i.faint { opacity: 0.35; }
.readout { display: block; min-height: 1.3em; font-size: 0.8rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.bars { display: grid; gap: 18px; padding: 18px; } .bars .name b { display: inline; font-size: inherit; }
.bars .name span { color: inherit; font-size: inherit; } .bars .name .soft { color: var(--soft); }
.bars .name { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; font-size: 0.92rem; }
.track { position: relative; height: 20px; margin-top: 5px; border-radius: 5px; background: var(--line); }
.track .fill { height: 100%; border-radius: 5px; background: var(--c1); } .other .fill { background: var(--soft); opacity: 0.6; }
.track .interval { position: absolute; top: 9px; height: 2px; background: var(--ink); }
.track .interval::before, .track .interval::after { content: ""; position: absolute; top: -4px; height: 10px; width: 2px;
  background: var(--ink); } .track .interval::after { right: 0; }
.scale { display: flex; justify-content: space-between; font-size: 0.78rem; color: var(--soft); margin-top: -10px; }
.scroll { overflow-x: auto; margin: 8px 0 20px; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px; border-bottom: 1px solid var(--line); vertical-align: middle; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; } td.word { overflow-wrap: break-word; }
.spark { width: 110px; height: 24px; display: block; }
details { margin: 8px 0 20px; } summary { cursor: pointer; color: var(--soft); }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.92em; }
footer { padding: 40px 20px 48px; font-size: 0.82rem; }
@media (max-width: 560px) { header { padding-top: 24px; } main, header, footer { padding-left: 14px; padding-right: 14px; }
  h2 { margin-top: 36px; } th, td { padding: 6px 10px; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll('svg[data-points]')) {
  const data = JSON.parse(chart.dataset.points), cursor = chart.querySelector('.cursor');
  const readout = chart.parentElement.querySelector('.readout');
  const leave = () => { cursor.setAttribute('x1', -9); cursor.setAttribute('x2', -9); readout.textContent = ''; };
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    let near = 0;
    data.at.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.at[near] - at)) near = i; });
    cursor.setAttribute('x1', data.at[near]); cursor.setAttribute('x2', data.at[near]);
    const values = Object.entries(data.y).map(([name, y]) => name + ' ' + y[near]);
    readout.textContent = [data.x[near], ...values].join('  ·  ');
  });
  chart.addEventListener('pointerleave', leave);
}
const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
if (!calm) for (const video of document.querySelectorAll('video[data-play]')) video.play().catch(() => {});
"""

# The page may run its own script and show what it carries; it may fetch nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; media-src data:"


def page(title: str, body: str) -> str:
    """A complete HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def cards(entries: list[tuple[str, str]]) -> str:
    """(value, what it is) as a row of tiles."""
    tiles = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in entries
    )
    return f'<div class="cards">{tiles}</div>' if tiles else ""


def table(head: list[str], rows: list[list[str]], numeric: set[int] | frozenset[int] = frozenset()) -> str:
    """A table that scrolls sideways in itself. Cells are HTML, already escaped; `numeric` columns are set to the right."""
    classes = ["n" if i in numeric else "word" for i in range(len(head))]
    top = "".join(f'<th class="{c}">{escape(h)}</th>' for h, c in zip(head, classes, strict=True))
    lines = "".join(
        "<tr>" + "".join(f'<td class="{c}">{cell}</td>' for cell, c in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def section(title: str, text: str, *parts: str) -> str:
    """A heading, a sentence, and what follows; nothing at all where nothing follows."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>" if body else ""
