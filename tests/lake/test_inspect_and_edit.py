"""Looking into lakes and data sets, taking episodes out, going back, cleaning up."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fixtures import Tiny, action_rows, state_rows, table_of, write_json, write_table, write_v21, write_v30
from test_ingest import check_alignment, contents, same_statistics

from drivetrain.cli import plain
from drivetrain.lake import commit
from drivetrain.lake.edit import clean, readmit, remove, roll_back
from drivetrain.lake.ingest import ingest
from drivetrain.lake.inspect import Answer, Inspection, ask, inspect
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.lake.notices import action_lag
from drivetrain.types import DrivetrainError


@pytest.fixture
def lake(tiny21: Path, tiny30: Path, tmp_path: Path) -> Lake:
    ingest([str(tiny21), str(tiny30)], str(tmp_path / "lake"), image_size=64)
    return open_lake(str(tmp_path / "lake"))


# --- inspect


def test_a_lake_is_described(lake: Lake) -> None:
    found = inspect(lake.uri)
    assert isinstance(found, Inspection) and found.findings == ()
    assert [(s.info.name, s.info.steps, s.format, s.shortest, s.longest) for s in found.datasets] == [
        ("tiny21", 240, "v2.1", 20, 20),
        ("tiny30", 240, "v3.0", 20, 20),
    ]
    assert found.datasets[0].tasks == dict.fromkeys(Tiny().tasks, 4)
    text = str(found)
    assert "tiny30: 12 episodes, 240 steps" in text and "joint6" in text and "0 fault(s), 0 notice(s)" in text
    json.dumps(plain(found))


def test_a_data_set_is_described_without_a_lake(tiny30: Path, tmp_path: Path) -> None:
    found = inspect(str(tiny30))
    assert isinstance(found, Inspection) and found.findings == () and found.version is None
    assert found.datasets[0].info.steps == 240
    states = np.concatenate([state_rows(Tiny(), e) for e in range(12)]).astype(np.float64)
    np.testing.assert_allclose(found.datasets[0].info.statistics["observation.state"].std, states.std(0), rtol=1e-12)
    broken = shutil.copytree(tiny30, tmp_path / "broken")
    (broken / "videos/observation.images.top/chunk-000/file-002.mp4").write_bytes(b"")
    found = inspect(str(broken))
    assert isinstance(found, Inspection)
    assert [f.episode for f in found.findings] == [8, 9, 10, 11] and found.datasets[0].info.episodes == 8
    with pytest.raises(DrivetrainError, match="--sql needs a lake"):
        inspect(str(tiny30), sql="select 1")


def test_sql(lake: Lake) -> None:
    answer = ask(
        lake, "select dataset, count(*) as n, max(state[1]) = 19 as b from steps group by dataset order by dataset"
    )
    assert answer == Answer(("dataset", "n", "b"), (("tiny21", 240, True), ("tiny30", 240, True)))
    assert ask(lake, "select name, episodes from datasets").rows == (("tiny21", 12), ("tiny30", 12))
    image = ask(lake, "select images from steps limit 1").rows[0][0]
    assert len(image) == 2 and re.fullmatch(r"<\d+ bytes>", image[0])
    assert str(ask(lake, "select 1 as one")) == "one\n1"
    with pytest.raises(DrivetrainError, match=r"cannot be answered(.|\n)*steps \(dataset, episode"):
        ask(lake, "select nothing from nowhere")


def test_a_page(lake: Lake, tmp_path: Path) -> None:
    page = tmp_path / "deep/page.html"
    inspect(lake.uri, html=page)
    text = page.read_text()
    assert text.count("data:image/jpeg;base64,") == 2 * 6 * 8 * 2 and text.count("<polyline") == 2 * 6 * 2 * 7
    assert "<script" not in text and "http" not in re.sub(r'src="[^"]*"', "", text)
    assert os.listdir(page.parent) == ["page.html"]


def test_a_page_escapes_what_others_wrote(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = write_v21(tmp_path / "evil", Tiny(lengths=(5,), tasks=(evil,), sizes={"top": (64, 64)}))
    ingest([str(folder)], str(tmp_path / "lake"), image_size=64)
    inspect(str(tmp_path / "lake"), html=tmp_path / "page.html")
    assert "<script" not in (tmp_path / "page.html").read_text()


def test_constant_dimensions_and_empty_tasks_are_noticed(tmp_path: Path) -> None:
    folder = write_v21(tmp_path / "odd", Tiny(lengths=(6, 7), tasks=("", "a"), sizes={"top": (64, 64)}))
    for episode in range(2):
        file = folder / f"data/chunk-000/episode_{episode:06d}.parquet"
        table = pq.read_table(file).to_pylist()
        for k, row in enumerate(table):
            row["action"][3] = 0.5
            row["action"][4] = 1.0 + 1e-4 * (k % 2)
        write_table(file, table_of(Tiny(lengths=(6, 7)), episode).from_pylist(table))
    report = ingest([str(folder)], str(tmp_path / "lake"), image_size=64)
    assert {(f.check, f.severity) for f in report.findings} == {
        ("constant-dimension", "notice"),
        ("empty-task", "notice"),
    }
    assert [f.found.split()[0] for f in report.findings if f.check == "constant-dimension"] == [
        "action[3]",
        "action[4]",
    ]
    assert open_lake(str(tmp_path / "lake")).table("quarantine").count_rows() == 0


# --- FC-68: action and state shifted against each other


@pytest.mark.parametrize(("roll", "expected"), [(0, 0), (1, -1), (-1, 1)])
def test_the_lag_between_action_and_motion(roll: int, expected: int) -> None:
    generator = np.random.default_rng(0)
    states = [np.cumsum(generator.normal(size=(60, 4)), axis=0) for _ in range(3)]
    positions = [np.roll(np.concatenate([s[1:], s[-1:]]), roll, axis=0) for s in states]
    found = action_lag(states, positions)
    assert found and found[0] == expected and found[1] > 0.9
    changes = [np.roll(np.diff(s, axis=0, append=s[-1:]), roll, axis=0) for s in states]
    found = action_lag(states, changes)
    assert found and found[0] == expected and found[1] > 0.9


def test_no_lag_where_nothing_correlates() -> None:
    generator = np.random.default_rng(0)
    states, actions = ([generator.normal(size=(60, 4)) for _ in range(3)] for _ in range(2))
    assert action_lag(states, actions) is None
    assert action_lag(states, [a[:, :3] for a in actions]) is None
    assert action_lag([np.zeros((60, 4))], [np.zeros((60, 4))]) is None


def test_late_actions_are_noticed_at_ingest(tmp_path: Path) -> None:
    tiny = Tiny(lengths=(40, 40), sizes={"top": (64, 64)}, dimensions=4)
    folder = write_v21(tmp_path / "late", tiny)
    for episode in range(2):
        file = folder / f"data/chunk-000/episode_{episode:06d}.parquet"
        rows = pq.read_table(file).to_pylist()
        for row, action in zip(rows, np.roll(action_rows(tiny, episode), 2, axis=0), strict=True):
            row["action"] = action.tolist()
        write_table(file, table_of(tiny, episode).from_pylist(rows))
    report = ingest([str(folder)], str(tmp_path / "lake"), image_size=64)
    assert "action-lag" in {f.check for f in report.findings}, report.findings


# --- FC-21, FC-55, FC-56: taking out and going back


def test_removed_episodes_are_gone_and_stay_out(lake: Lake, tiny30: Path, tmp_path: Path) -> None:
    after = remove(lake.uri, "tiny30", [0, 5, 11], reason="blurred")
    assert after.version == lake.version + 1 and after.datasets["tiny30"].episodes == 9
    check_alignment(after, "tiny21", Tiny())
    check_alignment(after, "tiny30", Tiny())
    assert sorted(set(after.spans(["tiny30"]).episode)) == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    states = np.concatenate([state_rows(Tiny(), e) for e in (1, 2, 3, 4, 6, 7, 8, 9, 10)]).astype(np.float64)
    found = after.datasets["tiny30"].statistics["observation.state"]
    np.testing.assert_allclose(found.std, states.std(0), rtol=1e-12)
    np.testing.assert_allclose(found.q99, np.quantile(states, 0.99, axis=0), rtol=1e-12)
    assert after.table("quarantine").to_table()["found"].to_pylist() == ["blurred"] * 3
    assert open_lake(lake.uri, lake.version).datasets["tiny30"].episodes == 12
    check_alignment(open_lake(lake.uri, lake.version), "tiny30", Tiny(), every=20)
    assert ingest([str(tiny30)], lake.uri, image_size=64).version == after.version
    readmit(lake.uri, "tiny30", [5])
    again = ingest([str(tiny30)], lake.uri, image_size=64)
    assert again.sources[0].added_episodes == 1
    check_alignment(open_lake(lake.uri), "tiny30", Tiny())


def test_a_removed_data_set_is_gone(lake: Lake, tiny21: Path) -> None:
    after = remove(lake.uri, "tiny21")
    assert list(after.datasets) == ["tiny30"] and after.table("steps").count_rows() == 240
    check_alignment(after, "tiny30", Tiny())
    assert ingest([str(tiny21)], lake.uri, image_size=64).sources[0].added_episodes == 12
    check_alignment(open_lake(lake.uri), "tiny21", Tiny())


def test_wrong_arguments_change_nothing(lake: Lake) -> None:
    for arguments, message in (
        (("tiny30", [3, 14]), "has no episode 14. Nothing was removed"),
        (("tiny31", [3]), "no data set 'tiny31'"),
    ):
        with pytest.raises(DrivetrainError, match=message):
            remove(lake.uri, *arguments)
    with pytest.raises(DrivetrainError, match="has no version 77"):
        roll_back(lake.uri, 77)
    with pytest.raises(DrivetrainError, match="were not removed"):
        readmit(lake.uri, "tiny30", [3])
    assert open_lake(lake.uri).version == lake.version


def test_roll_back(lake: Lake) -> None:
    remove(lake.uri, "tiny21")
    back = roll_back(lake.uri, lake.version)
    assert back.version == lake.version + 2
    assert contents(back) == contents(lake)
    same_statistics(back, lake)


def test_clean_deletes_only_what_no_version_names(
    lake: Lake, tiny30: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(lake)
    remove(lake.uri, "tiny21", [1])

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "publish", stop)
    with pytest.raises(KeyboardInterrupt):
        ingest([f"third={tiny30}"], lake.uri, image_size=64)
    monkeypatch.undo()
    left = sum(f.stat().st_size for f in Path(lake.uri).rglob("data/*.lance"))
    assert clean(lake.uri) == 0
    freed = clean(lake.uri, min_age_seconds=0)
    assert 0 < freed < left and clean(lake.uri, min_age_seconds=0) == 0
    assert contents(open_lake(lake.uri, lake.version)) == before
    check_alignment(open_lake(lake.uri), "tiny21", Tiny())


# --- quarantine


def test_a_bad_episode_is_set_aside_and_comes_back_when_repaired(tmp_path: Path) -> None:
    tiny = Tiny(lengths=(6, 7, 8), sizes={"top": (64, 64)})
    folder, lake = write_v21(tmp_path / "set", tiny), str(tmp_path / "lake")
    file = folder / "data/chunk-000/episode_000001.parquet"
    good = file.read_bytes()
    file.write_bytes(good[:-50])
    report = ingest([str(folder)], lake, image_size=64)
    assert report.sources[0].quarantined == 1 and report.sources[0].added_episodes == 2
    (row,) = open_lake(lake).table("quarantine").to_table().to_pylist()
    assert (row["dataset"], row["episode"], row["check"]) == ("set", 1, "data-file") and row["remedy"]
    assert "1 fault(s)" in str(inspect(lake))
    assert ingest([str(folder)], lake, image_size=64).version == report.version
    file.write_bytes(good)
    ingest([str(folder)], lake, image_size=64)
    assert open_lake(lake).table("quarantine").count_rows() == 0
    check_alignment(open_lake(lake), "set", tiny)


def test_strict_stops_at_the_first_bad_episode(tmp_path: Path) -> None:
    folder = write_v30(tmp_path / "set", Tiny(lengths=(6, 7, 8), sizes={"top": (64, 64)}), per_file=1)
    (folder / "data/chunk-000/file-001.parquet").write_bytes(b"")
    with pytest.raises(DrivetrainError, match=r"episode 1 .*data-file.*0 bytes.*strict"):
        ingest([str(folder)], str(tmp_path / "lake"), image_size=64, strict=True)
    info = json.loads((folder / "meta/info.json").read_text())
    write_json(folder / "meta/info.json", info | {"total_episodes": 9})
    with pytest.raises(DrivetrainError, match="total_episodes = 9"):
        ingest([str(folder)], str(tmp_path / "other"), image_size=64, strict=True)
    assert not (tmp_path / "other").exists()


def test_a_source_without_one_good_episode_leaves_its_quarantine(tmp_path: Path) -> None:
    folder = write_v21(tmp_path / "bad", Tiny(lengths=(6,), sizes={"top": (64, 64)}))
    (folder / "data/chunk-000/episode_000000.parquet").unlink()
    report = ingest([str(folder)], str(tmp_path / "lake"), image_size=64)
    assert report.sources[0].added_episodes == 0 and report.sources[0].quarantined == 1
    assert open_lake(str(tmp_path / "lake")).table("quarantine").count_rows() == 1
    with pytest.raises(DrivetrainError, match=r"holds no good episode. Type: drivetrain inspect"):
        open_lake(str(tmp_path / "lake")).spans()
    assert "1 fault(s)" in str(inspect(str(tmp_path / "lake")))
