"""The one way in which a camera image becomes the square image that the lake stores and policies see."""

from __future__ import annotations

import numpy as np
from PIL import Image


def fit(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [height, width, 3] -> uint8 [size, size, 3]: scaled to fit with its aspect kept, centred on black."""
    height, width = image.shape[:2]
    assert image.dtype == np.uint8 and image.shape[2:] == (3,), (image.dtype, image.shape)
    if height == width == size:
        return image
    scale = size / max(height, width)
    new_height, new_width = max(1, round(height * scale)), max(1, round(width * scale))
    scaled = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR, reducing_gap=2.0)
    out = np.zeros((size, size, 3), np.uint8)
    top, left = (size - new_height) // 2, (size - new_width) // 2
    out[top : top + new_height, left : left + new_width] = np.asarray(scaled)
    return out
