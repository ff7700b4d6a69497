"""What GR00T computes in a training step. See `drivetrain.policies.blocks.cost` for what is counted."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.policies.blocks.cost import Flops, attention, products, tokens_per_image, vision_flops
from drivetrain.policies.groot.config import GrootConfig


def flops(config: GrootConfig, tokens: Sequence[int], images: int, draws: int) -> dict[str, Flops]:
    """See `drivetrain.policies.flops_by_part`."""
    vision, language, head = config.vision, config.language, config.head
    total, squares, chunks = sum(tokens), sum(n * n for n in tokens), len(tokens) * draws
    sees, reads = config.tune_visual, config.tune_visual or config.tune_llm

    connect = images * tokens_per_image(vision) * vision.width * language.width
    heads, width = language.heads * language.head_dim, language.width
    grouped = (language.heads + 2 * language.kv_heads) * language.head_dim
    decoder = total * language.layers * (width * grouped + heads * width + 3 * width * language.mlp)
    causal = language.layers * (squares + total) / 2
    features = total * head.vl_layers * 12 * width**2

    rows = 1 + head.future_tokens + config.horizon
    cross = (head.layers + 1) // 2
    denoise = 2 * cross + 4 * (head.layers - cross) + 8 * head.layers  # in units of width^2, a row
    time = 256 * head.width + head.width**2 + (head.layers + 1) * 2 * head.width**2
    diffusion = chunks * (rows * (denoise * head.width**2 + head.width * head.hidden) + time)
    pairs = draws * rows * (cross * total + (head.layers - cross) * rows * len(tokens))

    state = len(tokens) * (config.state_width * head.hidden + head.hidden * head.width)
    encode = chunks * config.horizon * (config.action_width * head.width + 3 * head.width**2)
    decode = chunks * config.horizon * (head.hidden**2 + head.hidden * config.action_width)
    tuned, moved = config.tune_projector, config.tune_diffusion
    return {
        "vision": vision_flops(vision, images, trained=sees) + products(connect, trained=sees, reaches=sees),
        "language": products(decoder, trained=config.tune_llm, reaches=reads) + attention(causal, heads, reaches=reads),
        "features": products(features, trained=True, reaches=True)
        + attention(head.vl_layers * squares, width, reaches=True),
        "keys_values": products(2 * cross * total * width * head.width, trained=moved, reaches=True),
        "diffusion": products(diffusion, trained=moved, reaches=True) + attention(pairs, head.width, reaches=True),
        "projectors": products(state + encode, trained=tuned, reaches=False)
        + products(decode, trained=tuned, reaches=True),
    }


def sample_tokens(config: GrootConfig, cameras: int) -> int:
    """With 15 tokens of instruction, in the published template: 19, and 7 around each image; bytes have no template."""
    template = 1 if config.language.tokenizer == "bytes" else 19 + 7 * cameras
    return template + 15 + cameras * tokens_per_image(config.vision)
