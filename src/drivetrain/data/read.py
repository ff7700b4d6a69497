"""From a planned pack to steps: two random reads of the lake, whatever the pack's size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from drivetrain.data.plan import Pack
from drivetrain.types import Spans, Step

if TYPE_CHECKING:  # packs that were made elsewhere are trained on without Lance
    from drivetrain.lake.lake import Lake


def read_steps(lake: Lake, spans: Spans, pack: Pack, horizon: int) -> list[Step]:
    """The steps of a pack with the `horizon` actions that follow each, in the pack's order.

    Past the end of its episode a chunk repeats the last action, and `valid` says so.
    """
    windows = pack.row[:, None] + np.arange(horizon)
    valid = windows <= pack.last_row[:, None]
    windows = np.minimum(windows, pack.last_row[:, None])
    rows, place = np.unique(windows, return_inverse=True)
    actions = lake.read(rows, ["action"])["action"].to_pylist()
    now = lake.read(pack.row, ["state", "images", "episode", "frame"])
    steps = []
    for i, columns in enumerate(now.to_pylist()):
        span = pack.span[i]
        steps.append(
            Step(
                dataset=spans.datasets[spans.dataset[span]],
                episode=columns["episode"],
                frame=columns["frame"],
                task=spans.tasks[spans.task[span]],
                images=tuple(columns["images"]),
                state=np.array(columns["state"], dtype=np.float32),
                actions=np.array([actions[k] for k in place.reshape(windows.shape)[i]], dtype=np.float32),
                valid=valid[i],
            )
        )
    return steps
