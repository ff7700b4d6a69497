"""Statistics of numeric features from their rows, in float64, mergeable in any grouping.

Mean and standard deviation are merged by the formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise
algorithm for computing sample variances", 1979), which neither cancels nor overflows. Quantiles cannot be merged from
quantiles; a `Sketch` keeps all rows up to `CAPACITY` and is then exact, and beyond that a weighted subset whose worst
error it counts itself (the compaction of Manku, Rajagopalan and Lindsay, SIGMOD 1998).
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from drivetrain.types import FeatureStatistics

CAPACITY = 32768
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
METHOD = f"rows, float64; mean and std by Chan merge; quantiles exact up to {CAPACITY} rows, then by compaction sketch"


@dataclass(frozen=True)
class Sketch:
    """What is kept of the rows of one feature with D dimensions.

    count: rows.   mean, m2, min, max: float64 [D]; m2 is the sum of squared distances from the mean.
    levels: float32 [n, D] each; a value on level i stands for 2**i rows.
    compactions: int64 [number of levels]; how often each level was halved.
    """

    count: int
    mean: np.ndarray
    m2: np.ndarray
    min: np.ndarray
    max: np.ndarray
    levels: tuple[np.ndarray, ...]
    compactions: np.ndarray

    @property
    def rank_error(self) -> float:
        """The most by which the share of rows below a reported quantile can be off; 0 where quantiles are exact.

        Halving a sorted level of weight w moves the rank of any value by at most w.
        """
        return float((self.compactions * 2.0 ** np.arange(len(self.compactions))).sum()) / max(self.count, 1)


def sketch(rows: np.ndarray) -> Sketch:
    """The sketch of finite float32 rows [n, D], n > 0."""
    assert rows.ndim == 2 and len(rows), rows.shape
    wide = rows.astype(np.float64)
    mean = wide.mean(axis=0)
    wide -= mean
    # The mean of what is left corrects the rounding of the first mean.
    rest = wide.mean(axis=0)
    m2 = np.square(wide - rest).sum(axis=0)
    levels = (rows.astype(np.float32),)
    low, high = rows.min(axis=0).astype(np.float64), rows.max(axis=0).astype(np.float64)
    return _compact(Sketch(len(rows), mean + rest, m2, low, high, levels, np.zeros(1, np.int64)))


def merge(a: Sketch, b: Sketch) -> Sketch:
    """The sketch of the rows of both."""
    count = a.count + b.count
    distance = b.mean - a.mean
    depth = max(len(a.levels), len(b.levels))
    empty = np.empty((0, len(a.mean)), np.float32)
    levels = tuple(np.concatenate([s.levels[i] if i < len(s.levels) else empty for s in (a, b)]) for i in range(depth))
    compactions = np.zeros(depth, np.int64)
    for s in (a, b):
        compactions[: len(s.compactions)] += s.compactions
    return _compact(
        Sketch(
            count=count,
            mean=a.mean + distance * (b.count / count),
            m2=a.m2 + b.m2 + distance**2 * (a.count * (b.count / count)),
            min=np.minimum(a.min, b.min),
            max=np.maximum(a.max, b.max),
            levels=levels,
            compactions=compactions,
        )
    )


def statistics(s: Sketch) -> FeatureStatistics:
    """Population statistics (divided by n). Quantiles are interpolated linearly between rows, as numpy does."""
    values = np.concatenate(s.levels).astype(np.float64)
    weights = np.concatenate([np.full(len(level), 2.0**i) for i, level in enumerate(s.levels)])
    quantiles = _quantiles(values, weights, list(QUANTILES.values()))
    return FeatureStatistics(
        count=s.count,
        mean=s.mean,
        std=np.sqrt(s.m2 / s.count),
        min=s.min,
        max=s.max,
        **{name: np.clip(q, s.min, s.max) for name, q in zip(QUANTILES, quantiles, strict=True)},
    )


def to_bytes(s: Sketch) -> bytes:
    """A sketch as an npz file without pickles."""
    file = io.BytesIO()
    arrays = {f"level{i}": level for i, level in enumerate(s.levels)}
    moments = np.stack([s.mean, s.m2, s.min, s.max])
    np.savez_compressed(file, count=np.int64(s.count), moments=moments, compactions=s.compactions, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def from_bytes(data: bytes) -> Sketch:
    """The sketch that `to_bytes` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        levels = tuple(file[f"level{i}"] for i in range(len(file["compactions"])))
        return Sketch(int(file["count"]), *file["moments"], levels=levels, compactions=file["compactions"])


def _compact(s: Sketch) -> Sketch:
    """Halve every level that is over capacity: sorted by each dimension, every other value goes up one level."""
    levels, compactions = list(s.levels), list(s.compactions)
    i = 0
    while i < len(levels):
        if len(levels[i]) > CAPACITY:
            if i + 1 == len(levels):
                levels.append(np.empty((0, len(s.mean)), np.float32))
                compactions.append(0)
            ordered = np.sort(levels[i], axis=0)
            paired = len(ordered) // 2 * 2
            # Alternating which of each pair survives lets the errors of successive compactions cancel.
            survivors = ordered[compactions[i] % 2 : paired : 2]
            levels[i] = ordered[paired:]
            levels[i + 1] = np.concatenate([levels[i + 1], survivors])
            compactions[i] += 1
        i += 1
    return Sketch(s.count, s.mean, s.m2, s.min, s.max, tuple(levels), np.array(compactions, np.int64))


def _quantiles(values: np.ndarray, weights: np.ndarray, shares: list[float]) -> list[np.ndarray]:
    """Weighted quantiles [D] of `values` [n, D]; equal to numpy's where all weights are 1."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    if np.all(weights == 1):
        return [_at(ordered, share * (len(values) - 1)) for share in shares]
    # A value of weight w stands for the ranks [before, before + w); it is placed in their middle.
    after = np.cumsum(weights[order], axis=0)
    middle = after - (weights[order] + 1) / 2
    total = weights.sum()
    return [
        np.array([np.interp(share * (total - 1), middle[:, d], ordered[:, d]) for d in range(values.shape[1])])
        for share in shares
    ]


def _at(ordered: np.ndarray, position: float) -> np.ndarray:
    low = int(np.floor(position))
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
