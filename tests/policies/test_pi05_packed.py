"""The packed loss and every gradient equal those of one unpadded sample at a time, and those of a dense mask."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from gradients import by_part, disagreements
from pi05_samples import micro, random_sample, tight

from drivetrain.data.pack import pack
from drivetrain.policies.blocks.rotary import rotary_angles, rotate
from drivetrain.policies.pi05.layer import JointLayer
from drivetrain.policies.pi05.layout import interleave, make_layout
from drivetrain.policies.pi05.model import Pi05
from drivetrain.policies.pi05.names import parts
from drivetrain.types import PackedBatch, PackShape, Sample

ROOMY = PackShape(tokens=400, samples=7, images=13)


def made(**changes) -> Pi05:
    torch.manual_seed(0)
    model = Pi05(micro(**changes))
    with torch.no_grad():
        for parameter in model.parameters():  # no zero gates, no unit norms: every path must count
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def model() -> Pi05:
    return made()


def five(horizon: int = 10, draws: int = 2) -> list[Sample]:
    """One to three cameras, other numbers of words, action dimensions and weights in each."""
    config = micro(horizon)
    return [random_sample(config, i, cameras=1 + i % 3, draws=draws, dims=5 + i) for i in range(5)]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return five()


def gradients(model: Pi05, packs: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss over all packs, divided once by the summed count, and its gradients."""
    model.zero_grad()
    count = sum(float(p.loss_count()) for p in packs)
    total = 0.0
    for p in packs:
        found = model.loss(p)
        assert torch.equal(found.count, p.loss_count())
        (found.total / count).backward()
        total += float(found.total.detach())
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return total / count, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}


