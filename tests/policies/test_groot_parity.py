"""Our GR00T-N1.5 equals the released implementation (LeRobot 0.5.1) on equal weights, at batch size 1, in float32.

The reference runs one sample at a time, where its shared instruction and its unmasked padding do no harm; ours runs
both samples in one pack.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradients import assert_sees_an_error_in_every_gradient, by_part, disagreements
from groot_samples import golden
from safetensors.torch import load_file, save_file

from drivetrain.data.pack import pack
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import WORDS, WORDS_TIED, parts
from drivetrain.policies.groot.weights import build
from drivetrain.types import PackedBatch, PackShape, Sample

REFERENCE = Path(__file__).parents[1] / "golden" / "groot.safetensors"
# The queries and keys of this diffusion have gradients that are small differences of large terms: rounding moves them by
# up to 8e-5 of their norm, by another share on every instruction set.
ROUNDING = 3e-4


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return load_file(REFERENCE)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Groot:
    folder = tmp_path_factory.mktemp("published")
    weights = {n.removeprefix("weights."): t for n, t in reference.items() if n.startswith("weights.")}
    save_file(weights, folder / "model.safetensors")
    return build(golden(), folder)


def sample(reference: dict[str, torch.Tensor], index: int) -> Sample:
    """The stored inputs of one sample; its weight makes our sum the reference's mean."""
    given = {n.split(".")[1]: t.numpy() for n, t in reference.items() if n.startswith(f"{index}.")}
    (places,) = (given["tokens"] == golden().language.image_token).nonzero()
    return Sample(
        id=index,
        epoch=0,
        embodiment=int(given["embodiment"][0]),
        weight=1 / given["mask"].sum(),
        tokens=given["tokens"],
        image_tokens=places,
        images=given["images"],
        state=given["state"],
        actions=given["actions"],
        action_mask=given["mask"],
        noise=given["noise"][None],
        time=given["time"],
    )


@pytest.fixture(scope="module")
def batch(reference) -> PackedBatch:
    return pack([sample(reference, i) for i in (0, 1)], PackShape(tokens=70, samples=3, images=4))


def test_features(model, reference, batch):
    found = model.backbone(batch)
    for i in (0, 1):
        mine = found[batch.cu_tokens[i] : batch.cu_tokens[i + 1]]
        assert torch.allclose(mine, reference[f"{i}.features"], rtol=1e-4, atol=2e-5)


def test_velocity(model, reference, batch):
    kept = []
    hook = model.action_decoder.register_forward_hook(lambda module, given, made: kept.append(made))
    model(batch)
    hook.remove()
    for i in (0, 1):
        assert torch.allclose(kept[0][i], reference[f"{i}.velocity"], rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def gradients(model, reference, batch) -> dict[str, dict[str, torch.Tensor]]:
    """Whose -> by published tensor."""
    model.zero_grad()
    made = model.loss(batch)
    made.total.backward()
    assert float(made.total.detach()) == pytest.approx(float(reference["0.loss"] + reference["1.loss"]), rel=1e-5)
    published = {n.removeprefix("gradients."): t for n, t in reference.items() if n.startswith("gradients.")}
    if WORDS not in published:
        published[WORDS] = published.pop(WORDS_TIED)
    ours = by_part({n: p.grad for n, p in model.named_parameters()}, parts(model.config))
    return {"ours": ours, "published": published}


def test_loss_and_every_gradient(gradients):
    wrong = disagreements(gradients["ours"], gradients["published"], ROUNDING)
    assert not wrong, wrong


def test_an_error_of_a_thousandth_in_any_gradient_is_seen(gradients):
    assert_sees_an_error_in_every_gradient(gradients["ours"], gradients["published"], ROUNDING)


def test_sampled_actions(model, reference, batch):
    found = model.act(batch)
    for i in (0, 1):
        assert torch.allclose(found[i], reference[f"{i}.chunk"], rtol=1e-4, atol=2e-5)
