"""Small LeRobot data sets whose every image says which frame it is.

Each image carries a watermark: an 8x8 grid of black and white blocks with episode, frame and camera. state[0] and
action[0] are the frame, state[1] is the episode. One decoded sample then shows any wrong frame and any shifted row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GRID = 8
TASKS = ("pick up the cube", "open the drawer", "press the button")


@dataclass(frozen=True)
class Tiny:
    """What a tiny data set holds. `lengths`: frames of each episode; `sizes`: camera -> (height, width)."""

    lengths: tuple[int, ...] = (20,) * 12
    sizes: dict[str, tuple[int, int]] = field(default_factory=lambda: {"top": (64, 64), "wrist": (64, 64)})
    fps: float = 30
    dimensions: int = 7
    tasks: tuple[str, ...] = TASKS
    codec: str = "libx264"
    gop: int = 12

    def task(self, episode: int) -> int:
        return episode % len(self.tasks)


# --- watermark


def watermark(episode: int, frame: int, camera: int = 0, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """uint8 [height, width, 3]; episode and frame below 65536, camera below 256."""
    bits = [*_bits(episode, 16), *_bits(frame, 16), *_bits(camera, 8), *_bits(_checksum(episode, frame, camera), 8)]
    frame_of_reference = [1, 0, 1, 0, 1, 0, 1, 0]
    cells = np.array([*frame_of_reference, *bits, *[1 - b for b in frame_of_reference]]).reshape(GRID, GRID)
    rows = np.arange(size[0]) * GRID // size[0]
    columns = np.arange(size[1]) * GRID // size[1]
    plane = np.where(cells[rows][:, columns], 235, 20).astype(np.uint8)
    return np.repeat(plane[:, :, None], 3, axis=2)


def read_watermark(image: np.ndarray, size: tuple[int, int] = (64, 64)) -> tuple[int, int]:
    """(episode, frame) of an image that was resized to at least 64 pixels, padded from `size` to a square, and coded.

    Raises ValueError where no watermark can be read.
    """
    return read_full_watermark(image, size)[:2]


def read_full_watermark(image: np.ndarray, size: tuple[int, int] = (64, 64)) -> tuple[int, int, int]:
    """(episode, frame, camera)."""
    height, width = image.shape[:2]
    scale = max(height, width) / max(size)
    inner = round(size[0] * scale), round(size[1] * scale)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    grey = image[top : top + inner[0], left : left + inner[1]].astype(np.float64).mean(axis=2)
    centres = [((np.arange(GRID) + 0.5) * n / GRID).astype(int) for n in grey.shape]
    values = np.array([[grey[y - 1 : y + 2, x - 1 : x + 2].mean() for x in centres[1]] for y in centres[0]])
    bits = (values > 127).astype(int).reshape(-1)
    if list(bits[:8]) != [1, 0, 1, 0, 1, 0, 1, 0] or list(bits[-8:]) != [0, 1, 0, 1, 0, 1, 0, 1]:
        raise ValueError("the image has no watermark, or is turned or cut")
    episode, frame, camera, checksum = (_number(bits[a:b]) for a, b in ((8, 24), (24, 40), (40, 48), (48, 56)))
    if checksum != _checksum(episode, frame, camera):
        raise ValueError(f"the watermark is damaged: {episode}, {frame}, {camera}")
    return episode, frame, camera


def _bits(value: int, count: int) -> list[int]:
    assert 0 <= value < 2**count, value
    return [value >> i & 1 for i in reversed(range(count))]


def _number(bits: np.ndarray) -> int:
    return int("".join(map(str, bits)), 2)


def _checksum(episode: int, frame: int, camera: int) -> int:
    return (episode * 7 + frame * 13 + camera * 31 + 5) % 251


# --- contents


def state_rows(tiny: Tiny, episode: int) -> np.ndarray:
    """float32 [frames, dimensions]: frame, episode, then smooth motion."""
    n = tiny.lengths[episode]
    t = np.arange(n)[:, None]
    motion = np.sin(0.2 * t + np.arange(tiny.dimensions) + episode)
    motion[:, :2] = np.stack([np.arange(n), np.full(n, episode)], axis=1)[:, : tiny.dimensions]
    return motion.astype(np.float32)


def action_rows(tiny: Tiny, episode: int) -> np.ndarray:
    """float32 [frames, dimensions]: the frame, then the state one step on."""
    n = tiny.lengths[episode]
    motion = np.sin(0.2 * (np.arange(n)[:, None] + 1) + np.arange(tiny.dimensions) + episode)
    motion[:, 0] = np.arange(n)
    return motion.astype(np.float32)


def table_of(tiny: Tiny, episode: int) -> pa.Table:
    """The rows of one episode in LeRobot's columns."""
    n = tiny.lengths[episode]
    start = sum(tiny.lengths[:episode])
    return pa.table(
        {
            "observation.state": pa.array(list(state_rows(tiny, episode)), pa.list_(pa.float32())),
            "action": pa.array(list(action_rows(tiny, episode)), pa.list_(pa.float32())),
            "timestamp": pa.array((np.arange(n) / tiny.fps).astype(np.float32)),
            "frame_index": pa.array(np.arange(n)),
            "episode_index": pa.array(np.full(n, episode, np.int64)),
            "index": pa.array(np.arange(start, start + n)),
            "task_index": pa.array(np.full(n, tiny.task(episode), np.int64)),
        }
    )


