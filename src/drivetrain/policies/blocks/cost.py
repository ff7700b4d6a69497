"""Arithmetic of a training step, counted from a policy's dimensions: what its matrix products and attentions take.

Two FLOPs a multiply-add. Norms, activations, softmax and the optimizer are left out, and so is recomputation: it is the
work that the mathematics asks for, which is what a model FLOPs utilisation (MFU) divides by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward and one backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def products(multiply_adds: float, *, trained: bool, reaches: bool) -> Flops:
    """Matrix products with weights.

    trained: the gradient of the weights is taken.   reaches: so is that of the input, because something below trains.
    A trained first layer of which nothing lies below is counted as if its input's gradient were taken.
    """
    return Flops(2 * multiply_adds, 2 * multiply_adds * (2 if trained else 1 if reaches else 0))


def attention(pairs: float, width: float, *, reaches: bool) -> Flops:
    """Scores and weighted sums of `pairs` (query, key) pairs, over all heads `width` wide."""
    return Flops(4 * pairs * width, 8 * pairs * width if reaches else 0)


class VisionDimensions(Protocol):
    """What `vision_flops` asks of a policy's config of its SigLIP tower."""

    @property
    def image_size(self) -> int: ...
    @property
    def patch_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def mlp(self) -> int: ...


def vision_flops(vision: VisionDimensions, images: int, *, trained: bool) -> Flops:
    """The SigLIP tower over so many images."""
    tokens = images * tokens_per_image(vision)
    layer = 4 * vision.width**2 + 2 * vision.width * vision.mlp
    weights = tokens * (vision.layers * layer + 3 * vision.patch_size**2 * vision.width)
    pairs = vision.layers * tokens * tokens_per_image(vision)
    return products(weights, trained=trained, reaches=False) + attention(pairs, vision.width, reaches=trained)


def tokens_per_image(vision: VisionDimensions) -> int:
    return (vision.image_size // vision.patch_size) ** 2
