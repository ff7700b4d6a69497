"""LeRobot data sets into a lake, through Ray: one laptop core and a hundred nodes run the same code.

Workers write files that nobody sees (`episode.py`); this process alone makes them visible, in the order of the
episodes, as one lake version after another (`commit.py`). Killed anywhere and run again, the lake holds each episode
exactly once. Who does the work is decided in `pool.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from drivetrain.lake import pool
from drivetrain.lake.commit import Committer, check_compatible
from drivetrain.lake.episode import Work
from drivetrain.lake.findings import Finding
from drivetrain.lake.folder import Folder, folder_of
from drivetrain.lake.lake import Lake
from drivetrain.lake.notices import notices
from drivetrain.lake.pool import Run, here, ray_at, through_ray
from drivetrain.lake.sources import EpisodeSource, Source, read_source
from drivetrain.lake.tables import create_tables
from drivetrain.types import DrivetrainError

COMMIT_SECONDS = 20.0  # what a killed ingest loses at most
MAX_TASK_ROWS = 16384  # also the size of a fragment
MIN_TASK_ROWS = 128
RAY_SECONDS = 15.0  # until a local Ray and its workers are up, on an idle machine
PIXELS_PER_SECOND = 50e6  # decoded, resized and encoded by one core


@dataclass(frozen=True)
class SourceReport:
    """What became of one source. `already`: episodes that the lake had before; `quarantined`: episodes refused now."""

    dataset: str
    source: str
    added_episodes: int
    added_steps: int
    already: int
    quarantined: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. `version` is the lake version that holds it; `findings` are notices and refused episodes."""

    lake: str
    version: int
    sources: tuple[SourceReport, ...]
    findings: tuple[Finding, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.lake}, version {self.version}, in {self.seconds:.1f} s"]
        for s in self.sources:
            lines.append(
                f"{s.dataset}: {s.added_episodes} episodes ({s.added_steps} steps) added, "
                f"{s.already} there already, {s.quarantined} refused"
            )
        return "\n".join([*lines, *(f"{f.severity}: {f}" for f in self.findings)])


@dataclass(frozen=True)
class Progress:
    """How far an ingest is: counted in episodes of the data set at hand, and in steps since the start."""

    dataset: str
    done: int
    episodes: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Options:
    """What all sources of one ingest have in common. `started`: by `time.perf_counter`."""

    image_size: int
    strict: bool
    started: float
    progress: Callable[[Progress], None] | None


def ingest(
    sources: list[str],
    lake: str,
    *,
    image_size: int = 224,
    strict: bool = False,
    ray_address: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> IngestReport:
    """Add the episodes of LeRobot data sets that the lake does not have yet.

    sources: folders or URLs, each as `PATH` or as `NAME=PATH`; the name in the lake is the folder's name by default.
    image_size: images are stored square at this size; a data set keeps the size it was first ingested with.
    strict: stop at the first refused episode instead of putting it into quarantine; what was committed before stays.
    ray_address: a running cluster, or `local` to start one on this machine. By default a Ray that this process is
    connected to; otherwise a little work is done in this process, and for more a Ray is started for this call.

    Raises DrivetrainError before anything is written where a source or the lake cannot be used as a whole.
    """
    started = time.perf_counter()
    described = [read_source(*_path_and_name(source)) for source in sources]
    _check_names(described)
    folder = folder_of(lake)
    check_compatible(folder, described, image_size)
    if strict:
        for source in described:
            _raise_first([f for f in source.findings if f.severity == "error"])
    create_tables(folder)
    committer = Committer(folder, image_size)
    options = Options(image_size, strict, started, progress)
    alone = ray_address is None and not _ray_runs() and _is_small(described, committer)
    with nullcontext() if alone else ray_at(ray_address):
        run, cores = (here, 1) if alone else (through_ray, pool.cores())
        reports = [_ingest_source(source, committer, options, run, cores) for source in described]
    result = Lake(folder, committer.finish())
    findings = [f for source in reports for f in source.findings]
    for source in reports:
        if source.added_episodes:
            findings += notices(result, result.datasets[source.dataset])
    return IngestReport(folder.uri, result.version, tuple(reports), tuple(findings), time.perf_counter() - started)


def _ingest_source(source: Source, committer: Committer, options: Options, run: Run, cores: int) -> SourceReport:
    already = committer.begin(source)
    refused: set[int] = set()
    while True:
        # A second round is needed only where another ingest of the same data set interfered.
        out = committer.episodes(source.name) | committer.removed(source.name) | refused
        missing = [e for e in source.episodes if e.index not in out]
        if not missing:
            break
        for done in run(_split(replace(source, episodes=()), missing, committer.lake, options, cores)):
            if options.strict and done.findings:
                committer.flush()
                _raise_first(done.findings)
            refused |= {f.episode for f in done.findings}
            committer.add(done)
            if committer.seconds_since_commit() > COMMIT_SECONDS:
                committer.flush()
            if options.progress:
                counted = already + committer.added_episodes + len(refused)
                seconds = time.perf_counter() - options.started
                total = len(source.episodes)
                options.progress(Progress(source.name, counted, total, committer.added_steps, seconds))
        committer.flush()
    committer.flush()
    return SourceReport(
        dataset=source.name,
        source=source.folder.uri,
        added_episodes=committer.added_episodes,
        added_steps=committer.added_steps,
        already=already,
        quarantined=len(refused),
        findings=tuple(committer.findings),
    )


def _split(header: Source, episodes: list[EpisodeSource], lake: Folder, options: Options, cores: int) -> list[Work]:
    """Consecutive episodes in pieces: several per core to balance them, none so large that losing it hurts."""
    rows = sum(e.length for e in episodes)
    limit = min(MAX_TASK_ROWS, max(MIN_TASK_ROWS, rows // (4 * cores)))
    pieces: list[list[EpisodeSource]] = [[]]
    size = 0
    for episode in episodes:
        if pieces[-1] and size + episode.length > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(episode)
        size += episode.length
    return [Work(header, tuple(piece), lake, options.image_size, options.strict) for piece in pieces]


def _is_small(sources: list[Source], committer: Committer) -> bool:
    """Whether this process alone is done sooner than all cores are once Ray has started."""
    pixels = 0
    for source in sources:
        there = committer.episodes(source.name)
        frames = sum(e.length for e in source.episodes if e.index not in there)
        pixels += frames * sum(c.height * c.width for c in source.cameras)
    alone = pixels / PIXELS_PER_SECOND
    return alone < RAY_SECONDS + alone / (os.cpu_count() or 1)


def _ray_runs() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _path_and_name(source: str) -> tuple[str, str | None]:
    """`NAME=PATH` or `PATH`."""
    name, equals, path = source.partition("=")
    return (path, name) if equals and name and "/" not in name and ":" not in name else (source, None)


def _check_names(described: list[Source]) -> None:
    seen: dict[str, Source] = {}
    for source in described:
        if source.name in seen:
            raise DrivetrainError(
                f"{seen[source.name].folder.uri} and {source.folder.uri} are both called {source.name!r}. "
                f"Give one of them another name: NAME={source.folder.uri}"
            )
        seen[source.name] = source


def _raise_first(findings: list[Finding]) -> None:
    if findings:
        raise DrivetrainError(f"{findings[0]} (strict: nothing after it was ingested)")
