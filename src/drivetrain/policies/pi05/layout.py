"""Where everything stands in a pack of two streams: prefixes (images and words), and K suffixes (actions) for each.

A suffix reads the keys of its own prefix and its own. Keys are therefore laid out once more, as
[prefix 0, suffix (0,0)], [prefix 0, suffix (0,1)], ..., the dummy tail last and without suffixes; so both attentions
are plain variable-length calls, and no mask exists. Shapes follow from the pack's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain.policies.blocks.rotary import rotary_angles

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """P = T prefix rows, Q = B*K*H suffix rows, R = K*P + Q rows of interleaved keys.

    The query heads are folded into the sequence: row t of the stream is rows t*heads .. t*heads+heads-1 of the queries,
    which read the one key head, so query bounds count heads-fold.
    prefix_cu:     int32 [B+2], the prefixes among the P rows.    prefix_queries: the same, counted heads-fold.
    suffix_queries, suffix_keys: int32 [(B+1)*K + 1] each: bounds of the suffix queries, heads-fold, and of their keys.
    order:         int64 [R]: which row of [prefix rows; suffix rows] stands at each interleaved place.
    prefix_places: int64 [P, K], suffix_places: int64 [Q]: the places of each row; the inverse of `order`.
    prefix_angles, suffix_angles: rotary cosine and sine, float32 [P, 1, d/2] and [Q, 1, d/2]; a suffix goes on counting
                   where its prefix ends.
    longest_*:     no segment is longer; Python ints, so that no kernel launch waits for the device.
    """

    prefix_cu: Tensor
    prefix_queries: Tensor
    suffix_queries: Tensor
    suffix_keys: Tensor
    order: Tensor
    prefix_places: Tensor
    suffix_places: Tensor
    prefix_angles: Angles
    suffix_angles: Angles
    longest_prefix: int
    longest_prefix_queries: int
    longest_suffix_queries: int
    longest_suffix_keys: int


def make_layout(
    cu: Tensor, positions: Tensor, longest: int, *, draws: int, horizon: int, heads: int, head_dim: int, theta: float
) -> Layout:
    """cu int32 [B+2], positions int64 [T] and longest as in `PackedBatch`; nothing here waits for the device."""
    device, rows, samples = cu.device, len(positions), len(cu) - 2
    suffix_rows, places = samples * draws * horizon, draws * rows + samples * draws * horizon
    starts, lengths = cu[:-1].long(), cu.diff().long()
    draw = torch.arange(draws, device=device)
    # suffixes before each [prefix, suffix] pair; the tail, which comes last, has none of its own
    before = (torch.arange(samples + 1, device=device)[:, None] * draws + draw).clamp(max=samples * draws)
    pairs = draws * starts[:, None] + draw * lengths[:, None] + horizon * before  # [B+1, K]: where each pair begins

    row = torch.arange(rows, device=device)
    segment = torch.searchsorted(cu[1:].long(), row, right=True)
    prefix_places = pairs[segment] + positions[:, None]
    step = torch.arange(horizon, device=device)
    suffix_places = ((pairs + lengths[:, None])[:-1, :, None] + step).flatten()
    order = torch.empty(places, dtype=torch.long, device=device)
    order[prefix_places] = row[:, None].expand(-1, draws)
    order[suffix_places] = torch.arange(rows, rows + suffix_rows, device=device)

    suffix_positions = (lengths[:-1, None] + step).repeat_interleave(draws, dim=0).flatten()
    return Layout(
        prefix_cu=cu,
        prefix_queries=cu * heads,
        suffix_queries=_bounds(before * (horizon * heads), suffix_rows * heads),
        suffix_keys=_bounds(pairs, places),
        order=order,
        prefix_places=prefix_places,
        suffix_places=suffix_places,
        prefix_angles=rotary_angles(positions, head_dim, theta),
        suffix_angles=rotary_angles(suffix_positions, head_dim, theta),
        longest_prefix=longest,
        longest_prefix_queries=longest * heads,
        longest_suffix_queries=horizon * heads,
        longest_suffix_keys=longest + horizon,
    )


def _bounds(starts: Tensor, end: int) -> Tensor:
    return torch.cat([starts.flatten(), starts.new_full((1,), end)]).int()


def interleave(prefix: Tensor, suffix: Tensor, layout: Layout) -> Tensor:
    """Rows [P, ...] and [Q, ...] -> [R, ...], every prefix row K times."""
    made = _Interleave.apply(prefix, suffix, layout.order, layout.prefix_places, layout.suffix_places)
    assert isinstance(made, Tensor)
    return made


class _Interleave(torch.autograd.Function):
    """A gather whose gradient is a gather too: always the same sum in the same order, where autograd would scatter."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        prefix: Tensor,
        suffix: Tensor,
        order: Tensor,
        prefix_places: Tensor,
        suffix_places: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(prefix_places, suffix_places)
        return torch.cat([prefix, suffix]).index_select(0, order)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad,), (prefix_places, suffix_places) = grads, ctx.saved_tensors
        prefix = suffix = None
        if ctx.needs_input_grad[0]:
            prefix = grad.index_select(0, prefix_places.flatten()).unflatten(0, prefix_places.shape).sum(1)
        if ctx.needs_input_grad[1]:
            suffix = grad.index_select(0, suffix_places)
        return prefix, suffix, None, None, None
