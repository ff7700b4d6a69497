"""Checkpoints of the published names: strict reading, exact round trips, the variants that occur."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from groot_samples import golden
from safetensors.torch import load_file, save_file

from drivetrain.policies.groot.config import GrootConfig
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import POOLING, WORDS, WORDS_TIED, parts, pooling_head
from drivetrain.policies.groot.weights import LEROBOT_PREFIX, build, load, published_tensors, save
from drivetrain.types import DrivetrainError


@pytest.fixture(scope="module")
def model() -> Groot:
    torch.manual_seed(3)
    return Groot(golden())


@pytest.fixture(scope="module")
def tensors(model) -> dict[str, torch.Tensor]:
    return dict(published_tensors(model))


def same(one: Groot, other: Groot) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_full_size_has_the_published_parameters():
    """Counts in millions, by part; 898 tensors with one copy of the embedding."""
    config = GrootConfig()
    with torch.device("meta"):
        model = Groot(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def millions(*prefixes: str) -> float:
        return round(sum(s for n, s in sizes.items() if n.startswith(prefixes)) / 1e6, 1)

    assert millions("vision.") == 412.4
    assert millions("connector.") == 2.4
    assert millions("language.blocks.", "language.norm.") == 604.0
    assert millions("language.embedding.") == 310.6
    assert millions("features_blocks.") == 201.4
    assert millions("diffusion.") == 550.4
    assert millions("state_encoder.") == 52.5
    assert millions("action_encoder.") == 228.2
    assert millions("action_decoder.") == 34.6
    assert millions("features", "diffusion", "state_", "action_", "future") == 1068.8
    pooling = sum(torch.Size(shape).numel() for shape in pooling_head(config).values())
    assert round((sum(sizes.values()) + pooling) / 1e6, 1) == 2413.5
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert round(trained / 1e6, 1) == 1068.8
    published = [part.name for pieces in parts(config).values() for part in pieces]
    assert len(set(published)) == len(published) and len(published) + len(pooling_head(config)) == 898


def test_published_shapes_at_full_size():
    """A sample of the tensors whose shapes the public code states."""
    config = GrootConfig()
    with torch.device("meta"):
        model = Groot(config)
    found = {}
    for name, parameter in model.named_parameters():
        pieces = parts(config)[name]
        rows = [part.rows or parameter.shape[0] for part in pieces]
        assert sum(rows) == parameter.shape[0]
        found |= {part.name: (count, *parameter.shape[1:]) for part, count in zip(pieces, rows, strict=True)}
    eagle, head = "backbone.eagle_model", "action_head"
    for name, shape in {
        f"{eagle}.vision_model.vision_model.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{eagle}.vision_model.vision_model.embeddings.position_embedding.weight": (256, 1152),
        f"{eagle}.vision_model.vision_model.encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        f"{eagle}.mlp1.0.weight": (2048, 1152),
        f"{eagle}.language_model.model.embed_tokens.weight": (151680, 2048),
        f"{eagle}.language_model.model.layers.11.self_attn.k_proj.weight": (1024, 2048),
        f"{eagle}.language_model.model.layers.11.self_attn.q_norm.weight": (128,),
        f"{eagle}.language_model.model.layers.11.mlp.down_proj.weight": (2048, 6144),
        f"{head}.vl_self_attention.transformer_blocks.3.ff.net.0.proj.weight": (8192, 2048),
        f"{head}.model.transformer_blocks.14.attn1.to_k.weight": (1536, 2048),
        f"{head}.model.transformer_blocks.15.attn1.to_k.weight": (1536, 1536),
        f"{head}.model.transformer_blocks.15.norm1.linear.bias": (3072,),
        f"{head}.model.timestep_encoder.timestep_embedder.linear_1.weight": (1536, 256),
        f"{head}.model.proj_out_2.weight": (1024, 1536),
        f"{head}.action_encoder.W2.W": (32, 3072, 1536),
        f"{head}.action_decoder.layer2.W": (32, 1024, 32),
        f"{head}.state_encoder.layer1.W": (32, 64, 1024),
        f"{head}.position_embedding.weight": (1024, 1536),
        f"{head}.future_tokens.weight": (32, 1536),
    }.items():
        assert found[name] == shape, name


@pytest.mark.parametrize("style", ["published", "lerobot"])
def test_round_trip(model, tmp_path, style):
    save(model, tmp_path, style, shard_bytes=60_000)
    assert same(build(golden(), tmp_path), model)
    files = sorted(p.name for p in tmp_path.iterdir())
    if style == "lerobot":
        assert files == ["model.safetensors"]
        assert all(n.startswith(LEROBOT_PREFIX) for n in load_file(tmp_path / "model.safetensors"))
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) | {"model.safetensors.index.json"} == set(files) and len(files) > 3
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert {WORDS, WORDS_TIED} <= index["weight_map"].keys()


def test_our_own_names(model, tmp_path):
    write(tmp_path, model.state_dict())
    assert same(build(golden(), tmp_path), model)


@pytest.mark.parametrize("absent", [(), (WORDS,), (WORDS_TIED,), "pooling"])
@pytest.mark.parametrize("prefix", ["", LEROBOT_PREFIX])
def test_variants_that_occur(model, tensors, tmp_path, absent, prefix):
    gone = [n for n in tensors if n.startswith(POOLING)] if absent == "pooling" else absent
    write(tmp_path, {prefix + n: t for n, t in tensors.items() if n not in gone})
    other = Groot(golden())
    report = load(other, tmp_path)
    assert same(other, model)
    assert report.loaded == len(tensors) - 1 - len(pooling_head(golden()))


def test_every_fault_is_named(tensors, tmp_path):
    vision = [n for n in tensors if ".encoder.layers.1." in n]
    bad = {n.replace("layers.1", "block.1") if n in vision else n: t for n, t in tensors.items()}
    del bad["action_head.vlln.bias"]
    bad["action_head.model.proj_out_2.weight"] = torch.zeros(3, 3)
    with pytest.raises(DrivetrainError) as error:
        build(golden(), write(tmp_path, bad))
    text = str(error.value)
    assert f"({2 * len(vision) + 2} faults)" in text
    assert "missing: action_head.vlln.bias" in text
    assert "proj_out_2.weight: [3, 3] in the file, [20, 24] in the model" in text
    assert "missing: " + vision[0] in text


def test_no_weights_is_an_error(tmp_path, tensors):
    with pytest.raises(DrivetrainError, match="no weights at"):
        build(golden(), tmp_path / "nowhere")
    file = write(tmp_path, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 2 * file.stat().st_size // 3])
    with pytest.raises(DrivetrainError, match="not a readable"):
        build(golden(), tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(DrivetrainError, match="out of its folder"):
        build(golden(), outside)


def test_both_embeddings_gone_is_an_error(tensors, tmp_path):
    with pytest.raises(DrivetrainError, match="embed_tokens"):
        build(golden(), write(tmp_path, {n: t for n, t in tensors.items() if n not in (WORDS, WORDS_TIED)}))


def test_fresh_slot_for_a_new_robot(model, tensors, tmp_path):
    folder = write(tmp_path, tensors)
    fresh = build(golden(), folder, fresh_slots=(2,), seed=1)
    for name, found in fresh.state_dict().items():
        stored = model.state_dict()[name]
        if name.startswith(("state_encoder", "action_encoder", "action_decoder")):
            assert torch.equal(found[:2], stored[:2]), name
            assert name.endswith(".b") or not torch.equal(found[2], stored[2]), name
            assert not found[2].any() if name.endswith(".b") else 0.7 < found[2].std() * len(found[2]) ** 0.5 < 1.3, (
                name
            )
        else:
            assert torch.equal(found, stored), name
    assert same(build(golden(), folder, fresh_slots=(2,), seed=1), fresh)


def test_other_action_and_state_widths(model, tensors, tmp_path):
    folder = write(tmp_path, tensors)
    wider = dataclasses.replace(golden(), action_width=10, state_width=4)
    with pytest.raises(DrivetrainError, match="resize=True"):
        build(wider, folder)
    made, old = build(wider, folder, resize=True).state_dict(), model.state_dict()
    assert torch.equal(made["action_encoder.W1.W"][:, :7], old["action_encoder.W1.W"])
    assert 0.7 < made["action_encoder.W1.W"][:, 7:].std() * 10**0.5 < 1.3
    assert torch.equal(made["action_decoder.layer2.W"][..., :7], old["action_decoder.layer2.W"])
    assert torch.equal(made["action_decoder.layer2.b"][:, :7], old["action_decoder.layer2.b"])
    assert not made["action_decoder.layer2.b"][:, 7:].any()
    assert torch.equal(made["state_encoder.layer1.W"], old["state_encoder.layer1.W"][:, :4])


SHARDED = """
import dataclasses, sys, torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
folder, rank, helpers = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, helpers)
from gradients import by_part, disagreements
from groot_samples import golden, random_sample, tight
from drivetrain.policies.groot.model import Groot
from drivetrain.policies.groot.names import parts
from drivetrain.policies.groot.weights import build, load, published_tensors
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
with torch.device("meta"):
    model = Groot(golden())
