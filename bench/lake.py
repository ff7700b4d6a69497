"""How fast ingest and random reads are, next to what bounds them or what users would use instead.

    python bench/lake.py DATASET [--episodes 6]

ingest: steps per second of the whole ingest of a LeRobot data set in one process, against merely decoding and resizing the
same frames in the same process (no checks, no encoding, no writing). Both are timed on the same core, in turns.
read:   random steps per second, decoded to uint8 at training size, from the lake (one Lance take of 64 rows, Pillow) and from
the source's videos (torchcodec with one open decoder per file, resized), as LeRobot reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from drivetrain.data.image import fit
from drivetrain.lake import ingest as ingest_module
from drivetrain.lake.episode import Work, ingest_episodes
from drivetrain.lake.folder import folder_of
from drivetrain.lake.frames import episode_frames
from drivetrain.lake.images import decode_image
from drivetrain.lake.ingest import ingest
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.lake.rows import read_rows
from drivetrain.lake.sources import Source, read_source
from drivetrain.lake.tables import create_tables

ROWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--size", type=int, default=224)
    arguments = parser.parse_args()
    source = read_source(arguments.dataset)
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-bench-"))
    try:
        measure_ingest(source, folder, arguments.episodes, arguments.size)
        ingest_module.RAY_SECONDS = float("inf")
        ingest([arguments.dataset], str(folder / "lake"), image_size=arguments.size)
        measure_reads(source, open_lake(str(folder / "lake")), arguments.size)
    finally:
        shutil.rmtree(folder)


def measure_ingest(source: Source, folder: Path, count: int, size: int) -> None:
    """Episode by episode in turns, so that whatever else the machine does meets both alike."""
    lake = folder_of(str(folder / "timing"))
    create_tables(lake)
    header = replace(source, episodes=())
    seconds = {"ingest": 0.0, "decode and resize": 0.0}
    cpu = dict(seconds)
    steps = 0
    for episode in source.episodes[:count]:
        rows = read_rows(source, episode)
        for name in seconds:
            wall, process = time.perf_counter(), time.process_time()
            if name == "ingest":
                assert not ingest_episodes(Work(header, (episode,), lake, size, strict=True)).findings
            else:
                for camera in source.cameras:
                    for image in episode_frames(source, episode, camera, rows):
                        fit(image, size)
            seconds[name] += time.perf_counter() - wall
            cpu[name] += time.process_time() - process
        steps += episode.length
    for name in seconds:
        report("ingest, one core", name, "speed", steps / seconds[name], "steps/s")
        report("ingest, one core", name, "CPU time", 1e3 * cpu[name] / steps, "ms/step")
    report(
        "ingest, one core", "drivetrain", "share of decode and resize", cpu["decode and resize"] / cpu["ingest"], "1"
    )


def measure_reads(source: Source, lake: Lake, size: int, rounds: int = 12) -> None:
    from torchcodec.decoders import VideoDecoder

    generator = np.random.default_rng(0)
    info = lake.datasets[source.name]
    spans = lake.spans([source.name])
    by_number = {e.index: e for e in source.episodes}
    decoders = {}
    for e in source.episodes:
        for video in e.videos.values():
            path = source.folder.path(video.file)
            decoders[path] = VideoDecoder(path, seek_mode="approximate", num_ffmpeg_threads=1, dimension_order="NHWC")
    seconds = {"drivetrain": 0.0, "torchcodec": 0.0}
    for k in range(rounds + 1):
        rows = generator.integers(0, info.steps, ROWS)
        started = time.perf_counter()
        for step in lake.read(rows, ["state", "images"])["images"].to_pylist():
            for data in step:
                decode_image(data)
        between = time.perf_counter()
        for row in rows:
            span = int(np.searchsorted(spans.first_row, row, side="right")) - 1
            episode = by_number[int(spans.episode[span])]
            for video in episode.videos.values():
                decoder = decoders[source.folder.path(video.file)]
                start = round(video.start * source.fps)
                fit(decoder[start + int(row - spans.first_row[span])].numpy(), size)
        if k:  # the first round opens files
            seconds["drivetrain"] += between - started
            seconds["torchcodec"] += time.perf_counter() - between
    for who, value in seconds.items():
        report("random reads, one core", who, "speed", rounds * ROWS / value, "steps/s")


def report(case: str, who: str, metric: str, value: float, unit: str) -> None:
    line = {
        "bench": "lake",
        "case": case,
        "who": who,
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, one used",
        "versions": {p: version(p) for p in ("pylance", "av", "pillow", "torchcodec", "numpy")},
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
