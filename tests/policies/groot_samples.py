"""Random samples for tests of GR00T, and packs of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from drivetrain.data.pack import pack
from drivetrain.policies.groot.config import GrootConfig, HeadConfig, LanguageConfig, VisionConfig, tiny
from drivetrain.policies.groot.prompt import Prompt
from drivetrain.types import PackedBatch, PackShape, Sample


def micro(**changes) -> GrootConfig:
    """Smaller still than `tiny()`: 16 tokens per image, so that exhaustive comparisons take seconds."""
    config = tiny(horizon=5)
    vision = dataclasses.replace(config.vision, image_size=32, patch_size=8)
    head = dataclasses.replace(config.head, embodiments=4, layers=4)
    return dataclasses.replace(config, vision=vision, head=head, new_embodiment=3, **changes)


def random_sample(config: GrootConfig, seed: int, *, cameras: int = 1, embodiment: int = 3, draws: int = 1) -> Sample:
    rng = np.random.default_rng(seed)
    size, dims = config.vision.image_size, int(rng.integers(4, 9))
    tokens, places = Prompt(config).tokens(cameras, "lift the cup" + "!" * int(rng.integers(0, 12)))
    mask = np.zeros((config.horizon, config.action_width), np.bool_)
    mask[:, :dims] = True
    return Sample(
        id=seed,
        epoch=0,
        embodiment=embodiment,
        weight=float(rng.uniform(0.5, 2)),
        tokens=tokens,
        image_tokens=places,
        images=rng.integers(0, 256, (cameras, size, size, 3), np.uint8),
        state=rng.normal(size=config.state_width).astype(np.float32),
        actions=(rng.normal(size=mask.shape) * mask).astype(np.float32),
        action_mask=mask,
        noise=rng.normal(size=(draws, *mask.shape)).astype(np.float32),
        time=rng.uniform(-0.001, 1, draws).astype(np.float32),
    )


def tight(samples: list[Sample]) -> PackedBatch:
    """The samples with no empty slot and no tail: for one sample, the unpadded reference."""
    tokens, images = sum(len(s.tokens) for s in samples), sum(len(s.images) for s in samples)
    return pack(samples, PackShape(tokens=tokens, samples=len(samples), images=images))


def golden() -> GrootConfig:
    """The size at which the released implementation's outputs are kept in tests/golden/groot.safetensors."""
    return GrootConfig(
        vision=VisionConfig(image_size=16, patch_size=4, layers=2, width=24, heads=2, mlp=40),
        language=LanguageConfig(
            layers=2,
            width=32,
            heads=4,
            kv_heads=2,
            head_dim=12,
            mlp=48,
            vocabulary=40,
            image_token=37,
            tokenizer="bytes",
        ),
        head=HeadConfig(
            vl_layers=2,
            vl_heads=2,
            layers=4,
            width=24,
            heads=2,
            hidden=20,
            future_tokens=3,
            max_positions=8,
            embodiments=3,
            dropout=0.0,
        ),
        horizon=5,
        state_width=6,
        action_width=7,
        new_embodiment=2,
        tune_llm=True,
        tune_visual=True,
    )
