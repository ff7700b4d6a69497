"""Random samples for tests of pi-0.5, and packs of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from drivetrain.data.pack import pack
from drivetrain.policies.pi05.config import GemmaConfig, Pi05Config, VisionConfig, tiny
from drivetrain.types import PackedBatch, PackShape, Sample


def micro(horizon: int = 10, **changes) -> Pi05Config:
    """Smaller still than `tiny()`: 16 tokens per image, so that exhaustive comparisons take seconds."""
    config = tiny(horizon)
    vision = dataclasses.replace(config.vision, image_size=32, width=48, mlp=64)
    gemma = dataclasses.replace(config.gemma, layers=3, prefix_width=64, prefix_mlp=96, suffix_width=48, suffix_mlp=64)
    return dataclasses.replace(config, vision=vision, gemma=gemma, action_width=12, **changes)


def golden() -> Pi05Config:
    """The size at which the released implementation's outputs are kept in tests/golden/pi05.safetensors.

    Eight query heads, because the released code has that number written into it.
    """
    return Pi05Config(
        vision=VisionConfig(image_size=16, patch_size=4, layers=2, width=24, heads=2, mlp=40),
        gemma=GemmaConfig(
            layers=3,
            heads=8,
            head_dim=8,
            prefix_width=32,
            prefix_mlp=48,
            suffix_width=24,
            suffix_mlp=40,
            vocabulary=40,
            begin_token=2,
            image_token=0,
            tokenizer="bytes",
        ),
        horizon=5,
        state_width=6,
        action_width=8,
    )


def random_sample(config: Pi05Config, seed: int, *, cameras: int = 1, draws: int = 1, dims: int = 7) -> Sample:
    rng = np.random.default_rng(seed)
    vision, gemma = config.vision, config.gemma
    per_image = (vision.image_size // vision.patch_size) ** 2
    words = rng.integers(3, 200, 5 + int(rng.integers(0, 9)))
    tokens = np.concatenate([np.full(cameras * per_image, gemma.image_token), words])
    mask = np.zeros((config.horizon, config.action_width), np.bool_)
    mask[:, :dims] = True
    return Sample(
        id=seed,
        epoch=0,
        embodiment=0,
        weight=float(rng.uniform(0.5, 2)),
        tokens=tokens,
        image_tokens=np.arange(cameras * per_image),
        images=rng.integers(0, 256, (cameras, vision.image_size, vision.image_size, 3), np.uint8),
        state=np.zeros(config.state_width, np.float32),
        actions=(rng.normal(size=mask.shape) * mask).astype(np.float32),
        action_mask=mask,
        noise=rng.normal(size=(draws, *mask.shape)).astype(np.float32),
        time=rng.uniform(0.001, 1, draws).astype(np.float32),
    )


def tight(samples: list[Sample]) -> PackedBatch:
    """The samples with no empty slot and no tail: for one sample, the unpadded reference."""
    tokens, images = sum(len(s.tokens) for s in samples), sum(len(s.images) for s in samples)
    return pack(samples, PackShape(tokens=tokens, samples=len(samples), images=images))
