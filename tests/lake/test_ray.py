"""The same ingest through Ray: on this machine, with workers that crash, and on a cluster that loses a node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures import Tiny, write_v30
from test_ingest import check_alignment, contents, same_statistics

from drivetrain.lake import ingest as ingest_module
from drivetrain.lake import pool
from drivetrain.lake.episode import Done, Work, ingest_episodes
from drivetrain.lake.ingest import ingest
from drivetrain.lake.lake import open_lake
from drivetrain.types import DrivetrainError


def test_a_cluster_that_is_not_there_is_named() -> None:
    expected = r"Ray cannot be reached at 127.0.0.1:1: .*Check the address"
    with pytest.raises(DrivetrainError, match=expected), pool.ray_at("127.0.0.1:1"):
        pass


def test_ray_gives_the_same_tables_as_one_process(
    ray_session: str, tiny30: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "MIN_TASK_ROWS", 1)
    seen = []
    ingest([str(tiny30)], str(tmp_path / "ray"), image_size=64, ray_address="local", progress=seen.append)
    assert [p.done for p in seen] == list(range(1, 13))
    monkeypatch.setattr(ingest_module, "_ray_runs", lambda: False)
    ingest([str(tiny30)], str(tmp_path / "here"), image_size=64)
    through_ray, here = open_lake(str(tmp_path / "ray")), open_lake(str(tmp_path / "here"))
    assert contents(through_ray) == contents(here)
    same_statistics(through_ray, here)
    check_alignment(through_ray, "tiny30", Tiny(), every=20)


def crashing(episode: int) -> Callable[[Work], Done]:
    """A worker that dies of one episode. Ray sends inner functions by value, so workers need not find this file."""

    def work_or_crash(work: Work) -> Done:
        if any(e.index == episode for e in work.episodes):
            os._exit(11)
        return ingest_episodes(work)

    return work_or_crash


@pytest.mark.slow
def test_an_episode_that_kills_its_worker_is_refused_and_the_rest_goes_on(
    ray_session: str, tiny30: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRIES", 0)
    monkeypatch.setattr(ingest_module, "through_ray", lambda pieces: pool.through_ray(pieces, crashing(5)))
    report = ingest([str(tiny30)], str(tmp_path / "lake"), image_size=64, ray_address="local")
    assert [(f.episode, f.check) for f in report.findings] == [(5, "crash")]
    lake = open_lake(str(tmp_path / "lake"))
    assert lake.datasets["tiny30"].episodes == 11
    assert lake.table("quarantine").to_table()["episode"].to_pylist() == [5]
    monkeypatch.undo()
    again = ingest([str(tiny30)], str(tmp_path / "lake"), image_size=64, ray_address="local")
    assert again.sources[0].added_episodes == 1
    assert open_lake(str(tmp_path / "lake")).table("quarantine").count_rows() == 0


def slowed(seconds: float) -> Callable[[Work], Done]:
    def sleep_and_work(work: Work) -> Done:
        time.sleep(seconds)
        return ingest_episodes(work)

    return sleep_and_work


@pytest.mark.slow
def test_a_node_that_dies_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    folder = write_v30(tmp_path / "many", Tiny(lengths=(20,) * 24, sizes={"top": (64, 64)}))
    monkeypatch.setattr(ingest_module, "MIN_TASK_ROWS", 1)
    monkeypatch.setattr(ingest_module, "through_ray", lambda pieces: pool.through_ray(pieces, slowed(1.0)))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        killed = []

        def kill_one_node(progress) -> None:
            if progress.done >= 3 and not killed:
                cluster.remove_node(node, allow_graceful=False)
                killed.append(progress.done)

        lake = str(tmp_path / "lake")
        report = ingest([str(folder)], lake, image_size=64, ray_address=cluster.address, progress=kill_one_node)
        assert killed and report.findings == () and report.sources[0].added_episodes == 24
        check_alignment(open_lake(lake), "many", Tiny(lengths=(20,) * 24, sizes={"top": (64, 64)}), every=20)
    finally:
        cluster.shutdown()