def assert_same(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    split = parts(micro())
    wrong = disagreements(by_part(one[1], split), by_part(other[1], split))
    assert not wrong, wrong


@pytest.mark.parametrize("horizon", [10, 16, 50])
def test_a_pack_equals_its_samples_one_by_one(horizon):
    model, samples = made(horizon=horizon), five(horizon)
    singles = gradients(model, [tight([s]) for s in samples])
    assert_same(gradients(model, [tight(samples)]), singles)
    for name, grad in singles[1].items():
        assert grad.abs().max() > 0, f"{name} has no gradient: the comparison would prove nothing"


def test_tail_and_empty_slots_change_nothing(model, samples):
    assert_same(gradients(model, [pack(samples, ROOMY)]), gradients(model, [tight(samples)]))


def test_a_pack_that_counts_for_nothing_has_zero_gradients(model, samples):
    batch = pack(samples, ROOMY)
    nothing = dataclasses.replace(
        batch, weight=torch.zeros_like(batch.weight), action_mask=torch.zeros_like(batch.action_mask)
    )
    model.zero_grad()
    loss = model.loss(nothing)
    loss.total.backward()
    assert float(loss.total.detach()) == float(loss.count) == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_order_and_distribution_over_packs_change_nothing(model, samples):
    shuffled = [samples[i] for i in (3, 0, 4, 2, 1)]
    packs = [pack(shuffled[:2], ROOMY), pack(shuffled[2:], ROOMY)]
    assert_same(gradients(model, packs), gradients(model, [tight(samples)]))


def test_several_draws_equal_the_mean_of_single_draws(model):
    samples = five(draws=3)
    singles = [
        [dataclasses.replace(s, noise=s.noise[k : k + 1], time=s.time[k : k + 1]) for s in samples] for k in range(3)
    ]
    assert_same(
        gradients(model, [pack(samples, ROOMY)]), gradients(model, [pack(one_draw, ROOMY) for one_draw in singles])
    )


def test_a_sample_does_not_see_its_neighbours(model, samples):
    alone = model.act(tight(samples[:1]))[0]
    for neighbours in (samples[1:3], samples[3:]):
        assert torch.allclose(model.act(pack([*neighbours, samples[0]], ROOMY))[2], alone, atol=1e-5)


def test_act_integrates_the_velocity_that_training_uses(model, samples):
    """The cached prefix gives what reading it again in every step gives, and the first draw is the one that counts."""
    batch = pack(samples, ROOMY)
    steps = model.config.euler_steps
    one = dataclasses.replace(batch, noise=batch.noise[:, :1].clone(), time=batch.time[:, :1].clone())
    actions = one.noise.clone()
    layout = model._layout(one, 1)
    with torch.no_grad():
        for i in range(steps):
            time = torch.full_like(one.time, 1 - i / steps)
            actions -= model._velocity(actions, time, layout, model._prefix(one)) / steps
    assert torch.allclose(model.act(batch), actions[:, 0], atol=1e-5)


@pytest.mark.parametrize(("vision", "language"), [(False, False), (False, True), (True, False)])
def test_frozen_parts_leave_the_other_gradients_as_they_are(model, samples, vision, language):
    batch = pack(samples, ROOMY)
    full = gradients(model, [batch])
    try:
        model.configure_trainable(dataclasses.replace(model.config, tune_vision=vision, tune_language=language))
        partial = gradients(model, [batch])
    finally:
        model.configure_trainable(model.config)
    assert_same(partial, (full[0], {n: full[1][n] for n in partial[1]}))
    names = full[1].keys()
    of_vision = {n for n in names if n.startswith("vision.")}
    of_language = {n for n in names if n.startswith(("connector.", "embedding."))}
    of_language |= {n for n in names if n.startswith("layers.") and ".suffix." not in n}
    assert partial[1].keys() == names - (set() if vision else of_vision) - (set() if language else of_language)


def test_insulation_trains_the_suffix_as_before_and_the_prefix_not_at_all(model, samples):
    batch = pack(samples, ROOMY)
    insulated = made(insulate=True)
    loss, full = gradients(model, [batch])
    again, found = gradients(insulated, [batch])
    of_suffix = {n for n in found if ".suffix." in n or n.startswith(("action_", "conditioning."))}
    assert not [n for n in found.keys() - of_suffix if found[n].any()]
    assert_same((again, {n: found[n] for n in of_suffix}), (loss, {n: full[n] for n in of_suffix}))


# --- the same model written with dense masks --------------------------------------------------------------------------


def dense_loss(model: Pi05, sample: Sample) -> torch.Tensor:
    """One sample and one draw through every computation of the released model: one joint sequence, a dense mask, and a
    last layer whose prefix half is computed in full."""
    batch, config, gemma = tight([sample]), model.config, model.config.gemma
    prefix = model.embedding(batch.tokens) * math.sqrt(gemma.prefix_width)
    prefix = prefix.index_put((batch.image_tokens,), model.connector(model.vision(batch.images)).flatten(0, 1))
    time, noise, actions = batch.time[0], batch.noise[0, 0], batch.actions[0]
    suffix = model.action_in(time * noise + (1 - time) * actions)
    p, h = len(prefix), config.horizon
    visible = torch.ones(p + h, p + h, dtype=torch.bool)
    visible[:p, p:] = False
    angles = rotary_angles(torch.arange(p + h), gemma.head_dim, gemma.rope_theta)
    norms = model.conditioning(time)[0]

    def adaptive(x, number):
        scale, shift, gate = norms[number]
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift, gate

    for i, layer in enumerate(model.layers):
        normal, gate = adaptive(suffix, 2 * i)
        q = torch.cat([layer.prefix.q(layer.norm1(prefix)), layer.suffix.q(normal)])
        k, v = torch.cat([layer.prefix.kv(layer.norm1(prefix)), layer.suffix.kv(normal)]).chunk(2, dim=-1)
        q, k = rotate(q.unflatten(-1, (gemma.heads, -1)), *angles), rotate(k[:, None], *angles)
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * gemma.head_dim**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,kd->qhd", weights, v).flatten(1)
        prefix = prefix + layer.prefix.out(attended[:p])
        prefix = prefix + layer.prefix.feed_forward(layer.norm2(prefix))
        suffix = suffix + layer.suffix.out(attended[p:]) * gate
        normal, gate = adaptive(suffix, 2 * i + 1)
        suffix = suffix + layer.suffix.feed_forward(normal) * gate
    velocity = model.action_out(adaptive(suffix, 2 * gemma.layers)[0])
    return (((velocity - (noise - actions)) ** 2)[batch.action_mask[0]]).sum() * sample.weight


def test_equals_a_dense_mask_that_skips_nothing(model):
    samples = five(draws=1)
    batch = pack(samples, ROOMY)
    found = gradients(model, [batch])
    for parameter in model.unused():
        parameter.requires_grad_(True)
    try:
        model.zero_grad()
        dense = sum(dense_loss(model, s) for s in samples) / batch.loss_count()
        dense.backward()
        for parameter in model.unused():
            assert parameter.grad is None or not parameter.grad.any(), "it was said to be unused"
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if n in found[1] and p.grad is not None}
        assert wanted.keys() == found[1].keys()
        assert_same(found, (float(dense.detach()), wanted))
    finally:
        model.configure_trainable(model.config)
        model.zero_grad()


