"""Runs LeRobot 0.6.1's pi-0.5 at a small size and keeps its weights, inputs and outputs in pi05.safetensors.

Needs lerobot[pi]==0.6.1 (with transformers 5.4 or 5.5) and this repository's tests/policies on the path:

    PYTHONPATH=src:tests/policies python tests/golden/make_pi05.py

Two samples in one padded batch, as the released code runs them: three image slots of which one or two are absent, text
padded to twelve tokens. The released code reads its sizes from literals, so a subclass builds the same modules smaller.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lerobot.policies.pi05 import modeling_pi05 as released
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from pi05_samples import golden
from safetensors.torch import save_file
from transformers.models.auto import CONFIG_MAPPING

SLOTS, TEXT, DIMS = 3, 12, 5
SAMPLES = ((2, 7, 0.3137), (1, 4, 0.9991))  # cameras, words, time


class SmallTowers(released.PaliGemmaWithExpertModel):
    """The released class with sizes of our own: only the construction differs."""

    def __init__(self, *args, **kwargs):
        torch.nn.Module.__init__(self)
        self.freeze_vision_encoder = self.train_expert_only = False
        vision, gemma = golden().vision, golden().gemma
        shared = {
            "num_hidden_layers": gemma.layers,
            "num_attention_heads": gemma.heads,
            "num_key_value_heads": 1,
            "head_dim": gemma.head_dim,
            "vocab_size": gemma.vocabulary,
            "hidden_activation": "gelu_pytorch_tanh",
            "dtype": "float32",
        }
        both = CONFIG_MAPPING["paligemma"](
            text_config={
                **shared,
                "model_type": "gemma",
                "hidden_size": gemma.prefix_width,
                "intermediate_size": gemma.prefix_mlp,
            },
            vision_config={
                "model_type": "siglip_vision_model",
                "image_size": vision.image_size,
                "patch_size": vision.patch_size,
                "num_hidden_layers": vision.layers,
                "hidden_size": vision.width,
                "num_attention_heads": vision.heads,
                "intermediate_size": vision.mlp,
                "projection_dim": gemma.prefix_width,
                "vision_use_head": False,
                "dtype": "float32",
            },
            projection_dim=gemma.prefix_width,
        )
        both.text_config.use_adarms, both.text_config.adarms_cond_dim = False, None
        expert = CONFIG_MAPPING["gemma"](
            **shared,
            hidden_size=gemma.suffix_width,
            intermediate_size=gemma.suffix_mlp,
            use_adarms=True,
            adarms_cond_dim=gemma.suffix_width,
        )
        self.paligemma = released.PaliGemmaForConditionalGenerationWithPiGemma(config=both)
        self.gemma_expert = released.PiGemmaForCausalLM(config=expert)
        self.gemma_expert.model.embed_tokens = None


def build() -> released.PI05Pytorch:
    config = golden()
    size = released.GemmaConfig(
        config.gemma.suffix_width, config.gemma.layers, config.gemma.suffix_mlp, config.gemma.heads, 1,
        config.gemma.head_dim,
    )  # fmt: skip
    released.PaliGemmaWithExpertModel, released.get_gemma_config = SmallTowers, lambda variant: size
    return released.PI05Pytorch(
        PI05Config(
            device="cpu",
            chunk_size=config.horizon,
            n_action_steps=config.horizon,
            max_action_dim=config.action_width,
            max_state_dim=config.state_width,
            image_resolution=(config.vision.image_size,) * 2,
        )
    )


def make_inputs() -> dict[str, torch.Tensor]:
    """What drivetrain is given, one entry per sample, unpadded."""
    config, rng, made = golden(), np.random.default_rng(0), {}
    size, chunk = config.vision.image_size, (config.horizon, config.action_width)
    for i, (cameras, words, time) in enumerate(SAMPLES):
        actions = rng.normal(size=chunk).astype(np.float32)
        actions[:, DIMS:] = 0
        made |= {
            f"{i}.words": torch.from_numpy(rng.integers(3, config.gemma.vocabulary, words)),
            f"{i}.images": torch.from_numpy(rng.integers(0, 256, (cameras, size, size, 3), np.uint8)),
            f"{i}.actions": torch.from_numpy(actions),
            f"{i}.noise": torch.from_numpy(rng.normal(size=chunk).astype(np.float32)),
            f"{i}.time": torch.tensor([time]),
        }
    return made


def padded(inputs: dict[str, torch.Tensor]) -> tuple[list, list, torch.Tensor, torch.Tensor]:
    """The batch of the released code: images and their masks by slot, tokens and their mask."""
    count, size = len(SAMPLES), golden().vision.image_size
    images = [-torch.ones(count, 3, size, size) for _ in range(SLOTS)]
    present = [torch.zeros(count, dtype=torch.bool) for _ in range(SLOTS)]
    tokens, real = torch.zeros(count, TEXT, dtype=torch.long), torch.zeros(count, TEXT, dtype=torch.bool)
    for i, (cameras, words, _) in enumerate(SAMPLES):
        for slot in range(cameras):
            images[slot][i] = inputs[f"{i}.images"][slot].permute(2, 0, 1).float() / 255 * 2 - 1
            present[slot][i] = True
        tokens[i, :words], real[i, :words] = inputs[f"{i}.words"], True
    return images, present, tokens, real


def main() -> None:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # no zero gates, no unit norms: every path must count
            gemma_norm = name.endswith("norm.weight") and "language_model" in name
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") and not gemma_norm else 0.0
            parameter.normal_(centre, 0.1 if parameter.ndim == 1 else 0.15)
    inputs = make_inputs()
    batch = padded(inputs)
    actions, noise, time = (
        torch.stack([inputs[f"{i}.{n}"] for i in range(len(SAMPLES))]) for n in ("actions", "noise", "time")
    )
    losses = model(*batch, actions, noise, time[:, 0])
    loss = losses[:, :, :DIMS].mean()
    loss.backward()
    out = dict(inputs) | {"loss.real": loss.detach(), "loss.all": losses.mean().detach()}
    chunks = model.sample_actions(*batch, noise=noise)
    out |= {f"{i}.chunk": chunks[i] for i in range(len(SAMPLES))}
    out |= {f"weights.{n}": t for n, t in model.state_dict().items()}
    out |= {f"gradients.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    save_file(
        {n: t.detach().clone().contiguous() for n, t in out.items()}, Path(__file__).with_name("pi05.safetensors")
    )
    print(f"loss {float(loss.detach())}, {len(out)} tensors")


if __name__ == "__main__":
    main()
