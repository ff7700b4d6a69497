"""GR00T-N1.5 over packed samples, in single-device PyTorch. Names of published tensors are mapped in weights.py.

It computes what the released model computes at batch size 1 without padding, for every sample of a pack. What the
released model computes and does not use is not here: word logits, and the vision tower's pooling head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drivetrain.policies.blocks.flow import flow_loss
from drivetrain.policies.blocks.norm import LayerNorm
from drivetrain.policies.blocks.segments import Segments
from drivetrain.policies.blocks.vision import VisionTower, place_images
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.diffusion import DiffusionTransformer, VisionLanguageBlock
from drivetrain.policies.groot.embodiment import ActionEncoder, EmbodimentLinear, EmbodimentMLP, group_embodiments
from drivetrain.policies.groot.language import LanguageTower
from drivetrain.types import LossSum, PackedBatch


class Groot(nn.Module):
    """Images, instruction and state in; a chunk of H actions out, by flow matching.

    Random weights follow the references at the published widths: SigLIP's own rules, 1/sqrt(inputs) where they have 0.02
    (which a width of 2048 makes the same), torch's default for the head's Linears. They depend on torch.manual_seed alone.
    """

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        self.config = config
        vision, language, head = config.vision, config.language, config.head
        slots, width = head.embodiments, head.width
        self.vision = VisionTower(
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            layers=vision.layers,
            width=vision.width,
            heads=vision.heads,
            mlp=vision.mlp,
        )
        self.connector = nn.Linear(vision.width, language.width)
        self.language = LanguageTower(language)
        self.features_norm = LayerNorm(language.width)
        self.features_blocks = nn.ModuleList(
            VisionLanguageBlock(language.width, head.vl_heads, head.dropout) for _ in range(head.vl_layers)
        )
        self.state_encoder = EmbodimentMLP(slots, config.state_width, head.hidden, width)
        self.action_encoder = ActionEncoder(slots, config.action_width, width)
        self.action_decoder = EmbodimentMLP(slots, head.hidden, head.hidden, config.action_width)
        self.future_tokens = nn.Parameter(torch.empty(head.future_tokens, width))
        self.action_positions = nn.Parameter(torch.empty(head.max_positions, width))
        self.diffusion = DiffusionTransformer(
            features=language.width,
            layers=head.layers,
            width=width,
            heads=head.heads,
            hidden=head.hidden,
            dropout=head.dropout,
        )
        self.init_weights()
        self.configure_trainable(config)

    def init_weights(self) -> None:
        """Fresh values for every parameter; also what fills a model that was built on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        self.vision.init_weights()
        self.language.init_weights()
        nn.init.normal_(self.connector.weight, std=self.connector.in_features**-0.5)
        nn.init.zeros_(self.connector.bias)
        nn.init.normal_(self.future_tokens, std=0.02)
        nn.init.normal_(self.action_positions, std=0.02)
        for module in self.modules():
            if isinstance(module, EmbodimentLinear):
                module.init_weights()
            elif isinstance(module, nn.Module) and hasattr(module, "eps"):
                _reset_norm(module)

    def configure_trainable(self, config: GrootConfig) -> None:
        """Set requires_grad from `config.tune_*`. The features' norm and blocks and the future tokens always train."""
        self.requires_grad_(True)
        self.vision.requires_grad_(config.tune_visual)
        self.connector.requires_grad_(config.tune_visual)
        self.language.requires_grad_(config.tune_llm)
        for module in (self.state_encoder, self.action_encoder, self.action_decoder):
            module.requires_grad_(config.tune_projector)
        self.action_positions.requires_grad_(config.tune_projector)
        self.diffusion.requires_grad_(config.tune_diffusion)
        self.tunes_visual, self.tunes_llm, self.tunes_diffusion = (
            config.tune_visual,
            config.tune_llm,
            config.tune_diffusion,
        )

    def train(self, mode: bool = True) -> Groot:
        """Training mode for what is trained; a frozen diffusion transformer stays without dropout."""
        super().train(mode)
        self.diffusion.train(mode and self.tunes_diffusion)
        return self

    def forward(self, batch: PackedBatch) -> LossSum:
        """The un-normalised loss of a pack: K draws per sample read one pass over its images and words."""
        time = batch.time[..., None, None]  # BK11
        actions = batch.actions[:, None]  # B1HA
        noised = (1 - time) * batch.noise + time * actions  # BKHA, float32
        bucket = (batch.time * self.config.time_buckets).long()  # rounds toward zero: t = -0.0005 is bucket 0
        velocity = self.velocity(self.keys_values(batch), noised, bucket, batch)
        return flow_loss(velocity, actions - batch.noise, batch)

    def loss(self, batch: PackedBatch) -> LossSum:
        """The un-normalised loss of a pack, through `forward`, where sharding hooks in."""
        return self(batch)

    @torch.no_grad()
    def act(self, batch: PackedBatch) -> Tensor:
        """Normalised action chunks, float32 [B, H, A]: Euler steps from batch.noise[:, 0] at t = 0 to t = 1."""
        kv = self.keys_values(batch)
        actions, steps = batch.noise[:, :1].float(), self.config.euler_steps
        for i in range(steps):
            bucket = torch.full(actions.shape[:2], int(i / steps * self.config.time_buckets), device=actions.device)
            actions = actions + self.velocity(kv, actions, bucket, batch) / steps
        return actions[:, 0]

    def keys_values(self, batch: PackedBatch) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every cross block, [T, heads, d] each, from the pack's images and tokens."""
        segments = Segments(batch.cu_tokens, batch.max_tokens)
        features = self.features_norm(self.backbone(batch))
        for block in self.features_blocks:
            features = block(features, segments)
        return self.diffusion.keys_values(features)

    def backbone(self, batch: PackedBatch) -> Tensor:
        """Vision-language features [T, W]. No graph is kept below the lowest part that trains."""
        grad = torch.is_grad_enabled()
        with torch.set_grad_enabled(grad and self.tunes_visual):
            images = self.connector(self.vision(batch.images)).flatten(0, 1)
        with torch.set_grad_enabled(grad and (self.tunes_visual or self.tunes_llm)):
            words = self.language.embedding(batch.tokens)
            stream = place_images(words, images, batch.image_tokens)
            return self.language(stream, batch.positions, Segments(batch.cu_tokens, batch.max_tokens))

    def velocity(
        self, kv: tuple[tuple[Tensor, Tensor], ...], noised: Tensor, bucket: Tensor, batch: PackedBatch
    ) -> Tensor:
        """The velocity, float32 [B, K, H, A], of noised actions, float32 [B, K, H, A], at time buckets int64 [B, K]."""
        samples, draws, horizon, _ = noised.shape
        bucket = bucket.flatten()
        one = group_embodiments(batch.embodiment, self.config.head.embodiments)
        each = group_embodiments(batch.embodiment.repeat_interleave(draws), self.config.head.embodiments)
        state = self.state_encoder(batch.state[:, None], one)  # B1W
        actions = self.action_encoder(noised.flatten(0, 1), bucket, each) + self.action_positions[:horizon]
        future = self.future_tokens.to(actions.dtype).expand(samples * draws, -1, -1)
        x = torch.cat([state.repeat_interleave(draws, dim=0), future, actions], dim=1)  # (BK) M W
        queries = _query_segments(samples, draws * x.shape[1], x.device)
        hidden = self.diffusion(x, bucket, kv, queries, Segments(batch.cu_tokens, batch.max_tokens))
        decoded = self.action_decoder(hidden[:, -horizon:], each)
        return decoded.float().unflatten(0, (samples, draws))


def make_model(config: GrootConfig) -> Groot:
    """The entry of this room; see `drivetrain.policies`."""
    return Groot(config)


def _query_segments(samples: int, length: int, device: torch.device) -> Segments:
    """`samples` segments of `length` queries, all draws of a sample in one; none for the pack's tail."""
    ends = torch.arange(samples + 2, device=device, dtype=torch.int32).clamp(max=samples) * length
    return Segments(ends.int(), length)


def _reset_norm(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)
