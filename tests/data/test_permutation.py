import numpy as np
import pytest

from drivetrain.data.permutation import key, permute, unpermute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_is_a_bijection_with_an_inverse(n):
    order = permute(np.arange(n), n, key(7, n))
    assert sorted(order.tolist()) == list(range(n))
    assert (unpermute(order, n, key(7, n)) == np.arange(n)).all()


def test_keys_give_unrelated_orders():
    n = 5000
    a, b = permute(np.arange(n), n, key(0, 1)), permute(np.arange(n), n, key(0, 2))
    assert (a == b).mean() < 0.01
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a, np.arange(n))[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05


def test_a_billion_samples_cost_nothing_to_open_and_look_uniform():
    n = 10**9
    for start in (0, 123_456_789, n - 20_000):
        values = permute(np.arange(start, start + 20_000), n, key(3, start))
        assert len(set(values.tolist())) == 20_000
        counts, _ = np.histogram(values, bins=20, range=(0, n))
        assert (abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_order_of_key_parts_matters():
    assert key(1, 2) != key(2, 1)
    assert key(1) != key(1, 0)
