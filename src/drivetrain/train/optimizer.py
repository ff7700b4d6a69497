"""AdamW and its schedule, counted in optimizer updates: not in processes, not in accumulation, not in restarts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def clipped_step(optimizer: torch.optim.Optimizer, rate: float, clip_norm: float) -> tuple[Tensor, Tensor]:
    """One update from gradients scaled down to a global norm of at most `clip_norm`; the gradients are then dropped.

    Where the norm is not finite, weights and moments stay as they are, bit for bit; the device decides that, and the host
    learns of it from what is returned: the norm before scaling, and 1 where the update was skipped, else 0.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    skipped = (~norm.isfinite()).float()
    # the seam that loss scaling uses: the fused kernel divides gradients by the one, and does nothing where the other is 1
    optimizer.grad_scale = (norm / clip_norm).clamp(min=1.0)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm, skipped


def full(value: Tensor) -> Tensor:
    """A scalar that may be spread over ranks, as a plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
