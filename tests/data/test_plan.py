from collections import Counter

import numpy as np
import pytest

from drivetrain.data.mixture import draws_after, integer_shares
from drivetrain.data.plan import assign, make_plan
from drivetrain.types import DrivetrainError, PackShape, Spans


def make_spans(lengths: dict[str, list[int]]) -> Spans:
    """Spans of whole episodes, laid one after another."""
    dataset = np.concatenate([np.full(len(v), i) for i, v in enumerate(lengths.values())]).astype(np.int64)
    length = np.concatenate([np.array(v) for v in lengths.values()]).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(length)[:-1]])
    n = len(length)
    return Spans(
        tuple(lengths), ("task",), dataset, np.zeros(n, np.int64), np.arange(n), first, length, first + length - 1
    )


def mixed_plan(packs: int, per_pack: int = 32, **more):
    """1-, 2- and 3-camera data sets with instructions of 8 to 30 tokens, GR00T's token counts."""
    rng = np.random.default_rng(0)
    spans = make_spans({name: rng.integers(50, 150, 200).tolist() for name in ("one", "two", "three")})
    cameras = spans.dataset + 1
    tokens = 19 + 263 * cameras + rng.integers(8, 31, len(cameras))
    return make_plan(spans, tokens, cameras, samples=packs * per_pack, packs=packs, seed=1, **more)


def test_an_epoch_draws_every_sample_exactly_once():
    spans = make_spans({"a": [5, 7, 8]})
    plan = make_plan(spans, np.full(3, 10), np.ones(3, np.int64), samples=4, packs=2, seed=3)
    for epoch in range(3):
        packs = [p for k in range(5 * epoch, 5 * epoch + 5) for p in plan.step(k)]
        assert sorted(np.concatenate([p.sample for p in packs]).tolist()) == list(range(20))
        assert {e for p in packs for e in p.epoch.tolist()} == {epoch}


def test_rows_and_episode_ends_belong_to_the_sample():
    plan = mixed_plan(4)
    for p in plan.step(11):
        span = np.searchsorted(plan.offsets, p.sample, side="right") - 1
        assert (span == p.span).all()
        assert (p.row == plan.spans.first_row[span] + p.sample - plan.offsets[span]).all()
        assert (p.row <= p.last_row).all()


def test_any_step_is_the_same_whoever_asks_and_whenever():
    a, b = mixed_plan(4), mixed_plan(4)
    for k in range(20):
        a.step(k)
    for x, y in zip(a.step(1_000_000), b.step(1_000_000), strict=True):
        assert (x.sample == y.sample).all() and (x.epoch == y.epoch).all()


def test_no_sample_is_lost_or_drawn_twice_by_packing():
    plan = mixed_plan(8)
    for k in range(10):
        span, offset, _ = plan.draws(k)
        drawn = Counter((plan.offsets[span] + offset).tolist())
        assert Counter(np.concatenate([p.sample for p in plan.step(k)]).tolist()) == drawn


@pytest.mark.parametrize("packs", [8, 64])
def test_fill_and_balance_on_a_mixture_of_camera_counts(packs):
    plan = mixed_plan(packs)
    steps = [plan.step(k) for k in range(1000, 1010)]
    assert np.mean([plan.fill(k) for k in range(1000, 1010)]) >= 0.98
    for step in steps:
        cost = np.array([plan.tokens[p.span].sum() for p in step])
        assert len(step) == packs
        assert cost.max() <= 1.02 * cost.mean()


def test_balance_over_1024_ranks():
    plan = mixed_plan(1024, 16)
    cost = np.array([plan.tokens[p.span].sum() for p in plan.step(5)])
    assert len(cost) == 1024
    assert cost.max() <= 1.02 * cost.mean()
    assert plan.fill(6) >= 0.98


@pytest.mark.parametrize("weights", [{"one": 1, "two": 1, "three": 1}, {"one": 0.7, "two": 0.25, "three": 0.05}])
def test_weights_are_shares_of_samples_at_any_resume_point(weights):
    plan = mixed_plan(2, weights=weights)
    for step in (0, 777, 10**6):
        before = plan.blend.drawn_before(step)
        after = plan.blend.drawn_before(step + 100_000 // plan.samples)
        shares = (after - before) / (after - before).sum()
        assert abs(shares - np.array(list(weights.values())) / sum(weights.values())).max() < 0.005


def test_zero_weight_means_never_and_small_sets_count_their_epochs():
    spans = make_spans({"small": [10], "large": [1000], "never": [50]})
    plan = make_plan(
        spans, np.full(3, 10), np.ones(3, np.int64), samples=10, packs=1, seed=0, weights={"small": 1, "large": 9}
    )
    drawn = [plan.draws(k) for k in range(100)]
    counts = Counter(spans.dataset[s] for span, _, _ in drawn for s in span.tolist())
    assert counts == {0: 100, 1: 900}
    assert max(e for span, _, epoch in drawn for s, e in zip(span, epoch, strict=True) if spans.dataset[s] == 0) == 9


def test_weights_change_at_a_named_step():
    plan = mixed_plan(2, weights={"one": 1}, changes={10: {"two": 1}})
    assert (plan.blend.drawn_before(10) == [640, 0, 0]).all()
    assert (plan.blend.drawn_before(25) == [640, 960, 0]).all()


def test_draws_never_run_backwards():
    shares = integer_shares([0.001, 0.3, 0.6988, 0.0001, 0.0001, 0])
    previous = [0] * 6
    for total in range(3000):
        now = draws_after(shares, total)
        assert sum(now) == total
        assert all(b >= a for a, b in zip(previous, now, strict=True))
        previous = now


def test_a_step_that_does_not_fit_takes_an_extra_pack():
    tokens = np.array([60, 60, 60, 10])
    packs = assign(tokens, np.ones(4, np.int64), 2, PackShape(tokens=100, samples=4, images=4))
    assert len(packs) == 3
    assert sorted(np.concatenate(packs).tolist()) == [0, 1, 2, 3]


def test_a_sample_beyond_the_budget_is_named():
    spans = make_spans({"a": [5, 5], "b": [5]})
    with pytest.raises(DrivetrainError, match=r"'b', episode 2, takes 300 tokens"):
        make_plan(
            spans, np.array([10, 10, 300]), np.ones(3, np.int64), samples=4, packs=1, seed=0,
            shape=PackShape(tokens=256, samples=4, images=4),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"c": 1.0}, "names 'c'"),
        ({"empty": 1.0}, "no samples to draw"),
        ({"a": -1.0}, "not negative"),
        ({"a": 0.0}, "not all zero"),
    ],
)
def test_mixtures_that_cannot_be_drawn(weights, words):
    spans = make_spans({"a": [5], "empty": [0]})
    with pytest.raises(DrivetrainError, match=words):
        make_plan(spans, np.full(2, 10), np.ones(2, np.int64), samples=2, packs=1, seed=0, weights=weights)


def test_a_windowed_epoch_draws_every_sample_once_too():
    spans = make_spans({"a": [50, 70, 80], "b": [33]})
    plan = make_plan(
        spans, np.full(4, 10), np.ones(4, np.int64), samples=233, packs=2, seed=3, fragment=16, window=2,
    )  # fmt: skip
    packs = [p for k in range(2) for p in plan.step(k)]
    assert sorted(np.concatenate([p.sample for p in packs]).tolist()) == sorted([*range(233)] * 2)
