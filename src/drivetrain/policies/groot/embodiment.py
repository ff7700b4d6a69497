"""Weights of which every embodiment has its own. Samples are grouped by it; weights are never gathered per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.attention import on_host
from drivetrain.policies.blocks.flow import sinusoid


@dataclass(frozen=True)
class EmbodimentGroups:
    """Samples in order of embodiment.

    embodiment: int64 [B].   order, back: int64 [B], into that order and out of it.   ends: int32 [C], where in that
    order the samples of slot c end.   slots: (slot, samples) of the present slots, where reading them costs no wait
    for the device; None on a GPU.
    """

    embodiment: Tensor
    order: Tensor
    back: Tensor
    ends: Tensor
    slots: tuple[tuple[int, int], ...] | None


def group_embodiments(embodiment: Tensor, categories: int) -> EmbodimentGroups:
    """The groups of int64 [B] slot numbers below `categories`."""
    order = torch.argsort(embodiment, stable=True)
    every = torch.arange(categories, device=embodiment.device)
    counts = (embodiment[:, None] == every).sum(dim=0)
    slots = None
    if not on_host(embodiment) and not embodiment.is_cuda:  # a dry run has shapes without values: one embodiment
        slots = ((0, embodiment.shape[0]),)
    elif not embodiment.is_cuda:
        slots = tuple((slot, count) for slot, count in enumerate(counts.tolist()) if count)
        assert sum(count for _, count in slots) == embodiment.shape[0], f"embodiment outside 0..{categories - 1}"
    return EmbodimentGroups(embodiment, order, torch.argsort(order), counts.cumsum(0).int(), slots)


class EmbodimentLinear(nn.Module):
    """x [B, N, in] -> [B, N, out] with the weights of each sample's embodiment; W [C, in, out], b [C, out]."""

    def __init__(self, categories: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(categories, width_in, width_out))
        self.b = nn.Parameter(torch.empty(categories, width_out))

    def init_weights(self) -> None:
        # not the published 0.02: from 7 action dimensions that leaves the signal far below the time's sinusoid
        nn.init.normal_(self.W, std=self.W.shape[1] ** -0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor, groups: EmbodimentGroups) -> Tensor:
        if groups.slots is None:
            return self._grouped(x, groups)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.W.dtype)
        if len(groups.slots) == 1:
            slot = groups.slots[0][0]
            return F.linear(x, self.W[slot].T, self.b[slot])
        parts = x[groups.order].split([count for _, count in groups.slots])
        made = [F.linear(p, self.W[slot].T, self.b[slot]) for p, (slot, _) in zip(parts, groups.slots, strict=True)]
        return torch.cat(made)[groups.back]

    def _grouped(self, x: Tensor, groups: EmbodimentGroups) -> Tensor:
        """One kernel over all groups, whose sizes stay on the device."""
        count, tokens = x.shape[:2]
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.W.dtype
        rows = x[groups.order].flatten(0, 1).to(dtype)
        made = grouped_matmul(rows, self.W.to(dtype), groups.ends * tokens)
        return made.unflatten(0, (count, tokens))[groups.back] + self.b[groups.embodiment][:, None].to(dtype)


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] times weights[0], up to ends[1] times weights[1], ...; torch's kernel takes bfloat16 alone."""
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)])


class EmbodimentMLP(nn.Module):
    """Two layers with a ReLU between: the state encoder and the action decoder."""

    def __init__(self, categories: int, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(categories, width_in, hidden)
        self.layer2 = EmbodimentLinear(categories, hidden, width_out)

    def forward(self, x: Tensor, groups: EmbodimentGroups) -> Tensor:
        return self.layer2(F.relu(self.layer1(x, groups)), groups)


class ActionEncoder(nn.Module):
    """Noised actions [B, H, A] and time buckets int64 [B] -> [B, H, W]. The time embedding is [sine | cosine]."""

    def __init__(self, categories: int, action_width: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = EmbodimentLinear(categories, action_width, width)
        self.W2 = EmbodimentLinear(categories, 2 * width, width)
        self.W3 = EmbodimentLinear(categories, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, groups: EmbodimentGroups) -> Tensor:
        half = self.width // 2
        exponents = torch.arange(half, device=bucket.device, dtype=torch.float32) * (
            -torch.log(torch.tensor(1e4)) / half
        )
        time = torch.cat(sinusoid(bucket, exponents), dim=-1)
        embedded = self.W1(actions, groups)
        time = time.to(embedded.dtype)[:, None].expand(-1, actions.shape[1], -1)
        return self.W3(F.silu(self.W2(torch.cat([embedded, time], dim=-1), groups)), groups)
