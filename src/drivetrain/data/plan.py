"""The pack plan: which samples of the lake go into which pack of which step. A pure function; nothing is read.

What a sample costs is known from metadata, so packing happens here, globally, before any I/O. Step k is a function of
(spans, mixture, token counts, seed, samples, packs) alone: not of the number of processes, not of what was run before.
Rank r of W takes packs r, r+W, r+2W, ... of each step; a resumed run needs the step number and nothing else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from drivetrain.data.mixture import Blend, integer_shares
from drivetrain.data.permutation import key, permute
from drivetrain.data.windows import permute_windows
from drivetrain.types import DrivetrainError, PackShape, Spans

ROUND_TOKENS = 128  # token budgets are multiples of this: attention tiles, and FP8 products need 16


@dataclass(frozen=True)
class Pack:
    """The samples of one pack, in order. All int64 [n].

    sample: sample id, counting through the spans.   epoch: on which pass over its data set the sample is drawn.
    row, last_row: the sample's row in the lake's `steps` table, and the last row of its episode.
    span: index into the plan's spans.
    """

    sample: np.ndarray
    epoch: np.ndarray
    row: np.ndarray
    last_row: np.ndarray
    span: np.ndarray

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True)
class PackPlan:
    """step -> packs.

    tokens, images: int64 [spans]; what a sample of each span costs.
    blend:   how many draws each data set gets, by step.
    samples: observations per step.   packs: packs per step.   shape: the fixed shape that every pack fits.
    fragment, window: shuffle within `window` storage fragments of so many samples; window 0 shuffles a whole data set.
    """

    spans: Spans
    tokens: np.ndarray
    images: np.ndarray
    blend: Blend
    seed: int
    samples: int
    packs: int
    shape: PackShape
    fragment: int = 0
    window: int = 0

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [spans + 1]: first sample id of each span, and the number of samples."""
        return np.concatenate([[0], np.cumsum(self.spans.length)])

    @cached_property
    def set_spans(self) -> list[np.ndarray]:
        """Per data set: its span indices."""
        order = np.argsort(self.spans.dataset, kind="stable")
        bounds = np.searchsorted(self.spans.dataset[order], np.arange(len(self.spans.datasets) + 1))
        return [order[a:b] for a, b in pairwise(bounds.tolist())]

    @cached_property
    def set_offsets(self) -> list[np.ndarray]:
        """Per data set: cumulative sample counts over its spans, starting at 0."""
        return [np.concatenate([[0], np.cumsum(self.spans.length[s])]) for s in self.set_spans]

    def draws(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The draws of a step before packing: (span, offset in span, epoch), int64 [samples] each."""
        before, after = self.blend.drawn_before(step), self.blend.drawn_before(step + 1)
        parts = []
        for d in np.flatnonzero(after > before):
            size = int(self.set_offsets[d][-1])
            draw = np.arange(before[d], after[d])
            epoch, place = draw // size, draw % size
            index = np.empty_like(place)
            for e in np.unique(epoch):
                index[epoch == e] = self.shuffled(place[epoch == e], size, key(self.seed, int(d), int(e)))
            at = np.searchsorted(self.set_offsets[d], index, side="right") - 1
            parts.append((self.set_spans[d][at], index - self.set_offsets[d][at], epoch))
        span, offset, epoch = (np.concatenate(column) for column in zip(*parts, strict=True))
        return span, offset, epoch

    def shuffled(self, place: np.ndarray, size: int, epoch_key: int) -> np.ndarray:
        """Which of a data set's samples stand at these places of an epoch. int64 [n] -> int64 [n]."""
        if self.window:
            return permute_windows(place, size, epoch_key, self.fragment, self.window)
        return permute(place, size, epoch_key)

    def step(self, step: int) -> list[Pack]:
        """The packs of one step: `self.packs` of them, or a few more in the rare step that does not fit its budget."""
        span, offset, epoch = self.draws(step)
        sample = self.offsets[span] + offset
        row = self.spans.first_row[span] + offset
        places = assign(self.tokens[span], self.images[span], self.packs, self.shape)
        last = self.spans.last_row[span]
        return [Pack(sample[i], epoch[i], row[i], last[i], span[i]) for i in places]

    def fill(self, step: int) -> float:
        """The share of the token budget of a step that real tokens use."""
        packs = self.step(step)
        return sum(int(self.tokens[p.span].sum()) for p in packs) / (len(packs) * self.shape.tokens)


def make_plan(
    spans: Spans,
    tokens: np.ndarray,
    images: np.ndarray,
    *,
    samples: int,
    packs: int,
    seed: int,
    weights: dict[str, float] | None = None,
    changes: dict[int, dict[str, float]] | None = None,
    shape: PackShape | None = None,
    fragment: int = 4096,
    window: int = 0,
) -> PackPlan:
    """A plan, checked.

    weights: data set name -> share of the samples drawn; None: every data set by its number of samples.
    changes: step -> the weights from that step on.
    shape:   None: the smallest shape that holds the packs of a spread of steps, measured here.
    fragment, window: as in PackPlan.
    Raises DrivetrainError for an unknown or missing data set, an empty one with weight, or a sample beyond the budget.
    """
    if not len(spans.length):
        raise DrivetrainError(
            "the lake holds no samples to train on. Run `drivetrain inspect LAKE` to see what it holds."
        )
    if samples < packs:
        raise DrivetrainError(f"{samples} samples a step cannot fill {packs} packs; lower --batch.packs.")
    sizes = np.bincount(spans.dataset, spans.length, minlength=len(spans.datasets)).astype(np.int64)
    natural = dict(zip(spans.datasets, sizes.tolist(), strict=True))
    phases = {0: weights or natural, **(changes or {})}
    starts = tuple(sorted(phases))
    shares = tuple(tuple(integer_shares(_in_order(phases[s], natural))) for s in starts)
    blend = Blend(starts, shares, samples)
    plan = PackPlan(spans, tokens, images, blend, seed, samples, packs, shape or _UNBOUNDED, fragment, window)
    if shape is None:
        return replace(plan, shape=measured_shape(plan))
    drawn = np.array(shares).sum(axis=0)[spans.dataset] > 0
    if (too_long := drawn & ((tokens > shape.tokens) | (images > shape.images))).any():
        worst = int(np.argmax(np.where(too_long, tokens, -1)))
        raise DrivetrainError(
            f"a sample of data set {spans.datasets[spans.dataset[worst]]!r}, episode {spans.episode[worst]}, takes "
            f"{tokens[worst]} tokens and {images[worst]} images; a pack holds {shape.tokens} and {shape.images}. "
            "Raise --batch.shape.tokens or --batch.shape.images."
        )
    return plan


_UNBOUNDED = PackShape(tokens=1 << 62, samples=1 << 62, images=1 << 62)


def measured_shape(plan: PackPlan) -> PackShape:
    """The smallest shape that holds every pack of a spread of steps; T in multiples of 128.

    Few packs a step vary more from step to step, so more steps are tried.
    """
    probes = max(16, 256 // plan.packs)
    packs = [p for k in range(probes) for p in plan.step(k * 7)]
    tokens = max(int(plan.tokens[p.span].sum()) for p in packs)
    return PackShape(
        tokens=-(-tokens // ROUND_TOKENS) * ROUND_TOKENS,
        samples=max(len(p) for p in packs),
        images=max(int(plan.images[p.span].sum()) for p in packs),
    )


def assign(tokens: np.ndarray, images: np.ndarray, packs: int, shape: PackShape) -> list[np.ndarray]:
    """Lay samples into packs of nearly equal cost: longest first, each into the emptiest pack that still has room.

    tokens, images: int64 [n]. Returns per pack the indices of its samples, int64, in ascending order. A sample that no
    pack has room for opens an extra pack: rare, exact, and the same on every rank.
    """
    order = np.lexsort((tokens, images))[::-1]
    heap = [(0, p) for p in range(packs)]
    members: list[list[int]] = [[] for _ in range(packs)]
    room = [[shape.tokens, shape.samples, shape.images] for _ in range(packs)]
    for i in order.tolist():
        t, v = int(tokens[i]), int(images[i])
        skipped = []
        while heap:
            load, p = heapq.heappop(heap)
            if room[p][0] >= t and room[p][1] >= 1 and room[p][2] >= v:
                break
            skipped.append((load, p))
        else:
            load, p = 0, len(members)
            members.append([])
            room.append([shape.tokens, shape.samples, shape.images])
        members[p].append(i)
        room[p][0] -= t
        room[p][1] -= 1
        room[p][2] -= v
        for entry in skipped:
            heapq.heappush(heap, entry)
        heapq.heappush(heap, (load + t, p))
    return [np.array(sorted(m), dtype=np.int64) for m in members]


def _in_order(weights: dict[str, float], sizes: dict[str, int]) -> list[float]:
    """Weights in the order of the data sets; names that do not exist and empty sets with weight are errors."""
    for name, weight in weights.items():
        if name not in sizes:
            raise DrivetrainError(f"the mixture names {name!r}; the lake holds {', '.join(map(repr, sizes))}.")
        if weight > 0 and not sizes[name]:
            raise DrivetrainError(f"data set {name!r} has weight {weight} in the mixture but no samples to draw.")
    return [float(weights.get(name, 0.0)) for name in sizes]
