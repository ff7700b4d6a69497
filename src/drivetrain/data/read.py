"""From a planned pack to steps: two random reads of the lake, whatever the pack's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from drivetrain.data.plan import Pack
from drivetrain.types import Spans, Step

if TYPE_CHECKING:  # packs that were made elsewhere are trained on without Lance
    import pyarrow as pa

    from drivetrain.lake.lake import Lake


def read_steps(lake: Lake, spans: Spans, pack: Pack, horizon: int) -> list[Step]:
    """The steps of a pack with the `horizon` actions that follow each, in the pack's order.

    Past the end of its episode a chunk repeats the last action, and `valid` says so.
    """
    windows = pack.row[:, None] + np.arange(horizon)
    valid = windows <= pack.last_row[:, None]
    windows = np.minimum(windows, pack.last_row[:, None])
    rows, place = np.unique(windows, return_inverse=True)
    place = place.reshape(windows.shape)
    actions = _vectors(lake.read(rows, ["action"]), "action")
    now = lake.read(pack.row, ["state", "images", "episode", "frame"])
    states = _vectors(now, "state")
    steps = []
    for i, columns in enumerate(now.drop_columns(["state"]).to_pylist()):
        span = pack.span[i]
        steps.append(
            Step(
                dataset=spans.datasets[spans.dataset[span]],
                episode=columns["episode"],
                frame=columns["frame"],
                task=spans.tasks[spans.task[span]],
                images=tuple(columns["images"]),
                state=states[i],
                actions=np.stack([actions[k] for k in place[i]]),
                valid=valid[i],
            )
        )
    return steps


def _vectors(table: pa.Table, column: str) -> list[np.ndarray]:
    """The rows of a list column as float32 vectors; data sets of one pack may differ in their length."""
    lists = table[column].combine_chunks()
    ends = lists.offsets.to_numpy()
    return np.split(lists.flatten().to_numpy(), ends[1:-1] - ends[0])
