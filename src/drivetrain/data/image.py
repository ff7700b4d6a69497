"""The one way in which a camera image becomes the square image that the lake stores and policies see, and the way back
from the lake to pixels."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from drivetrain.types import DatasetInfo, DrivetrainError, Observation, Step


def fit(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 [height, width, 3] -> uint8 [size, size, 3]: scaled to fit with its aspect kept, centred on black."""
    height, width = image.shape[:2]
    assert image.dtype == np.uint8 and image.shape[2:] == (3,), (image.dtype, image.shape)
    if height == width == size:
        return image
    scale = size / max(height, width)
    new_height, new_width = max(1, round(height * scale)), max(1, round(width * scale))
    scaled = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
    out = np.zeros((size, size, 3), np.uint8)
    top, left = (size - new_height) // 2, (size - new_width) // 2
    out[top : top + new_height, left : left + new_width] = np.asarray(scaled)
    return out


def stored_images(step: Step, info: DatasetInfo, size: int) -> np.ndarray:
    """The images of a step of the lake, decoded: uint8 [V, size, size, 3], in the data set's camera order."""
    where = f"{step.dataset} episode {step.episode} frame {step.frame}"
    if len(step.images) != len(info.cameras):
        raise DrivetrainError(
            f"{where}: {len(step.images)} images, {len(info.cameras)} cameras {info.cameras} expected"
        )
    pictures = np.zeros((len(step.images), size, size, 3), np.uint8)
    for i, data in enumerate(step.images):
        with Image.open(io.BytesIO(data)) as image:
            if image.size != (info.image_size, info.image_size):
                raise DrivetrainError(f"{where}: an image of {image.size}, the lake stores {info.image_size} squared")
            pictures[i] = _resized(image.convert("RGB"), size)
    return pictures


def observed_images(observation: Observation, info: DatasetInfo, size: int) -> np.ndarray:
    """The same for a live observation, which goes through the lake's size first, as a stored image did."""
    if missing := [camera for camera in info.cameras if camera not in observation.images]:
        raise DrivetrainError(
            f"the policy looks through {', '.join(info.cameras)}; the observation lacks {', '.join(missing)} "
            f"and has {', '.join(observation.images) or 'no images'}"
        )
    if surplus := sorted(set(observation.images) - set(info.cameras)):
        raise DrivetrainError(f"the policy knows no camera {', '.join(surplus)}; it was trained with {info.cameras}")
    pictures = np.zeros((len(info.cameras), size, size, 3), np.uint8)
    for i, camera in enumerate(info.cameras):
        pictures[i] = _resized(Image.fromarray(fit(observation.images[camera], info.image_size)), size)
    return pictures


def _resized(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image if image.width == size else image.resize((size, size), Image.Resampling.BILINEAR))
