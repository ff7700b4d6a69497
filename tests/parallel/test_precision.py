"""Mixed precision from outside: computed in bfloat16, trained in float32, and what does not train held in bfloat16."""

from __future__ import annotations

import copy

import groot_samples
import pi05_samples
import torch
from torch import nn

from drivetrain.data.pack import pack
from drivetrain.parallel.precision import compute_in, hold_frozen
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.pi05.model import Pi05
from drivetrain.types import PackShape


def test_a_module_reads_its_parameters_in_the_other_dtype_and_keeps_them():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    mixed = copy.deepcopy(plain)
    compute_in(mixed, torch.bfloat16)
    x = torch.randn(5, 6).bfloat16()
    assert mixed[0].weight.dtype == torch.bfloat16
    made = mixed(x)
    made.float().sum().backward()

    half = copy.deepcopy(plain).bfloat16()
    wanted = half(x)
    wanted.float().sum().backward()
    assert made.dtype == torch.bfloat16 and torch.equal(made, wanted)
    for (name, parameter), other in zip(mixed.named_parameters(), half.parameters(), strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, other.grad.float()), name
    assert all(torch.equal(a, b) for a, b in zip(mixed.state_dict().values(), plain.state_dict().values(), strict=True))
    assert list(mixed.state_dict()) == list(plain.state_dict())


def test_rows_of_a_table_are_cast_not_the_table():
    table = nn.Embedding(10, 4)
    compute_in(table, torch.bfloat16)
    rows = table(torch.tensor([1, 1, 3]))
    assert rows.dtype == torch.bfloat16 and table.weight.dtype == torch.float32
    rows.float().sum().backward()
    assert torch.equal(table.weight.grad.sum(1), torch.tensor([0.0, 8, 0, 4, 0, 0, 0, 0, 0, 0]))


def test_pi05_keeps_its_float32_parts_and_its_embedding_stays_a_table():
    torch.manual_seed(0)
    model = Pi05(pi05_samples.micro())
    exact = (model.conditioning, model.action_in, model.action_out)
    compute_in(model, torch.bfloat16, exact)
    assert model.action_in.weight.dtype == model.conditioning.modulation.weight.dtype == torch.float32
    assert model.layers[0].prefix.gate_up.weight.dtype == torch.bfloat16
    batch = pack([pi05_samples.random_sample(pi05_samples.micro(), 0)], PackShape(tokens=64, samples=1, images=1))
    model.loss(batch).total.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


def test_what_does_not_train_is_held_in_half_the_bytes():
    torch.manual_seed(0)
    model = Groot(groot_samples.micro(tune_llm=False, tune_visual=False))
    before = copy.deepcopy(model)
    hold_frozen(model, torch.bfloat16)
    compute_in(before, torch.bfloat16)
    compute_in(model, torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    samples = [groot_samples.random_sample(groot_samples.micro(), seed) for seed in range(2)]
    batch = pack(samples, PackShape(tokens=400, samples=2, images=2))
    assert torch.equal(model.loss(batch).total, before.loss(batch).total)
