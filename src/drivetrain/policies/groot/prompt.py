"""What the language tower reads: the published chat template around images and instruction, or its byte-level twin."""

from __future__ import annotations

import functools

import numpy as np

from drivetrain.policies.blocks.prompt import load_tokenizer
from drivetrain.policies.groot.config import GrootConfig

# The template of GR00T-N1.5's processor. It is split only where special tokens stand, so encoding it piece by piece
# gives the tokens of the whole.
OPENING = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"

BYTE_END = 257  # after the 256 bytes and the image token


class Prompt:
    """Instruction and number of cameras -> tokens. The byte-level prompt leaves the template's words out, to stay
    short: the images, the instruction as UTF-8, one end token.

    Only the instruction is ever cut, to `config.language.task_tokens`.
    """

    def __init__(self, config: GrootConfig) -> None:
        self.language = config.language
        self.per_image = (config.vision.image_size // config.vision.patch_size) ** 2
        self._encode = functools.lru_cache(maxsize=4096)(load_tokenizer(config.language.tokenizer))

    def __reduce__(self):
        raise TypeError("a Prompt is rebuilt from its config in every process")

    def length(self, cameras: int, task: str) -> int:
        """The number of tokens that `tokens` makes."""
        return sum(len(piece) for piece in self._text(cameras, task)) + cameras * self.per_image

    def is_cut(self, task: str) -> bool:
        """Whether the instruction is longer than the policy reads."""
        return len(self._encode(task.strip())) > self.language.task_tokens

    def tokens(self, cameras: int, task: str) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S], with image placeholders, and int64 [cameras * N]: where they stand."""
        pieces, at, places = [], 0, []
        text = self._text(cameras, task)
        for i, piece in enumerate(text):
            pieces.append(piece)
            at += len(piece)
            if i < cameras:
                pieces.append([self.language.image_token] * self.per_image)
                places.append(np.arange(at, at + self.per_image))
                at += self.per_image
        where = np.concatenate(places) if places else np.zeros(0, np.int64)
        return np.concatenate([np.asarray(p, np.int64) for p in pieces]), where

    def _text(self, cameras: int, task: str) -> list[list[int]]:
        """The text before each camera's image tokens, then the text after the last."""
        words = list(self._encode(task.strip())[: self.language.task_tokens])
        if self.language.tokenizer == "bytes":
            return [[]] * cameras + [[*words, BYTE_END]]
        before = [f"</img><image {i + 1}><img>" for i in range(cameras)]
        if cameras:
            before[0] = OPENING + "<image 1><img>"
        opening = "</img>" if cameras else OPENING
        return [*(list(self._encode(b)) for b in before), [*self._encode(opening), *words, *self._encode(CLOSING)]]
