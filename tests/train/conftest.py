"""A lake of watermarked episodes from two robots."""

from pathlib import Path

import pytest
from fixtures import Tiny, write_v21, write_v30

from drivetrain.lake.ingest import ingest


@pytest.fixture(scope="session")
def lake(tmp_path_factory) -> Path:
    """Two data sets: one with one camera, one with two."""
    folder = tmp_path_factory.mktemp("train")
    one = write_v21(folder / "one", Tiny(lengths=(12, 20, 16), sizes={"observation.images.front": (64, 64)}))
    two = write_v30(folder / "two", Tiny(lengths=(18, 9)))
    ingest([str(one), str(two)], str(folder / "lake"), image_size=64)
    return folder / "lake"
