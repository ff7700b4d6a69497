"""Checkpoints of the published names: strict reading, exact round trips, the variants that occur."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pi05_samples import golden, random_sample, tight
from safetensors.torch import load_file, save_file

from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.policies.pi05.model import Pi05
from drivetrain.policies.pi05.names import TOWER, UNUSED_HEAD, WORDS, WORDS_TIED, parts
from drivetrain.policies.pi05.weights import LEROBOT_PREFIX, build, load, published_tensors, save
from drivetrain.types import DrivetrainError


@pytest.fixture(scope="module")
def model() -> Pi05:
    torch.manual_seed(3)
    model = Pi05(golden())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def tensors(model) -> dict[str, torch.Tensor]:
    return dict(published_tensors(model))


def same(one: Pi05, other: Pi05) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def full_size() -> Pi05:
    with torch.device("meta"):
        return Pi05(Pi05Config())


def test_full_size_has_the_published_parameters():
    """Counts in millions, by part; 812 tensors as in `lerobot/pi05_base`, of which one is not in the model."""
    model, config = full_size(), Pi05Config()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def millions(*prefixes: str, within: str = "") -> float:
        return round(sum(s for n, s in sizes.items() if n.startswith(prefixes) and within in n) / 1e6, 1)

    assert millions("vision.") == 412.4
    assert millions("connector.") == 2.4
    assert millions("embedding.") == 526.6
    prefix = millions("layers.", within=".prefix.") + millions("layers.", within=".norm") + millions("prefix_norm.")
    assert round(prefix, 1) == 1981.9
    assert millions("conditioning.modulation.") == 116.5
    assert round(millions("layers.", within=".suffix.") + millions("conditioning.modulation."), 1) == 427.9
    assert millions("action_", "conditioning.time") == 2.2
    assert millions("") == 3353.4
    unused = sum(p.numel() for p in model.unused())
    assert round(unused / 1e6, 1) == 109.1, "the prefix's half of the last layer"
    assert round(sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6, 1) == 3244.4
    published = [part.name for pieces in parts(config).values() for part in pieces]
    assert len(set(published)) == len(published) == 811
    assert UNUSED_HEAD not in published


def test_published_shapes_at_full_size():
    model, config, found = full_size(), Pi05Config(), {}
    for name, parameter in model.named_parameters():
        pieces = parts(config)[name]
        rows = [part.rows or parameter.shape[0] for part in pieces]
        assert sum(rows) == parameter.shape[0], name
        found |= {part.name: (count, *parameter.shape[1:]) for part, count in zip(pieces, rows, strict=True)}
    language = "paligemma_with_expert.paligemma.model.language_model"
    expert = "paligemma_with_expert.gemma_expert.model"
    for name, shape in {
        f"{TOWER}.vision_model.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{TOWER}.vision_model.embeddings.position_embedding.weight": (256, 1152),
        f"{TOWER}.vision_model.encoder.layers.26.self_attn.k_proj.bias": (1152,),
        f"{TOWER}.vision_model.post_layernorm.weight": (1152,),
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight": (2048, 1152),
        WORDS: (257152, 2048),
        f"{language}.layers.17.self_attn.q_proj.weight": (2048, 2048),
        f"{language}.layers.17.self_attn.k_proj.weight": (256, 2048),
        f"{language}.layers.0.mlp.down_proj.weight": (2048, 16384),
        f"{language}.layers.0.input_layernorm.weight": (2048,),
        f"{language}.norm.weight": (2048,),
        f"{expert}.layers.3.self_attn.o_proj.weight": (1024, 2048),
        f"{expert}.layers.3.self_attn.v_proj.weight": (256, 1024),
        f"{expert}.layers.3.mlp.gate_proj.weight": (4096, 1024),
        f"{expert}.layers.17.post_attention_layernorm.dense.weight": (3072, 1024),
        f"{expert}.norm.dense.bias": (3072,),
        "action_in_proj.weight": (1024, 32),
        "action_out_proj.weight": (32, 1024),
        "time_mlp_out.weight": (1024, 1024),
    }.items():
        assert found[name] == shape, name


def test_round_trip(model, tmp_path):
    save(model, tmp_path)
    assert same(build(golden(), tmp_path), model)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(n.startswith(LEROBOT_PREFIX) for n in stored)
    assert not stored[LEROBOT_PREFIX + UNUSED_HEAD].any() and LEROBOT_PREFIX + WORDS in stored
    save(model, tmp_path, dtype=torch.bfloat16, unused_head=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert LEROBOT_PREFIX + UNUSED_HEAD not in stored and {t.dtype for t in stored.values()} == {torch.bfloat16}


def test_our_own_names(model, tmp_path):
    assert same(build(golden(), write(tmp_path, model.state_dict())), model)


@pytest.mark.parametrize("prefix", ["", LEROBOT_PREFIX])
@pytest.mark.parametrize(
    "variant", ["as published", "no unused head", "embedding alone", "newer tower", "old time names"]
)
def test_variants_that_occur(model, tensors, tmp_path, prefix, variant):
    made = dict(tensors)
    if variant == "no unused head":
        del made[UNUSED_HEAD]
    if variant == "embedding alone":
        made[WORDS_TIED] = made.pop(WORDS)
    if variant == "newer tower":
        made = {n.replace(f"{TOWER}.vision_model.", f"{TOWER}."): t for n, t in made.items()}
    if variant == "old time names":
        made = {n.replace("time_mlp_", "action_time_mlp_"): t for n, t in made.items()}
    write(tmp_path, {prefix + n: t for n, t in made.items()})
    other = Pi05(golden())
    report = load(other, tmp_path)
    assert same(other, model) and report.loaded == len(tensors) - 1
    assert report.unused == (() if variant == "no unused head" else (prefix + UNUSED_HEAD,))


def test_of_two_embeddings_the_one_that_was_trained_is_read(model, tensors, tmp_path):
    """LeRobot 0.6.1 saves both, and reads the language model's; the head's copy may be stale."""
    write(tmp_path, {**tensors, WORDS_TIED: tensors[WORDS], WORDS: torch.zeros_like(tensors[WORDS])})
    other = Pi05(golden())
    assert set(load(other, tmp_path).unused) == {UNUSED_HEAD, WORDS}
    assert same(other, model)


def test_every_fault_is_named(tensors, tmp_path):
    vision = [n for n in tensors if ".encoder.layers.1." in n]
    bad = {n.replace("layers.1", "block.1") if n in vision else n: t for n, t in tensors.items()}
    del bad["time_mlp_in.bias"]
    bad["action_out_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(DrivetrainError) as error:
        build(golden(), write(tmp_path, bad))
    text = str(error.value)
    assert f"({2 * len(vision) + 2} faults)" in text
    assert "missing: time_mlp_in.bias" in text and "missing: " + vision[0] in text
    assert "action_out_proj.weight: [3, 3] in the file, [8, 24] in the model" in text


def test_a_checkpoint_of_another_policy_is_refused(tensors, tmp_path):
    """pi-0 has plain norms in its expert and a projection of the state."""
    other = {n.replace(".dense.weight", ".weight"): t for n, t in tensors.items() if not n.endswith(".dense.bias")}
    with pytest.raises(DrivetrainError, match=r"not known: state_proj\.weight"):
        build(golden(), write(tmp_path, {**other, "state_proj.weight": torch.zeros(3, 3)}))


def test_no_or_broken_weights_are_an_error(tmp_path, tensors):
    with pytest.raises(DrivetrainError, match="no weights at"):
        build(golden(), tmp_path / "nowhere")
    with pytest.raises(DrivetrainError, match=r"under two names: .*time_mlp_in\.bias"):
        twice = tensors | {"model.time_mlp_in.bias": tensors["time_mlp_in.bias"].clone()}
        build(golden(), write(tmp_path, twice))
    with pytest.raises(DrivetrainError, match=r"missing: .*lm_head"):
        build(golden(), write(tmp_path, {n: t for n, t in tensors.items() if n not in (WORDS, WORDS_TIED)}))
    file = write(tmp_path, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 2 * file.stat().st_size // 3])
    with pytest.raises(DrivetrainError, match="not a readable"):
        build(golden(), tmp_path)


def test_words_are_scaled_and_images_are_not(model):
    """The trap of this family: only the text embedding is multiplied by sqrt(width)."""
    batch = tight([random_sample(golden(), 0)])
    batch.tokens.clamp_(max=39)
    stream = model._prefix(batch)
    images = model.connector(model.vision(batch.images))[0]
    assert torch.allclose(stream[:16], images)
    assert torch.allclose(stream[16:], model.embedding.weight[batch.tokens[16:]] * 32**0.5)
