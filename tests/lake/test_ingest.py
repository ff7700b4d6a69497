"""Source to lake and back: every frame, state and action is where it belongs, whatever happened on the way."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fixtures import Tiny, action_rows, read_full_watermark, state_rows, write_v21

from drivetrain.lake import commit
from drivetrain.lake import ingest as ingest_module
from drivetrain.lake import lake as lake_module
from drivetrain.lake.folder import folder_of
from drivetrain.lake.images import decode_image
from drivetrain.lake.ingest import ingest
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.lake.sources import Camera, read_source
from drivetrain.types import DrivetrainError


def check_alignment(lake: Lake, name: str, tiny: Tiny, *, every: int = 3) -> None:
    """Every row's numbers, and every so many rows' images, against what the fixture drew."""
    spans = lake.spans([name])
    rows = np.concatenate([np.arange(first, first + n) for first, n in zip(spans.first_row, spans.length, strict=True)])
    table = lake.read(rows, ["dataset", "episode", "frame", "timestamp", "task", "state", "action"])
    episodes = np.repeat(spans.episode, spans.length)
    assert table["episode"].to_numpy().tolist() == episodes.tolist()
    assert set(table["dataset"].to_pylist()) == {name}
    for episode, first, n in zip(spans.episode, np.cumsum(spans.length) - spans.length, spans.length, strict=True):
        part = table.slice(first, n)
        assert part["frame"].to_pylist() == list(range(n))
        assert np.array_equal(np.array(part["state"].to_pylist(), np.float32), state_rows(tiny, episode))
        assert np.array_equal(np.array(part["action"].to_pylist(), np.float32), action_rows(tiny, episode))
        assert np.allclose(part["timestamp"].to_numpy(), np.arange(n) / tiny.fps, atol=1e-6)
        assert set(part["task"].to_pylist()) == {tiny.tasks[tiny.task(episode)]}
    some = rows[::every]
    images = lake.read(some, ["episode", "frame", "images"]).to_pylist()
    for row in images:
        for camera, data in enumerate(row["images"]):
            image = decode_image(data)
            size = tiny.sizes[lake.datasets[name].cameras[camera]]
            assert read_full_watermark(image, size) == (row["episode"], row["frame"], camera)


def contents(lake: Lake) -> dict[str, list]:
    """All rows of all tables; sketches and statistics are left to `same_statistics`."""
    leave = {"datasets": ["statistics", "statistics_hash", "state_sketch", "action_sketch"]}
    return {
        name: lake.table(name).to_table().drop_columns(leave.get(name, [])).to_pylist()
        for name in ("datasets", "episodes", "steps", "quarantine")
    }


def same_statistics(a: Lake, b: Lake) -> None:
    for name, info in a.datasets.items():
        for feature, s in info.statistics.items():
            for field, value in vars(s).items():
                np.testing.assert_allclose(
                    value, getattr(b.datasets[name].statistics[feature], field), rtol=1e-12, atol=1e-12
                )


@pytest.fixture(scope="module")
def both(tiny21: Path, tiny30: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """One lake with both clean data sets."""
    lake = tmp_path_factory.mktemp("both") / "lake"
    report = ingest([str(tiny21), f"second={tiny30}"], str(lake), image_size=96)
    assert not report.findings, report.findings
    assert [s.added_episodes for s in report.sources] == [12, 12]
    assert report.version == open_lake(str(lake)).version
    return open_lake(str(lake))


@pytest.mark.parametrize("name", ["tiny21", "second"])
def test_every_frame_state_and_action_is_aligned(both: Lake, name: str) -> None:
    check_alignment(both, name, Tiny())
    info = both.datasets[name]
    assert (info.cameras, info.image_size, info.fps, info.episodes, info.steps) == (("top", "wrist"), 96, 30.0, 12, 240)
    assert info.state_names == info.action_names == tuple(f"joint{i}" for i in range(7))


def test_statistics_are_those_of_the_rows(both: Lake) -> None:
    states = np.concatenate([state_rows(Tiny(), e) for e in range(12)]).astype(np.float64)
    s = both.datasets["tiny21"].statistics["observation.state"]
    assert s.count == 240
    np.testing.assert_allclose(s.mean, states.mean(0), rtol=1e-12)
    np.testing.assert_allclose(s.std, states.std(0), rtol=1e-12)
    np.testing.assert_allclose(s.q01, np.quantile(states, 0.01, axis=0), rtol=1e-12, atol=1e-12)


def test_read_keeps_order_and_repeats(both: Lake) -> None:
    rows = np.array([239, 0, 0, 17, 240])
    table = both.read(rows, ["dataset", "frame", "episode"])
    assert table["frame"].to_pylist() == [19, 0, 0, 17, 0]
    assert table["episode"].to_pylist() == [11, 0, 0, 0, 0]
    assert table["dataset"].to_pylist() == ["tiny21"] * 4 + ["second"]
    assert both.read(rows[:0], ["frame"]).num_rows == 0


def test_spans_leave_out_the_held_out_episodes(both: Lake) -> None:
    spans = both.spans(["second"], held_out=2)
    assert spans.episode.tolist() == list(range(10))
    assert spans.first_row[0] == 240 and spans.last_row[0] == 259 and spans.datasets == ("second",)
    assert both.spans(["second"], held_out=2, only_held_out=True).episode.tolist() == [10, 11]
    every = both.spans()
    assert len(every.episode) == 24 and every.datasets == ("tiny21", "second")
    assert [every.tasks[t] for t in every.task[:3]] == list(Tiny().tasks)
    with pytest.raises(DrivetrainError, match=r"held_out = 12 leaves none"):
        both.spans(held_out=12)
    with pytest.raises(DrivetrainError, match=r"no data set 'third'.*tiny21, second"):
        both.spans(["third"])


def test_millions_of_episodes_open_in_seconds() -> None:
    """10^9 steps in 3 million episodes: arithmetic on arrays, right to the last row."""
    n = 3_000_000
    length = 300 + np.arange(n) % 67
    spans = pa.StructArray.from_arrays(
        [pa.array(["a", "b", "c"]).take(pa.array(np.arange(2 * n) % 3)), pa.array(np.zeros(2 * n, np.int64)),
         pa.array(np.repeat(length, 2))], ["task", "start", "length"],
    )  # fmt: skip
    table = pa.table(
        {
            "dataset": pa.DictionaryArray.from_arrays(pa.array(np.arange(n) // (n // 2)), ["x", "y"]).cast(pa.string()),
            "episode": np.arange(n) % (n // 2),
            "length": length,
            "spans": pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32) * 2), spans),
        }
    )
    started = time.perf_counter()
    index = lake_module._episode_index(table)
    found = lake_module._spans(["y", "x"], [np.arange(n // 2, n), np.arange(n // 2)], index)
    assert time.perf_counter() - started < 30
    assert found.tasks == ("a", "b", "c") and len(found.length) == 2 * n
    assert found.first_row[0] == length[: n // 2].sum() and found.last_row[n - 1] == length.sum() - 1
    assert (found.dataset[0], found.dataset[-1], found.episode[0], found.episode[-1]) == (0, 1, 0, n // 2 - 1)
    assert all(
        getattr(found, f).dtype == np.int64 for f in ("dataset", "task", "episode", "first_row", "length", "last_row")
    )
    with_a_gap = lake_module._spans(["x"], [np.array([2, 0])], index)
    assert with_a_gap.first_row.tolist() == [601, 601, 0, 0] and with_a_gap.tasks == ("b", "c", "a")


def test_ray_is_started_only_for_work_enough(tiny21: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer = commit.Committer(folder_of(str(tmp_path / "lake")), 224)
    source = read_source(str(tiny21))
    hour = replace(source, cameras=(Camera("top", "observation.images.top", 480, 640, True),))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert ingest_module._is_small([source], committer)
    assert not ingest_module._is_small([hour] * 30, committer)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert ingest_module._is_small([hour] * 30, committer)


def test_a_pickled_lake_reads_the_same_version(both: Lake) -> None:
    copy = pickle.loads(pickle.dumps(both))
    assert copy.version == both.version
    assert copy.read(np.array([5]), ["frame"]).equals(both.read(np.array([5]), ["frame"]))


def test_ingesting_again_adds_nothing(both: Lake, tiny21: Path) -> None:
    report = ingest([str(tiny21)], both.uri, image_size=96)
    assert report.version == both.version
    assert report.sources[0].already == 12 and report.sources[0].added_episodes == 0


def test_new_episodes_of_a_source_are_added(tmp_path: Path) -> None:
    tiny = Tiny(lengths=(10, 11, 12))
    folder = write_v21(tmp_path / "growing", Tiny(lengths=(10, 11)))
    lake = str(tmp_path / "lake")
    first = ingest([str(folder)], lake, image_size=64)
    shutil.rmtree(folder)
    write_v21(folder, tiny)
    second = ingest([str(folder)], lake, image_size=64)
    assert (second.sources[0].already, second.sources[0].added_episodes) == (2, 1)
    check_alignment(open_lake(lake), "growing", tiny)
    assert open_lake(lake, first.version).datasets["growing"].episodes == 2
    assert open_lake(lake).datasets["growing"].statistics["action"].count == 33


KILLED = """
import os, signal, sys
from drivetrain.lake import commit, ingest
where, source, lake = sys.argv[1:]
ingest.COMMIT_SECONDS, ingest.MIN_TASK_ROWS = 0.0, 1
calls = 0
def kill_after(function, number):
    def wrapped(*a, **k):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*a, **k)
    return wrapped
