"""Rotary position embedding in the half-split form that Qwen, Llama and Gemma use."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [T, 1, head_dim / 2] each, of int64 positions [T]."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * theta ** (-steps / head_dim)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by its positions; computed in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
