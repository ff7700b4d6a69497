"""Normalisation of states and actions to [-1, 1]: one rule for training and for inference."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np

from drivetrain.types import DatasetInfo, DrivetrainError

Range = Literal["min_max", "quantiles"]

log = logging.getLogger(__name__)

# A dimension that moves by less than this share of its magnitude is noise about a constant: scaled to [-1, 1], it
# would drown the rest in training, and the first new value at inference would come out in the thousands.
RELATIVE_FLOOR = 1e-3
ABSOLUTE_FLOOR = 1e-8


@dataclass(frozen=True)
class Scaler:
    """y = (x - centre) / half_range, float64 [dimensions] each.

    A constant or nearly constant dimension has half_range 1: it is shifted to 0, never divided by a tiny number, and
    comes back exactly. `constant` marks these dimensions.
    """

    centre: np.ndarray
    half_range: np.ndarray
    constant: np.ndarray

    @property
    def dimensions(self) -> int:
        return len(self.centre)

    def normalise(self, x: np.ndarray, width: int) -> np.ndarray:
        """[..., dimensions] in physical units -> float32 [..., width], zero beyond the dimensions."""
        self._check(x, "to normalise")
        out = np.zeros((*x.shape[:-1], width), np.float32)
        out[..., : self.dimensions] = (x.astype(np.float64) - self.centre) / self.half_range
        return out

    def restore(self, y: np.ndarray) -> np.ndarray:
        """[..., at least dimensions] normalised -> float32 [..., dimensions] in physical units; the inverse."""
        if y.shape[-1] < self.dimensions:
            raise DrivetrainError(f"{y.shape[-1]} normalised dimensions given, {self.dimensions} expected")
        return (y[..., : self.dimensions].astype(np.float64) * self.half_range + self.centre).astype(np.float32)

    def _check(self, x: np.ndarray, purpose: str) -> None:
        if x.shape[-1] != self.dimensions:
            raise DrivetrainError(
                f"{x.shape[-1]} dimensions {purpose}, but the statistics are of {self.dimensions}: "
                "is this the robot and data set that the policy was trained on?"
            )
        if not np.isfinite(x).all():
            raise DrivetrainError(
                f"a value {purpose} is not finite: dimension {int(np.argwhere(~np.isfinite(x))[0][-1])}"
            )


def scaler(info: DatasetInfo, feature: str, width: int, ranges: Range = "min_max") -> Scaler:
    """The Scaler of `feature` (`observation.state`, `action`) of a data set.

    ranges: "min_max" maps [min, max] to [-1, 1]; "quantiles" maps [q01, q99], so values outside are not cut.
    width:  what the feature is padded to; more dimensions than that are an error.
    Raises DrivetrainError where statistics are missing, not finite, or of another length: nothing passes through raw.
    """
    if feature not in info.statistics:
        known = ", ".join(sorted(info.statistics)) or "none"
        raise DrivetrainError(
            f"data set {info.name!r} has no statistics of {feature!r} (it has: {known}); ingest it again"
        )
    statistics = info.statistics[feature]
    names = info.state_names if feature == "observation.state" else info.action_names
    low, high = (statistics.min, statistics.max) if ranges == "min_max" else (statistics.q01, statistics.q99)
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if low.shape != (len(names),) or high.shape != (len(names),):
        raise DrivetrainError(
            f"data set {info.name!r}: {feature!r} has {len(names)} dimensions, its statistics have shape {low.shape}"
        )
    if len(names) > width:
        raise DrivetrainError(
            f"data set {info.name!r}: {feature!r} has {len(names)} dimensions, the policy takes {width}"
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        bad = int(np.argmin(np.isfinite(low) & np.isfinite(high) & (low <= high)))
        raise DrivetrainError(
            f"data set {info.name!r}: the range of {feature!r}[{bad}] ({names[bad]}) is {low[bad]} to {high[bad]}"
        )
    half = (high - low) / 2
    constant = half <= np.maximum(ABSOLUTE_FLOOR, RELATIVE_FLOOR * np.maximum(np.abs(low), np.abs(high)))
    if constant.any():
        still = ", ".join(names[i] for i in np.flatnonzero(constant))
        log.warning("data set %r: %s does not move in %s; shifted to 0, not scaled", info.name, feature, still)
    return Scaler(centre=(low + high) / 2, half_range=np.where(constant, 1.0, half), constant=constant)
