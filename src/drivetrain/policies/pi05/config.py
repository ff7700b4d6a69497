"""pi-0.5's dimensions.

`Pi05Config()` is the published model of 3.35 billion parameters; `tiny()` is the same code at 0.87 million.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP tower: `image_size` / `patch_size` squared tokens per image."""

    image_size: int = 224
    patch_size: int = 14
    layers: int = 27
    width: int = 1152
    heads: int = 16
    mlp: int = 4304


@dataclass(frozen=True)
class GemmaConfig:
    """The two Gemma streams, which share their attention: images and words (prefix), and actions (suffix).

    heads:       query heads; all of them read one key and value head.
    begin_token: stands before every prompt.
    image_token: placeholder that image features replace; any id of the vocabulary.
    tokenizer:   "bytes", or the folder or hub name of a Hugging Face tokenizer.
    text_tokens: the most tokens of one prompt; of a longer one only the task is shortened.
    """

    layers: int = 18
    heads: int = 8
    head_dim: int = 256
    rope_theta: float = 1e4
    prefix_width: int = 2048
    prefix_mlp: int = 16_384
    suffix_width: int = 1024
    suffix_mlp: int = 4096
    vocabulary: int = 257_152
    begin_token: int = 2
    image_token: int = 0
    tokenizer: str = "google/paligemma-3b-pt-224"
    text_tokens: int = 200


@dataclass(frozen=True)
class Pi05Config:
    """The whole policy. Widths D and A are what states and actions are padded to.

    state_in_prompt: the state is written into the prompt in 256 bins; without it the policy sees no state.
    loss_over:       "real": the robot's own action dimensions count, as in LeRobot; "all": the padding counts too, as in
                     openpi, which divides the gradient of a 7-dimensional robot by 4.6.
    tune_vision:     train the vision tower.
    tune_language:   train the projector, the word embedding and the prefix stream.
    insulate:        the actions' loss stops at the prefix's keys and values (knowledge insulation). There is no other
                     loss here, so the vision tower and the prefix stream then learn nothing.
    euler_steps:     integration steps of `act`.
    min_period, max_period: of the sinusoids that the flow time is shown as.
    beta_alpha, beta_beta, time_scale, time_offset: flow times are time_scale * Beta(alpha, beta) + time_offset.
    """

    kind: ClassVar[str] = "pi05"

    vision: VisionConfig = VisionConfig()
    gemma: GemmaConfig = GemmaConfig()
    horizon: int = 50
    state_width: int = 32
    action_width: int = 32
    state_in_prompt: bool = True
    loss_over: Literal["real", "all"] = "real"
    tune_vision: bool = True
    tune_language: bool = True
    insulate: bool = False
    euler_steps: int = 10
    min_period: float = 4e-3
    max_period: float = 4.0
    beta_alpha: float = 1.5
    beta_beta: float = 1.0
    time_scale: float = 0.999
    time_offset: float = 0.001


def tiny(horizon: int = 16) -> Pi05Config:
    """The same architecture at 0.87 million parameters for a CPU: 64-pixel images, text as bytes."""
    return Pi05Config(
        vision=VisionConfig(image_size=64, patch_size=8, layers=2, width=96, heads=3, mlp=192),
        gemma=GemmaConfig(
            layers=4,
            heads=3,
            head_dim=32,
            prefix_width=96,
            prefix_mlp=192,
            suffix_width=64,
            suffix_mlp=192,
            vocabulary=264,
            begin_token=257,
            image_token=256,
            tokenizer="bytes",
            text_tokens=224,
        ),
        horizon=horizon,
    )
