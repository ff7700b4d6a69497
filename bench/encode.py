"""Which image encoding should the lake use? Bytes, decode and encode time, and error, on frames of a real data set.

    python bench/encode.py DATASET [--frames 120] [--size 224]

One JSON line per encoding and metric. Error is measured against the resized frame before encoding (PSNR, and SSIM as the
mean of the three channels). "HEVC/H.264 short GOP" is one group of pictures decoded whole for one frame, as a random read
must do.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version

import av
import numpy as np
from PIL import Image

from drivetrain.data.image import fit
from drivetrain.lake.frames import episode_frames
from drivetrain.lake.rows import read_rows
from drivetrain.lake.sources import read_source

GOP = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--size", type=int, default=224)
    arguments = parser.parse_args()
    images = some_frames(arguments.dataset, arguments.frames, arguments.size)
    for quality in (75, 85, 90, 92, 95, 98):
        for subsampling in (2, 0):
            name = f"JPEG q{quality} {'4:4:4' if subsampling == 0 else '4:2:0'}"
            measure(
                name, images, lambda a, q=quality, s=subsampling: pillow(a, "JPEG", quality=q, subsampling=s), unpillow
            )
    for quality in (80, 90, 95):
        measure(
            f"WebP q{quality} method 2", images, lambda a, q=quality: pillow(a, "WEBP", quality=q, method=2), unpillow
        )
    measure("WebP lossless", images, lambda a: pillow(a, "WEBP", lossless=True, method=2), unpillow)
    measure("PNG", images, lambda a: pillow(a, "PNG", compress_level=3), unpillow)
    measure_video(images)


def some_frames(dataset: str, count: int, size: int) -> list[np.ndarray]:
    """Runs of consecutive frames from several episodes, as ingest resizes them."""
    source = read_source(dataset)
    episodes = source.episodes[:: max(1, len(source.episodes) // 4)][:4]
    images = []
    for episode in episodes:
        frames = episode_frames(source, episode, source.cameras[0], read_rows(source, episode))
        images += [fit(next(frames), size) for _ in range(count // len(episodes))]
    return images


def measure(name: str, images: list[np.ndarray], encode: Callable, decode: Callable) -> None:
    encode(images[0])
    started = time.process_time()
    files = [encode(image) for image in images]
    encoded = time.process_time() - started
    started = time.process_time()
    back = [decode(file) for file in files]
    decoded = time.process_time() - started
    report(name, images, back, sum(map(len, files)), encoded, decoded)


def measure_video(images: list[np.ndarray]) -> None:
    """Groups of GOP frames, each a stream of its own; one frame costs on average half of its group."""
    groups = [images[i : i + GOP] for i in range(0, len(images) - GOP + 1, GOP)]
    started = time.process_time()
    files = [video(group) for group in groups]
    encoded = time.process_time() - started
    started = time.process_time()
    back = [frame for file in files for frame in unvideo(file)]
    whole = time.process_time() - started
    per_random_frame = whole / len(groups) * (GOP + 1) / 2 / GOP
    kept = [image for group in groups for image in group]
    report(f"H.264 crf 20, GOP {GOP}", kept, back, sum(map(len, files)), encoded, per_random_frame * len(kept))


def pillow(image: np.ndarray, format: str, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format, **options)
    return file.getvalue()


def unpillow(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def video(images: list[np.ndarray]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "20", "preset": "fast", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = *images[0].shape[:2], "yuv420p"
        stream.codec_context.thread_count = 1
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def unvideo(file: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(file)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def report(name: str, images: list, back: list, size: int, encoded: float, decoded: float) -> None:
    n = len(images)
    values = {
        "bytes/frame": size / n,
        "encode ms/frame": 1e3 * encoded / n,
        "decode ms/frame": 1e3 * decoded / n,
        "PSNR dB": float(np.mean([psnr(a, b) for a, b in zip(images, back, strict=True)])),
        "SSIM": float(np.mean([ssim(a, b) for a, b in zip(images[::4], back[::4], strict=True)])),
    }
    for metric, value in values.items():
        line = {
            "bench": "encode",
            "case": name,
            "who": "drivetrain",
            "metric": metric,
            "value": round(value, 5),
            "unit": metric.split()[-1],
            "hardware": f"{os.cpu_count()} cores, {platform.machine()}, one used",
            "versions": {p: version(p) for p in ("pillow", "av", "numpy")},
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
        }
        print(json.dumps(line), flush=True)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return 99.0 if error == 0 else 10 * np.log10(255**2 / error)


def ssim(a: np.ndarray, b: np.ndarray, window: int = 8) -> float:
    """Structural similarity with a flat window (Wang et al. 2004, with their constants)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2

    def mean(v: np.ndarray) -> np.ndarray:
        total = np.pad(v, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
        w = window
        return (total[w:, w:] - total[:-w, w:] - total[w:, :-w] + total[:-w, :-w]) / w**2

    mx, my = mean(x), mean(y)
    vx, vy, cxy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    return float((((2 * mx * my + c1) * (2 * cxy + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


if __name__ == "__main__":
    main()
