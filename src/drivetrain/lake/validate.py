"""The checks of an episode's rows. Each raises RefusedError at the first row that fails; a clean episode passes all.

Reading raises the other refusals: `rows.py` (data-file, columns, length, empty, shape, image) and `frames.py` (video,
frame-count, video-clock, video-range, camera-size).
"""

from __future__ import annotations

import numpy as np

from drivetrain.lake.rows import EpisodeRows, refuse
from drivetrain.lake.sources import ACTION, STATE, EpisodeSource, Source

# Frames are found by number, so a timestamp only has to tell neighbours apart.
TOLERANCE_FRAMES = 0.5
# Beyond this the square of a value overflows float32.
MAX_VALUE = 1e18
# A median step that is off by more than this share means that the recording ran at another rate.
RATE_TOLERANCE = 0.005


def check_rows(source: Source, episode: EpisodeSource, rows: EpisodeRows) -> None:
    """All checks that need no images, the cheapest and most telling first."""
    check_frames(source, episode, rows)
    check_timestamps(source, episode, rows)
    check_tasks(source, episode, rows)
    check_values(source, episode, STATE, source.state_names, rows.state)
    check_values(source, episode, ACTION, source.action_names, rows.action)


def check_frames(source: Source, episode: EpisodeSource, rows: EpisodeRows) -> None:
    """frame_index counts 0, 1, ... without holes or repeats. The order of rows in the file does not matter."""
    wrong = np.flatnonzero(rows.frame != np.arange(len(rows.frame)))
    if len(wrong):
        k = int(wrong[0])
        twice = k > 0 and rows.frame[k] == rows.frame[k - 1]
        found = f"frame_index {rows.frame[k]} occurs twice" if twice else f"frame_index {k} is missing"
        raise refuse(source, episode, "frame-index", found, "Record the episode again, or remove it.", k)


def check_timestamps(source: Source, episode: EpisodeSource, rows: EpisodeRows) -> None:
    """Frame k is at k/fps seconds, give or take half a frame, computed in float64."""
    time, fps = rows.timestamp, source.fps
    grid = np.arange(len(time)) / fps
    tolerance = TOLERANCE_FRAMES / fps + 1e-6
    bad = np.flatnonzero(~(np.abs(time - grid) <= tolerance))
    if not len(bad):
        return
    k = int(bad[0])
    if not np.isfinite(time[k]):
        raise refuse(source, episode, "non-finite", f"timestamp is {time[k]}", "Write k/fps into the column.", k)
    if np.all(np.abs(np.sort(time) - grid) <= tolerance):
        found = f"the rows are in the wrong order: frame {k} carries the time of frame {round(time[k] * fps)}"
        remedy = "Sort the rows by timestamp and number frame_index anew."
        raise refuse(source, episode, "order", found, remedy, k)
    steps = np.diff(time) * fps
    median = float(np.median(steps)) if len(steps) else 1.0
    even = len(steps) > 1 and float(steps.max() - steps.min()) < 0.05
    if median > 0 and (abs(median - 1) > RATE_TOLERANCE or (even and abs(time[0] * fps) <= TOLERANCE_FRAMES)):
        found = f"the timestamps are those of {fps / median:.3f} frames/s, meta/info.json says {fps:g}"
        raise refuse(source, episode, "rate", found, "Correct fps in meta/info.json, or the timestamps.", k)
    found = f"timestamp {time[k]:.6f} s where {grid[k]:.6f} s is due"
    if k > 0 and time[k] - time[k - 1] > 1.5 / fps:
        found += f"; a gap of {(time[k] - time[k - 1]) * fps:.1f} frames"
    raise refuse(source, episode, "timestamps", found, "Record the episode again, or correct the timestamps.", k)


def check_tasks(source: Source, episode: EpisodeSource, rows: EpisodeRows) -> None:
    """Every task_index has a text."""
    for index in np.unique(rows.task):
        if int(index) not in source.tasks:
            k = int(np.flatnonzero(rows.task == index)[0])
            found = f"task_index {index} has no text; the tasks file has {sorted(source.tasks)}"[:300]
            raise refuse(source, episode, "task", found, "Add the task to the tasks file in meta/.", k)


def check_values(
    source: Source, episode: EpisodeSource, feature: str, names: tuple[str, ...], values: np.ndarray
) -> None:
    """Everything is finite, and small enough to be squared in float32."""
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(values) <= MAX_VALUE)
    if bad.any():
        k, dimension = (int(i) for i in np.argwhere(bad)[0])
        found = f"{feature}[{dimension}] ({names[dimension]}) is {values[k, dimension]}"
        remedy = "Remove the episode, or correct the value."
        raise refuse(source, episode, "non-finite", found, remedy, k)
