"""pi-0.5 over packed samples, in single-device PyTorch. Names of published tensors are mapped in weights.py.

It computes what the released model computes on the real tokens of each sample: absent cameras and padded words, which
the released model computes and then masks, do not exist here. What it computes and does not use is not here either:
the prefix's half of the last layer beyond its keys and values, and both word heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.flow import flow_loss
from drivetrain.policies.blocks.norm import GemmaNorm, LayerNorm, modulate_rms
from drivetrain.policies.blocks.vision import VisionTower, place_images
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.policies.pi05.layer import JointLayer
from drivetrain.policies.pi05.layout import Layout, make_layout
from drivetrain.types import LossSum, PackedBatch


class Conditioning(nn.Module):
    """Flow time -> scale, shift and gate of every adaptive norm, all in one product. Float32 throughout.

    norms: two a layer, and the final one (whose gate is never used).
    """

    def __init__(self, width: int, norms: int, min_period: float, max_period: float) -> None:
        super().__init__()
        self.width, self.periods = width, (min_period, max_period)
        self.time1 = nn.Linear(width, width)
        self.time2 = nn.Linear(width, width)
        self.modulation = nn.Linear(width, norms * 3 * width)

    def forward(self, time: Tensor) -> Tensor:
        """float32 [N] -> float32 [N, norms, 3, W]."""
        hidden = F.silu(self.time2(F.silu(self.time1(self.embed(time)))))
        return self.modulation(hidden).unflatten(-1, (-1, 3, self.width))

    def embed(self, time: Tensor) -> Tensor:
        """[sine | cosine] of the time at W/2 periods: float32 [N] -> float32 [N, W].

        Angles reach 1571, which float32 would round to 1e-4: they are taken in float64.
        """
        shortest, longest = self.periods
        share = torch.linspace(0, 1, self.width // 2, dtype=torch.float64, device=time.device)
        angles = time.double()[:, None] * (2 * math.pi / shortest * (shortest / longest) ** share)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


class Pi05(nn.Module):
    """Images, instruction and state (in the prompt) in; a chunk of H actions out, by flow matching.

    Random weights: SigLIP's own rules, 1/sqrt(inputs) for the Gemma streams (0.02 at the published width), zeros for the
    modulation, torch's default for the other Linears. They depend on torch.manual_seed alone.
    """

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = config
        vision, gemma = config.vision, config.gemma
        self.vision = VisionTower(
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            layers=vision.layers,
            width=vision.width,
            heads=vision.heads,
            mlp=vision.mlp,
        )
        self.connector = nn.Linear(vision.width, gemma.prefix_width)
        self.embedding = nn.Embedding(gemma.vocabulary, gemma.prefix_width)
        self.layers = nn.ModuleList(
            JointLayer(gemma, last=i == gemma.layers - 1, insulate=config.insulate) for i in range(gemma.layers)
        )
        self.prefix_norm = GemmaNorm(gemma.prefix_width)  # published, and never run
        self.conditioning = Conditioning(gemma.suffix_width, 2 * gemma.layers + 1, config.min_period, config.max_period)
        self.action_in = nn.Linear(config.action_width, gemma.suffix_width)
        self.action_out = nn.Linear(gemma.suffix_width, config.action_width)
        self.init_weights()
        self.configure_trainable(config)

    def init_weights(self) -> None:
        """Fresh values for every parameter; also what fills a model that was built on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, GemmaNorm):
                nn.init.zeros_(module.weight)
            elif isinstance(module, LayerNorm) and module.weight is not None and module.bias is not None:
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        self.vision.init_weights()
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.connector.weight, std=self.connector.in_features**-0.5)
        nn.init.zeros_(self.connector.bias)
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        nn.init.zeros_(self.conditioning.modulation.weight)
        nn.init.zeros_(self.conditioning.modulation.bias)

    def configure_trainable(self, config: Pi05Config) -> None:
        """Set requires_grad from `config.tune_*`. The suffix stream and the action projections always train; what no
        forward pass reads never does, so that no optimizer holds state for it."""
        self.requires_grad_(True)
        self.vision.requires_grad_(config.tune_vision)
        read: list[nn.Module] = [self.connector, self.embedding, self.prefix_norm]
        for layer in self._layers():
            read += [layer.prefix, layer.norm1, layer.norm2]
        for module in read:
            module.requires_grad_(config.tune_language)
        for parameter in self.unused():
            parameter.requires_grad_(False)

    def unused(self) -> list[nn.Parameter]:
        """The parameters that exist because published checkpoints hold them, and that no forward pass reads."""
        return [self.prefix_norm.weight, *(p for layer in self._layers() for p in layer.unused())]

    def forward(self, batch: PackedBatch) -> LossSum:
        """The un-normalised loss of a pack: K draws per sample read one pass over its images and words."""
        time, actions = batch.time[..., None, None], batch.actions[:, None]  # BK11, B1HA
        noised = time * batch.noise + (1 - time) * actions  # BKHA, float32; t = 1 is noise
        layout = self._layout(batch, batch.time.shape[1])
        velocity = self._velocity(noised, batch.time, layout, self._prefix(batch))
        return flow_loss(velocity, batch.noise - actions, batch)

    def loss(self, batch: PackedBatch) -> LossSum:
        """The un-normalised loss of a pack, through `forward`, where sharding hooks in."""
        return self(batch)

    @torch.no_grad()
    def act(self, batch: PackedBatch) -> Tensor:
        """Normalised action chunks, float32 [B, H, A]: Euler steps from batch.noise[:, 0] at t = 1 down to t = 0.

        The prefix is read once; its keys and values serve every step.
        """
        layout, steps = self._layout(batch, draws=1), self.config.euler_steps
        prefix = self._prefix(batch)
        carried, cache = prefix, []
        for layer in self.layers:
            carried, _, kv = layer(carried, None, None, layout)
            cache.append(kv)
        actions = batch.noise[:, :1].float()
        for i in range(steps):
            time = torch.full(actions.shape[:2], 1 - i / steps, device=actions.device)
            actions = actions - self._velocity(actions, time, layout, prefix, cache) / steps
        return actions[:, 0]

    def _layers(self) -> list[JointLayer]:
        return [layer for layer in self.layers if isinstance(layer, JointLayer)]

    def _layout(self, batch: PackedBatch, draws: int) -> Layout:
        gemma, horizon = self.config.gemma, batch.noise.shape[2]
        return make_layout(
            batch.cu_tokens,
            batch.positions,
            batch.max_tokens,
            draws=draws,
            horizon=horizon,
            heads=gemma.heads,
            head_dim=gemma.head_dim,
            theta=gemma.rope_theta,
        )

    def _prefix(self, batch: PackedBatch) -> Tensor:
        """The prefix stream, [T, W], before its first layer. Words are scaled by sqrt(W), image features are not."""
        images = self.connector(self.vision(batch.images)).flatten(0, 1)
        words = self.embedding(batch.tokens) * math.sqrt(self.config.gemma.prefix_width)
        return place_images(words, images, batch.image_tokens)

    def _velocity(
        self, noised: Tensor, time: Tensor, layout: Layout, prefix: Tensor, cache: list[Tensor] | None = None
    ) -> Tensor:
        """The velocity, float32 [B, K, H, A], of noised actions, float32 [B, K, H, A], at times float32 [B, K].

        prefix: before its first layer.   cache: its keys and values, layer by layer, where it has been read before.
        """
        norms = self.conditioning(time.flatten())  # [BK, norms, 3, V]
        suffix = self.action_in(noised.flatten(0, 1)).to(prefix.dtype)  # (BK) H V
        carried = None if cache else prefix
        for i, layer in enumerate(self.layers):
            modulation = norms[:, 2 * i : 2 * i + 2]
            carried, suffix, _ = layer(carried, suffix, modulation, layout, cache[i] if cache else None)
        scale, shift, _ = norms[:, -1].unbind(1)
        return self.action_out(modulate_rms(suffix, scale, shift).float()).unflatten(0, time.shape)


def make_model(config: Pi05Config) -> Pi05:
    """The entry of this room; see `drivetrain.policies`."""
    return Pi05(config)
