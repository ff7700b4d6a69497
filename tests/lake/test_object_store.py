"""Sources and lakes on an S3 server on loopback, and two ingests at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import Tiny, write_v21, write_v30
from test_ingest import check_alignment, contents

from drivetrain.lake import commit, tables
from drivetrain.lake.folder import folder_of
from drivetrain.lake.ingest import ingest
from drivetrain.lake.lake import open_lake
from drivetrain.types import DrivetrainError


@pytest.mark.parametrize("write", [write_v21, write_v30])
def test_a_source_and_a_lake_in_a_bucket(write: Callable[..., Path], bucket: str, tmp_path: Path) -> None:
    import s3fs

    tiny, name = Tiny(lengths=(5, 6, 7)), write.__name__
    s3fs.S3FileSystem().put(str(write(tmp_path / name, tiny)), f"{bucket}/sets/{name}", recursive=True)
    lake = f"{bucket}/lakes/{name}"
    report = ingest([f"{bucket}/sets/{name}"], lake, image_size=64)
    assert report.findings == () and report.sources[0].added_episodes == 3
    check_alignment(open_lake(lake), name, tiny)
    assert ingest([f"{bucket}/sets/{name}"], lake, image_size=64).version == report.version


def test_one_lake_version_has_one_writer_in_a_bucket(bucket: str) -> None:
    lake = folder_of(f"{bucket}/lakes/race")
    first = tables.publish(lake, None, tables.create_tables(lake), "a")
    with pytest.raises(tables.VersionTakenError):
        tables.publish(lake, None, {}, "b")
    assert tables.read_manifest(lake) == first


def test_a_bucket_that_is_not_there_is_named(bucket: str, tiny21: Path) -> None:
    with pytest.raises(DrivetrainError, match="s3://nowhere/set is not a LeRobot data set"):
        ingest(["s3://nowhere/set"], f"{bucket}/lakes/none")
    with pytest.raises(DrivetrainError, match="the lake s3://nowhere/lake cannot be"):
        ingest([str(tiny21)], "s3://nowhere/lake")
    with pytest.raises(DrivetrainError, match="not a lake"):
        open_lake(f"{bucket}/lakes/none")


def test_another_writer_between_reading_and_publishing(
    tmp_path: Path, tiny30: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loser of a race builds on the winner: same data set, other data set, and partly the same episodes."""
    lake = str(tmp_path / "lake")
    other = write_v21(tmp_path / "other", Tiny(lengths=(5, 6)))
    small = write_v21(tmp_path / "small", Tiny(lengths=(7, 8)))
    publish, raced = commit.publish, []

    def publish_late(*arguments):
        if not raced:
            raced.append(True)
            ingest([str(other)], lake, image_size=64)
            ingest([str(small)], lake, image_size=64)
        return publish(*arguments)

    monkeypatch.setattr(commit, "publish", publish_late)
    report = ingest([str(small), str(tiny30)], lake, image_size=64)
    result = open_lake(lake)
    assert {n: i.episodes for n, i in result.datasets.items()} == {"other": 2, "small": 2, "tiny30": 12}
    assert [s.added_episodes for s in report.sources] == [0, 12]
    check_alignment(result, "other", Tiny(lengths=(5, 6)))
    check_alignment(result, "small", Tiny(lengths=(7, 8)))
    check_alignment(result, "tiny30", Tiny())
    assert result.datasets["small"].statistics["action"].count == 15


CONCURRENT = "import sys; from drivetrain.lake.ingest import ingest; ingest(sys.argv[2:], sys.argv[1], image_size=64)"


def test_processes_that_ingest_the_same_at_once(tmp_path: Path, tiny21: Path, tiny30: Path) -> None:
    lake = str(tmp_path / "lake")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    sources = [[str(tiny21), str(tiny30)], [str(tiny30), str(tiny21)]]
    running = [
        subprocess.Popen([sys.executable, "-c", CONCURRENT, lake, *s], env=environment, stderr=subprocess.PIPE)
        for s in sources
    ]
    for process in running:
        _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error.decode()
    result = open_lake(lake)
    for name in ("tiny21", "tiny30"):
        assert result.datasets[name].episodes == 12
        check_alignment(result, name, Tiny(), every=20)
    assert len(contents(result)["steps"]) == 480
