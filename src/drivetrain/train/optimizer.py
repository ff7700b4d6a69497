"""AdamW and its schedule, counted in optimizer updates: not in processes, not in accumulation, not in restarts."""

from __future__ import annotations

import math

import torch
from torch import nn

from drivetrain.run import Optimizer


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW over what is trained. Weight decay spares vectors (biases, norms), as the published GR00T fine-tune does.

    Build it after sharding: it must hold the sharded parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # fused: one call for all parameters, on the CPU too, where dispatching sharded tensors one by one costs more than the math
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The rate of update `step` (0-based) of `steps`: linear warm-up, then half a cosine; constant past the end."""
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    span = config.learning_rate - config.final_learning_rate
    return config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))
