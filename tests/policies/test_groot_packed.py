"""The packed loss and every gradient equal those of one unpadded sample at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gradients import by_part, disagreements
from groot_samples import micro, random_sample, tight

from drivetrain.data.pack import pack
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import parts
from drivetrain.types import DrivetrainError, PackedBatch, PackShape, Sample

ROOMY = PackShape(tokens=400, samples=7, images=13)


@pytest.fixture(scope="module")
def model() -> Groot:
    torch.manual_seed(0)
    model = Groot(micro())
    with torch.no_grad():
        for parameter in model.parameters():  # no zero biases, no unit norms: every path must count
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """One to three cameras, four embodiment slots of which one stays unused, two draws each."""
    config = micro()
    return [
        random_sample(config, i, cameras=1 + i % 3, embodiment=slot, draws=2) for i, slot in enumerate((3, 1, 3, 0, 1))
    ]


def gradients(model: Groot, packs: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss over all packs, divided once by the summed count, and its gradients."""
    model.zero_grad()
    count = sum(float(p.loss_count()) for p in packs)
    total = 0.0
    for p in packs:
        made = model.loss(p)
        assert torch.equal(made.count, p.loss_count())
        (made.total / count).backward()
        total += float(made.total.detach())
    return total / count, {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
    }


def assert_same(model: Groot, one: list[PackedBatch], other: list[PackedBatch]) -> None:
    loss_one, grads_one = gradients(model, one)
    loss_other, grads_other = gradients(model, other)
    assert loss_one == pytest.approx(loss_other, rel=1e-5)
    split = parts(model.config)
    wrong = disagreements(by_part(grads_one, split), by_part(grads_other, split))
    assert not wrong, wrong


def test_a_pack_equals_its_samples_one_by_one(model, samples):
    singles = [tight([s]) for s in samples]
    assert_same(model, [tight(samples)], singles)
    for name, grad in gradients(model, singles)[1].items():
        assert grad.abs().max() > 0, f"{name} has no gradient: the comparison would prove nothing"


def test_tail_and_empty_slots_change_nothing(model, samples):
    assert_same(model, [pack(samples, ROOMY)], [tight(samples)])


def test_order_and_distribution_over_packs_change_nothing(model, samples):
    shuffled = [samples[i] for i in (3, 0, 4, 2, 1)]
    assert_same(model, [pack(shuffled[:2], ROOMY), pack(shuffled[2:], ROOMY)], [tight(samples)])


def test_several_draws_equal_the_mean_of_single_draws(model, samples):
    singles = [
        dataclasses.replace(s, noise=s.noise[k : k + 1], time=s.time[k : k + 1]) for k in range(2) for s in samples
    ]
    assert_same(model, [pack(samples, ROOMY)], [pack(singles[:5], ROOMY), pack(singles[5:], ROOMY)])


def test_a_sample_does_not_see_its_neighbours(model, samples):
    alone = model.act(tight(samples[:1]))[0]
    for neighbours in (samples[1:3], samples[3:]):
        assert torch.allclose(model.act(pack([*neighbours, samples[0]], ROOMY))[2], alone, atol=1e-5)


@pytest.mark.parametrize("tuned", [(False, False), (True, False), (False, True)])
def test_frozen_parts_leave_the_other_gradients_as_they_are(model, samples, tuned):
    batch = pack(samples, ROOMY)
    _, full = gradients(model, [batch])
    try:
        model.configure_trainable(dataclasses.replace(model.config, tune_visual=tuned[0], tune_llm=tuned[1]))
        _, partial = gradients(model, [batch])
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        assert not [n for n in frozen if partial[n].any()]
        expected = {n: torch.zeros_like(g) if n in frozen else g for n, g in full.items()}
        split = parts(model.config)
        wrong = disagreements(by_part(partial, split), by_part(expected, split))
        assert not wrong, wrong
        assert {p.requires_grad for p in model.vision.parameters()} == {tuned[0]}
    finally:
        model.configure_trainable(model.config)


def test_weights_depend_on_the_seed_alone():
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(Groot(micro()).state_dict())
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])
    assert not torch.equal(made[0]["connector.weight"], made[2]["connector.weight"])
    assert all(torch.isfinite(t).all() for t in made[0].values())


def test_frozen_diffusion_has_no_dropout():
    config = micro()
    config = dataclasses.replace(config, head=dataclasses.replace(config.head, dropout=0.5), tune_diffusion=False)
    model = Groot(config).train()
    assert not model.diffusion.blocks[0].dropout.training
    assert model.features_blocks[0].dropout.training


def test_pack_layout(samples):
    batch = pack(samples, ROOMY)
    ends = np.cumsum([len(s.tokens) for s in samples])
    assert batch.cu_tokens.tolist() == [0, *ends, ends[-1], ends[-1], 400]
    assert batch.positions[: ends[0]].tolist() == list(range(ends[0]))
    assert batch.positions[ends[-1] :].tolist() == list(range(400 - ends[-1]))
    used = sum(len(s.images) for s in samples)
    per_image = len(batch.image_tokens) // 13
    assert (batch.tokens[batch.image_tokens[: used * per_image]] == micro().language.image_token).all()
    assert (batch.image_tokens[used * per_image :] == 400).all()
    assert batch.embodiment.tolist() == [3, 1, 3, 0, 1, 3, 3] and batch.sample.tolist() == [0, 1, 2, 3, 4, -1, -1]
    assert batch.max_tokens == 256 and pack(samples, PackShape(tokens=700, samples=5, images=9)).max_tokens == 512
    assert pack(samples[:1], ROOMY).max_tokens == 400, "the tail is a segment too"
    expected = sum(s.action_mask.sum() * s.weight * 2 for s in samples)
    assert float(batch.loss_count()) == pytest.approx(expected, rel=1e-6)


def test_pack_refuses_what_does_not_fit(samples):
    for limit in ("tokens", "samples", "images"):
        with pytest.raises(DrivetrainError, match=f"batch.shape.{limit}"):
            pack(samples, dataclasses.replace(ROOMY, **{limit: 3}))
