"""A keyed permutation of range(n) that is evaluated by index: an epoch's order without a list of its samples.

A balanced Feistel network permutes the smallest power of four >= n; indices that land outside range(n) walk on until
they land inside (cycle walking), which keeps the map a bijection. At most four times the work, no memory, and any
position of any epoch costs the same, so 10^9 samples are as cheap to open as ten.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6


def mix(values: np.ndarray | np.uint64 | int) -> np.ndarray:
    """uint64 -> uint64 with every input bit spread over every output bit (the finaliser of SplitMix64, Steele 2014)."""
    with np.errstate(over="ignore"):
        z = np.asarray(values, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key(*parts: int) -> int:
    """One 64-bit key from several integers; the order matters."""
    state = np.uint64(0)
    for part in parts:
        state = mix(state ^ mix(np.uint64(part & 0xFFFFFFFFFFFFFFFF)))
    return int(state)


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where the permutation of range(n) named by `key` sends each index. int64 [...] in range(n) -> int64 [...]."""
    return _walk(index, n, key, _forward)


def unpermute(value: np.ndarray, n: int, key: int) -> np.ndarray:
    """The inverse of `permute`: at which index a value stands."""
    return _walk(value, n, key, _backward)


def _walk(index: np.ndarray, n: int, key: int, network) -> np.ndarray:
    assert n > 0
    out = np.asarray(index, dtype=np.uint64)
    assert out.size == 0 or int(out.max()) < n, "index outside the permuted range"
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    rounds = [mix(np.uint64(key) ^ mix(r)) for r in range(ROUNDS)]
    out = network(out, half, rounds)
    while (outside := out >= n).any():
        out[outside] = network(out[outside], half, rounds)
    return out.astype(np.int64)


def _forward(x: np.ndarray, half: np.uint64, rounds: list[np.ndarray]) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for k in rounds:
        left, right = right, left ^ (mix(right ^ k) & low)
    return (left << half) | right


def _backward(x: np.ndarray, half: np.uint64, rounds: list[np.ndarray]) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for k in reversed(rounds):
        left, right = right ^ (mix(left ^ k) & low), left
    return (left << half) | right
