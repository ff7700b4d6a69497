"""The ways in which data sets are known to be broken, each as its smallest input, and what the lake says.

Checks run in this process, without Ray: `ingest_episodes` is what a worker runs. FC-n numbers the known failures.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures import (
    Tiny,
    images_of,
    read_full_watermark,
    table_of,
    write_json,
    write_lines,
    write_table,
    write_v21,
    write_v30,
    write_video,
)

from drivetrain.lake.episode import Done, Work, ingest_episodes
from drivetrain.lake.folder import folder_of
from drivetrain.lake.images import decode_image
from drivetrain.lake.sources import read_source
from drivetrain.lake.tables import SCHEMAS, append, create_tables, table_uri
from drivetrain.types import DrivetrainError

SMALL = Tiny(lengths=(6, 7, 8), sizes={"top": (64, 64)})


def examine(folder: Path, lake: Path, *, size: int = 64) -> tuple[Done, list[dict]]:
    """What a worker makes of all episodes, and the rows it wrote."""
    import lance

    source = read_source(str(folder))
    target = folder_of(str(lake))
    version = create_tables(target)["steps"]
    done = ingest_episodes(Work(replace(source, episodes=()), source.episodes, target, size, strict=False))
    if not done.fragments:
        return done, []
    steps = lance.dataset(table_uri(target, "steps"), version=append(target, "steps", version, done.fragments))
    assert steps.schema.equals(SCHEMAS["steps"])
    return done, steps.to_table().to_pylist()


def check_watermarks(rows: list[dict], sizes: dict[str, tuple[int, int]]) -> None:
    for row in rows:
        assert row["action"][0] == row["frame"]
        for camera, (data, size) in enumerate(zip(row["images"], sizes.values(), strict=True)):
            assert read_full_watermark(decode_image(data), size) == (row["episode"], row["frame"], camera)


def refused(folder: Path, lake: Path) -> dict[int, str]:
    """Episode -> check and finding, for the refused ones; the others must be right in every frame."""
    done, rows = examine(folder, lake)
    check_watermarks(rows, {"top": (64, 64)})
    assert all(f.remedy and f.source == str(folder) and f.file for f in done.findings)
    assert {e["episode"] for e in done.episodes}.isdisjoint({f.episode for f in done.findings})
    return {f.episode: f"{f.check}@{f.frame}: {f.found}" for f in done.findings}


@pytest.fixture
def v21(tmp_path: Path) -> Path:
    return write_v21(tmp_path / "v21", SMALL)


@pytest.fixture
def v30(tmp_path: Path) -> Path:
    return write_v30(tmp_path / "v30", SMALL, per_file=2)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def edit_json(file: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    write_json(file, value)


def edit_column(file: Path, name: str, change: Callable[[list], Any]) -> None:
    """Change the values of one column in place; its type stays."""
    table = pq.read_table(file)
    values = table[name].to_pylist()
    change(values)
    column = pa.array(values, table[name].type)
    write_table(file, table.set_column(table.column_names.index(name), name, column))


def data_file(folder: Path, episode: int) -> Path:
    return folder / f"data/chunk-000/episode_{episode:06d}.parquet"


def video_file(folder: Path, episode: int, camera: str = "top") -> Path:
    return folder / f"videos/chunk-000/observation.images.{camera}/episode_{episode:06d}.mp4"


# --- FC-70: good data sets pass without a finding


def test_clean_data_sets_have_no_findings(tiny21: Path, tiny30: Path, tmp_path: Path) -> None:
    for folder in (tiny21, tiny30):
        done, rows = examine(folder, tmp_path / folder.name)
        assert done.findings == [] and len(rows) == 240 and read_source(str(folder)).findings == ()
        check_watermarks(rows, Tiny().sizes)


def test_idle_episodes_and_constant_dimensions_pass(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 1), "observation.state", lambda rows: [rows.__setitem__(i, [0.5] * 7) for i in range(7)])
    assert refused(v21, lake) == {}


def test_the_real_data_set_has_no_findings(lake: Path) -> None:
    folder = Path(__file__).parents[2] / "../shared/data/g1_bottle_v21"
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    source = read_source(str(folder))
    assert source.findings == ()
    assert (source.version, source.fps, len(source.episodes), len(source.state_names)) == ("v2.1", 30.0, 12, 26)
    assert source.state_names[0] == "kLeftShoulderPitch"
    shortest = min(source.episodes, key=lambda e: e.length)
    target = folder_of(str(lake))
    create_tables(target)
    done = ingest_episodes(Work(replace(source, episodes=()), (shortest,), target, 224, strict=False))
    assert done.findings == [] and done.episodes[0]["length"] == shortest.length


# --- FC-01: order


def test_file_order_and_metadata_order_do_not_matter(v21: Path, lake: Path) -> None:
    lines = (v21 / "meta/episodes.jsonl").read_text().splitlines()
    (v21 / "meta/episodes.jsonl").write_text("\n".join(reversed(lines)))
    assert refused(v21, lake) == {}
    assert [e.index for e in read_source(str(v21)).episodes] == [0, 1, 2]


def test_row_order_does_not_matter(v21: Path, v30: Path, lake: Path) -> None:
    table = table_of(SMALL, 1)
    write_table(data_file(v21, 1), table.take(pa.array([3, 1, 2, 0, 6, 5, 4])))
    assert refused(v21, lake) == {}
    file = v30 / "data/chunk-000/file-000.parquet"
    write_table(file, pa.concat_tables([table_of(SMALL, 1), table_of(SMALL, 0)]))
    assert refused(v30, lake) == {}


def test_times_of_another_order_are_told_from_gaps(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 0), "timestamp", lambda t: t.__setitem__(slice(2, 5), [t[4], t[3], t[2]]))
    edit_column(data_file(v21, 1), "timestamp", lambda t: t.__setitem__(slice(4, 7), [x + 0.2 for x in t[4:]]))
    found = refused(v21, lake)
    assert list(found) == [0, 1]
    assert found[0].startswith("order@2: the rows are in the wrong order: frame 2 carries the time of frame 4")
    assert found[1].startswith("timestamps@4") and "a gap of 7.0 frames" in found[1]


# --- FC-02: versions


def test_versions_are_told_by_layout_and_field(v21: Path, v30: Path, tmp_path: Path, lake: Path) -> None:
    assert read_source(str(v21)).version == "v2.1"
    assert read_source(str(v30)).version == "v3.0"
    v20 = write_v21(tmp_path / "v20", SMALL, version="v2.0")
    assert read_source(str(v20)).version == "v2.0" and refused(v20, lake) == {}
    edit_json(v30 / "meta/info.json", lambda i: i.update(codebase_version="v2.1"))
    with pytest.raises(DrivetrainError, match=r'says v2.1, but .* laid out as v3.0.*set "codebase_version": "v3.0"'):
        read_source(str(v30))
    edit_json(v21 / "meta/info.json", lambda i: i.update(codebase_version="v1.6"))
    with pytest.raises(DrivetrainError, match=r'codebase_version "v1.6"; v2.0, v2.1, v3.0 can be read'):
        read_source(str(v21))
    shutil.copytree(v30 / "meta/episodes", v21 / "meta/episodes")
    with pytest.raises(DrivetrainError, match=r"holds two layouts"):
        read_source(str(v21))
    shutil.rmtree(v30 / "meta/episodes")
    (v30 / "meta/tasks.parquet").unlink()
    with pytest.raises(DrivetrainError, match=r"no list of episodes"):
        read_source(str(v30))


# --- FC-03, FC-27: statistics and names of the source are not needed


def test_statistics_come_from_rows_and_names_may_be_null(v21: Path, lake: Path) -> None:
    (v21 / "meta/episodes_stats.jsonl").unlink()

    def holes(info: dict) -> None:
        info["features"]["observation.images.top"]["names"] = None
        info["features"]["observation.state"]["names"] = None
        info["features"]["action"]["names"] = {"motors": [f"m{i}" for i in range(7)]}

    edit_json(v21 / "meta/info.json", holes)
    done, _ = examine(v21, lake)
    assert done.findings == [] and done.sketches["action"].count == 21
    source = read_source(str(v21))
    assert source.state_names[6] == "state[6]" and source.action_names[6] == "m6"


# --- FC-04, FC-35: videos


def test_a_video_one_frame_short_or_long_is_found(v21: Path, lake: Path) -> None:
    frames = list(images_of(SMALL, 2, "top"))
    write_video(video_file(v21, 2), iter(frames[:-1]), 30)
    write_video(video_file(v21, 1), iter([*images_of(SMALL, 1, "top"), frames[0]]), 30)
    found = refused(v21, lake)
    assert found[2].startswith("frame-count@-1: observation.images.top has only 7 of 8 frames")
    assert found[1].startswith("frame-count@-1: observation.images.top has more than 7 frames")
    assert list(found) == [1, 2]


def test_a_last_timestamp_past_the_last_frame_is_found(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 2), "timestamp", lambda t: t.__setitem__(7, 7.6 / 30))
    assert refused(v21, lake)[2].startswith("timestamps@7")


def broken_videos(folder: Path) -> dict[str, Callable[[Path], None]]:
    def half(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def half_faststart(file: Path) -> None:
        write_video(file, images_of(SMALL, 0, "top"), 30, movflags="faststart")
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 7 // 10])

    def audio(file: Path) -> None:
        import av

        with av.open(str(file), "w") as container:
            stream = container.add_stream("aac", rate=16000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux(stream.encode(frame))
            container.mux(stream.encode())

    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"
    return {
        "video@-1: the file is empty": lambda f: f.write_bytes(b"") and None,
        "video@-1: the file cannot be opened": half,
        "video@": half_faststart,
        "video@-1: the file is a Git LFS pointer": lambda f: f.write_text(pointer) and None,
        "video@-1: the file has no video stream": audio,
        "video@-1: the file is missing": lambda f: f.unlink(),
    }


@pytest.mark.parametrize("kind", range(6))
def test_broken_videos_are_named(kind: int, v21: Path, lake: Path) -> None:
    expected, breaking = list(broken_videos(v21).items())[kind]
    breaking(video_file(v21, 0))
    found = refused(v21, lake)
    assert list(found) == [0] and found[0].startswith(expected), found


# --- FC-07, FC-28: metadata that point to the wrong place


def episodes_v30(folder: Path) -> Path:
    return folder / "meta/episodes/chunk-000/file-000.parquet"


def test_offsets_past_the_end_or_into_a_neighbour_are_found(v30: Path, lake: Path) -> None:
    prefix = "videos/observation.images.top"
    edit_column(episodes_v30(v30), f"{prefix}/from_timestamp", lambda t: t.__setitem__(2, 100.0))
    assert refused(v30, lake)[2].startswith("frame-count@-1: observation.images.top has only 0 of 8 frames")
    edit_column(episodes_v30(v30), f"{prefix}/from_timestamp", lambda t: t.__setitem__(slice(1, 3), [0.0, 0.0]))
    found = refused(v30, lake)
    assert list(found) == [0, 1] and "the same frames to this episode and to episode 1" in found[0]


def test_rows_in_another_file_than_the_metadata_say_are_found(v30: Path, lake: Path) -> None:
    edit_column(episodes_v30(v30), "data/file_index", lambda t: t.__setitem__(2, 0))
    found = refused(v30, lake)
    assert list(found) == [2] and found[2].startswith("length@-1: no row of episode 2 is in the file")
    edit_column(episodes_v30(v30), "data/file_index", lambda t: t.__setitem__(2, 9))
    assert refused(v30, lake)[2].startswith("data-file@-1: the file is missing")


# --- FC-08: interrupted writers


def test_damaged_parquet_is_named(tmp_path: Path, lake: Path) -> None:
    folder = write_v21(tmp_path / "damaged", replace(SMALL, lengths=(6, 7, 8, 600)))
    cut, empty, page = (data_file(folder, e) for e in (0, 1, 3))
    cut.write_bytes(cut.read_bytes()[:-50])
    empty.write_bytes(b"")
    at = pq.ParquetFile(page).metadata.row_group(0).column(0).data_page_offset + 40
    data = bytearray(page.read_bytes())
    data[at : at + 8] = bytes(8)
    page.write_bytes(bytes(data))
    data_file(folder, 2).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")
    found = refused(folder, lake)
    assert list(found) == [0, 1, 2, 3] and all(f.startswith("data-file@-1") for f in found.values()), found
    assert "writer was cut off" in found[0] and "0 bytes" in found[1] and "git lfs pull" in found[2]


def test_totals_that_disagree_are_reported(v21: Path) -> None:
    edit_json(v21 / "meta/info.json", lambda i: i.update(total_episodes=14))
    (finding,) = read_source(str(v21)).findings
    assert finding.check == "totals" and "total_episodes = 14, the list of episodes has 3" in finding.found


def test_damaged_metadata_name_the_file(v30: Path) -> None:
    file = episodes_v30(v30)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(DrivetrainError, match=r"episodes/chunk-000/file-000.parquet is not a readable Parquet"):
        read_source(str(v30))


# --- FC-09, FC-69: codecs


@pytest.mark.parametrize("codec", ["libsvtav1", "libx265", "libx264"])
@pytest.mark.parametrize("gop", [3, 250])
def test_every_codec_gives_every_frame(codec: str, gop: int, tmp_path: Path, lake: Path) -> None:
    tiny = Tiny(lengths=(9, 14, 7), sizes={"top": (64, 64)}, codec=codec, gop=gop)
    for folder in (write_v30(tmp_path / "v30", tiny, per_file=3), write_v21(tmp_path / "v21", tiny)):
        done, rows = examine(folder, lake)
        assert done.findings == [] and len(rows) == 30
        check_watermarks(rows, tiny.sizes)


# --- FC-19, FC-20: cameras


def test_cameras_of_any_size_keep_their_aspect_and_order(tmp_path: Path, lake: Path) -> None:
    tiny = Tiny(lengths=(5, 6), sizes={"side": (96, 128), "base": (128, 96), "wrist": (64, 64)})
    folder = write_v21(tmp_path / "cameras", tiny)
    done, rows = examine(folder, lake, size=128)
    assert done.findings == [] and [c.name for c in read_source(str(folder)).cameras] == ["side", "base", "wrist"]
    check_watermarks(rows, tiny.sizes)
    wide = decode_image(rows[0]["images"][0])
    assert wide.shape == (128, 128, 3) and wide[:12].max() < 10 and wide[20:30].max() > 200


def test_a_camera_of_another_size_than_declared_is_found(v21: Path, lake: Path) -> None:
    edit_json(v21 / "meta/info.json", lambda i: i["features"]["observation.images.top"].update(shape=[48, 64, 3]))
    found = refused(v21, lake)
    assert len(found) == 3 and "is 64x64 pixels, meta/info.json says 64x48" in found[0]


# --- FC-29, FC-30: clocks


def test_drifted_offsets_still_find_every_frame(tmp_path: Path, lake: Path) -> None:
    tiny = Tiny(lengths=(4,) * 30, sizes={"top": (64, 64)})
    folder = write_v30(tmp_path / "drift", tiny, per_file=30)
    name = "videos/observation.images.top/from_timestamp"
    edit_column(episodes_v30(folder), name, lambda t: [t.__setitem__(i, t[i] + 0.9 / 30 * i / 29) for i in range(30)])
    assert refused(folder, lake) == {}


def test_float32_times_of_a_long_recording_pass(v21: Path) -> None:
    from drivetrain.lake.rows import EpisodeRows
    from drivetrain.lake.validate import check_timestamps

    n = 200_000
    time = (np.arange(n) / 30).astype(np.float32).astype(np.float64)
    nothing = np.zeros((n, 7), np.float32)
    rows = EpisodeRows(np.arange(n), time, np.zeros(n, np.int64), nothing, nothing, {})
    source = read_source(str(v21))
    check_timestamps(source, source.episodes[0], rows)
    rows.timestamp[:] = np.arange(n) / 30 + np.where(np.arange(n) % 2, 0.5 / 30, 0)  # exactly at the tolerance
    check_timestamps(source, source.episodes[0], rows)


@pytest.mark.parametrize("fps", ["30", True, None, 0, -30, 1e9, float("nan"), float("inf")])
def test_impossible_rates_are_refused(fps: object, v21: Path) -> None:
    edit_json(v21 / "meta/info.json", lambda i: i.update(fps=fps))
    with pytest.raises(DrivetrainError, match=r"fps is"):
        read_source(str(v21))


def test_fractional_rates_are_kept(tmp_path: Path, lake: Path) -> None:
    folder = write_v21(tmp_path / "ntsc", replace(SMALL, fps=29.97))
    assert refused(folder, lake) == {} and read_source(str(folder)).fps == 29.97


def test_a_rate_that_rows_or_video_contradict_is_found(tmp_path: Path, lake: Path) -> None:
    folder = write_v21(tmp_path / "rates", replace(SMALL, lengths=(40, 6, 600)))
    write_video(video_file(folder, 0), images_of(replace(SMALL, lengths=(40,)), 0, "top"), 15)
    edit_column(data_file(folder, 1), "timestamp", lambda t: t.__setitem__(slice(None), [2 * x for x in t]))
    edit_column(
        data_file(folder, 2), "timestamp", lambda t: t.__setitem__(slice(None), [i / 29.97 for i in range(600)])
    )
    found = refused(folder, lake)
    assert found[0].startswith("video-clock@1") and "the video says 15.000 frames/s" in found[0]
    assert found[1].startswith("rate@1: the timestamps are those of 15.000 frames/s")
    assert found[2].startswith("rate@500") and "29.970" in found[2]


# --- FC-36: tasks


def test_tasks_of_any_text_survive(tmp_path: Path, lake: Path) -> None:
    texts = ("把瓶子放下", 'say "hi" 🤖\nthen stop', "", "same", "same")
    tiny = Tiny(lengths=(3,) * 5, sizes={"top": (64, 64)}, tasks=texts)
    for write in (write_v21, write_v30):
        done, rows = examine(write(tmp_path / write.__name__, tiny), lake)
        assert done.findings == [] and [r["task"] for r in rows[::3]] == list(texts)


def test_tasks_files_of_any_form_are_read(v21: Path) -> None:
    file = v21 / "meta/tasks.jsonl"
    tasks = [{"task_index": i, "task": t} for i, t in enumerate(SMALL.tasks)]
    for text in (
        json.dumps(tasks, indent=2),
        "\n".join(json.dumps(t, indent=2) for t in tasks),
        "\ufeff" + "\n".join(map(json.dumps, tasks)),
    ):
        file.write_text(text, encoding="utf-8")
        assert read_source(str(v21)).tasks == dict(enumerate(SMALL.tasks))


def test_tasks_that_cannot_be_read_are_named_with_their_line(v21: Path) -> None:
    file = v21 / "meta/tasks.jsonl"
    file.write_text('{"task_index": 0, "task": "a"}\n{"task_index": 1, "task": \n')
    with pytest.raises(DrivetrainError, match=r"tasks.jsonl, line 3"):
        read_source(str(v21))
    file.write_bytes('{"task_index": 0, "task": "Ä"}'.encode("latin-1"))
    with pytest.raises(DrivetrainError, match=r"not UTF-8 at byte"):
        read_source(str(v21))
    file.unlink()
    with pytest.raises(DrivetrainError, match=r"tasks.jsonl is missing"):
        read_source(str(v21))


def test_a_task_without_text_is_found(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 1), "task_index", lambda t: t.__setitem__(3, 7))
    assert refused(v21, lake) == {1: "task@3: task_index 7 has no text; the tasks file has [0, 1, 2]"}


def test_a_task_that_changes_within_an_episode_makes_two_spans(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 2), "task_index", lambda t: t.__setitem__(slice(5, 8), [0, 0, 0]))
    done, _ = examine(v21, lake)
    assert [(s["task"], s["start"], s["length"]) for s in done.episodes[2]["spans"]] == [
        (SMALL.tasks[2], 0, 5),
        (SMALL.tasks[0], 5, 3),
    ]


# --- FC-37, FC-66: values


@pytest.mark.parametrize(
    ("column", "value", "found"),
    [
        ("action", float("nan"), "non-finite@4: action[2] (joint2) is nan"),
        ("observation.state", float("inf"), "non-finite@4: observation.state[2] (joint2) is inf"),
        ("action", 1e30, "non-finite@4: action[2] (joint2) is"),
        ("action", None, "non-finite@4: action[2] (joint2) is nan"),
    ],
)
def test_values_that_would_break_training_are_found(
    column: str, value: object, found: str, v21: Path, lake: Path
) -> None:
    edit_column(data_file(v21, 1), column, lambda rows: rows[4].__setitem__(2, value))
    result = refused(v21, lake)
    assert list(result) == [1] and result[1].startswith(found)


def test_null_cells_and_wrong_shapes_are_found(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 0), "action", lambda rows: rows.__setitem__(3, None))
    edit_column(data_file(v21, 1), "action", lambda rows: rows[5].pop())
    edit_column(data_file(v21, 2), "frame_index", lambda rows: rows.__setitem__(2, None))
    found = refused(v21, lake)
    assert found[0] == "non-finite@3: action is null"
    assert found[1] == "shape@5: action has 6 values, meta/info.json says 7"
    assert found[2] == "non-finite@2: frame_index is null"


def test_indices_of_other_types_are_widened_and_never_rounded(v21: Path, lake: Path) -> None:
    for episode, kind in enumerate((pa.int32(), pa.float64(), pa.float64())):
        table = table_of(SMALL, episode)
        values = table["frame_index"].cast(kind)
        if episode == 2:
            values = pa.chunked_array([[*values.to_pylist()[:-1], 6.5]])
        write_table(data_file(v21, episode), table.set_column(3, "frame_index", values))
    found = refused(v21, lake)
    assert list(found) == [2] and found[2].startswith("columns@-1: frame_index has the type double")


# --- FC-50: short episodes


def test_short_episodes_pass_and_empty_ones_are_named(tmp_path: Path, lake: Path) -> None:
    tiny = Tiny(lengths=(1, 2, 15, 16, 17, 3), sizes={"top": (64, 64)})
    folder = write_v21(tmp_path / "short", tiny)
    lines = [json.loads(line) for line in (folder / "meta/episodes.jsonl").read_text().splitlines()]
    lines[5]["length"] = 0
    write_lines(folder / "meta/episodes.jsonl", lines)
    write_table(data_file(folder, 5), table_of(tiny, 5).slice(0, 0))
    found = refused(folder, lake)
    assert list(found) == [5] and found[5].startswith("empty@-1")


def test_missing_and_repeated_frames_are_found(v21: Path, lake: Path) -> None:
    edit_column(data_file(v21, 0), "frame_index", lambda f: f.__setitem__(3, 2))
    edit_column(data_file(v21, 1), "frame_index", lambda f: f.__setitem__(6, 9))
    write_table(data_file(v21, 2), table_of(SMALL, 2).slice(0, 5))
    found = refused(v21, lake)
    assert found[0] == "frame-index@3: frame_index 2 occurs twice"
    assert found[1] == "frame-index@6: frame_index 6 is missing"
    assert found[2] == "length@-1: the metadata say 8 rows, the file has 5"


def test_a_missing_column_is_named(v21: Path, lake: Path) -> None:
    write_table(data_file(v21, 1), table_of(SMALL, 1).drop_columns(["action"]))
    assert refused(v21, lake) == {1: "columns@-1: the column 'action' is missing"}
    edit_json(v21 / "meta/info.json", lambda i: i["features"].pop("action"))
    with pytest.raises(DrivetrainError, match=r"has no feature 'action'; it has observation.state"):
        read_source(str(v21))


# --- paths


@pytest.mark.parametrize(
    "template", ["../{episode_index}", "/etc/passwd", "a/../../b", "s3://else/where", "{x}", "{episode_index.real}"]
)
def test_no_path_of_the_metadata_leaves_the_folder(template: str, v21: Path) -> None:
    edit_json(v21 / "meta/info.json", lambda i: i.update(video_path=template))
    with pytest.raises(DrivetrainError, match=r"leaves the folder|cannot be filled"):
        read_source(str(v21))
