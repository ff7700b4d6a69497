"""Updates that were skipped because a loss or a gradient was not finite: counted, limited, and their samples named."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drivetrain.parallel.mesh import World
from drivetrain.train.meters import Meters
from drivetrain.types import DrivetrainError, PackedBatch, StepPacks

NAMED = 8  # samples that a message lists


class Skips:
    """What the loop does about skipped updates, one update after they happened."""

    def __init__(self, limit: int, world: World, meters: Meters, name: Callable[[int], str]):
        """limit: so many in a row stop the run.   name: sample id -> its data set, episode and frame, in words."""
        self.limit, self.world, self.meters, self.name = limit, world, meters, name
        self.in_a_row = 0
        self.before: tuple[StepPacks, torch.Tensor] | None = None

    def remember(self, batch: StepPacks, losses: torch.Tensor) -> None:
        """The packs of an update and their losses, [packs], in case it turns out to have been skipped."""
        self.before = batch, losses

    def heed(self, numbers: list[float] | None) -> bool:
        """Act on (ranks asked to stop, skipped) of the update last remembered; equal on all ranks.

        Returns whether to stop. Raises DrivetrainError after too many skipped updates in a row.
        """
        if numbers is None or self.before is None:
            return False
        stopping, skipped = numbers
        if not skipped:
            self.in_a_row = 0
            return stopping > 0
        self.in_a_row += 1
        batch, losses = self.before
        suspects = sorted({s for of_rank in self.world.gather(suspicious(batch.packs, losses)) for s in of_rank})
        names = self.world.first(lambda: [self.name(s) for s in suspects[:NAMED]])
        if len(suspects) > NAMED:
            names.append(f"{len(suspects) - NAMED} more")
        self.meters.skipped(batch.step, names)
        if self.in_a_row >= self.limit:
            where = f"the last on {'; '.join(names)}" if names else "though no loss was: a gradient overflowed"
            raise DrivetrainError(
                f"{self.in_a_row} updates in a row, up to step {batch.step}, had a loss or gradient that is not finite, "
                f"{where}. Look at these samples with `drivetrain inspect`, or lower --optimizer.learning-rate."
            )
        return stopping > 0


def suspicious(packs: list[PackedBatch], losses: torch.Tensor) -> list[int]:
    """Ids of the samples whose numbers are not finite; if there are none, of all samples of packs with such a loss."""
    bad: list[int] = []
    for pack in packs:
        finite = pack.state.isfinite().all(dim=1) & (pack.actions.isfinite() | ~pack.action_mask).flatten(1).all(dim=1)
        bad += pack.sample[~finite & (pack.sample >= 0)].tolist()
    if bad:
        return bad
    finite = losses.isfinite().tolist()
    return [s for pack, ok in zip(packs, finite, strict=True) if not ok for s in pack.sample.tolist() if s >= 0]
