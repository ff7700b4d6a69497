"""`drivetrain inspect`: what is in a lake or a data set, and what is wrong with it; in words, as a page, or by SQL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np

from drivetrain.lake.findings import Finding, RefusedError
from drivetrain.lake.folder import folder_of
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.lake.notices import action_lag, notices, some_episodes
from drivetrain.lake.rows import read_rows, refuse
from drivetrain.lake.sources import ACTION, STATE, EpisodeSource, Source, read_source
from drivetrain.lake.statistics import sketch, statistics
from drivetrain.lake.tables import SCHEMAS, read_manifest, versions
from drivetrain.lake.validate import check_rows
from drivetrain.types import DatasetInfo, DrivetrainError

MAX_ANSWER_ROWS = 1000


@dataclass(frozen=True)
class DatasetSummary:
    """One data set, in numbers. `action_lag`: see notices.action_lag; None where nothing correlates."""

    info: DatasetInfo
    format: str
    hours: float
    tasks: dict[str, int]
    shortest: int
    longest: int
    action_lag: int | None


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. `tasks` of a summary count episodes; `history` says what made each lake version."""

    target: str
    version: int | None
    datasets: tuple[DatasetSummary, ...]
    findings: tuple[Finding, ...]
    history: tuple[str, ...] = ()
    page: str | None = None

    def __str__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class Answer:
    """The rows that a question gave, images by their size."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __str__(self) -> str:
        texts = [self.columns, *(tuple(map(str, row)) for row in self.rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(self.columns))]
        return "\n".join("  ".join(f"{t:<{w}}" for t, w in zip(row, widths, strict=True)).rstrip() for row in texts)


def inspect(target: str, *, sql: str | None = None, html: Path | None = None) -> Inspection | Answer:
    """Look into a lake, or a LeRobot data set that is in none.

    sql:  a question over the tables datasets, episodes, steps and quarantine of a lake; the answer is returned.
    html: a file to write with pictures of some episodes of a lake.
    A data set's numbers are all checked, of its videos only the headers; ingest decodes every frame.
    """
    folder = folder_of(target)
    if read_manifest(folder) is None:
        if sql or html:
            option = "--sql" if sql else "--html"
            raise DrivetrainError(f"{option} needs a lake. Type first: drivetrain ingest {target} --lake LAKE")
        return inspect_source(read_source(target))
    lake = open_lake(target)
    if sql:
        return ask(lake, sql)
    inspection = inspect_lake(lake)
    if html:
        from drivetrain.lake.page import write_page

        write_page(html, lake, inspection)
        inspection = replace(inspection, page=str(html))
    return inspection


def inspect_lake(lake: Lake) -> Inspection:
    """Everything about a lake that does not need its images."""
    rows = {row["name"]: row for row in lake.table("datasets").to_table(["name", "format"]).to_pylist()}
    summaries, findings = [], []
    for name, info in lake.datasets.items():
        spans = lake.spans([name])
        episodes = np.unique(spans.episode)
        lengths = np.array([spans.length[spans.episode == e].sum() for e in episodes])
        tasks: dict[str, int] = {}
        for task in {(int(e), int(t)) for e, t in zip(spans.episode, spans.task, strict=True)}:
            tasks[spans.tasks[task[1]]] = tasks.get(spans.tasks[task[1]], 0) + 1
        lag = action_lag(*some_episodes(lake, info))
        summaries.append(_summary(info, rows[name]["format"], tasks, lengths, lag))
        findings += notices(lake, info)
    for row in lake.table("quarantine").to_table().to_pylist():
        row.pop("dataset")
        findings.append(Finding(**row))
    history = [read_manifest(lake.folder, v) for v in versions(lake.folder)[-20:]]
    return Inspection(
        target=lake.uri,
        version=lake.version,
        datasets=tuple(summaries),
        findings=tuple(findings),
        history=tuple(f"version {m.version}, {m.created}: {m.what}" for m in history if m),
    )


def inspect_source(source: Source) -> Inspection:
    """The metadata and numbers of a LeRobot data set, checked as ingest checks them; videos by their headers."""
    findings, states, actions = list(source.findings), [], []
    tasks: dict[str, int] = {}
    for episode in source.episodes:
        try:
            rows = read_rows(source, episode)
            check_rows(source, episode, rows)
            check_video_headers(source, episode)
        except RefusedError as refused:
            findings.append(refused.finding)
            continue
        states.append(rows.state)
        actions.append(rows.action)
        for task in np.unique(rows.task):
            tasks[source.tasks[int(task)]] = tasks.get(source.tasks[int(task)], 0) + 1
    if not states:
        return Inspection(source.folder.uri, None, (), tuple(findings))
    info = DatasetInfo(
        name=source.name,
        source=source.folder.uri,
        robot=source.robot,
        fps=source.fps,
        cameras=tuple(c.name for c in source.cameras),
        image_size=0,
        state_names=source.state_names,
        action_names=source.action_names,
        episodes=len(states),
        steps=sum(map(len, states)),
        statistics={
            STATE: statistics(sketch(np.concatenate(states))),
            ACTION: statistics(sketch(np.concatenate(actions))),
        },
    )
    lengths = np.array([len(s) for s in states])
    summary = _summary(info, source.version, tasks, lengths, action_lag(states[:8], actions[:8]))
    return Inspection(source.folder.uri, None, (summary,), tuple(findings))


def check_video_headers(source: Source, episode: EpisodeSource) -> None:
    """Raise RefusedError where a video is missing, cannot be opened, or announces too few frames."""
    for camera in source.cameras:
        if not camera.video:
            continue
        video, frames = episode.videos[camera.name], 0
        try:
            with source.folder.open(video.file) as data, av.open(data, mode="r") as container:
                frames = container.streams.video[0].frames if container.streams.video else 0
        except (av.error.FFmpegError, OSError) as error:
            raise refuse(source, episode, "video", str(error), "Copy the file again.", file=video.file) from None
        if 0 < frames < episode.length:
            found = f"{camera.key} announces {frames} frames, the data have {episode.length} rows"
            raise refuse(source, episode, "frame-count", found, "Encode the video again.", file=video.file)


def ask(lake: Lake, sql: str) -> Answer:
    """The answer of DuckDB to a question over the lake's tables. Images are read only where the question needs them."""
    import duckdb

    connection = duckdb.connect()
    try:
        for name in SCHEMAS:
            connection.register(name, lake.table(name))
        result = connection.execute(sql)
        columns = tuple(c[0] for c in result.description or ())
        rows = result.fetchmany(MAX_ANSWER_ROWS)
    except duckdb.Error as error:
        tables = "; ".join(f"{name} ({', '.join(schema.names)})" for name, schema in SCHEMAS.items())
        raise DrivetrainError(f"the question cannot be answered: {error}\nThe tables are: {tables}") from None
    finally:
        connection.close()
    return Answer(columns, tuple(tuple(_shown(v) for v in row) for row in rows))


