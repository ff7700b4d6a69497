"""How the lake encodes images; how they become square is data/image.py's, for live observations must do the same."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

JPEG_QUALITY = 90  # with full colour resolution: docs/decisions/image-encoding.md


def encode_image(image: np.ndarray) -> bytes:
    """uint8 [height, width, 3] -> a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY, subsampling="4:4:4")
    return file.getvalue()


def decode_image(data: bytes) -> np.ndarray:
    """Any still image that Pillow reads -> uint8 [height, width, 3], RGB."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
