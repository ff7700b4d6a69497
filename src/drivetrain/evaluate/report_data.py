"""The data part of a report, read from the lake: what was trained on, what it looks like, what was refused."""

from __future__ import annotations

import base64
from html import escape

import numpy as np

from drivetrain.evaluate.charts import histogram, sparkline
from drivetrain.evaluate.page import cards, section, table
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.types import DatasetInfo, DrivetrainError

MOST_ROWS = 20_000
MOST_DATASETS = 12
STRIP = 8
MOST_REFUSALS = 50


def data_sections(uri: str, lake_version: int | None) -> str:
    """The sections on the data sets of a lake and on its quarantine; a sentence where the lake is gone."""
    try:
        lake = open_lake(uri, lake_version)
    except DrivetrainError as error:
        return section("Data", "The lake cannot be read any more.", f'<p class="soft">{escape(str(error))}</p>')
    infos = list(lake.datasets.values())
    shown = "".join(_dataset(lake, info) for info in infos[:MOST_DATASETS])
    left = len(infos) - MOST_DATASETS
    more = f'<p class="soft">{left} more data sets are not shown.</p>' if left > 0 else ""
    about = f"Version {lake.version} of the lake, {sum(i.steps for i in infos):,} steps in all."
    refused = "Episodes that a check refused, and what to do about each. They were not trained on."
    return section("Data", about, shown, more) + section("Quarantine", refused, _quarantine(lake))


def _dataset(lake: Lake, info: DatasetInfo) -> str:
    table_of = lake.table("episodes").to_table(columns=["dataset", "episode", "length"])
    mine = np.array(table_of["dataset"].to_pylist()) == info.name
    lengths = table_of["length"].to_numpy()
    first_rows = (np.cumsum(lengths) - lengths)[mine]
    lengths = lengths[mine]
    facts = [
        (f"{info.episodes:,}", "episodes"),
        (f"{info.steps:,}", f"steps at {info.fps:g} a second"),
        (f"{info.steps / info.fps / 60:,.1f} min", "of demonstrations"),
        (f"{len(info.cameras)} × {info.image_size} px", ", ".join(info.cameras)),
    ]
    tasks = sorted(set(lake.spans([info.name]).tasks))
    instructions = "; ".join(tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
    title = f"<h3>{escape(info.name)}</h3><p class='soft'>{escape(info.robot or 'robot')}: “{escape(instructions)}”</p>"
    lengths_chart = histogram("Episode length", lengths, x_label="steps", y_label="episodes")
    return (
        title
        + cards(facts)
        + f"<h3>One episode from start to end</h3>{_strips(lake, info, int(first_rows[0]), int(lengths[0]))}"
        + f'<div class="grid uneven"><div>{lengths_chart}</div>{_distributions(lake, info, first_rows, lengths)}</div>'
    )


def _strips(lake: Lake, info: DatasetInfo, first_row: int, length: int) -> str:
    """For each camera, pictures of one episode, as the lake stores them."""
    rows = first_row + np.unique(np.linspace(0, length - 1, STRIP).round().astype(np.int64))
    pictures = lake.read(rows, ["images"])["images"].to_pylist()
    return "".join(
        '<div class="strip">'
        + "".join(
            f'<img alt="{escape(camera)}, step {r - first_row}" src="{_uri(p[c])}">'
            for r, p in zip(rows, pictures, strict=True)
        )
        + "</div>"
        for c, camera in enumerate(info.cameras)
    )


def _uri(picture: bytes) -> str:
    kinds = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"RI": "webp"}
    return f"data:image/{kinds.get(picture[:2], 'jpeg')};base64,{base64.b64encode(picture).decode()}"


def _distributions(lake: Lake, info: DatasetInfo, first_rows: np.ndarray, lengths: np.ndarray) -> str:
    """State and action dimensions: how their values are spread, with the exact statistics of the lake."""
    every = max(1, -(-int(lengths.sum()) // MOST_ROWS))
    rows = np.concatenate([np.arange(f, f + n) for f, n in zip(first_rows, lengths, strict=True)])[::every]
    values = lake.read(rows, ["action", "state"])
    lines = []
    for column, feature, names in (
        ("action", "action", info.action_names),
        ("state", "observation.state", info.state_names),
    ):
        numbers = np.array(values[column].to_pylist(), dtype=np.float64)
        s = info.statistics[feature]
        for d, name in enumerate(names):
            exact = (s.min[d], s.q01[d], s.mean[d], s.q99[d], s.max[d], s.std[d])
            lines.append([f"{column} {escape(name)}", sparkline(numbers[:, d]), *(f"{v:.3g}" for v in exact)])
    head = ["Dimension", "Values", "Min", "1 %", "Mean", "99 %", "Max", "Std"]
    return f"<div>{table(head, lines, numeric=frozenset(range(2, 8)))}</div>"


def _quarantine(lake: Lake) -> str:
    refused = lake.table("quarantine").to_table().to_pylist()
    if not refused:
        return ""
    rows = [
        [
            escape(str(r["dataset"] or r["source"])),
            str(r["episode"]) if r["episode"] >= 0 else "all",
            escape(str(r["check"])),
            escape(str(r["found"])),
            escape(str(r["remedy"])),
        ]
        for r in refused[:MOST_REFUSALS]
    ]
    more = len(refused) - len(rows)
    note = f'<p class="soft">{more} more are in the table <code>quarantine</code>.</p>' if more else ""
    return table(["Data set", "Episode", "Check", "Found", "What to do"], rows, numeric={1}) + note
