"""Samples laid end to end into one pack of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drivetrain.types import DrivetrainError, PackedBatch, PackShape, Sample


def pack(samples: Sequence[Sample], shape: PackShape) -> PackedBatch:
    """The samples, in the order given, as `PackedBatch` describes; what is left of `shape` is empty slots and tail.

    All samples must agree in image size, image tokens, K, H, A and D. Every array is written once.
    Raises DrivetrainError where the samples exceed the shape, naming the limit.
    """
    if not samples:
        raise DrivetrainError("a pack needs at least one sample")
    lengths = np.array([len(s.tokens) for s in samples])
    images = sum(len(s.images) for s in samples)
    _check_fits(len(samples), int(lengths.sum()), images, shape)
    first = samples[0]
    per_image = len(first.image_tokens) // max(len(first.images), 1)
    starts = np.concatenate([[0], np.cumsum(lengths)])

    tokens = np.zeros(shape.tokens, np.int64)
    positions = np.empty(shape.tokens, np.int64)
    image_tokens = np.full(shape.images * per_image, shape.tokens, np.int64)
    pixels = np.zeros((shape.images, *first.images.shape[1:]), np.uint8)
    at = 0
    for sample, start in zip(samples, starts, strict=False):
        count = len(sample.images)
        if len(sample.image_tokens) != count * per_image:
            raise DrivetrainError(
                f"sample {sample.id}: {len(sample.image_tokens)} image tokens for {count} images of {per_image}"
            )
        tokens[start : start + len(sample.tokens)] = sample.tokens
        positions[start : start + len(sample.tokens)] = np.arange(len(sample.tokens))
        image_tokens[at * per_image : (at + count) * per_image] = sample.image_tokens + start
        pixels[at : at + count] = sample.images
        at += count
    positions[starts[-1] :] = np.arange(shape.tokens - starts[-1])
    cu_tokens = np.full(shape.samples + 2, starts[-1], np.int32)
    cu_tokens[: len(starts)] = starts
    cu_tokens[-1] = shape.tokens

    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cu_tokens=torch.from_numpy(cu_tokens),
        images=torch.from_numpy(pixels),
        image_tokens=torch.from_numpy(image_tokens),
        state=_slots([s.state for s in samples], shape.samples, np.float32),
        actions=_slots([s.actions for s in samples], shape.samples, np.float32),
        action_mask=_slots([s.action_mask for s in samples], shape.samples, np.bool_),
        noise=_slots([s.noise for s in samples], shape.samples, np.float32),
        time=_slots([s.time for s in samples], shape.samples, np.float32),
        embodiment=_slots([s.embodiment for s in samples], shape.samples, np.int64, empty=first.embodiment),
        weight=_slots([s.weight for s in samples], shape.samples, np.float32),
        sample=_slots([s.id for s in samples], shape.samples, np.int64, empty=-1),
        epoch=_slots([s.epoch for s in samples], shape.samples, np.int64, empty=-1),
        max_tokens=_bound(max(int(lengths.max()), int(shape.tokens - starts[-1])), shape.tokens),
    )


def _bound(longest: int, most: int) -> int:
    """A power of two that no segment exceeds: kernels launch blocks up to it, and every new value recompiles."""
    return min(most, max(256, 1 << (longest - 1).bit_length()))


def _slots(values: Sequence[np.ndarray | float | int], slots: int, dtype: type, empty: int = 0) -> torch.Tensor:
    """[slots, ...]: the values, then `empty`."""
    out = np.full((slots, *np.shape(values[0])), empty, dtype)
    for i, value in enumerate(values):
        out[i] = value
    return torch.from_numpy(out)


def _check_fits(samples: int, tokens: int, images: int, shape: PackShape) -> None:
    for name, found, limit in (
        ("samples", samples, shape.samples),
        ("tokens", tokens, shape.tokens),
        ("images", images, shape.images),
    ):
        if found > limit:
            raise DrivetrainError(
                f"these samples hold {found} {name}, a pack at most {limit}: raise batch.shape.{name} or batch.packs"
            )
