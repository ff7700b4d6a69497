"""Where the segments of a packed stream begin and end, carried through blocks as one value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """cu: int32 [segments + 1], from 0 to the number of rows.  longest: no segment is longer.

    cos, sin: float32 [T, 1, head_dim / 2], the rotary angles of the rows, where a block needs them. They travel in here
    and not as arguments, because sharded modules cast tensor arguments to their compute dtype.
    """

    cu: Tensor
    longest: int
    cos: Tensor | None = None
    sin: Tensor | None = None