def describe(inspection: Inspection) -> str:
    """An inspection for a person."""
    version = f", version {inspection.version}" if inspection.version is not None else ""
    lines = [f"{inspection.target}{version}"]
    for s in inspection.datasets:
        i = s.info
        lines += [
            "",
            f"{i.name}: {i.episodes} episodes, {i.steps} steps, {s.hours:.2f} h at {i.fps:g} fps, {s.format}, robot {i.robot}",
            f"  from     {i.source}",
            f"  cameras  {', '.join(i.cameras) or 'none'}"
            + (f", kept at {i.image_size} pixels" if i.image_size else ""),
            f"  episodes {s.shortest} to {s.longest} steps",
            f"  lag      {'unknown' if s.action_lag is None else s.action_lag} steps from action to motion",
        ]
        lines += [
            f"  task     {n:>5} episodes: {task}" for task, n in sorted(s.tasks.items(), key=lambda t: -t[1])[:10]
        ]
        if len(s.tasks) > 10:
            lines.append(f"  task     and {len(s.tasks) - 10} more")
        for feature, names in ((STATE, i.state_names), (ACTION, i.action_names)):
            lines += ["", *_statistics_lines(i, feature, names)]
    errors = [f for f in inspection.findings if f.severity == "error"]
    odd = [f for f in inspection.findings if f.severity == "notice"]
    lines += ["", f"{len(errors)} fault(s), {len(odd)} notice(s)"]
    lines += [f"  {f}" for f in (*errors, *odd)]
    if inspection.history:
        lines += ["", *inspection.history]
    if inspection.page:
        lines += ["", f"pictures: {inspection.page}"]
    return "\n".join(lines)


def _statistics_lines(info: DatasetInfo, feature: str, names: tuple[str, ...]) -> list[str]:
    s = info.statistics[feature]
    width = max(map(len, names))
    head = f"  {feature:<{width}}  {'mean':>10} {'std':>10} {'min':>10} {'q01':>10} {'q99':>10} {'max':>10}"
    values = zip(names, s.mean, s.std, s.min, s.q01, s.q99, s.max, strict=True)
    return [head, *(f"  {n:<{width}}  " + " ".join(f"{v:>10.4g}" for v in row) for n, *row in values)]


def _summary(
    info: DatasetInfo, format: str, tasks: dict[str, int], lengths: np.ndarray, lag: tuple[int, float] | None
) -> DatasetSummary:
    return DatasetSummary(
        info=info,
        format=format,
        hours=info.steps / info.fps / 3600,
        tasks=tasks,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        action_lag=lag[0] if lag else None,
    )


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list):
        return [_shown(v) for v in value]
    return value
