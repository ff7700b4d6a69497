"""Images as the lake keeps them: square, aspect kept by padding, JPEG.

Training data and live observations must pass through the same `fit_image`, or a policy sees another world than it
learned.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

JPEG_QUALITY = 90  # with full colour resolution: docs/decisions/image-encoding.md


def fit_image(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [height, width, 3] -> uint8 [size, size, 3]: scaled with antialiasing, centred, black where nothing is.

    An image that is already size x size comes back as it is.
    """
    height, width, channels = image.shape
    assert channels == 3 and image.dtype == np.uint8, (image.shape, image.dtype)
    if (height, width) == (size, size):
        return image
    scale = size / max(height, width)
    inner = (max(1, round(width * scale)), max(1, round(height * scale)))
    resized = np.asarray(Image.fromarray(image).resize(inner, Image.Resampling.BILINEAR))
    fitted = np.zeros((size, size, 3), np.uint8)
    top, left = (size - inner[1]) // 2, (size - inner[0]) // 2
    fitted[top : top + inner[1], left : left + inner[0]] = resized
    return fitted


def encode_image(image: np.ndarray) -> bytes:
    """uint8 [height, width, 3] -> a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY, subsampling="4:4:4")
    return file.getvalue()


def decode_image(data: bytes) -> np.ndarray:
    """Any still image that Pillow reads -> uint8 [height, width, 3], RGB."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
