from __future__ import annotations

import json
from dataclasses import replace

import av
import numpy as np
import pytest
from faulty_simulators import HANGS, PROCESS_DIES, RAISES

from drivetrain.evaluate.results import EpisodeResult, read_results, success_text, wilson_interval
from drivetrain.evaluate.rollout import chunk_seed, evaluate, replay
from drivetrain.evaluate.simulator import open_simulator
from drivetrain.types import DrivetrainError, Observation

SUITE = "metaworld/reach"
SETTINGS = {"max_steps": 80, "execute": 4, "image_size": 64, "progress": lambda line: None}


class Recorded:
    """A policy that knows, for each initial state, what to do; it finds its place by the seed it is handed."""

    def __init__(self, actions: dict[int, np.ndarray], execute: int = 4, horizon: int = 8, seed: int = 0) -> None:
        self.chunks: dict[int, np.ndarray] = {}
        self.seen: list[Observation] = []
        self.batches: list[int] = []
        for state_id, taken in actions.items():
            padded = np.concatenate([taken, np.repeat(taken[-1:], 200, axis=0)])
            for chunk in range(40):
                start = chunk * execute
                self.chunks[chunk_seed(seed, state_id, chunk)] = padded[start : start + horizon]

    def __call__(self, observations: list[Observation], seeds: list[int]) -> list[np.ndarray]:
        self.seen += observations
        self.batches.append(len(observations))
        return [self.chunks[seed] for seed in seeds]


@pytest.fixture(scope="module")
def expert() -> dict[int, np.ndarray]:
    """Initial state -> the clean expert's actions up to success."""
    simulator = open_simulator(SUITE, 64)
    actions = {}
    for state_id in range(6):
        simulator.reset(state_id)
        taken = []
        for _ in range(80):
            taken.append(simulator.expert_action())
            if simulator.step(taken[-1]).success:
                break
        actions[state_id] = np.stack(taken)
        assert replay(simulator, state_id, actions[state_id])
    simulator.close()
    return actions


def test_the_experts_actions_succeed_through_the_whole_path(expert, tmp_path) -> None:
    still = {5: np.zeros((1, 4), np.float32)}
    policy = Recorded(expert | still)
    results = evaluate(policy, SUITE, [3, 0, 5, 1], workers=2, out=tmp_path, videos_per_outcome=1, **SETTINGS)
    assert [r.state_id for r in results] == [3, 0, 5, 1]
    assert [r.outcome for r in results] == ["success", "success", "time-out", "success"]
    assert [r.steps for r in results] == [len(expert[3]), len(expert[0]), 80, len(expert[1])]
    assert all(r.total_reward > 0 and r.latency_ms >= 0 for r in results)
    assert [bool(r.video) for r in results] == [True, False, True, False], "one video of each outcome"
    for result in results:
        if result.video:
            with av.open(str(tmp_path / result.video)) as container:
                stream = container.streams.video[0]
                assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
                assert sum(1 for _ in container.decode(stream)) >= result.steps
    assert read_results(tmp_path) == results
    overall = json.loads((tmp_path / "eval_info.json").read_text())["overall"]
    assert overall["pc_success"] == 75.0 and overall["n_episodes"] == 4 and len(overall["video_paths"]) == 2


def test_results_do_not_depend_on_workers_or_order(expert) -> None:
    noisy = {s: np.clip(a + np.random.default_rng(s).normal(0, 0.3, a.shape), -1, 1) for s, a in expert.items()}

    def run(states, workers):
        policy = Recorded({s: a.astype(np.float32) for s, a in noisy.items()})
        results = evaluate(policy, SUITE, states, workers=workers, **SETTINGS)
        assert sorted(r.state_id for r in results) == sorted(states), "each initial state exactly once"
        return {r.state_id: replace(r, latency_ms=0.0) for r in results}

    assert run([0, 1, 2, 3], 1) == run([3, 1, 0, 2], 3)


def test_chunks_run_as_asked_and_stop_at_the_step_limit(expert) -> None:
    policy = Recorded({0: np.zeros((1, 4), np.float32)}, execute=3)
    settings = SETTINGS | {"execute": 3, "max_steps": 10}
    (result,) = evaluate(policy, SUITE, [0], workers=1, **settings)
    assert (result.steps, result.outcome, len(policy.batches)) == (10, "time-out", 4), "asked at steps 0, 3, 6, 9"


def test_a_blind_policy_sees_black_images_and_everything_else(expert) -> None:
    policy = Recorded(expert)
    evaluate(policy, SUITE, [0], workers=1, blind=True, **SETTINGS)
    assert all(image.shape == (64, 64, 3) and image.max() == 0 for o in policy.seen for image in o.images.values())
    assert all(np.abs(o.state).sum() > 0 and o.task for o in policy.seen)


def test_a_simulator_that_crashes_is_an_outcome_and_is_replaced(expert) -> None:
    faulty = "faulty_simulators:open_faulty/reach"
    states = [0, PROCESS_DIES, RAISES, HANGS, 4]
    settings = SETTINGS | {"step_seconds": -5.0}  # leaves 10 seconds of patience for a chunk of 4
    results = {r.state_id: r for r in evaluate(Recorded(expert), faulty, states, workers=2, **settings)}
    assert {s: r.outcome for s, r in results.items()} == {
        0: "success",
        PROCESS_DIES: "crash",
        RAISES: "crash",
        HANGS: "crash",
        4: "success",
    }
    assert "exit code 7" in results[PROCESS_DIES].detail
    assert "unstable" in results[RAISES].detail and "silent" in results[HANGS].detail


def test_broken_policies_and_plans_are_named(expert) -> None:
    def wrong_width(observations, seeds):
        return [np.zeros((8, 3), np.float32)] * len(seeds)

    def not_finite(observations, seeds):
        return [np.full((8, 4), np.nan, np.float32)] * len(seeds)

    with pytest.raises(DrivetrainError, match=r"\[8, 3\].*initial state 0, step 0"):
        evaluate(wrong_width, SUITE, [0], workers=1, **SETTINGS)
    with pytest.raises(DrivetrainError, match="not finite"):
        evaluate(not_finite, SUITE, [0], workers=1, **SETTINGS)
    with pytest.raises(DrivetrainError, match="initial state 2 is listed twice"):
        evaluate(not_finite, SUITE, [1, 2, 2], **SETTINGS)


def test_wilson_intervals_and_their_wording() -> None:
    # Values of the score interval as published tables give them, to a tenth of a percent.
    for (successes, episodes), (low, high) in {
        (5, 5): (56.6, 100),
        (2, 5): (11.8, 76.9),
        (25, 50): (36.6, 63.4),
    }.items():
        bounds = wilson_interval(successes, episodes)
        assert np.allclose(100 * np.array(bounds), [low, high], atol=0.06)
    assert wilson_interval(0, 20)[0] == 0.0
    assert success_text(17, 20) == "17 of 20, 95 % interval 64 to 95 %"
    assert success_text(46, 50) == "46 of 50 (92 %), 95 % interval 81 to 97 %"


def test_crashes_count_as_episodes() -> None:
    crash = EpisodeResult("metaworld/reach", 0, 0, "crash", 2, 0.0, 0.0, 0.0)
    assert not crash.success and not replace(crash, outcome="time-out").success
