"""The SigLIP vision tower: images have one size, so it is dense and needs no segments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.policies.blocks.attention import dense_attention
from drivetrain.policies.blocks.norm import LayerNorm


class VisionTower(nn.Module):
    """uint8 images [I, size, size, 3] -> features [I, N, width], N = (size / patch)^2, in row order; no class token."""

    def __init__(self, *, image_size: int, patch_size: int, layers: int, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch = nn.Conv2d(3, width, patch_size, patch_size)  # weight_WCpp; never run as a convolution
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, width))
        self.blocks = nn.ModuleList(VisionBlock(width, heads, mlp) for _ in range(layers))
        self.norm = LayerNorm(width, 1e-6)

    def init_weights(self) -> None:
        """As Hugging Face initialises SigLIP: LeCun normal patches, Xavier projections, positions of 1/sqrt(width)."""
        width = self.positions.shape[1]
        nn.init.normal_(self.patch.weight, std=self.patch.weight[0].numel() ** -0.5)
        nn.init.zeros_(self.patch.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.positions, std=width**-0.5)
        for block in self.blocks:
            assert isinstance(block, VisionBlock)
            # the three projections are initialised one by one: Xavier's bound depends on the output width
            for weight in (*block.qkv.weight.split(width), block.out.weight, block.up.weight, block.down.weight):
                nn.init.xavier_uniform_(weight)
            for layer in (block.qkv, block.out, block.up, block.down):
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, images: Tensor) -> Tensor:
        """Pixels scaled to [-1, 1], cut into patches and projected: a matrix product, as patches do not overlap."""
        p = self.patch_size
        count, size = images.shape[:2]
        side = size // p
        pixels = (
            images.reshape(count, side, p, side, p, 3).permute(0, 1, 3, 5, 2, 4).reshape(count, side * side, 3 * p * p)
        )
        pixels = (pixels.float() * (2 / 255) - 1).to(self.patch.weight.dtype)
        return F.linear(pixels, self.patch.weight.flatten(1), self.patch.bias) + self.positions


class VisionBlock(nn.Module):
    """A pre-norm encoder layer: x [I, N, W] -> the same."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = LayerNorm(width, 1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = LayerNorm(width, 1e-6)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(dense_attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def place_images(embedded: Tensor, features: Tensor, image_tokens: Tensor) -> Tensor:
    """`embedded` [T, W] with row image_tokens[j] replaced by features[j]; the place T means nowhere.

    A row past the end catches the empty image slots, so that shapes are static and no gradient reaches their images.
    """
    caught = torch.cat([embedded, embedded.new_zeros(1, embedded.shape[1])])
    return caught.index_copy(0, image_tokens, features.to(embedded.dtype))[:-1]
