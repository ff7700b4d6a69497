"""Normalisation layers. Statistics are taken in float32 whatever the input's dtype, which the output keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """Layer norm over the last dimension; `affine` adds a learned scale and bias."""

    def __init__(self, width: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, (self.width,), weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Qwen's form: the weight itself, not 1 + weight)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight.to(x.dtype), self.eps).to(x.dtype)


def modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    """Adaptive layer norm: x [B, N, W] normalised without weights, then scaled and shifted per sample, both [B, W]."""
    normal = F.layer_norm(x, (x.shape[-1],), None, None, eps).to(x.dtype)
    return normal * (1 + scale[:, None]) + shift[:, None]


class GemmaNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, computed in float32 (Gemma's form)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), 1 + self.weight.float(), self.eps).to(x.dtype)


def modulate_rms(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """Adaptive RMS norm: x [B, N, W] normalised without weights, scaled and shifted per sample, float32 [B, W] both."""
    normal = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return (normal * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)
