"""What an ingest worker does: episodes in, files of the `steps` table out. Nothing here knows of Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from drivetrain.data.image import fit
from drivetrain.lake.findings import Finding, RefusedError
from drivetrain.lake.folder import Folder
from drivetrain.lake.frames import episode_frames
from drivetrain.lake.images import encode_image
from drivetrain.lake.rows import EpisodeRows, read_rows
from drivetrain.lake.sources import ACTION, STATE, EpisodeSource, Source
from drivetrain.lake.statistics import Sketch, merge, sketch
from drivetrain.lake.tables import SCHEMAS, write_rows
from drivetrain.lake.validate import check_rows


@dataclass(frozen=True)
class Work:
    """Episodes of one source for one worker. `source.episodes` is left empty: a worker needs only its own."""

    source: Source
    episodes: tuple[EpisodeSource, ...]
    lake: Folder
    image_size: int
    strict: bool


@dataclass
class Done:
    """What became of a `Work`: fragments that nobody sees yet, in the order of the episodes, and what was refused.

    episodes: rows of the `episodes` table.   sketches: feature -> sketch of the accepted rows.
    """

    work: Work
    fragments: list[str] = field(default_factory=list)
    episodes: list[dict] = field(default_factory=list)
    sketches: dict[str, Sketch] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def ingest_episodes(work: Work) -> Done:
    """Read, check, resize, encode and write episodes. An episode is written whole or not at all."""
    done = Done(work)
    accepted = _accepted(work, done)
    first = next(accepted, None)  # an empty stream would leave an empty file
    if first is not None:
        done.fragments = write_rows(work.lake, "steps", itertools.chain([first], accepted))
    return done


def _accepted(work: Work, done: Done) -> Iterator[pa.RecordBatch]:
    """One batch of `steps` for each episode that passes; notes everything else in `done`."""
    for episode in work.episodes:
        try:
            rows = read_rows(work.source, episode)
            check_rows(work.source, episode, rows)
            batch = _batch(work, episode, rows)
        except RefusedError as refusal:
            done.findings.append(refusal.finding)
            if work.strict:
                return
            continue
        done.episodes.append(_episode_row(work.source, episode, rows))
        for feature, values in ((STATE, rows.state), (ACTION, rows.action)):
            new = sketch(values)
            done.sketches[feature] = merge(done.sketches[feature], new) if feature in done.sketches else new
        yield batch


def _batch(work: Work, episode: EpisodeSource, rows: EpisodeRows) -> pa.RecordBatch:
    cameras = [
        [encode_image(fit(image, work.image_size)) for image in episode_frames(work.source, episode, camera, rows)]
        for camera in work.source.cameras
    ]
    n = len(rows.frame)
    assert all(len(images) == n for images in cameras), [len(images) for images in cameras]
    columns = {
        "dataset": pa.array([work.source.name] * n),
        "episode": pa.array(np.full(n, episode.index, np.int64)),
        "frame": pa.array(rows.frame),
        "timestamp": pa.array(rows.timestamp),
        "task": pa.array([work.source.tasks[int(t)] for t in rows.task]),
        "state": _lists(rows.state),
        "action": _lists(rows.action),
        "images": pa.array(
            [list(step) for step in zip(*cameras, strict=True)] or [[]] * n, pa.list_(pa.large_binary())
        ),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMAS["steps"])


def _lists(values: np.ndarray) -> pa.ListArray:
    n, dimensions = values.shape
    offsets = np.arange(n + 1, dtype=np.int32) * dimensions
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values).reshape(-1)))


def _episode_row(source: Source, episode: EpisodeSource, rows: EpisodeRows) -> dict:
    starts = np.flatnonzero(np.diff(rows.task, prepend=rows.task[0] - 1))
    lengths = np.diff(starts, append=len(rows.task))
    return {
        "dataset": source.name,
        "episode": episode.index,
        "length": len(rows.frame),
        "spans": [
            {"task": source.tasks[int(rows.task[s])], "start": int(s), "length": int(n)}
            for s, n in zip(starts, lengths, strict=True)
        ],
        "data_file": episode.data_file,
        "video_files": [episode.videos[c.name].file for c in source.cameras if c.video],
    }
