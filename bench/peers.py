"""Training steps of other projects' policies on the very samples that drivetrain is timed with. They are run, not copied.

Each function takes samples and returns one whole training step as a function without arguments; see bench/policy_step.py.
The peer's own package must be installed, and its model has random weights of full size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from drivetrain.types import Sample

PI05_SLOTS, PI05_TEXT = 3, 200  # camera slots and words that LeRobot pads every sample of pi-0.5 to


def lerobot_pi05(samples: list[Sample], *, checkpointing: bool, compiled: bool) -> tuple[str, Callable[[], object]]:
    """LeRobot's pi05 as its trainer runs it: bfloat16, plain global-norm clip, AdamW of its own preset made fused.

    The samples' words are padded to 200, absent cameras are filled and masked. Preprocessing is left out, for both sides.
    """
    import lerobot
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Pytorch

    config = PI05Config(
        dtype="bfloat16", gradient_checkpointing=checkpointing, compile_model=compiled, compile_mode="default"
    )
    with torch.device("cuda"):
        model = PI05Pytorch(config)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer_lr,
        betas=config.optimizer_betas,
        eps=config.optimizer_eps,
        weight_decay=config.optimizer_weight_decay,
        fused=True,
    )

    count = len(samples)
    images = torch.zeros(PI05_SLOTS, count, 224, 224, 3, dtype=torch.uint8)
    present = torch.zeros(PI05_SLOTS, count, dtype=torch.bool)
    words, real = torch.zeros(count, PI05_TEXT, dtype=torch.long), torch.zeros(count, PI05_TEXT, dtype=torch.bool)
    for i, sample in enumerate(samples):
        cameras = len(sample.images)
        images[:cameras, i] = torch.from_numpy(sample.images)
        present[:cameras, i] = True
        text = torch.from_numpy(np.delete(sample.tokens, sample.image_tokens))
        words[i, : len(text)], real[i, : len(text)] = text, True
    pixels = [(x.cuda().permute(0, 3, 1, 2).float() / 127.5 - 1) for x in images]
    masks = [m.cuda() for m in present]
    words, real = words.cuda(), real.cuda()
    actions, noise, time = (
        torch.from_numpy(np.stack(part)).cuda()
        for part in ([s.actions for s in samples], [s.noise[0] for s in samples], [s.time[0] for s in samples])
    )

    def step() -> torch.Tensor:
        losses = model.forward(pixels, masks, words, real, actions, noise, time)
        loss = losses[..., :7].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer_grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return f"lerobot {lerobot.__version__}", step