def test_unused_is_what_a_last_layer_skips(model):
    names = {n for n, p in model.named_parameters() if any(p is u for u in model.unused())}
    skipped = ("prefix.q.weight", "prefix.out.weight", "norm2.weight", "prefix.gate_up.weight", "prefix.down.weight")
    assert names == {"prefix_norm.weight", *(f"layers.2.{n}" for n in skipped)}


# --- the layout of the keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 3])
def test_layout_of_interleaved_keys(draws):
    """Rows named by where they come from: [prefix 0, suffix (0,0)], [prefix 0, suffix (0,1)], ..., the tail last."""
    cu, horizon = torch.tensor([0, 4, 4, 7, 10], dtype=torch.int32), 2  # the second slot is empty; a tail of 3
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2])
    layout = make_layout(cu, positions, 4, draws=draws, horizon=horizon, heads=8, head_dim=4, theta=1e4)
    prefix = torch.arange(10.0, dtype=torch.float64)[:, None].requires_grad_()
    suffix = (100 + torch.arange(3.0 * draws * horizon, dtype=torch.float64))[:, None].requires_grad_()
    rows = interleave(prefix, suffix, layout)
    wanted, keys, queries, segments = [], [0], [0], [(0, 4), (4, 4), (4, 7), (7, 10)]
    for i, (start, end) in enumerate(segments):
        for k in range(draws):
            own = [100 + (i * draws + k) * horizon + j for j in range(horizon)] if i < 3 else []
            wanted += [*range(start, end), *own]
            keys.append(len(wanted))
            queries.append(queries[-1] + 8 * len(own))
    assert rows.flatten().tolist() == wanted
    assert layout.suffix_keys.tolist() == keys and layout.suffix_queries.tolist() == queries
    assert layout.prefix_queries.tolist() == (cu * 8).tolist()
    assert max(b - a for a, b in itertools.pairwise(keys)) <= layout.longest_suffix_keys
    assert torch.autograd.gradcheck(lambda p, s: interleave(p, s, layout), (prefix, suffix))


def test_no_mask_and_no_head_is_allocated():
    for module in Pi05(micro()).modules():
        assert not any(b.ndim > 1 for b in module.buffers(recurse=False))
    assert not [n for n, _ in Pi05(micro()).named_parameters() if "head" in n]


def test_weights_depend_on_the_seed_alone():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(Pi05(micro()).state_dict())
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert not torch.equal(found[0]["connector.weight"], found[2]["connector.weight"])
    assert all(torch.isfinite(t).all() for t in found[0].values())


def test_gates_start_closed(samples):
    """As published: a fresh model's suffix passes through its layers unchanged, and its gates learn from the first step."""
    torch.manual_seed(0)
    model = Pi05(micro())
    layer = model.layers[0]
    assert isinstance(layer, JointLayer)
    _, grads = gradients(model, [tight(samples)])
    assert not grads["layers.0.suffix.out.weight"].any()
    assert grads["conditioning.modulation.weight"].any() and grads["action_in.weight"].any()
