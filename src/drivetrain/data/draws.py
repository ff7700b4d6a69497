"""Random numbers that depend on what is drawn for, never on which process draws: any world size sees the same noise."""

from __future__ import annotations

import numpy as np

_WORD = (1 << 64) - 1


def stream(seed: int, epoch: int, sample: int, draw: int = 0) -> np.random.Generator:
    """An independent stream for one draw of one sample in one epoch; equal arguments, equal numbers, on any machine.

    A counter-based generator (Philox 4x64): seed and epoch are its key, sample and draw the high words of its counter,
    so that streams cannot overlap before 2^64 blocks.
    """
    key = np.array([seed & _WORD, epoch & _WORD], np.uint64)
    counter = np.array([0, 0, draw & _WORD, sample & _WORD], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def groot_time(
    generator: np.random.Generator, *, alpha: float = 1.5, beta: float = 1.0, s: float = 0.999
) -> np.float32:
    """GR00T-N1.5's flow time (s - u) / s, u ~ Beta(alpha, beta): in [(s-1)/s, 1], densest near 0, the noisy end."""
    return np.float32((s - generator.beta(alpha, beta)) / s)


def pi05_time(
    generator: np.random.Generator,
    *,
    alpha: float = 1.5,
    beta: float = 1.0,
    scale: float = 0.999,
    offset: float = 0.001,
) -> np.float32:
    """pi-0.5's flow time scale * u + offset, u ~ Beta(alpha, beta): in [0.001, 1], densest near 1, the noisy end."""
    return np.float32(scale * generator.beta(alpha, beta) + offset)
