"""Our pi-0.5 equals the released implementation (LeRobot 0.6.1) on equal weights, in float32.

The reference runs both samples in one batch, with padded text, with one or two absent cameras, and with its dense mask;
ours runs the real tokens in one pack.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gradients import assert_sees_an_error_in_every_gradient, by_part, disagreements
from pi05_samples import golden
from safetensors.torch import load_file, save_file

from drivetrain.data.pack import pack
from drivetrain.policies.pi05.model import Pi05
from drivetrain.policies.pi05.names import WORDS, WORDS_TIED, parts
from drivetrain.policies.pi05.weights import load, published_tensors
from drivetrain.types import PackedBatch, PackShape, Sample

REFERENCE = Path(__file__).parents[1] / "golden" / "pi05.safetensors"
DIMS = 5


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return load_file(REFERENCE)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> Pi05:
    folder = tmp_path_factory.mktemp("published")
    weights = {n.removeprefix("weights."): t for n, t in reference.items() if n.startswith("weights.")}
    save_file(weights, folder / "model.safetensors")
    model = Pi05(golden())
    report = load(model, folder)
    assert len(report.unused) == 2, report.unused
    return model


def sample(reference: dict[str, torch.Tensor], index: int, dims: int) -> Sample:
    """The stored inputs of one sample, unpadded."""
    given = {n.split(".")[1]: t.numpy() for n, t in reference.items() if n.startswith(f"{index}.")}
    places = np.arange(16 * len(given["images"]))
    mask = np.zeros(given["actions"].shape, np.bool_)
    mask[:, :dims] = True
    return Sample(
        id=index,
        epoch=0,
        embodiment=0,
        weight=1.0,
        tokens=np.concatenate([np.zeros_like(places), given["words"]]),
        image_tokens=places,
        images=given["images"],
        state=np.zeros(6, np.float32),
        actions=given["actions"],
        action_mask=mask,
        noise=given["noise"][None],
        time=given["time"],
    )


def batch(reference: dict[str, torch.Tensor], dims: int = DIMS) -> PackedBatch:
    return pack([sample(reference, i, dims) for i in (0, 1)], PackShape(tokens=70, samples=3, images=4))


@pytest.fixture(scope="module")
def gradients(model, reference) -> dict[str, dict[str, torch.Tensor]]:
    """Whose -> by published tensor."""
    model.zero_grad()
    made = model.loss(batch(reference))
    loss = made.total / made.count
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(reference["loss.real"]), rel=1e-5)
    released = {n.removeprefix("gradients."): t for n, t in reference.items() if n.startswith("gradients.")}
    released[WORDS] = released.pop(WORDS_TIED)
    unused, split = model.unused(), parts(model.config)
    ours = {}
    for name, parameter in model.named_parameters():
        if any(parameter is u for u in unused):
            assert all(p.name not in released or not released.pop(p.name).any() for p in split[name]), name
        else:
            ours[name] = parameter.grad
    return {"ours": by_part(ours, split), "released": released}


def test_loss_and_every_gradient(gradients):
    wrong = disagreements(gradients["ours"], gradients["released"])
    assert not wrong, wrong


def test_an_error_of_a_thousandth_in_any_gradient_is_seen(gradients):
    assert_sees_an_error_in_every_gradient(gradients["ours"], gradients["released"])


def test_loss_over_all_dimensions(model, reference):
    """openpi's definition: the padding's targets are noise, and count."""
    made = model.loss(batch(reference, dims=8))
    assert float((made.total / made.count).detach()) == pytest.approx(float(reference["loss.all"]), rel=1e-5)
    assert float(reference["loss.all"]) != pytest.approx(float(reference["loss.real"]), rel=1e-2)


def test_sampled_actions(model, reference):
    found = model.act(batch(reference))
    for i in (0, 1):
        assert torch.allclose(found[i], reference[f"{i}.chunk"], rtol=1e-4, atol=2e-5)


def test_we_write_what_the_released_model_holds(model, reference):
    """Every tensor by name and shape; LeRobot makes the second copy of the embedding itself when it reads."""
    held = {n.removeprefix("weights."): t.shape for n, t in reference.items() if n.startswith("weights.")}
    del held[WORDS_TIED]
    assert {n: t.shape for n, t in published_tensors(model)} == held
