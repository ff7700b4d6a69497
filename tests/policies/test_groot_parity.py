"""Our GR00T-N1.5 equals the released implementation (LeRobot 0.5.1) on equal weights, at batch size 1, in float32.

The reference runs one sample at a time, where its shared instruction and its unmasked padding do no harm; ours runs
both samples in one pack.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from groot_samples import golden
from safetensors.torch import load_file, save_file

from drivetrain.data.pack import pack
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import WORDS, WORDS_TIED, parts
from drivetrain.policies.groot.weights import build
from drivetrain.types import PackedBatch, PackShape, Sample

REFERENCE = Path(__file__).parents[1] / "golden" / "groot.safetensors"


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


def test_loss_and_every_gradient(model, reference, batch):
    model.zero_grad()
    made = model.loss(batch)
    made.total.backward()
    assert float(made.total.detach()) == pytest.approx(float(reference["0.loss"] + reference["1.loss"]), rel=1e-5)
    published = {n.removeprefix("gradients."): t for n, t in reference.items() if n.startswith("gradients.")}
    if WORDS not in published:
        published[WORDS] = published.pop(WORDS_TIED)
    compared = set()
    for name, parameter in model.named_parameters():
        split = parts(model.config)[name]
        rows = [part.rows or len(parameter) for part in split]
        assert parameter.grad is not None, name
        for part, grad in zip(split, parameter.grad.split(rows), strict=True):
            error = (grad - published[part.name]).abs().max()
            assert error <= 1e-4 * published[part.name].abs().max() + 1e-7, f"{part.name}: {error}"
            compared.add(part.name)
    assert compared == set(published), compared ^ set(published)


def test_sampled_actions(model, reference, batch):
    found = model.act(batch)
    for i in (0, 1):
        assert torch.allclose(found[i], reference[f"{i}.chunk"], rtol=1e-4, atol=2e-5)
