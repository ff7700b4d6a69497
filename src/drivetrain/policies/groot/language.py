"""The language tower: the first layers of a Qwen3 decoder over packed tokens. It predicts no words: no lm_head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.attention import varlen_attention
from drivetrain.policies.blocks.norm import RMSNorm
from drivetrain.policies.blocks.rotary import rotary_angles, rotate
from drivetrain.policies.blocks.segments import Segments
from drivetrain.policies.groot.config import LanguageConfig


class LanguageTower(nn.Module):
    """Embeddings [T, W] -> features [T, W] after the final norm; causal within each segment."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LanguageBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)

    def init_weights(self) -> None:
        """Normal of deviation 1/sqrt(inputs): Qwen3's 0.02 at the published width, and still right at a small one."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, LanguageBlock)
            for layer in (block.qkv, block.out, block.gate_up, block.down):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x: Tensor, positions: Tensor, segments: Segments) -> Tensor:
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        turned = Segments(segments.cu, segments.longest, cos, sin)
        for block in self.blocks:
            x = block(x, turned)
        return self.norm(x)


class LanguageBlock(nn.Module):
    """A Qwen3 decoder layer: grouped-query attention with normalised queries and keys, then a gated MLP; no biases."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.kv_heads
        self.norm1 = RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, heads * config.head_dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim)
        self.k_norm = RMSNorm(config.head_dim)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.norm2 = RMSNorm(config.width)
        self.gate_up = nn.Linear(config.width, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        c = self.config
        assert segments.cos is not None and segments.sin is not None
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q = rotate(self.q_norm(q), segments.cos, segments.sin)
        k = rotate(self.k_norm(k), segments.cos, segments.sin)
        attended = varlen_attention(q, k, v, segments.cu, segments.cu, segments.longest, segments.longest, causal=True)
        x = x + self.out(attended.flatten(1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)
