"""However many processes, and however the parameters are spread over them: the same training."""

import pytest
from commands import train
from runs import data, lines, weights

from drivetrain.parallel.mesh import usual_shard

PACKS = {"batch_packs": 4, "batch_samples": 8}


@pytest.fixture(scope="module")
def alone(lake, tmp_path_factory):
    """One process that computes four packs an update."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(lake, out, processes=1, **PACKS)
    return out


@pytest.mark.parametrize(
    ("processes", "shard"),
    [
        (4, 2),  # two copies, each over two processes
        pytest.param(2, 1, marks=pytest.mark.slow),  # copies alone, two packs each
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.slow),
    ],
)
def test_the_loss_curve_and_the_weights_are_those_of_one_process(processes, shard, alone, lake, tmp_path):
    out = tmp_path / "run"
    train(lake, out, processes=processes, shard=shard, **PACKS)
    assert data(out) == data(alone)
    here, there = ([line["loss"] for line in lines(run) if "loss" in line] for run in (out, alone))
    assert len(here) == 8 and here == pytest.approx(there, rel=1e-6)
    assert (weights(out) - weights(alone)).norm() <= 1e-6 * weights(alone).norm()


@pytest.mark.parametrize(
    ("size", "on_this_node", "usual"), [(1, None, 1), (8, 8, 8), (1024, 8, 8), (6, 4, 6), (4, None, 4)]
)
def test_shards_stay_within_a_node(size, on_this_node, usual, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_this_node:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    assert usual_shard(size) == usual
