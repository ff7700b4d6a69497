"""FLOPs by config, against figures that were worked out by hand from the published architectures, and against torch's
own count of a real forward and backward pass."""

from __future__ import annotations

from dataclasses import replace

import groot_samples
import pi05_samples
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.policies import flops, flops_by_part, make_model
from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.pi05.config import Pi05Config

GROOT_TOKENS = {1: 297, 2: 560, 3: 823}


@pytest.mark.parametrize(
    ("cameras", "vision", "language", "features", "keys_values", "rest"),
    [(1, 220, 363, 122, 30, 42), (2, 440, 692, 236, 56, 42), (3, 661, 1027, 354, 83, 43)],
)
def test_groot_forward_by_part(cameras, vision, language, features, keys_values, rest) -> None:
    parts = flops_by_part(GrootConfig(), [GROOT_TOKENS[cameras]], cameras)
    giga = {name: part.forward / 1e9 for name, part in parts.items()}
    assert giga["vision"] == pytest.approx(vision, rel=0.01)
    assert giga["language"] == pytest.approx(language, rel=0.01)
    assert giga["features"] == pytest.approx(features, rel=0.01)
    assert giga["keys_values"] == pytest.approx(keys_values, abs=0.5)  # figures of two digits
    assert giga["diffusion"] == pytest.approx(rest, abs=0.5)


@pytest.mark.parametrize(
    ("changes", "tera"),
    [
        ({}, (1.17, 2.14, 3.13)),
        ({"tune_visual": True}, (1.97, 3.71, 5.48)),
        ({"tune_llm": True}, (1.89, 3.52, 5.18)),
        ({"tune_visual": True, "tune_llm": True}, (2.33, 4.40, 6.50)),
    ],
)
def test_groot_training(changes, tera) -> None:
    for cameras, expected in zip((1, 2, 3), tera, strict=True):
        total = flops(replace(GrootConfig(), **changes), [GROOT_TOKENS[cameras]], cameras).total
        assert total / 1e12 == pytest.approx(expected, rel=0.01)


def test_groot_draws_share_the_backbone() -> None:
    per_target = [flops(GrootConfig(), [GROOT_TOKENS[v]], v, draws=4).total / 4e12 for v in (1, 2, 3)]
    assert per_target == pytest.approx([0.39, 0.63, 0.88], rel=0.015)


@pytest.mark.parametrize(
    ("changes", "cameras", "text", "draws", "tera"),
    [
        ({}, 3, 200, 1, 13.37),
        ({}, 3, 75, 1, 11.86),
        ({}, 2, 45, 1, 7.82),
        ({}, 2, 20, 1, 7.52),
        ({}, 1, 45, 1, 4.18),
        ({}, 2, 45, 2, 7.92),
        ({}, 2, 45, 5, 8.25),
        ({}, 2, 45, 8, 8.57),
        ({"tune_vision": False, "tune_language": False}, 2, 45, 1, 2.68),
        ({"insulate": True}, 2, 45, 1, 2.68),
    ],
)
def test_pi05_training(changes, cameras, text, draws, tera) -> None:
    config = replace(Pi05Config(), **changes)
    assert flops(config, [cameras * 256 + text], cameras, draws).total / 1e12 == pytest.approx(tera, rel=0.01)


def test_samples_add_up() -> None:
    for config in (GrootConfig(), Pi05Config()):
        apart = flops(config, [300], 1, 2) + flops(config, [900], 3, 2)
        assert flops(config, [300, 900], 4, 2).total == pytest.approx(apart.total)


@pytest.mark.parametrize(
    ("samples", "changes"),
    [
        (groot_samples, {}),
        (groot_samples, {"tune_llm": False, "tune_visual": False}),
        (groot_samples, {"tune_llm": False}),
        (pi05_samples, {}),
        (pi05_samples, {"tune_vision": False, "tune_language": False}),
    ],
)
def test_torch_counts_the_same(samples, changes) -> None:
    """Torch counts what really ran. It takes causal attention for full, and spares the input gradient of first layers:
    together under 3 % here."""
    config = replace(samples.micro(), **changes)
    chosen = [samples.random_sample(config, seed, cameras=1 + seed % 2, draws=2) for seed in range(3)]
    batch, model = samples.tight(chosen), make_model(config)
    if isinstance(config, GrootConfig):
        model.eval()
    expected = flops(config, [len(s.tokens) for s in chosen], sum(len(s.images) for s in chosen), draws=2)

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model(batch).total
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == pytest.approx(expected.forward, rel=0.03)
    assert backward.get_total_flops() == pytest.approx(expected.backward, rel=0.06)
