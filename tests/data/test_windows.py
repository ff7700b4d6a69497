import numpy as np
import pytest

from drivetrain.data.windows import permute_windows


@pytest.mark.parametrize("n", [1, 7, 64, 65, 100, 1000, 1023])
@pytest.mark.parametrize("fragment", [1, 8, 64])
@pytest.mark.parametrize("window", [1, 3, 1000])
def test_every_sample_once(n, fragment, window):
    for name in range(2):
        order = permute_windows(np.arange(n), n, name, fragment, window)
        assert sorted(order.tolist()) == list(range(n))


def test_index_by_index_equals_all_at_once():
    n = 1000
    order = permute_windows(np.arange(n), n, 9, 64, 3)
    assert [int(permute_windows(np.array([i]), n, 9, 64, 3)[0]) for i in range(n)] == order.tolist()


def test_few_fragments_are_open_at_a_time():
    n, fragment, window = 100_000, 1000, 4
    order = permute_windows(np.arange(n), n, 3, fragment, window)
    open_at_once = [len(set((order[i : i + 1000] // fragment).tolist())) for i in range(0, n, 1000)]
    assert max(open_at_once) <= 2 * window
    within = order[: window * fragment]
    assert abs(np.corrcoef(within[:-1], within[1:])[0, 1]) < 0.05
