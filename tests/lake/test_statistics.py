"""Statistics against numpy on the same rows, whatever the grouping (FC-06, FC-47, FC-48)."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from drivetrain.lake.statistics import CAPACITY, QUANTILES, Sketch, from_bytes, merge, sketch, statistics, to_bytes


def merged(rows: np.ndarray, pieces: int) -> Sketch:
    return reduce(merge, (sketch(part) for part in np.array_split(rows, pieces) if len(part)))


def compare(s: Sketch, rows: np.ndarray) -> None:
    wide, found = rows.astype(np.float64), statistics(s)
    assert found.count == len(rows)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(found.std, wide.std(0), rtol=1e-10, atol=1e-13)
    assert np.array_equal(found.min, wide.min(0)) and np.array_equal(found.max, wide.max(0))
    for name, share in QUANTILES.items():
        np.testing.assert_allclose(getattr(found, name), np.quantile(wide, share, axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pieces", [1, 2, 7, 500])
def test_any_grouping_gives_numpy_s_values(pieces: int) -> None:
    rows = np.random.default_rng(0).normal(3, 2, (2000, 5)).astype(np.float32)
    s = merged(rows, pieces)
    compare(s, rows)
    assert s.rank_error == 0
    compare(from_bytes(to_bytes(s)), rows)


def test_quantiles_are_not_averages_of_quantiles() -> None:
    generator = np.random.default_rng(1)
    rows = np.concatenate([generator.uniform(-1, 1, (950, 1)), generator.uniform(4, 6, (50, 1))]).astype(np.float32)
    s = merge(sketch(rows[:950]), sketch(rows[950:]))
    compare(s, rows)
    assert 5.3 < statistics(s).q99[0] < 5.8  # a weighted mean of the two q99 would be 1.2


def test_neither_overflow_nor_cancellation() -> None:
    pixels = np.tile(np.array([[0.0], [200.0]], np.float32), (500, 1))
    assert statistics(merged(pixels, 3)).std == pytest.approx(100)
    signal = np.array([[5000.0], [5000.5], [5001.0]], np.float32)
    assert statistics(merged(signal, 3)).std == pytest.approx(np.std([5000, 5000.5, 5001]), rel=1e-12)
    far = (np.random.default_rng(2).normal(0, 1e-3, (10_000, 1)) + 1e4).astype(np.float32)
    compare(merged(far, 10), far)


def test_one_row_has_finite_statistics() -> None:
    found = statistics(sketch(np.array([[1.5, -2.0]], np.float32)))
    assert found.count == 1
    assert (
        np.array_equal(found.std, [0, 0])
        and np.array_equal(found.q01, [1.5, -2])
        and np.array_equal(found.q99, [1.5, -2])
    )


def test_a_constant_dimension_has_std_zero_exactly() -> None:
    rows = np.full((5000, 2), 0.1, np.float32)
    found = statistics(merged(rows, 13))
    assert np.all(found.std < 1e-15) and np.all(found.min == found.max) and np.all(found.q50 == found.min)


@pytest.mark.parametrize("kind", ["normal", "sorted", "two values"])
def test_beyond_its_capacity_the_sketch_keeps_its_stated_error(kind: str) -> None:
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(12 * CAPACITY + 7, 2)).astype(np.float32)
    if kind == "sorted":
        rows.sort(axis=0)
    if kind == "two values":
        rows = (rows > 2).astype(np.float32)
    s = merged(rows, 60)
    assert 0 < s.rank_error < 0.0005
    assert sum(len(level) for level in s.levels) < 5 * CAPACITY
    assert sum(len(level) * 2**i for i, level in enumerate(s.levels)) == len(rows)
    found = statistics(s)
    np.testing.assert_allclose(found.mean, rows.astype(np.float64).mean(0), rtol=1e-9, atol=1e-12)
    for name, share in QUANTILES.items():
        value = getattr(found, name)
        below, upto = (rows < value).mean(0), (rows <= value).mean(0)
        assert np.all(below - s.rank_error <= share + 1e-4) and np.all(upto + s.rank_error >= share - 1e-4), (
            name,
            below,
            upto,
        )
