"""GR00T-N1.5's dimensions.

`GrootConfig()` is the published 3B model; `tiny()` is the same code at a few million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP2 tower: `image_size` / `patch_size` squared tokens per image."""

    image_size: int = 224
    patch_size: int = 14
    layers: int = 27
    width: int = 1152
    heads: int = 16
    mlp: int = 4304


@dataclass(frozen=True)
class LanguageConfig:
    """Qwen3 decoder cut to its first `layers` layers.

    tokenizer:   "bytes", or the folder or hub name of a Hugging Face tokenizer.
    task_tokens: an instruction is cut to so many tokens; the template around it is never cut.
    """

    layers: int = 12
    width: int = 2048
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 6144
    vocabulary: int = 151_680
    image_token: int = 151_669
    rope_theta: float = 1e6
    tokenizer: str = "lerobot/eagle2hg-processor-groot-n1p5"
    task_tokens: int = 256


@dataclass(frozen=True)
class HeadConfig:
    """VL self-attention and the flow-matching diffusion transformer (DiT)."""

    vl_layers: int = 4
    vl_heads: int = 32
    layers: int = 16
    width: int = 1536
    heads: int = 32
    hidden: int = 1024
    future_tokens: int = 32
    max_positions: int = 1024
    embodiments: int = 32
    dropout: float = 0.2


@dataclass(frozen=True)
class GrootConfig:
    """The whole policy. Widths D and A are what states and actions are padded to.

    embodiments: data set name -> slot of the per-embodiment weights; a data set not named takes `new_embodiment`.
    tune_*:      what is trained; the published fine-tune trains the projectors and the diffusion head.
    euler_steps: integration steps of `act`.
    """

    kind: ClassVar[str] = "groot"

    vision: VisionConfig = VisionConfig()
    language: LanguageConfig = LanguageConfig()
    head: HeadConfig = HeadConfig()
    horizon: int = 16
    state_width: int = 64
    action_width: int = 32
    embodiments: dict[str, int] = field(default_factory=dict)
    new_embodiment: int = 31
    tune_llm: bool = False
    tune_visual: bool = False
    tune_projector: bool = True
    tune_diffusion: bool = True
    euler_steps: int = 4
    time_buckets: int = 1000
    beta_alpha: float = 1.5
    beta_beta: float = 1.0
    noise_s: float = 0.999


def tiny(horizon: int = 16) -> GrootConfig:
    """The same architecture at 1.8 million parameters, all of them trained, for a CPU: 64-pixel images, text as bytes."""
    return GrootConfig(
        vision=VisionConfig(image_size=64, patch_size=16, layers=3, width=96, heads=3, mlp=192),
        language=LanguageConfig(
            layers=2,
            width=96,
            heads=3,
            kv_heads=1,
            head_dim=32,
            mlp=192,
            vocabulary=264,
            image_token=256,
            tokenizer="bytes",
            task_tokens=96,
        ),
        head=HeadConfig(vl_layers=1, vl_heads=3, layers=4, width=64, heads=2, hidden=64, future_tokens=4, dropout=0.0),
        horizon=horizon,
        tune_llm=True,
        tune_visual=True,
    )
