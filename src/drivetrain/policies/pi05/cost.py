"""What pi-0.5 computes in a training step. See `drivetrain.policies.blocks.cost` for what is counted."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.policies.blocks.cost import Flops, attention, products, tokens_per_image, vision_flops
from drivetrain.policies.pi05.config import Pi05Config


def flops(config: Pi05Config, tokens: Sequence[int], images: int, draws: int) -> dict[str, Flops]:
    """See `drivetrain.policies.flops_by_part`. The last layer's prefix is projected to keys and values and no further."""
    vision, gemma, horizon = config.vision, config.gemma, config.horizon
    total, squares, chunks = sum(tokens), sum(n * n for n in tokens), len(tokens) * draws
    heads, deep, rows = gemma.heads * gemma.head_dim, gemma.layers - 1, chunks * config.horizon
    trained = config.tune_language and not config.insulate
    sees = config.tune_vision and not config.insulate

    connect = images * tokens_per_image(vision) * vision.width * gemma.prefix_width
    keys_values = gemma.prefix_width * 2 * gemma.head_dim
    prefix = deep * (keys_values + 2 * gemma.prefix_width * heads + 3 * gemma.prefix_width * gemma.prefix_mlp)
    width = gemma.suffix_width
    suffix = gemma.layers * (width * (2 * gemma.head_dim + 2 * heads) + 3 * width * gemma.suffix_mlp)
    time = 2 * width**2 + (2 * gemma.layers + 1) * 3 * width**2
    pairs = gemma.layers * horizon * draws * (total + horizon * len(tokens))
    return {
        "vision": vision_flops(vision, images, trained=sees) + products(connect, trained=trained, reaches=sees),
        "prefix": products(total * (prefix + keys_values), trained=trained, reaches=sees),
        "suffix": products(rows * suffix, trained=True, reaches=True),
        "attention": attention(deep * squares, heads, reaches=sees or trained) + attention(pairs, heads, reaches=True),
        "projections": products(rows * 2 * width * config.action_width + chunks * time, trained=True, reaches=True),
    }


def sample_tokens(config: Pi05Config, cameras: int) -> int:
    """With 45 tokens of prompt: a short instruction and a state of 8 dimensions. Without the state, 20."""
    return (45 if config.state_in_prompt else 20) + cameras * tokens_per_image(config.vision)
