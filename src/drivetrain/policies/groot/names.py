"""How the tensors of GR00T-N1.5 are called in published checkpoints, and which rows of our parameters they are.

Our parameters are the published tensors stacked along their first dimension where one product does the work of several.
"""

from __future__ import annotations

from drivetrain.policies.blocks.checkpoint import Part, Parts, siglip_parts
from drivetrain.policies.groot.config import GrootConfig

VISION = "backbone.eagle_model.vision_model.vision_model"
LANGUAGE = "backbone.eagle_model.language_model.model"
WORDS = f"{LANGUAGE}.embed_tokens.weight"
WORDS_TIED = "backbone.eagle_model.language_model.lm_head.weight"
POOLING = f"{VISION}.head."
HEAD = "action_head"


def parts(config: GrootConfig) -> Parts:
    """Our parameter's name -> the published tensors that it consists of, in order of rows."""
    made = siglip_parts(config.vision.layers, config.vision.width, VISION)

    def layer(ours: str, *published: tuple[str, int | None], bias: bool = True) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            made[f"{ours}.{kind}"] = tuple(Part(f"{name}.{kind}", rows) for name, rows in published)

    layer("connector", ("backbone.eagle_model.mlp1.0", None))
    made["language.embedding.weight"] = (Part(WORDS),)
    _language(config, layer)
    _head(config, layer)
    made["future_tokens"] = (Part(f"{HEAD}.future_tokens.weight"),)
    made["action_positions"] = (Part(f"{HEAD}.position_embedding.weight"),)
    per_embodiment = [f"{mlp}.layer{i}" for mlp in ("state_encoder", "action_decoder") for i in (1, 2)]
    for ours in [*per_embodiment, *(f"action_encoder.W{i}" for i in (1, 2, 3))]:
        for kind in ("W", "b"):
            made[f"{ours}.{kind}"] = (Part(f"{HEAD}.{ours}.{kind}"),)
    return made


def _language(config: GrootConfig, layer) -> None:
    c = config.language
    layer("language.norm", (f"{LANGUAGE}.norm", None), bias=False)
    for i in range(c.layers):
        ours, theirs = f"language.blocks.{i}", f"{LANGUAGE}.layers.{i}"
        rows = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
        for mine, published in (
            ("norm1", [("input_layernorm", None)]),
            ("norm2", [("post_attention_layernorm", None)]),
            ("q_norm", [("self_attn.q_norm", None)]),
            ("k_norm", [("self_attn.k_norm", None)]),
            ("qkv", [(f"self_attn.{p}_proj", rows[p]) for p in "qkv"]),
            ("out", [("self_attn.o_proj", None)]),
            ("gate_up", [("mlp.gate_proj", c.mlp), ("mlp.up_proj", c.mlp)]),
            ("down", [("mlp.down_proj", None)]),
        ):
            layer(f"{ours}.{mine}", *((f"{theirs}.{name}", count) for name, count in published), bias=False)


def _head(config: GrootConfig, layer) -> None:
    width, head = config.language.width, config.head
    layer("features_norm", (f"{HEAD}.vlln", None))
    for i in range(head.vl_layers):
        ours, theirs = f"features_blocks.{i}", f"{HEAD}.vl_self_attention.transformer_blocks.{i}"
        layer(f"{ours}.norm1", (f"{theirs}.norm1", None))
        layer(f"{ours}.norm2", (f"{theirs}.norm3", None))
        layer(f"{ours}.qkv", *((f"{theirs}.attn1.to_{p}", width) for p in "qkv"))
        _common(ours, theirs, layer)
    dit = f"{HEAD}.model"
    for i in (1, 2):
        layer(f"diffusion.time{i}", (f"{dit}.timestep_encoder.timestep_embedder.linear_{i}", None))
    layer("diffusion.out", (f"{dit}.proj_out_2", None))
    blocks = [f"{dit}.transformer_blocks.{i}" for i in range(head.layers)]
    modulations = [*(f"{b}.norm1.linear" for b in blocks), f"{dit}.proj_out_1"]
    layer("diffusion.modulation", *((name, 2 * head.width) for name in modulations))
    layer("diffusion.keys_values.project", *((f"{b}.attn1.to_{p}", head.width) for b in blocks[::2] for p in "kv"))
    for i, theirs in enumerate(blocks):
        ours = f"diffusion.blocks.{i}"
        projections = "q" if i % 2 == 0 else "qkv"
        layer(f"{ours}.q_or_qkv", *((f"{theirs}.attn1.to_{p}", head.width) for p in projections))
        _common(ours, theirs, layer)


def _common(ours: str, theirs: str, layer) -> None:
    layer(f"{ours}.out", (f"{theirs}.attn1.to_out.0", None))
    layer(f"{ours}.feed_forward.up", (f"{theirs}.ff.net.0.proj", None))
    layer(f"{ours}.feed_forward.down", (f"{theirs}.ff.net.2", None))


def pooling_head(config: GrootConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower's pooling head: in every published file, computed by none, absent here."""
    width, mlp = config.vision.width, config.vision.mlp
    shapes = {
        "probe": (1, 1, width),
        "attention.in_proj_weight": (3 * width, width),
        "attention.in_proj_bias": (3 * width,),
        "attention.out_proj.weight": (width, width),
        "attention.out_proj.bias": (width,),
        "layernorm.weight": (width,),
        "layernorm.bias": (width,),
        "mlp.fc1.weight": (mlp, width),
        "mlp.fc1.bias": (mlp,),
        "mlp.fc2.weight": (width, mlp),
        "mlp.fc2.bias": (width,),
    }
    return {POOLING + name: shape for name, shape in shapes.items()}