def images_of(tiny: Tiny, episode: int, camera: str) -> Iterator[np.ndarray]:
    """The watermarked images of one episode and camera."""
    number = list(tiny.sizes).index(camera)
    for frame in range(tiny.lengths[episode]):
        yield watermark(episode, frame, number, tiny.sizes[camera])


def write_video(
    file: Path, images: Iterator[np.ndarray], fps: float, codec: str = "libx264", gop: int = 12, **options: str
) -> None:
    """Encode uint8 [height, width, 3] images as mp4."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w", options=options) as container:
        stream = None
        for image in images:
            if stream is None:
                stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.codec_context.gop_size = gop
                stream.codec_context.thread_count = 1
                stream.options = {"crf": "20"} if codec == "libx264" else {}
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        assert stream is not None, "a video needs a frame"
        container.mux(stream.encode())


# --- layouts


def write_v21(folder: Path, tiny: Tiny | None = None, version: str = "v2.1") -> Path:
    """A data set in the layout of v2.1 (or v2.0): one Parquet file, and one video per camera, for each episode."""
    tiny = tiny or Tiny()
    info = _info(tiny, version) | {
        "total_chunks": 1,
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    write_json(folder / "meta/info.json", info)
    write_lines(folder / "meta/tasks.jsonl", [{"task_index": i, "task": t} for i, t in enumerate(tiny.tasks)])
    episodes = [
        {"episode_index": e, "tasks": [tiny.tasks[tiny.task(e)]], "length": n} for e, n in enumerate(tiny.lengths)
    ]
    write_lines(folder / "meta/episodes.jsonl", episodes)
    if version == "v2.1":
        write_lines(
            folder / "meta/episodes_stats.jsonl", [{"episode_index": e["episode_index"], "stats": {}} for e in episodes]
        )
    for episode in range(len(tiny.lengths)):
        write_table(folder / f"data/chunk-000/episode_{episode:06d}.parquet", table_of(tiny, episode))
        for camera in tiny.sizes:
            file = folder / f"videos/chunk-000/observation.images.{camera}/episode_{episode:06d}.mp4"
            write_video(file, images_of(tiny, episode, camera), tiny.fps, tiny.codec, tiny.gop)
    return folder


def write_v30(folder: Path, tiny: Tiny | None = None, per_file: int = 4) -> Path:
    """A data set in the layout of v3.0, with `per_file` episodes in each Parquet file and in each video."""
    tiny = tiny or Tiny()
    info = _info(tiny, "v3.0") | {
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    write_json(folder / "meta/info.json", info)
    tasks = pa.table({"task_index": pa.array(range(len(tiny.tasks))), "task": pa.array(tiny.tasks)})
    write_table(folder / "meta/tasks.parquet", tasks)
    rows, offset = [], 0
    for file, first in enumerate(range(0, len(tiny.lengths), per_file)):
        members = range(first, min(first + per_file, len(tiny.lengths)))
        path = folder / f"data/chunk-000/file-{file:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, table_of(tiny, first).schema) as writer:
            for episode in members:
                writer.write_table(table_of(tiny, episode))
        for camera in tiny.sizes:
            images = (image for episode in members for image in images_of(tiny, episode, camera))
            write_video(
                folder / f"videos/observation.images.{camera}/chunk-000/file-{file:03d}.mp4",
                images, tiny.fps, tiny.codec, tiny.gop,
            )  # fmt: skip
        start = 0
        for episode in members:
            rows.append(_episode_v30(tiny, episode, file, start, offset))
            start += tiny.lengths[episode]
            offset += tiny.lengths[episode]
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
    return folder


def _episode_v30(tiny: Tiny, episode: int, file: int, start: int, offset: int) -> dict:
    n = tiny.lengths[episode]
    row = {
        "episode_index": episode,
        "tasks": [tiny.tasks[tiny.task(episode)]],
        "length": n,
        "dataset_from_index": offset,
        "dataset_to_index": offset + n,
        "data/chunk_index": 0,
        "data/file_index": file,
    }
    for camera in tiny.sizes:
        prefix = f"videos/observation.images.{camera}"
        row |= {
            f"{prefix}/chunk_index": 0,
            f"{prefix}/file_index": file,
            f"{prefix}/from_timestamp": start / tiny.fps,
            f"{prefix}/to_timestamp": (start + n) / tiny.fps,
        }
    return row


def features_of(tiny: Tiny) -> dict:
    """The features of info.json, as LeRobot's writer takes them."""
    names = [f"joint{i}" for i in range(tiny.dimensions)]
    vector = {"dtype": "float32", "shape": [tiny.dimensions], "names": names}
    cameras = {
        f"observation.images.{camera}": {
            "dtype": "video",
            "shape": [*size, 3],
            "names": ["height", "width", "channels"],
        }
        for camera, size in tiny.sizes.items()
    }
    return {"observation.state": vector, "action": vector, **cameras}


def _info(tiny: Tiny, version: str) -> dict:
    scalars = {
        name: {"dtype": dtype, "shape": [1], "names": None}
        for name, dtype in {"timestamp": "float32", **dict.fromkeys(INDICES, "int64")}.items()
    }
    return {
        "codebase_version": version,
        "robot_type": "tiny",
        "total_episodes": len(tiny.lengths),
        "total_frames": sum(tiny.lengths),
        "total_tasks": len(tiny.tasks),
        "fps": tiny.fps,
        "splits": {"train": f"0:{len(tiny.lengths)}"},
        "features": features_of(tiny) | scalars,
    }


INDICES = ("frame_index", "episode_index", "index", "task_index")


def write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def write_lines(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_table(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)
