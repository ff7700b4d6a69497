"""How the tensors of pi-0.5 are called in published checkpoints, and which rows of our parameters they are."""

from __future__ import annotations

from drivetrain.policies.blocks.checkpoint import Part, Parts, siglip_parts
from drivetrain.policies.pi05.config import Pi05Config

PALIGEMMA = "paligemma_with_expert.paligemma"
TOWER = f"{PALIGEMMA}.model.vision_tower"
LANGUAGE = f"{PALIGEMMA}.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert"
WORDS = f"{PALIGEMMA}.lm_head.weight"
WORDS_TIED = f"{LANGUAGE}.embed_tokens.weight"
UNUSED_HEAD = f"{EXPERT}.lm_head.weight"  # of the action expert: in every published file, computed by none, absent here


def parts(config: Pi05Config) -> Parts:
    """Our parameter's name -> the published tensors that it consists of, in order of rows."""
    gemma = config.gemma
    made = siglip_parts(config.vision.layers, config.vision.width, f"{TOWER}.vision_model")
    made["embedding.weight"] = (Part(WORDS),)
    made["prefix_norm.weight"] = (Part(f"{LANGUAGE}.norm.weight"),)
    modulations = []
    for i in range(gemma.layers):
        ours, prefix, suffix = f"layers.{i}", f"{LANGUAGE}.layers.{i}", f"{EXPERT}.model.layers.{i}"
        made[f"{ours}.norm1.weight"] = (Part(f"{prefix}.input_layernorm.weight"),)
        made[f"{ours}.norm2.weight"] = (Part(f"{prefix}.post_attention_layernorm.weight"),)
        made |= _stream(f"{ours}.prefix", prefix, gemma.prefix_mlp, gemma.head_dim)
        made |= _stream(f"{ours}.suffix", suffix, gemma.suffix_mlp, gemma.head_dim)
        modulations += [f"{suffix}.input_layernorm", f"{suffix}.post_attention_layernorm"]
    modulations.append(f"{EXPERT}.model.norm")
    for kind in ("weight", "bias"):
        rows = 3 * gemma.suffix_width
        made[f"conditioning.modulation.{kind}"] = tuple(Part(f"{name}.dense.{kind}", rows) for name in modulations)
        for ours, theirs in (
            ("connector", f"{PALIGEMMA}.model.multi_modal_projector.linear"),
            ("conditioning.time1", "time_mlp_in"),
            ("conditioning.time2", "time_mlp_out"),
            ("action_in", "action_in_proj"),
            ("action_out", "action_out_proj"),
        ):
            made[f"{ours}.{kind}"] = (Part(f"{theirs}.{kind}"),)
    return made


def _stream(ours: str, theirs: str, mlp: int, head_dim: int) -> Parts:
    return {
        f"{ours}.q.weight": (Part(f"{theirs}.self_attn.q_proj.weight"),),
        f"{ours}.kv.weight": tuple(Part(f"{theirs}.self_attn.{p}_proj.weight", head_dim) for p in "kv"),
        f"{ours}.out.weight": (Part(f"{theirs}.self_attn.o_proj.weight"),),
        f"{ours}.gate_up.weight": tuple(Part(f"{theirs}.mlp.{p}_proj.weight", mlp) for p in ("gate", "up")),
        f"{ours}.down.weight": (Part(f"{theirs}.mlp.down_proj.weight"),),
    }


def canonical(name: str) -> str:
    """A name as any of the published files has it -> the name that `parts` uses.

    The variants: LeRobot's prefix `model.`; the vision tower without its inner `vision_model.` (newer transformers); the
    time MLP under its name in pi-0.
    """
    name = name.removeprefix("model.")
    if name.startswith(f"{TOWER}.") and not name.startswith(f"{TOWER}.vision_model."):
        name = name.replace(TOWER, f"{TOWER}.vision_model", 1)
    return name.replace("action_time_mlp_", "time_mlp_", 1) if name.startswith("action_time_mlp_") else name
