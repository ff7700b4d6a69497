"""A data set that LeRobot's own writer made, and what LeRobot's own reader makes of it, against the lake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixtures import Tiny, action_rows, features_of, images_of, state_rows
from test_ingest import check_alignment

from drivetrain.lake.images import decode_image
from drivetrain.lake.ingest import ingest
from drivetrain.lake.lake import open_lake


@pytest.mark.slow
@pytest.mark.parametrize("use_videos", [True, False])
def test_lerobot_s_writer_and_reader_agree_with_the_lake(use_videos: bool, tmp_path: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    tiny = Tiny(lengths=(9, 12, 7, 11))
    features = features_of(tiny)
    if not use_videos:
        for camera in tiny.sizes:
            features[f"observation.images.{camera}"]["dtype"] = "image"
    root = tmp_path / "written"
    writer = LeRobotDataset.create("me/written", fps=30, features=features, root=root, use_videos=use_videos)
    for episode in range(4):
        cameras = {c: list(images_of(tiny, episode, c)) for c in tiny.sizes}
        for frame in range(tiny.lengths[episode]):
            images = {f"observation.images.{c}": shots[frame] for c, shots in cameras.items()}
            numbers = {
                "observation.state": state_rows(tiny, episode)[frame],
                "action": action_rows(tiny, episode)[frame],
            }
            writer.add_frame({**numbers, **images, "task": tiny.tasks[tiny.task(episode)]})
        writer.save_episode()
    writer.finalize()

    report = ingest([str(root)], str(tmp_path / "lake"), image_size=64)
    assert [f for f in report.findings if f.severity == "error"] == []
    lake = open_lake(str(tmp_path / "lake"))
    check_alignment(lake, "written", tiny, every=1)
    reader = LeRobotDataset("me/written", root=root)
    for row in (0, 8, 9, 20, 21, 38):
        theirs = reader[row]
        ours = lake.read(np.array([row]), ["state", "images"]).to_pylist()[0]
        assert np.array_equal(theirs["observation.state"].numpy(), np.array(ours["state"], np.float32))
        for camera, data in zip(tiny.sizes, ours["images"], strict=True):
            seen = theirs[f"observation.images.{camera}"].numpy().transpose(1, 2, 0) * 255
            assert np.abs(seen - decode_image(data)).mean() < 4
