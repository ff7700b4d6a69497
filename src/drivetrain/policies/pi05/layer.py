"""One layer of pi-0.5: two Gemma streams, each with its own weights, whose attention is shared one way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.attention import varlen_attention
from drivetrain.policies.blocks.norm import GemmaNorm, modulate_rms
from drivetrain.policies.blocks.rotary import rotate
from drivetrain.policies.pi05.config import GemmaConfig
from drivetrain.policies.pi05.layout import Angles, Layout, interleave


class Stream(nn.Module):
    """The weights of one stream in one layer, all but its norms: one key and value head for all query heads."""

    def __init__(self, width: int, mlp: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.kv = nn.Linear(width, 2 * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """[rows, W] -> turned queries with the heads folded into the rows: [rows * heads, 1, d]."""
        return rotate(self.q(x).unflatten(-1, (-1, self.head_dim)), *angles).reshape(-1, 1, self.head_dim)

    def keys_values(self, x: Tensor, angles: Angles) -> Tensor:
        """[rows, W] -> turned key and value, [rows, 2, d]."""
        k, v = self.kv(x).unflatten(-1, (2, self.head_dim)).split(1, dim=1)
        return torch.cat([rotate(k, *angles), v], dim=1)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class JointLayer(nn.Module):
    """Prefix [P, W] and suffix [B*K, H, V] -> both, one layer on.

    Prefixes read themselves; a suffix reads its prefix and itself. Both attentions are bidirectional.
    last:     the prefix is read and not carried on: its queries, output projection and MLP exist, as published, and are
              never run.
    insulate: no gradient flows from a suffix into the keys and values of its prefix.
    """

    def __init__(self, config: GemmaConfig, *, last: bool, insulate: bool) -> None:
        super().__init__()
        self.last, self.insulate = last, insulate
        heads, head_dim = config.heads, config.head_dim
        self.norm1 = GemmaNorm(config.prefix_width)
        self.norm2 = GemmaNorm(config.prefix_width)
        self.prefix = Stream(config.prefix_width, config.prefix_mlp, heads, head_dim)
        self.suffix = Stream(config.suffix_width, config.suffix_mlp, heads, head_dim)

    def forward(
        self,
        prefix: Tensor | None,
        suffix: Tensor | None,
        modulation: Tensor | None,
        layout: Layout,
        kv: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """One pass over either stream, or over both.

        modulation: float32 [B*K, 2, 3, V]: scale, shift and gate before attention and before the MLP of the suffix.
        kv:         the prefix's keys and values, [P, 2, d], where the prefix is not given again.
        Returns prefix (None after the last layer), suffix, and kv where no suffix used them.
        """
        if prefix is not None:
            prefix, kv = self._read(prefix, layout)
        if suffix is None:
            return prefix, None, kv
        assert modulation is not None and kv is not None
        return prefix, self._move(suffix, modulation, kv.detach() if self.insulate else kv, layout), None

    def unused(self) -> list[nn.Parameter]:
        """The parameters that no forward pass reads."""
        parts = (self.prefix.q, self.prefix.out, self.norm2, self.prefix.gate_up, self.prefix.down)
        return [p for part in parts for p in part.parameters()] if self.last else []

    def _read(self, x: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor]:
        normal = self.norm1(x)
        kv = self.prefix.keys_values(normal, layout.prefix_angles)
        if self.last:
            return None, kv
        attended = varlen_attention(
            self.prefix.queries(normal, layout.prefix_angles),
            kv[:, :1],
            kv[:, 1:],
            layout.prefix_queries,
            layout.prefix_cu,
            layout.longest_prefix_queries,
            layout.longest_prefix,
            causal=False,
        )
        x = x + self.prefix.out(attended.reshape(len(x), -1))
        return x + self.prefix.feed_forward(self.norm2(x)), kv

    def _move(self, x: Tensor, modulation: Tensor, kv: Tensor, layout: Layout) -> Tensor:
        (scale1, shift1, gate1), (scale2, shift2, gate2) = (m.unbind(1) for m in modulation.unbind(1))
        normal = modulate_rms(x, scale1, shift1).flatten(0, 1)
        own = self.suffix.keys_values(normal, layout.suffix_angles)
        keys_values = interleave(kv, own, layout)
        attended = varlen_attention(
            self.suffix.queries(normal, layout.suffix_angles),
            keys_values[:, :1],
            keys_values[:, 1:],
            layout.suffix_queries,
            layout.suffix_keys,
            layout.longest_suffix_queries,
            layout.longest_suffix_keys,
            causal=False,
        )
        x = x + self.suffix.out(attended.reshape(len(normal), -1)).view_as(x) * gate1[:, None].to(x.dtype)
        return x + self.suffix.feed_forward(modulate_rms(x, scale2, shift2)) * gate2[:, None].to(x.dtype)
