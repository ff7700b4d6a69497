"""Two watermarked data sets in one lake: one camera at v2.1, two cameras at v3.0."""

from pathlib import Path

import pytest
from fixtures import write_v21, write_v30
from watermarked import ONE, TWO

from drivetrain.lake.ingest import ingest


@pytest.fixture(scope="session")
def watermarked_lake(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("watermarked")
    ingest(
        [str(write_v21(folder / "one", ONE)), str(write_v30(folder / "two", TWO))], str(folder / "lake"), image_size=64
    )
    return folder / "lake"
