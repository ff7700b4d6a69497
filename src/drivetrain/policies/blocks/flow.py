"""Flow matching: the path between noise and actions, and the loss as a sum and a count."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree as pytree

from drivetrain.types import LossSum, PackedBatch

# Fully sharded modules look for the tensors of their output here, to know when the backward pass begins.
pytree.register_dataclass(LossSum)


def flow_loss(velocity: Tensor, target: Tensor, batch: PackedBatch) -> LossSum:
    """Squared error over the entries that count, times each sample's weight, summed over draws and not divided.

    velocity, target: [B, K, H, A]; compared in float32.
    """
    mask = batch.action_mask[:, None] * batch.weight[:, None, None, None]  # BKHA, broadcast over K
    total = ((velocity.float() - target) ** 2 * mask).sum()
    return LossSum(total=total, count=batch.loss_count())


def sinusoid(x: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine, float32 [..., F] each, of x [...] at the frequencies exp(exponents), float32 [F]."""
    angles = x.float()[..., None] * exponents.exp()
    return angles.sin(), angles.cos()
