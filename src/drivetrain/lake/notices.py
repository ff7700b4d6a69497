"""What is odd about a data set that was taken into the lake: nothing that stops training, all worth a look."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from drivetrain.lake.findings import Finding
from drivetrain.lake.lake import Lake
from drivetrain.lake.sources import ACTION, STATE
from drivetrain.types import DatasetInfo

LAGS = range(-3, 4)
MIN_CORRELATION = 0.5  # below it action and state are different things, and a lag means nothing
LAG_EPISODES = 8
TINY_RANGE = 1e-3  # of the largest absolute value: a dimension that moves less is as good as constant


def notices(lake: Lake, info: DatasetInfo) -> list[Finding]:
    """Constant dimensions, empty instructions, and actions that do not run ahead of the state."""
    found = [*_constant_dimensions(info), *_empty_tasks(lake, info)]
    measured = action_lag(*some_episodes(lake, info))
    if measured and measured[0] < 0:
        lag, correlation = measured
        text = (
            f"the action of a step moves with the state of {-lag} step(s) before the next one (r = {correlation:.2f})"
        )
        remedy = (
            "If actions were recorded late, shift them by so many rows; if they are measured positions, ignore this."
        )
        found.append(_notice(info, "action-lag", text, remedy))
    return found


def action_lag(states: list[np.ndarray], actions: list[np.ndarray]) -> tuple[int, float] | None:
    """(lag in steps, correlation): 0 where the action of step t moves like the state of step t + 1, as a command does.

    A positive lag is a robot that follows late; -1 is an action that equals the present state. Actions may be positions
    or their changes: the reading that correlates better is taken. states, actions: [n, dimensions] per episode, with the
    same dimensions. None where nothing correlates.
    """
    if not states or states[0].shape[1] != actions[0].shape[1]:
        return None
    long_enough = [k for k in range(len(states)) if len(states[k]) > 4 * max(LAGS)]
    moves = [np.diff(states[k].astype(np.float64), axis=0)[1:] for k in long_enough]
    positions = [np.diff(actions[k].astype(np.float64), axis=0)[:-1] for k in long_enough]
    changes = [actions[k].astype(np.float64)[1:-1] for k in long_enough]
    best: tuple[int, float] | None = None
    for commands in (positions, changes):
        for lag in LAGS:
            r = _correlation(commands, moves, lag)
            if r > MIN_CORRELATION and (best is None or r > best[1] + 1e-9):
                best = (lag, r)
    return best


def _correlation(commands: list[np.ndarray], moves: list[np.ndarray], lag: int) -> float:
    """Pearson's r between the command of step t and the move of step t + lag, averaged over the dimensions that move."""
    if not commands:
        return 0.0
    a = np.concatenate([c[max(0, -lag) : len(c) - max(0, lag)] for c in commands])
    b = np.concatenate([m[max(0, lag) : len(m) - max(0, -lag)] for m in moves])
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    size = np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))
    moving = size > 1e-12
    return float(((a * b).sum(axis=0)[moving] / size[moving]).mean()) if moving.any() else 0.0


def _constant_dimensions(info: DatasetInfo) -> list[Finding]:
    found = []
    for feature, names in ((STATE, info.state_names), (ACTION, info.action_names)):
        s = info.statistics[feature]
        largest = np.maximum(np.abs(s.min), np.abs(s.max))
        for i in np.flatnonzero(s.max - s.min <= TINY_RANGE * largest):
            text = f"{feature}[{i}] ({names[i]}) stays between {s.min[i]:.6g} and {s.max[i]:.6g}"
            remedy = "Normalising must not blow up what little it moves; leave the dimension out if it is unused."
            found.append(_notice(info, "constant-dimension", text, remedy))
    return found


def _empty_tasks(lake: Lake, info: DatasetInfo) -> list[Finding]:
    spans = lake.spans([info.name])
    empty = sorted({int(e) for e, t in zip(spans.episode, spans.task, strict=True) if not spans.tasks[t].strip()})
    if not empty:
        return []
    text = f"{len(empty)} episode(s) have an empty instruction, the first is {empty[0]}"
    return [_notice(info, "empty-task", text, "Write the instruction into the tasks file in meta/.")]


def some_episodes(lake: Lake, info: DatasetInfo) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """States and actions of a few episodes, spread over the data set."""
    spans = lake.spans([info.name])
    first = np.unique(spans.last_row, return_index=True)[1]
    chosen = first[np.linspace(0, len(first) - 1, min(LAG_EPISODES, len(first))).astype(int)]
    states, actions = [], []
    for i in chosen:
        table = lake.read(np.arange(spans.first_row[i], spans.last_row[i] + 1), ["state", "action"])
        states.append(_matrix(table["state"]))
        actions.append(_matrix(table["action"]))
    return states, actions


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """float32 [rows, dimensions] of a column of equally long lists."""
    return column.combine_chunks().flatten().to_numpy().reshape(len(column), -1)


def _notice(info: DatasetInfo, check: str, found: str, remedy: str) -> Finding:
    return Finding(info.source, -1, -1, check, "", found, remedy, "notice")
