"""`drivetrain report`: what a run did and what it is worth, on one page that needs no network.

What is read of a run's folder; whatever is absent is left out of the page:

    train/run.json, train/metrics.jsonl     the run and its log        (or both directly in the folder)
    evaluation/<name>/episodes.parquet      closed loop, with videos   (or episodes.parquet directly in the folder)
    open_loop.json                          errors on held-out data
    summary.json                            lake, checkpoint, policy, seconds, resumed_at_step
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drivetrain.evaluate.page import cards, page, section, table
from drivetrain.evaluate.report_data import data_sections
from drivetrain.evaluate.report_evaluation import films, open_loop_bars, success_bars
from drivetrain.evaluate.report_training import read_metrics, training_charts
from drivetrain.evaluate.results import EpisodeResult, count_successes, read_results, success_text
from drivetrain.types import DrivetrainError

ORDER = {"untrained": 0, "trained": 1, "blind": 2}


@dataclass
class Material:
    """Everything a run's folder holds that the page can show."""

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    evaluations: dict[str, tuple[Path, list[EpisodeResult]]] = field(default_factory=dict)
    open_loop: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def report(runs: list[Path], html: Path) -> str:
    """Write one page about the folders `runs`; returns its path. Errors: a folder that holds nothing to report."""
    materials = [gather(folder) for folder in runs]
    title = "drivetrain report: " + ", ".join(m.run.get("recipe") or m.folder.name for m in materials)
    body = "".join(_run_part(m) for m in materials) + f"<footer>{escape(_provenance())}</footer>"
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page(title, body), encoding="utf-8")
    return str(html)


def write_report(html: Path, run_folder: Path) -> None:
    """Write the page about one run's folder."""
    report([run_folder], html)


def gather(folder: Path) -> Material:
    """Read a run's folder, an evaluation's folder, or a folder with both."""
    found = Material(folder)
    train = folder / "train" if (folder / "train").is_dir() else folder
    if (train / "run.json").is_file():
        found.run = json.loads((train / "run.json").read_text())
    if (train / "metrics.jsonl").is_file():
        found.metrics, found.events = read_metrics(train / "metrics.jsonl")
    named = sorted((folder / "evaluation").glob("*/episodes.parquet"), key=lambda p: ORDER.get(p.parent.name, 9))
    for file in [*named, *folder.glob("episodes.parquet")]:
        found.evaluations[file.parent.name] = file.parent, read_results(file.parent)
    for name in ("open_loop", "summary"):
        if (folder / f"{name}.json").is_file():
            setattr(found, name, json.loads((folder / f"{name}.json").read_text()))
    if not (found.run or found.metrics or found.evaluations or found.open_loop):
        raise DrivetrainError(
            f"{folder} holds neither a run (run.json, metrics.jsonl) nor an evaluation (episodes.parquet). "
            f"Give the folder that --out named."
        )
    return found


def _run_part(material: Material) -> str:
    results = {name: results for name, (_, results) in material.evaluations.items()}
    lake = material.summary.get("lake") or material.run.get("lake") or ""
    lake_version = material.run.get("lake_version") or None
    return (
        f"<header><h1>{escape(_heading(material))}</h1><p>{escape(_subtitle(material))}</p>{cards(_facts(material))}</header>"
        "<main>"
        + section(
            "Success in simulation",
            "Every policy starts once from each of the same initial states. The line across a bar is the 95 % Wilson "
            "interval of its success rate; where two intervals overlap widely, the difference is not established.",
            success_bars(results) if results else "",
        )
        + section(
            "Episodes",
            "The first episodes of each outcome, from the recorded actions, in slow motion.",
            films(material.evaluations),
        )
        + section(
            "Error on held-out episodes",
            f"Definition: {material.open_loop.get('definition', '')}. Lower is better.",
            open_loop_bars(material.open_loop) if material.open_loop else "",
        )
        + section(
            "Training",
            "Steps are optimizer updates. Time per step is that of the slowest process.",
            training_charts(material.metrics, material.events),
        )
        + (data_sections(str(lake), lake_version) if lake else "")
        + section("Configuration", "The whole run, as saved beside every checkpoint.", _configuration(material.run))
        + "</main>"
    )


def _heading(material: Material) -> str:
    suites = {r.suite for _, results in material.evaluations.values() for r in results}
    return " · ".join([material.run.get("recipe") or material.folder.name, *sorted(suites)])


def _subtitle(material: Material) -> str:
    parts = []
    if material.run.get("steps"):
        parts.append(f"{material.run['steps']:,} steps")
    if "trained" in material.evaluations:
        results = material.evaluations["trained"][1]
        parts.append(f"trained policy: {success_text(count_successes(results), len(results))}")
    if material.summary.get("resumed_at_step") is not None:
        parts.append(f"a process was killed and the run went on from step {material.summary['resumed_at_step']}")
    return "; ".join(parts)


def _facts(material: Material) -> list[tuple[str, str]]:
    facts = []
    if material.evaluations:
        name = "trained" if "trained" in material.evaluations else next(iter(material.evaluations))
        results = material.evaluations[name][1]
        facts.append((f"{count_successes(results)} of {len(results)}", f"episodes succeed ({name})"))
    if material.open_loop:
        facts.append((f"{material.open_loop['policy']:.2f}", "error on held-out episodes"))
    if material.metrics:
        last = material.metrics[-1]
        facts.append((f"{last['loss']:.3f}", f"loss at step {last['step']:,}"))
        waits = sum(m["data_wait_seconds"] for m in material.metrics) / sum(m["step_seconds"] for m in material.metrics)
        rates = sorted(m["samples_per_second"] for m in material.metrics)
        facts.append((f"{rates[len(rates) // 2]:,.0f} /s", "samples, median"))
        facts.append((f"{100 * waits:.1f} %", "of the time waiting for data"))
    if material.summary.get("seconds"):
        facts.append((f"{material.summary['seconds']:,.0f} s", "in all"))
    return facts


def _configuration(run: dict[str, Any]) -> str:
    if not run:
        return ""
    rows = [[f"<code>{escape(name)}</code>", escape(_value(value))] for name, value in _flat(run)]
    return f"<details><summary>{len(rows)} settings</summary>{table(['Setting', 'Value'], rows)}</details>"


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else key)]
    return [(name, value)]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _provenance() -> str:
    versions = []
    for name in ("drivetrain", "torch", "lerobot", "mujoco", "metaworld"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"Written {when} by {', '.join(versions)}; Python {platform.python_version()} on {platform.machine()}."
