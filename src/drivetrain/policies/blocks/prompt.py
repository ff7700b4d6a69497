"""Text to tokens, for every policy's prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drivetrain.types import DrivetrainError


def load_tokenizer(name: str) -> Callable[[str], tuple[int, ...]]:
    """Text -> token ids, special tokens of the text recognised and none added.

    name: "bytes"; a folder with a tokenizer.json (needs the `tokenizers` package); or any other folder or hub name that
    `transformers` can load.
    """
    if name == "bytes":
        return lambda text: tuple(text.encode())
    file = Path(name) / "tokenizer.json"
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            return lambda text: tuple(fast.encode(text, add_special_tokens=False).ids)
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DrivetrainError(
            f"the tokenizer {name!r} needs the package {error.name!r}: pip install {error.name}"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DrivetrainError(f"the tokenizer {name!r} cannot be loaded: {error}") from error
    return lambda text: tuple(loaded.encode(text, add_special_tokens=False))
