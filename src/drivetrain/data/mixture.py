"""Which data set each draw comes from, by index: exact shares at every step, in closed form.

Data set d arrives at times (i + 1/2) / w_d on a common clock, i = 0, 1, ...; the global order of draws is the order of
arrivals. So after any number of draws each set has had its share to within about one draw, at any resume point, and
every step holds almost the same blend, which is also what keeps the token count of a step nearly constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.types import DrivetrainError

FINE = 32  # the clock counts 2^-32 draws; weights are multiples of 2^-32, so that all arithmetic is exact in integers


def draws_after(shares: Sequence[int], total: int) -> list[int]:
    """How many of the first `total` draws each data set has had. Shares are integers that sum to 2^32."""
    assert sum(shares) == 1 << FINE, "shares must sum to one"

    def counts(clock: int) -> list[int]:
        return [(clock * share + (1 << (2 * FINE - 1))) >> (2 * FINE) for share in shares]

    low, high = 0, (total + len(shares) + 1) << FINE  # counts(low) <= total < counts(high)
    low = max(low, (total - len(shares) - 1) << FINE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(counts(middle)) <= total else (low, middle)
    drawn = counts(low)
    # the draws still missing arrive at one and the same tick: lower data set index first
    arriving = [d for d, (now, later) in enumerate(zip(drawn, counts(high), strict=True)) if later > now]
    for d in arriving[: total - sum(drawn)]:
        drawn[d] += 1
    return drawn


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Weights as integers that sum to 2^32, in proportion; zero stays zero, anything else is at least one."""
    total = float(sum(weights))
    if not weights or not np.isfinite(total) or total <= 0 or min(weights) < 0:
        raise DrivetrainError(f"mixture weights must be finite, not negative, and not all zero; got {list(weights)}.")
    shares = [max(1, round(w / total * (1 << FINE))) if w > 0 else 0 for w in weights]
    largest = max(range(len(shares)), key=shares.__getitem__)
    shares[largest] += (1 << FINE) - sum(shares)
    return shares


@dataclass(frozen=True)
class Blend:
    """The draws of a run: phases of constant weights, each from a named step on.

    starts:  step at which each phase begins; the first is 0.
    shares:  per phase, one integer share per data set.
    samples: draws per step.
    """

    starts: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    samples: int

    def drawn_before(self, step: int) -> np.ndarray:
        """int64 [data sets]: how many draws of each data set come before `step`."""
        total = np.zeros(len(self.shares[0]), dtype=np.int64)
        ends = (*self.starts[1:], None)
        for start, end, shares in zip(self.starts, ends, self.shares, strict=True):
            steps = min(step, step if end is None else end) - start
            if steps <= 0:
                break
            total += np.array(draws_after(shares, steps * self.samples), dtype=np.int64)
        return total
