"""Runs LeRobot 0.5.1's GR00T-N1.5 at a small size and keeps its weights, inputs and outputs in groot.safetensors.

Needs lerobot==0.5.1, transformers==5.3.0, diffusers==0.35.2 (all without their dependencies but for torch's) and this
repository's tests/policies on the path:

    PYTHONPATH=src:tests/policies python tests/golden/make_groot.py

flash-attn is not needed (the towers run with eager attention), nor is peft, whose LoRA wrappers are never called.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from groot_samples import golden
from safetensors.torch import save_file

SAMPLES = ((2, 2, 0.3137), (1, 0, -0.0008))  # cameras, embodiment, time
WORDS = ([3, 9, 27, 4], [11, 5])


def import_reference():
    """LeRobot's package imports every policy it has; an empty package in its place imports these two files alone."""
    root = Path(importlib.util.find_spec("lerobot").submodule_search_locations[0])
    for name in ("lerobot.policies", "lerobot.policies.groot", "lerobot.policies.groot.eagle2_hg_model"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from lerobot.policies.groot.action_head import flow_matching_action_head as head

    if importlib.util.find_spec("peft") is None:
        from transformers.models import llama, qwen2, qwen3, siglip  # noqa: F401 - they look for peft themselves

        sys.modules["peft"] = mock.MagicMock()
    from lerobot.policies.groot.eagle2_hg_model import configuration_eagle2_5_vl, modeling_eagle2_5_vl

    return head, configuration_eagle2_5_vl.Eagle25VLConfig, modeling_eagle2_5_vl.Eagle25VLForConditionalGeneration


def build(config):
    head_module, eagle_config, eagle_model = import_reference()
    from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

    v, c, h = config.vision, config.language, config.head
    vision = {
        "image_size": v.image_size,
        "patch_size": v.patch_size,
        "num_hidden_layers": v.layers,
        "hidden_size": v.width,
        "num_attention_heads": v.heads,
        "intermediate_size": v.mlp,
        "model_type": "siglip_vision_model",
    }
    text = {
        "vocab_size": c.vocabulary,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "architectures": ["Qwen3ForCausalLM"],
        "use_cache": False,
    }
    eagle = eagle_model(
        eagle_config(
            vision_config=vision,
            text_config=text,
            select_layer=-1,
            use_pixel_shuffle=False,
            mlp_connector_layers=1,
            image_token_index=c.image_token,
            _attn_implementation="eager",
        ),
        vision_model=SiglipVisionModel(SiglipVisionConfig(**vision, attn_implementation="eager")),
        language_model=Qwen3ForCausalLM(Qwen3Config(**text, attn_implementation="eager")),
    )
    attention = {"dropout": 0.0, "final_dropout": True, "positional_embeddings": None}
    head = head_module.FlowmatchingActionHead(
        head_module.FlowmatchingActionHeadConfig(
            action_dim=config.action_width,
            max_action_dim=config.action_width,
            max_state_dim=config.state_width,
            action_horizon=config.horizon,
            hidden_size=h.hidden,
            input_embedding_dim=h.width,
            backbone_embedding_dim=c.width,
            num_target_vision_tokens=h.future_tokens,
            max_seq_len=h.max_positions,
            max_num_embodiments=h.embodiments,
            num_inference_timesteps=config.euler_steps,
            vl_self_attention_cfg={
                **attention,
                "num_layers": h.vl_layers,
                "num_attention_heads": h.vl_heads,
                "attention_head_dim": c.width // h.vl_heads,
            },
            diffusion_model_cfg={
                **attention,
                "num_layers": h.layers,
                "num_attention_heads": h.heads,
                "norm_type": "ada_norm",
                "attention_head_dim": h.width // h.heads,
                "output_dim": h.hidden,
                "cross_attention_dim": c.width,
                "interleave_self_attention": True,
            },
        )
    )
    return head_module, eagle, head


def make_inputs(config, index: int) -> dict[str, torch.Tensor]:
    cameras, embodiment, time = SAMPLES[index]
    rng = np.random.default_rng(index)
    size, chunk = config.vision.image_size, (config.horizon, config.action_width)
    per_image = (size // config.vision.patch_size) ** 2
    tokens = [WORDS[index][0], *[config.language.image_token] * (cameras * per_image), *WORDS[index][1:]]
    return {
        "tokens": torch.tensor(tokens),
        "images": torch.from_numpy(rng.integers(0, 256, (cameras, size, size, 3), np.uint8)),
        "state": torch.from_numpy(rng.normal(size=config.state_width).astype(np.float32)),
        "actions": torch.from_numpy(rng.normal(size=chunk).astype(np.float32)),
        "mask": torch.arange(chunk[1]).expand(chunk) < 4 + index,
        "noise": torch.from_numpy(rng.normal(size=chunk).astype(np.float32)),
        "time": torch.tensor([time]),
        "embodiment": torch.tensor([embodiment]),
    }


def run(head_module, eagle, head, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The reference at batch size 1: its loss, and what is kept."""
    from transformers.feature_extraction_utils import BatchFeature

    def features() -> BatchFeature:
        tokens = inputs["tokens"][None]
        pixels = (inputs["images"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        made = eagle(
            pixel_values=pixels, input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True
        )
        return BatchFeature({"backbone_features": made.hidden_states[-1], "backbone_attention_mask": None})

    chunk = BatchFeature(
        {
            "state": inputs["state"][None, None],
            "action": inputs["actions"][None],
            "action_mask": inputs["mask"][None],
            "embodiment_id": inputs["embodiment"],
        }
    )
    decoded: list[torch.Tensor] = []
    hook = head.action_decoder.register_forward_hook(lambda module, given, made: decoded.append(made))
    head.sample_time = lambda batch, device, dtype: inputs["time"]
    backbone = features()
    kept = {"features": backbone["backbone_features"].detach()[0]}
    with mock.patch.object(torch, "randn", lambda *a, **k: inputs["noise"][None]):
        loss = head(backbone, chunk)["loss"]
        kept["velocity"] = decoded[0].detach()[0, -len(inputs["actions"]) :]
        kept["chunk"] = head.get_action(features(), chunk)["action_pred"].detach()[0]
    hook.remove()
    kept["loss"] = loss.detach()
    return loss, kept


def main() -> None:
    torch.manual_seed(0)
    config = golden()
    head_module, eagle, head = build(config)
    modules = {"backbone.eagle_model.": eagle, "action_head.": head}
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():  # no zero biases, no unit norms: every path must count
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else 0.15)
    for parameter in (p for m in modules.values() for p in m.parameters()):
        parameter.requires_grad_(True)
    out: dict[str, torch.Tensor] = {}
    total = torch.zeros(())
    for index in range(len(SAMPLES)):
        inputs = make_inputs(config, index)
        loss, kept = run(head_module, eagle, head, inputs)
        total = total + loss
        out |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in (inputs | kept).items()}
    total.backward()
    for prefix, module in modules.items():
        out |= {f"weights.{prefix}{n}": t.detach().clone() for n, t in module.state_dict().items()}
        out |= {f"gradients.{prefix}{n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    save_file({n: t.contiguous() for n, t in out.items()}, Path(__file__).with_name("groot.safetensors"))
    print(f"loss {float(total)}, {len(out)} tensors")


if __name__ == "__main__":
    main()
