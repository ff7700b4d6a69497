"""The transformer blocks of the action head, and the diffusion transformer (DiT) that turns noise into motion."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.attention import dense_attention, varlen_attention
from drivetrain.policies.blocks.flow import sinusoid
from drivetrain.policies.blocks.norm import LayerNorm, modulate
from drivetrain.policies.blocks.segments import Segments

TIME_CHANNELS = 256


class FeedForward(nn.Module):
    """Widen four times, GELU, narrow; dropout after both products, as published."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.dropout(F.gelu(self.up(x), approximate="tanh"))))


class VisionLanguageBlock(nn.Module):
    """Bidirectional self-attention over the packed features of each sample: x [T, W] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended = varlen_attention(q, k, v, segments.cu, segments.cu, segments.longest, segments.longest, causal=False)
        # published twice: once inside the attention, once in the block
        x = x + self.dropout(self.dropout(self.out(attended.flatten(1))))
        return x + self.feed_forward(self.norm2(x))


class DiffusionBlock(nn.Module):
    """x [B*K, M, W], scale and shift [B*K, W] -> x. A cross block reads the sample's features, the others x itself."""

    def __init__(self, width: int, heads: int, dropout: float, cross: bool) -> None:
        super().__init__()
        self.heads, self.cross = heads, cross
        self.q_or_qkv = nn.Linear(width, width if cross else 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = FeedForward(width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        queries: Segments | None = None,
        keys: Segments | None = None,
    ) -> Tensor:
        projected = self.q_or_qkv(modulate(x, scale, shift))
        if self.cross:
            assert k is not None and v is not None and queries is not None and keys is not None
            q = projected.flatten(0, 1).unflatten(-1, (self.heads, -1))
            k, v = k.to(q.dtype), v.to(q.dtype)
            attended = varlen_attention(q, k, v, queries.cu, keys.cu, queries.longest, keys.longest, causal=False)
        else:
            attended = dense_attention(*projected.unflatten(-1, (3, self.heads, -1)).unbind(2))
        x = x + self.dropout(self.dropout(self.out(attended.reshape(x.shape))))
        return x + self.feed_forward(F.layer_norm(x, x.shape[-1:]).to(x.dtype))


class KeysValues(nn.Module):
    """Keys and values of all cross blocks in one product: features [T, W] -> a (k, v) [T, heads, d] each."""

    def __init__(self, features: int, width: int, heads: int, cross_layers: int) -> None:
        super().__init__()
        self.heads, self.cross_layers = heads, cross_layers
        self.project = nn.Linear(features, cross_layers * 2 * width)

    def forward(self, features: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        rows = self.project(features).unflatten(-1, (2 * self.cross_layers, self.heads, -1)).unbind(1)
        return tuple(zip(rows[::2], rows[1::2], strict=True))


class DiffusionTransformer(nn.Module):
    """Even blocks cross-attend to the features, odd ones attend to themselves; time enters by adaptive norms."""

    def __init__(self, *, features: int, layers: int, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = layers
        self.time1 = nn.Linear(TIME_CHANNELS, width)
        self.time2 = nn.Linear(width, width)
        # every block's (scale, shift), then the output norm's (shift, scale)
        self.modulation = nn.Linear(width, (layers + 1) * 2 * width)
        self.keys_values = KeysValues(features, width, heads, (layers + 1) // 2)
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads, dropout, i % 2 == 0) for i in range(layers))
        self.out = nn.Linear(width, hidden)

    def forward(
        self, x: Tensor, bucket: Tensor, kv: tuple[tuple[Tensor, Tensor], ...], queries: Segments, keys: Segments
    ) -> Tensor:
        """x [B*K, M, W] and time buckets int64 [B*K] -> [B*K, M, hidden]."""
        time = F.silu(self.embed_time(bucket))
        modulations = self.modulation(time).unflatten(-1, (2 * self.layers + 2, -1)).unbind(1)
        for i, block in enumerate(self.blocks):
            scale, shift = modulations[2 * i : 2 * i + 2]
            x = block(x, scale, shift, *kv[i // 2], queries, keys) if i % 2 == 0 else block(x, scale, shift)
        shift, scale = modulations[-2:]
        return self.out(modulate(x, scale, shift, eps=1e-6))

    def embed_time(self, bucket: Tensor) -> Tensor:
        """[cosine | sine] of the bucket at 128 frequencies from 1 to 1e-4, then an MLP: int64 [B] -> [B, W]."""
        half = TIME_CHANNELS // 2
        exponents = torch.arange(half, device=bucket.device, dtype=torch.float32) * (-math.log(1e4) / (half - 1))
        sine, cosine = sinusoid(bucket, exponents)
        channels = torch.cat([cosine, sine], dim=-1).to(self.time1.weight.dtype)
        return self.time2(F.silu(self.time1(channels)))
