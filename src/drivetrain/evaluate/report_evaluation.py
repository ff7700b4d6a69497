"""The evaluation part of a report: success with its interval, films, errors against baselines."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from statistics import fmean

from drivetrain.evaluate.page import table
from drivetrain.evaluate.results import EpisodeResult, count_successes, success_text, wilson_interval
from drivetrain.evaluate.video import VIDEO_FPS

MOST_VIDEO_BYTES = 24_000_000
"""Of all films on a page; a page that no mail server takes is of no use."""

NOTES = {"untrained": "fresh weights, nothing learned", "blind": "the trained policy, shown black images"}


def success_bars(evaluations: dict[str, list[EpisodeResult]]) -> str:
    """One bar per evaluation, with its interval, and a table of what else was measured."""
    bars = []
    for name, results in evaluations.items():
        successes, episodes = count_successes(results), len(results)
        low, high = wilson_interval(successes, episodes)
        note = f' <span class="soft">{escape(NOTES[name])}</span>' if name in NOTES else ""
        bars.append(
            f'<div class="{"other" if name in NOTES else ""}"><div class="name"><span><b>{escape(name)}</b>{note}</span>'
            f"<span>{success_text(successes, episodes)}</span></div>"
            f'<div class="track"><div class="fill" style="width:{100 * successes / episodes:.1f}%"></div>'
            f'<div class="interval" style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></div></div></div>'
        )
    scale = '<div class="scale"><span>0</span><span>half of the episodes</span><span>all</span></div>'
    head = ["Policy", "Episodes", "Success", "Time-out", "Crash", "Steps to success", "Return", "Policy call, ms"]
    rows = [[escape(name), *_numbers(results)] for name, results in evaluations.items()]
    return f'<div class="card bars">{"".join(bars)}{scale}</div>' + table(head, rows, numeric=frozenset(range(1, 8)))


def _numbers(results: list[EpisodeResult]) -> list[str]:
    succeeded = [r.steps for r in results if r.success]
    return [
        str(len(results)),
        *(str(sum(r.outcome == kind for r in results)) for kind in ("success", "time-out", "crash")),
        f"{fmean(succeeded):.0f}" if succeeded else "–",
        f"{fmean(r.total_reward for r in results):,.0f}",
        f"{fmean(r.latency_ms for r in results):.1f}",
    ]


def films(evaluations: dict[str, tuple[Path, list[EpisodeResult]]]) -> str:
    """The videos of all evaluations, inside the page. Trained successes play by themselves; the others on a click."""
    shown, bytes_left = [], MOST_VIDEO_BYTES
    for name, (folder, results) in sorted(evaluations.items(), key=lambda item: item[0] in NOTES):
        for result in results:
            file = folder / result.video
            if not result.video or not file.is_file() or file.stat().st_size > bytes_left:
                continue
            content = file.read_bytes()
            bytes_left -= len(content)
            play = "data-play" if name not in NOTES and result.success else ""
            shown.append(
                f'<figure><video src="data:video/mp4;base64,{base64.b64encode(content).decode()}" '
                f'{play} controls loop muted playsinline preload="auto"></video><figcaption>'
                f'<b>{escape(name)}</b> · <span class="tag {result.outcome}">{result.outcome}</span><br>'
                f'<span class="soft">state {result.state_id}, {result.steps} steps, {VIDEO_FPS} a second</span>'
                f"</figcaption></figure>"
            )
    return f'<div class="films">{"".join(shown)}</div>' if shown else ""


def open_loop_bars(errors: dict) -> str:
    """The policy's error beside the baselines', and by action dimension."""
    entries = [("policy", errors["policy"]), ("mean action", errors["mean_action"])]
    if errors.get("repeat_state") is not None:
        entries.append(("hold the present position", errors["repeat_state"]))
    widest = max(value for _, value in entries) * 1.05 or 1.0
    bars = "".join(
        f'<div class="{"" if name == "policy" else "other"}"><div class="name"><b>{escape(name)}</b>'
        f'<span>{value:.3f}</span></div><div class="track"><div class="fill" style="width:{100 * value / widest:.1f}%">'
        f"</div></div></div>"
        for name, value in entries
    )
    note = f"{errors['samples']:,} steps of {errors['episodes']} episodes that were not trained on."
    if errors.get("left_out"):
        note += f" Left out, since constant in training: {', '.join(errors['left_out'])}."
    rows = [[escape(name), f"{value:.3f}"] for name, value in errors["per_dimension"].items()]
    details = table(["Action", "Error"], rows, numeric={1})
    more = f"<details><summary>By action dimension</summary>{details}</details>"
    return f'<div class="card bars">{bars}</div><p class="soft">{escape(note)}</p>{more}'
