"""LeRobot data sets into a lake, through Ray: one laptop core and a hundred nodes run the same code.

Workers write files that nobody sees (`episode.py`); this process alone makes them visible, in the order of the episodes,
as one lake version after another (`commit.py`). Killed anywhere and run again, the lake holds each episode exactly once.
Plain Ray tasks do the work, with more of them waiting than there are cores, which is what an autoscaling cluster looks at.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from drivetrain.lake.commit import Committer, check_compatible
from drivetrain.lake.episode import Done, Work, ingest_episodes
from drivetrain.lake.findings import Finding
from drivetrain.lake.folder import Folder, folder_of
from drivetrain.lake.sources import Source, read_source
from drivetrain.lake.tables import create_tables
from drivetrain.types import DrivetrainError

COMMIT_SECONDS = 20.0  # what a killed ingest loses at most
MAX_TASK_ROWS = 32768  # also the size of a fragment
MIN_TASK_ROWS = 128
OBJECT_STORE_BYTES = 100_000_000  # tasks return metadata only


@dataclass(frozen=True)
class SourceReport:
    """What became of one source. `already`: episodes that the lake had before."""

    dataset: str
    source: str
    added_episodes: int
    added_steps: int
    already: int
    quarantined: int


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. `version` is the lake version that holds it; `findings` are notices and quarantined episodes."""

    lake: str
    version: int
    sources: tuple[SourceReport, ...]
    findings: tuple[Finding, ...]
    seconds: float


@dataclass(frozen=True)
class Progress:
    """How far an ingest is: counted in episodes of the data set at hand, and in steps since the start."""

    dataset: str
    done: int
    episodes: int
    steps: int
    seconds: float


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
    ray_address: a running cluster; by default a Ray that is already initialised, or a local one for this call.

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
    reports, findings = [], []
    with _ray(ray_address) as start:
        for source in described:
            ingest_one = _ingest_source(source, committer, image_size, strict, start, progress, started)
            reports.append(ingest_one)
            findings += committer.findings
    manifest = committer.finish()
    return IngestReport(folder.uri, manifest.version, tuple(reports), tuple(findings), time.perf_counter() - started)


def _ingest_source(
    source: Source,
    committer: Committer,
    image_size: int,
    strict: bool,
    start_ray: Callable[[], None],
    progress: Callable[[Progress], None] | None,
    started: float,
) -> SourceReport:
    already = committer.begin(source)
    refused: set[int] = set()
    while True:
        # A second round is needed only where another ingest of the same data set interfered.
        there = committer.episodes()
        missing = [e for e in source.episodes if e.index not in there and e.index not in refused]
        if not missing:
            break
        start_ray()
        committer.start_clock()
        header = replace(source, episodes=())
        for done in _in_order(_split(header, missing, committer.lake, image_size, strict)):
            if strict:
                committer.flush()
                _raise_first(done.findings)
            refused |= {f.episode for f in done.findings}
            committer.add(done)
            if committer.seconds_since_commit() > COMMIT_SECONDS:
                committer.flush()
            if progress:
                counted = already + committer.added_episodes + len(refused)
                seconds = time.perf_counter() - started
                progress(Progress(source.name, counted, len(source.episodes), committer.added_steps, seconds))
        committer.flush()
    committer.flush()
    return SourceReport(
        source.name, source.folder.uri, committer.added_episodes, committer.added_steps, already, len(refused)
    )


def _split(header: Source, episodes: list, lake: Folder, image_size: int, strict: bool) -> list[Work]:
    """Consecutive episodes in pieces: several per core to balance them, none so large that losing it hurts."""
    import ray

    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    rows = sum(e.length for e in episodes)
    limit = min(MAX_TASK_ROWS, max(MIN_TASK_ROWS, rows // (4 * cores)))
    pieces, size = [[]], 0
    for episode in episodes:
        if pieces[-1] and size + episode.length > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(episode)
        size += episode.length
    return [Work(header, tuple(piece), lake, image_size, strict) for piece in pieces]


def _in_order(pieces: list[Work]) -> Iterator[Done]:
    """The results in the order of the pieces, with about twice as many tasks under way as the cluster has cores."""
    import ray
    from ray.exceptions import RayError

    remote = ray.remote(num_cpus=1, max_retries=4)(ingest_episodes)
    waiting: deque = deque()
    todo = iter(pieces)
    more = True
    while more or waiting:
        window = 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) + 2
        while more and len(waiting) < window:
            piece = next(todo, None)
            more = piece is not None
            if piece is not None:
                waiting.append((piece, remote.remote(piece)))
        if waiting:
            piece, reference = waiting.popleft()
            try:
                yield ray.get(reference)
            except RayError as error:
                numbers = f"{piece.episodes[0].index} to {piece.episodes[-1].index}"
                raise DrivetrainError(
                    f"{piece.source.folder.uri}: the worker that ingested the episodes {numbers} failed: {_cause(error)}. "
                    "What was committed before is safe; type the same command again to go on."
                ) from error


@contextmanager
def _ray(address: str | None) -> Iterator[Callable[[], None]]:
    """A function that makes sure Ray runs; what it started is shut down at the end."""
    ours = False

    def start() -> None:
        nonlocal ours
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        if ray.is_initialized():
            return
        quiet = {"log_to_driver": False, "logging_level": "error"}
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        try:
            with warnings.catch_warnings():  # Ray forks only to replace the copy by another program at once
                warnings.filterwarnings("ignore", message="lance is not fork-safe")
                ray.init(address=address, **quiet) if address else ray.init(address="local", **quiet, **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "here"
            raise DrivetrainError(
                f"Ray could not be reached or started {where}: {_cause(error)}. Check the address, or leave it out for a local one."
            ) from error
        ours = True

    try:
        yield start
    finally:
        if ours:
            import ray

            ray.shutdown()


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


def _cause(error: Exception) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1][:300]
