"""What the prefix stream reads after its images: the published prompt, with the robot's state written into it.

    "Task: {task}, State: {bin} {bin} ...;\\nAction: "

A state dimension is one of 256 bins of its normalised value over [-1, 1]. How many tokens a bin takes depends on its
digits, so the length of a prompt is not known before the state is read. Its bound is: the length with the widest bin in
every dimension. Packs are planned with the bound, which is 0.43 tokens a dimension too many where bins are spread evenly
(3 of the 560 of a 7-dimensional robot with two cameras); the pack holds the prompt as long as it is, and the difference
goes to its tail.
"""

from __future__ import annotations

import functools

import numpy as np

from drivetrain.policies.blocks.prompt import load_tokenizer
from drivetrain.policies.pi05.config import Pi05Config
from drivetrain.types import DrivetrainError

BINS = 256
EDGES = np.linspace(-1, 1, BINS + 1)[:-1]


def bins(state: np.ndarray) -> np.ndarray:
    """int64 bins, 0 to 255, of a normalised state; what lies outside [-1, 1] goes to the outermost bin.

    The released code prints -1 for a value below -1 and 255 for NaN. Ours clips, and a NaN does not come so far:
    normalisation refuses it.
    """
    return np.clip(np.digitize(state, EDGES) - 1, 0, BINS - 1)


class Prompt:
    """Number of cameras, task and state -> tokens.

    Only the task is ever shortened, at its end, until the prompt with the widest state fits `config.gemma.text_tokens`;
    state and answer marker are always whole. Without `config.state_in_prompt` the prompt is the task and a line break.
    """

    def __init__(self, config: Pi05Config) -> None:
        self.config, self.gemma = config, config.gemma
        self.per_image = (config.vision.image_size // config.vision.patch_size) ** 2
        self._encode = load_tokenizer(config.gemma.tokenizer)
        self._widest = functools.lru_cache(self._find_widest)
        self._fitted = functools.lru_cache(maxsize=4096)(self._fit)

    def __reduce__(self):
        raise TypeError("a Prompt is rebuilt from its config in every process")

    def bound(self, cameras: int, task: str, dimensions: int) -> int:
        """No prompt of this task and a state of so many dimensions takes more tokens, images included."""
        return cameras * self.per_image + self._fitted(clean(task), dimensions)[1]

    def is_cut(self, task: str, dimensions: int) -> bool:
        """Whether the task is longer than the policy reads."""
        return self._fitted(clean(task), dimensions)[0] != clean(task)

    def tokens(self, cameras: int, task: str, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S], with image placeholders, and int64 [cameras * N]: where they stand.

        state: float32 [dimensions], the robot's own, normalised.
        """
        fitted, bound = self._fitted(clean(task), len(state))
        text = self._text(fitted, bins(state))
        if len(text) > bound:
            raise DrivetrainError(
                f"the tokenizer {self.gemma.tokenizer!r} joins the numbers of a state into other tokens ({len(text)} "
                f"where at most {bound} were expected): pi-0.5 needs one that splits digits"
            )
        images = cameras * self.per_image
        return np.array([self.gemma.image_token] * images + text, np.int64), np.arange(images)

    def _text(self, task: str, state: np.ndarray) -> list[int]:
        begin, encode = self.gemma.begin_token, self._encode
        if not self.config.state_in_prompt:  # the line break is a token of its own, as in openpi
            return [begin, *encode(task), *encode("\n")]
        return [begin, *encode(f"Task: {task}, State: {' '.join(map(str, state.tolist()))};\nAction: ")]

    def _fit(self, task: str, dimensions: int) -> tuple[str, int]:
        """The task, shortened to fit, and the most tokens that its prompt takes."""
        state, most = self._widest(dimensions), self.gemma.text_tokens
        if (length := len(self._text(task, state))) <= most:
            return task, length
        if (least := len(self._text("", state))) > most:
            raise DrivetrainError(
                f"a state of {dimensions} dimensions takes up to {least} tokens, the prompt holds {most}: raise "
                "--policy.gemma.text-tokens, or leave the state out with --policy.no-state-in-prompt"
            )
        fits, too_long = 0, len(task)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if len(self._text(task[:middle].rstrip(), state)) <= most:
                fits = middle
            else:
                too_long = middle
        short = task[:fits].rstrip()
        return short, len(self._text(short, state))

    def _find_widest(self, dimensions: int) -> np.ndarray:
        """The state whose bins take the most tokens."""
        if not self.config.state_in_prompt:
            return np.zeros(0, np.int64)
        candidates = [np.full(dimensions, b) for b in range(BINS)]
        return max(candidates, key=lambda state: len(self._text("", state)))


def clean(task: str) -> str:
    """The task as it is printed: one line, without underscores."""
    return task.strip().replace("_", " ").replace("\n", " ")