name, number = where.split(":")
if name == "progress":
    ingest.ingest([source], lake, image_size=64, progress=kill_after(lambda p: None, int(number)))
else:
    setattr(commit, name, kill_after(getattr(commit, name), int(number)))
    ingest.ingest([source], lake, image_size=64)
"""


@pytest.fixture(scope="module")
def whole(tiny30: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """What an ingest that nobody kills makes of `tiny30`."""
    lake = str(tmp_path_factory.mktemp("whole") / "lake")
    ingest([str(tiny30)], lake, image_size=64)
    return open_lake(lake)


SLOW = [pytest.param(where, marks=pytest.mark.slow) for where in ("create_tables:1", "progress:2", "replace_rows:3")]


@pytest.mark.parametrize("where", ["append:4", "publish:2", *SLOW])
def test_killed_and_run_again_gives_the_same_tables(where: str, tiny30: Path, whole: Lake, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", KILLED, where, str(tiny30), lake]
    killed = subprocess.run(command, env=environment, capture_output=True, timeout=200)
    assert killed.returncode == -9, killed.stderr.decode()
    before = open_lake(lake).datasets["tiny30"].episodes if where[-1] != "1" else 0
    assert before < 12
    report = ingest([str(tiny30)], lake, image_size=64)
    assert report.sources[0].already == before and report.sources[0].added_episodes == 12 - before
    assert contents(open_lake(lake)) == contents(whole)
    same_statistics(open_lake(lake), whole)


def test_a_source_that_is_none_leaves_nothing_behind(tmp_path: Path, tiny21: Path) -> None:
    lake = tmp_path / "lake"
    with pytest.raises(DrivetrainError, match=r"does not exist"):
        ingest([str(tiny21), str(tmp_path / "nowhere")], str(lake))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DrivetrainError, match=r"not a LeRobot data set: it has no meta/info.json"):
        ingest([str(tmp_path / "empty")], str(lake))
    with pytest.raises(DrivetrainError, match=r"hf://datasets/lerobot/pusht"):
        ingest(["lerobot/pusht"], str(lake))
    assert not lake.exists()


def test_what_a_kill_left_of_a_table_is_not_in_the_way(tmp_path: Path, tiny21: Path) -> None:
    (tmp_path / "lake/steps.lance/data").mkdir(parents=True)
    (tmp_path / "lake/steps.lance/data/half.lance").write_bytes(b"half")
    (tmp_path / "lake/versions").mkdir()
    (tmp_path / "lake/versions/0000000001.json.1234.tmp").write_bytes(b"{")
    report = ingest([str(tiny21)], str(tmp_path / "lake"), image_size=64)
    assert report.sources[0].added_episodes == 12
    assert "tiny21: 12 episodes (240 steps) added, 0 there already, 0 refused" in str(report)
    check_alignment(open_lake(str(tmp_path / "lake")), "tiny21", Tiny(), every=20)


def test_an_address_of_an_unknown_kind_is_named(tmp_path: Path, tiny21: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"foo://bar cannot be read: .*Check the address"):
        ingest(["foo://bar"], str(tmp_path / "lake"))
    with pytest.raises(DrivetrainError, match=r"the lake foo://bar cannot be read: .*Check the address"):
        ingest([str(tiny21)], "foo://bar")
    with pytest.raises(DrivetrainError, match=r"the lake foo://bar cannot be read"):
        open_lake("foo://bar")


def test_a_lake_that_cannot_be_written_is_named(tmp_path: Path, tiny21: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DrivetrainError, match=r"cannot be written"):
        ingest([str(tiny21)], str(tmp_path / "file" / "lake"))


def test_no_lake_and_no_version_are_named(tmp_path: Path, both: Lake) -> None:
    with pytest.raises(DrivetrainError, match=r"drivetrain ingest DATASET --lake"):
        open_lake(str(tmp_path))
    with pytest.raises(DrivetrainError, match=r"has no version 99"):
        open_lake(both.uri, 99)


def test_another_data_set_of_the_same_name_is_refused(both: Lake, tmp_path: Path) -> None:
    other = write_v21(tmp_path / "tiny21", Tiny(lengths=(5,)))
    with pytest.raises(DrivetrainError, match=r"Give this one another name"):
        ingest([str(other)], both.uri, image_size=96)
    with pytest.raises(DrivetrainError, match=r"image_size = 96; now it is 64"):
        ingest([both.datasets["tiny21"].source], both.uri, image_size=64)
    assert open_lake(both.uri).version == both.version


FULL = """
import resource, sys
from drivetrain.lake.ingest import ingest
from drivetrain.types import DrivetrainError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    ingest([sys.argv[1]], sys.argv[2], image_size=64)
except DrivetrainError as error:
    print(error)
"""


def test_a_full_disk_is_named_and_costs_nothing(tiny30: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: both make a write fail half-way."""
    lake = str(tmp_path / "lake")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    failed = subprocess.run(
        [sys.executable, "-c", FULL, str(tiny30), lake], env=environment, capture_output=True, text=True, timeout=200
    )
    assert f"the lake {lake} cannot be written" in failed.stdout, failed
    with pytest.raises(DrivetrainError, match="nothing was ingested yet"):
        open_lake(lake)
    assert ingest([str(tiny30)], lake, image_size=64).sources[0].added_episodes == 12
    check_alignment(open_lake(lake), "tiny30", Tiny(), every=20)


def test_a_fault_of_the_program_is_not_taken_for_one_of_the_disk(
    tiny30: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("drivetrain.lake.episode.encode_image", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ingest([str(tiny30)], str(tmp_path / "lake"), image_size=64)
