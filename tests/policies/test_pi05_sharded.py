"""pi-0.5 sharded, and on a GPU compiled, in bfloat16, with the flash kernel: the same model."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradients import by_part, disagreements
from pi05_samples import golden, micro, random_sample
from torch.distributed.tensor import DTensor

from drivetrain.data.pack import pack
from drivetrain.parallel.mesh import world
from drivetrain.policies.pi05.model import Pi05
from drivetrain.policies.pi05.names import parts
from drivetrain.policies.pi05.parallelize import parallelize
from drivetrain.policies.pi05.weights import load, published_tensors, save
from drivetrain.train.optimizer import full
from drivetrain.types import PackShape


@pytest.mark.skipif(torch.cuda.is_available(), reason="a world with a GPU takes it; the last test is for that")
def test_a_model_of_one_process_reads_computes_and_writes_the_same(tmp_path):
    check(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a world with a GPU takes it; the last test is for that")
def test_a_model_sharded_over_two_processes_reads_computes_and_writes_the_same(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, __file__, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def check(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Pi05(golden())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    samples = [random_sample(golden(), i, cameras=1 + i, draws=2, dims=5) for i in range(2)]
    batch = pack(samples, PackShape(tokens=100, samples=3, images=4))
    batch.tokens.clamp_(max=39)
    plain.loss(batch).total.backward()
    with world() as here:
        if here.main:
            save(plain, folder)
        torch.distributed.barrier()
        with torch.device("meta"):
            model = Pi05(golden())
        parallelize(model, here.mesh, "float32")
        model.to_empty(device=here.device)
        load(model, folder)
        assert any(isinstance(p, DTensor) for p in model.parameters()) == (here.size > 1)
        stored = dict(published_tensors(plain))
        assert all(torch.equal(stored[n], t) for n, t in published_tensors(model))
        loss = model(batch)
        loss.total.backward()
        assert torch.allclose(loss.total.detach(), plain.loss(batch).total.detach(), rtol=1e-5)
        wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        # gradients are summed over processes, which here all saw the same pack
        found = {n: full(p.grad) / here.size for n, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        wrong = disagreements(by_part(found, parts(golden())), by_part(wanted, parts(golden())))
        assert not wrong, wrong
        assert torch.allclose(model.act(batch), plain.act(batch), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernel and compilation are for CUDA")
def test_a_gpu_in_bfloat16_agrees_with_a_cpu_in_float32():
    """Compiled, sharded, with the flash kernel over folded heads: equal up to what bfloat16 rounds."""
    torch.manual_seed(0)
    config = micro()
    config = dataclasses.replace(config, gemma=dataclasses.replace(config.gemma, heads=8, head_dim=64))
    exact = Pi05(config)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    rounded = copy.deepcopy(exact).cuda()
    samples = [random_sample(config, i, cameras=1 + i % 3, draws=2, dims=5 + i) for i in range(5)]
    batch = pack(samples, PackShape(tokens=400, samples=7, images=13))
    exact.loss(batch).total.backward()
    with world() as here:
        parallelize(rounded, here.mesh, "bfloat16")
        loss = rounded(batch.to("cuda"))
        loss.total.backward()
        assert float(loss.total.detach()) == pytest.approx(float(exact.loss(batch).total.detach()), rel=2e-3)
        found = {n: full(p.grad).cpu() for n, p in rounded.named_parameters() if p.grad is not None}
        for name, parameter in exact.named_parameters():
            if parameter.grad is None:
                assert name not in found
                continue
            assert (found[name] - parameter.grad).norm() <= 0.04 * parameter.grad.norm(), name
        assert torch.allclose(rounded.act(batch.to("cuda")).cpu(), exact.act(batch), atol=0.02)


if __name__ == "__main__":
    check(Path(sys.argv[1]))
