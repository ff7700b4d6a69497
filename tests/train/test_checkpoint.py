"""Checkpoints that cannot lie: what fails is said and does no harm, what is damaged is found and named."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_on
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from drivetrain.checkpoint.folder import complete, faults, find, locked
from drivetrain.checkpoint.restore import changed_settings, restore, training_state
from drivetrain.checkpoint.save import Checkpoints
from drivetrain.checkpoint.writer import Writer, causes
from drivetrain.parallel.mesh import world
from drivetrain.recipes import RECIPES
from drivetrain.types import DrivetrainError

RUN = RECIPES["groot_finetune_tiny"]()


class Small:
    """A model of two layers, its optimizer after one update, and its checkpoints."""

    def __init__(self, here, out: Path, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        fully_shard(self.model, mesh=here.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.model(torch.ones(2, 64)).sum().backward()
        self.optimizer.step()
        self.events: list[dict] = []
        self.checkpoints = Checkpoints(
            out, replace(RUN, **settings), {}, lambda event, **values: self.events.append({"event": event, **values})
        )

    def save(self, step: int) -> None:
        self.checkpoints.save(step, training_state(self.model, self.optimizer))
        self.checkpoints.wait()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().full_tensor().flatten() for p in self.model.parameters()])


@pytest.fixture
def small(tmp_path):
    with world(threads=1) as here:
        yield Small(here, tmp_path, keep_checkpoints=3)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_checkpoint_says_how_large_it_is_and_how_long_it_took(small, tmp_path):
    small.save(2)
    (event,) = small.events
    folder = tmp_path / "checkpoints/step_00000002"
    assert event["event"] == "checkpoint" and event["step"] == 2
    assert event["bytes"] == sum(f.stat().st_size for f in folder.iterdir()) > small.weights().numel() * 12
    assert 0 < event["held_seconds"] <= event["seconds"]
    assert (tmp_path / "checkpoints/latest").read_text() == folder.name
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=folder).returncode == 0
    assert faults(folder) == []


def test_what_was_saved_is_what_is_restored(small, tmp_path):
    small.save(2)
    before = small.weights()
    moments = [s["exp_avg"].full_tensor().clone() for s in small.optimizer.state.values()]
    with torch.no_grad():
        for p in small.model.parameters():
            p.zero_()
        for s in small.optimizer.state.values():
            s["exp_avg"].zero_()
    assert restore(find(tmp_path), small.model, small.optimizer) == 2
    assert torch.equal(small.weights(), before)
    after = [s["exp_avg"].full_tensor() for s in small.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", "datasets.json"])
@pytest.mark.parametrize("damage", ["a flipped bit", "truncated", "gone"])
def test_damage_is_named_and_the_checkpoint_before_is_taken(small, tmp_path, capsys, name, damage):
    small.save(2)
    small.save(4)
    file = tmp_path / "checkpoints/step_00000004" / name
    if damage == "a flipped bit":
        flip_a_bit(file)
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.unlink()
    with pytest.raises(DrivetrainError, match=name.replace(".", r"\.")):
        find(file.parent)
    assert find(tmp_path).name == "step_00000002"
    said = capsys.readouterr().err
    assert "passed over" in said and f"step_00000004/{name}" in said


def test_a_lost_or_old_pointer_misleads_nobody(small, tmp_path, capsys):
    small.save(2)
    small.save(4)
    pointer = tmp_path / "checkpoints/latest"
    pointer.write_text("step_00000002")
    assert find(tmp_path).name == "step_00000004"
    assert "names step_00000002" in capsys.readouterr().err
    pointer.unlink()
    assert find(tmp_path).name == "step_00000004"
    assert "missing" in capsys.readouterr().err


def test_nothing_whole_is_no_reason_to_start_over_in_silence(small, tmp_path):
    small.save(2)
    (tmp_path / "checkpoints/step_00000002/SHA256SUMS").unlink()
    with pytest.raises(DrivetrainError, match=r"no checkpoint in .* is whole.*SHA256SUMS"):
        find(tmp_path)


def test_a_publication_that_fails_is_told_and_tried_again(small, tmp_path, capsys):
    small.save(2)
    pointer = tmp_path / "checkpoints/latest"
    pointer.unlink()
    pointer.mkdir()  # nothing can be renamed onto it
    small.save(4)
    assert small.events[-1]["event"] == "checkpoint failed" and small.events[-1]["step"] == 4
    assert "step 4 failed" in capsys.readouterr().err
    with pytest.raises(DrivetrainError, match=r"step 4 could not be written: rank 0: .*latest"):
        small.checkpoints.finish()
    pointer.rmdir()
    small.save(6)
    small.checkpoints.finish()
    assert pointer.read_text() == "step_00000006" == find(tmp_path).name


def test_a_damaged_folder_under_the_same_name_is_replaced(small, tmp_path):
    small.save(2)
    flip_a_bit(tmp_path / "checkpoints/step_00000002/__0_0.distcp")
    small.save(2)
    assert faults(tmp_path / "checkpoints/step_00000002") == []
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step_00000002", "latest"}


def test_weights_that_are_not_finite_are_never_latest(small, tmp_path):
    small.save(2)
    with torch.no_grad():
        next(iter(small.model.parameters())).fill_(float("nan"))
    small.save(4)
    assert "NaN" in small.events[-1]["reason"] and "0.weight" in small.events[-1]["reason"]
    assert find(tmp_path).name == "step_00000002" == (tmp_path / "checkpoints/latest").read_text()
    assert [c.name for c in complete(tmp_path)] == ["step_00000002"]


@pytest.mark.parametrize(("keep", "left"), [(-1, [6]), (0, [6]), (1, [6]), (2, [6, 4]), (9, [6, 4, 2])])
def test_retention_never_removes_what_latest_names(tmp_path, keep, left):
    with world(threads=1) as here:
        small = Small(here, tmp_path, keep_checkpoints=keep)
        for step in (2, 4, 6):
            small.save(step)
    assert [c.name for c in complete(tmp_path)] == [f"step_{n:08d}" for n in left]
    assert find(tmp_path).name == "step_00000006"


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB: enough for three checkpoints of the small model, not for four."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_leaves_the_run_alive_and_the_last_checkpoint_usable(small_disk):
    with world(threads=1) as here:
        small = Small(here, small_disk, keep_checkpoints=9)
        for step in range(1, 6):
            small.save(step)
        failed = [e for e in small.events if e["event"] == "checkpoint failed"]
        good = [e["step"] for e in small.events if e["event"] == "checkpoint"]
        assert failed and good and "no space left" in failed[0]["reason"]
        assert find(small_disk).name == f"step_{good[-1]:08d}"
        assert not list((small_disk / "checkpoints").glob("*.partial"))
        with pytest.raises(DrivetrainError, match="no space left"):
            small.checkpoints.finish()


def test_a_disk_that_fills_during_the_write_says_so(small_disk):
    (small_disk / "checkpoints").mkdir()
    (small_disk / "other").write_bytes(b"0" * 220_000)
    with world(threads=1) as here:
        small = Small(here, small_disk)
        final = small_disk / "checkpoints/step_00000001"
        writer = Writer(final, 0, {}, lambda: None)  # a size of 0 passes the check that comes first
        with pytest.raises(CheckpointException) as caught:
            dcp_save(training_state(small.model, small.optimizer), storage_writer=writer)
    assert "no space left on device" in causes(caught.value)
    assert "unexpected pos" not in causes(caught.value)
    assert complete(small_disk) == []


# --- several ranks ----------------------------------------------------------------------------------------------------


def refuse_on_one_rank(out: Path) -> tuple[list[dict], str | None, str | None]:
    with world(threads=1) as here:
        small = Small(here, out)
        small.save(1)
        good = small.checkpoints.failure
        if here.rank == 1:
            with torch.no_grad():
                next(iter(small.model.parameters())).to_local().fill_(float("inf"))
        small.save(2)
        return small.events, good, small.checkpoints.failure


def test_a_fault_of_one_rank_is_the_same_failure_on_all(tmp_path):
    (events, good, bad), (_, other_good, other_bad) = run_on(2, refuse_on_one_rank, tmp_path)
    assert good is None and other_good is None
    assert bad == other_bad and bad.startswith("rank 1: ")
    assert [e["event"] for e in events] == ["checkpoint", "checkpoint failed"]
    assert find(tmp_path).name == "step_00000001"
    assert [faults(find(tmp_path), part, 3) for part in range(3)] == [[], [], []]


# --- lock and settings ------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from drivetrain.checkpoint.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_folder_is_held_by_one_run_and_a_dead_one_lets_go(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DrivetrainError, match=f"process {holder.pid} on "), locked(tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_only_the_fields_that_differ_are_listed(small, tmp_path):
    small.save(2)
    saved = find(tmp_path)
    other = replace(RUN, keep_checkpoints=3, workers=7, optimizer=replace(RUN.optimizer, learning_rate=0.5))
    with pytest.raises(DrivetrainError) as caught:
        changed_settings(saved, other)
    assert "optimizer.learning_rate was 0.0001, is 0.5" in str(caught.value)
    assert "eps" not in str(caught.value) and "workers" not in str(caught.value)
    accepted = changed_settings(saved, other, accept=True)
    assert len(accepted) == 2 and any(line.startswith("workers was") for line in accepted)
    wider = replace(RUN, keep_checkpoints=3, policy=replace(RUN.policy, horizon=3))
    with pytest.raises(DrivetrainError, match=r"policy\.horizon .*Another policy"):
        changed_settings(saved, wider, accept=True)
