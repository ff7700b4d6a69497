"""A step in shapes against a step that really ran, and the full models on 1,024 GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.cluster.dry_run import GIB, dry_run, traffic
from drivetrain.recipes import RECIPES
from drivetrain.types import DrivetrainError

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "policy_step.jsonl"

# Every process of a real gloo world records its own step, as the dry run does, on tensors that hold values.
REAL = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from drivetrain.cluster.dry_run import fake_pack, one_update, recording, usual_shape
from drivetrain.parallel.mesh import world
from drivetrain.recipes import RECIPES
from drivetrain.train.main import sharded_model
from drivetrain.train.optimizer import make_optimizer

out, recipe, shard, packs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
run = replace(RECIPES[recipe](), shard=shard)
with world(shard, 1) as here:
    shape = usual_shape(run, 4, cameras=2)
    model = sharded_model(run, here)
    model.train()
    optimizer = make_optimizer(model, run.optimizer)
    packs = [fake_pack(run, shape) for _ in range(packs // here.size)]
    for pack in packs:  # the segments of a pack hold all of its tokens
        pack.cu_tokens[1:] = torch.tensor([shape.tokens // 4 * i for i in (1, 2, 3, 4)] + [shape.tokens])
        pack.image_tokens[:] = torch.arange(len(pack.image_tokens))
    one_update(run, model, optimizer, packs, here)
    with recording(model, optimizer, packs) as recorder:
        one_update(run, model, optimizer, packs, here, recorder)
    issued = [[c.kind, c.phase, c.bytes, c.ranks, c.stride] for c in recorder.collectives]
    held = {k: sum(a.bytes for a in recorder.allocations if a.kind == k) for k in ("masters", "optimizer")}
    (out / f"{here.rank}.json").write_text(json.dumps([issued, held]))
"""


@pytest.mark.parametrize(
    ("recipe", "processes", "shard", "packs"),
    [
        ("groot_finetune_tiny", 2, 2, 4),
        pytest.param("pi05_finetune_tiny", 4, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_real_step_issues_the_same_collectives_and_holds_the_same(recipe, processes, shard, packs, tmp_path) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
    command = [sys.executable, *launch, str(tmp_path), recipe, str(shard), str(packs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]

    run = replace(RECIPES[recipe](), shard=shard)
    run = replace(run, batch=replace(run.batch, samples=4 * packs, packs=packs))
    for rank in range(processes):
        issued, held = json.loads((tmp_path / f"{rank}.json").read_text())
        dry = dry_run(run, processes, rank, cameras=2)
        assert dry.packs == packs // processes and not dry.scaled
        assert [[c.kind, c.phase, c.bytes, c.ranks, c.stride] for c in dry.collectives] == issued
        assert {kind: dry.memory[kind] for kind in held} == held


def test_groot_on_1024_gpus_in_under_a_minute() -> None:
    check_1024("groot_finetune", parameters=2.398e9, trained=1.0688e9)


@pytest.mark.slow
def test_pi05_on_1024_gpus_in_under_a_minute() -> None:
    check_1024("pi05_finetune", parameters=3.3534e9, trained=3.25e9)


def check_1024(recipe: str, parameters: float, trained: float) -> None:
    run, began = replace(RECIPES[recipe](), shard=8), time.process_time()
    dry = dry_run(run, 1024, rank=700, cameras=2)
    assert time.process_time() - began < 60
    assert dry.parameters == pytest.approx(parameters, rel=0.001)
    assert dry.trained == pytest.approx(trained, rel=0.02)
    # eight share one copy of float32 masters (what is frozen is held in bfloat16) and of AdamW's two moments
    held = 4 * dry.trained + 2 * (dry.parameters - dry.trained)
    assert dry.memory["masters"] == pytest.approx(held / 8, rel=0.01)
    assert dry.memory["optimizer"] == pytest.approx(8 * dry.trained / 8, rel=0.01)
    sent = traffic(dry.collectives)
    # every trained parameter is reduced once, in float32: within the eight, then its part over the 128 copies
    assert sent["reduce-scatter", "backward", 8, 1][1] == pytest.approx(4 * dry.trained, rel=0.01)
    assert sent["all-reduce", "backward", 128, 8][1] == pytest.approx(4 * dry.trained / 8, rel=0.01)
    # a whole checkpoint: masters, and the moments of what is trained
    assert dry.checkpoint_bytes == pytest.approx(held + 8 * dry.trained, rel=0.01)
    assert f"{dry.parameters / 1e6:,.1f} M" in str(dry)


@pytest.mark.slow
@pytest.mark.parametrize("line", [json.loads(text) for text in RESULTS.read_text().splitlines()[:5]], ids=str)
def test_memory_against_measured_peaks(line) -> None:
    """Compiled blocks keep less than the eager ones of a dry run, never more."""
    policy, _, flags = line["case"].partition("_finetune, ")
    cameras, samples = int(flags.split()[0]), int(flags.split()[2])
    run = RECIPES[f"{policy}_finetune"]()
    run = replace(run, batch=replace(run.batch, samples=samples, packs=1))
    predicted = sum(dry_run(run, 1, cameras=cameras).memory.values()) / GIB
    print(f"{line['case']}: predicted {predicted:.1f} GiB, measured {line['peak_gib']} GiB")
    assert 0.97 * line["peak_gib"] < predicted < 1.3 * line["peak_gib"]


def test_a_rank_or_a_split_that_does_not_exist_is_refused() -> None:
    run = RECIPES["groot_finetune_tiny"]()
    with pytest.raises(DrivetrainError, match="no rank 4 among 4"):
        dry_run(run, 4, rank=4)
    with pytest.raises(DrivetrainError, match="groups of 3"):
        dry_run(replace(run, shard=3), 4)