for block in (*model.vision.blocks, *model.language.blocks, *model.features_blocks, *model.diffusion.blocks):
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
register_fsdp_forward_method(model, "act")
model.to_empty(device="cpu")
load(model, folder)
assert all(isinstance(p, DTensor) for p in model.parameters())
whole = dict(published_tensors(model))
stored = load_file(folder / "model.safetensors")
assert stored.keys() == whole.keys() and all(torch.equal(stored[n], whole[n]) for n in stored)

plain = build(golden(), folder)
samples = [random_sample(golden(), i, cameras=1 + i, embodiment=2 * i) for i in range(2)]
batch = tight([dataclasses.replace(s, tokens=s.tokens % 38) for s in samples])
for m in (plain, model):
    m.loss(batch).total.backward()
found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
wanted = {n: p.grad for n, p in plain.named_parameters()}
wrong = disagreements(by_part(found, parts(golden())), by_part(wanted, parts(golden())), 3e-4)
assert not wrong, wrong
assert torch.allclose(plain.act(batch), model.act(batch), rtol=1e-4, atol=1e-5)
print("equal", len(stored))
"""


@pytest.mark.slow  # two processes that each import torch's distributed half
def test_sharded_model(tensors, tmp_path):
    """Two processes, every parameter sharded, built on the meta device: what is saved is what was read, and gradients
    and sampled actions are those of the whole model."""
    write(tmp_path, tensors)
    command = [sys.executable, "-c", SHARDED, str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(Path(__file__).parent)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=240)
            assert f"equal {len(tensors)}" in out.decode(), err.decode()[-3000:]
    finally:
        for process in ranks:
            process.kill()
