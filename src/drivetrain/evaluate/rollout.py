"""A policy driven in closed loop, from each initial state once.

The policy runs in this process and is asked for all waiting simulators at once; simulators run in spawned processes.
What an episode does depends on its initial state and the seed alone: not on how many workers there are, nor on who
answers first.
(A policy whose arithmetic depends on the batch it is asked in can still differ in the last bit.)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from drivetrain.evaluate.results import EpisodeResult, Outcome, count_successes, success_text, write_results
from drivetrain.evaluate.simulator import Simulator, SuiteInfo, check_suite
from drivetrain.evaluate.video import write_video
from drivetrain.evaluate.workers import Worker, WorkerFailed, await_ready, first_answers, spawn_workers
from drivetrain.types import DrivetrainError, Observation

Act = Callable[[list[Observation], list[int]], list[np.ndarray]]
"""A batched policy: n observations, n noise seeds -> n chunks, float32 [H, action dimensions], in physical units."""

VIDEO_SIZE = 256


@dataclass(frozen=True)
class ChunkOutcome:
    """What running part of a chunk led to. `observation` is None when the episode is over: nobody will look at it."""

    rewards: tuple[float, ...]
    success: bool
    done: bool
    observation: Observation | None


@dataclass(frozen=True)
class _Plan:
    """What is to be run; `patience` is how many seconds a simulator may take to answer."""

    state_ids: tuple[int, ...]
    max_steps: int
    execute: int
    seed: int
    blind: bool
    patience: float


@dataclass
class _Episode:
    """An episode under way. `actions` are those carried out, which is all it takes to see it again."""

    state_id: int
    chunk: int = 0
    observation: Observation | None = None
    asked: np.ndarray | None = None
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def evaluate(
    act: Act,
    suite: str,
    state_ids: Sequence[int],
    *,
    max_steps: int,
    execute: int,
    image_size: int,
    workers: int = 2,
    seed: int = 0,
    out: Path | None = None,
    videos_per_outcome: int = 2,
    blind: bool = False,
    step_seconds: float = 2.0,
    progress: Callable[[str], None] = print,
) -> list[EpisodeResult]:
    """Run one episode from each initial state; the results in the order of `state_ids`.

    execute:      how many actions of a chunk are carried out before the policy is asked again.
    image_size:   of the images the policy sees, square, in pixels: what its demonstrations were recorded at.
    blind:        the policy sees black images; a policy that does as well so has not learned to look.
    out:          folder for episodes.parquet, eval_info.json, and videos of the first episodes of each outcome, which are
                  filmed afterwards by carrying out their actions again.
    step_seconds: a simulator that needs longer for a step, on average over a chunk, counts as crashed.
    Errors: unknown suite, repeated initial states, no picture can be drawn, chunks of a wrong shape or not finite.
    """
    began = time.monotonic()
    check_suite(suite)
    _check_arguments(state_ids, max_steps, execute)
    pool = spawn_workers(suite, image_size, max(1, min(workers, len(state_ids))))
    finished: dict[int, tuple[EpisodeResult, np.ndarray]] = {}
    try:
        info = await_ready(pool)
        every = max(1, len(state_ids) // 10)
        plan = _Plan(tuple(state_ids), max_steps, execute, seed, blind, patience=30.0 + step_seconds * execute)
        for episode, outcome, detail in _run_all(act, info, pool, plan):
            result = _result(episode, suite, seed, outcome, detail)
            actions = np.array(episode.actions, np.float32).reshape(-1, len(info.action_names))
            finished[episode.state_id] = result, actions
            if len(finished) % every == 0 or len(finished) == len(state_ids):
                so_far = [r for r, _ in finished.values()]
                progress(f"  {len(so_far)} of {len(state_ids)} episodes, {count_successes(so_far)} succeeded")
        results = [finished[state_id][0] for state_id in state_ids]
        seconds = time.monotonic() - began
        if out is not None:
            actions_of = {state_id: actions for state_id, (_, actions) in finished.items()}
            results = _with_videos(pool, results, actions_of, out, videos_per_outcome, progress)
            write_results(out, results, seconds)
    finally:
        for worker in pool:
            worker.stop()
    progress(f"{suite}: {success_text(count_successes(results), len(results))}")
    return results


def chunk_seed(seed: int, state_id: int, chunk: int) -> int:
    """The noise seed of one policy call, in [0, 2**32): a function of what is asked, never of who asks or when."""
    return int(np.random.SeedSequence((seed, state_id, chunk)).generate_state(1)[0])


def begin_episode(simulator: Simulator, state_id: int) -> Observation:
    """Worker side: the first observation from an initial state."""
    return simulator.reset(state_id)


def run_actions(simulator: Simulator, actions: np.ndarray, is_last: bool) -> ChunkOutcome:
    """Worker side: carry out actions, float32 [n, A], until the episode is over. is_last: no picture is wanted after."""
    rewards, success, done = [], False, False
    for action in actions:
        step = simulator.step(action)
        rewards.append(step.reward)
        success, done = step.success, step.done
        if done:
            break
    return ChunkOutcome(tuple(rewards), success, done, None if done or is_last else simulator.observe())


def replay(simulator: Simulator, state_id: int, actions: np.ndarray, video: Path | None = None) -> bool:
    """Carry out recorded actions, float32 [T, A], from an initial state; whether they succeed. Filmed into `video`."""
    success = False

    def pictures() -> Iterator[np.ndarray]:
        nonlocal success
        simulator.reset(state_id)
        yield simulator.render(VIDEO_SIZE)
        for action in actions:
            success = simulator.step(action).success
            yield simulator.render(VIDEO_SIZE)

    if video is not None:
        write_video(video, pictures())
        return success
    simulator.reset(state_id)
    for action in actions:
        success = simulator.step(action).success
    return success


def _check_arguments(state_ids: Sequence[int], max_steps: int, execute: int) -> None:
    if len(set(state_ids)) != len(state_ids):
        repeated = next(s for s in state_ids if list(state_ids).count(s) > 1)
        raise DrivetrainError(f"initial state {repeated} is listed twice; each runs once. Give distinct states.")
    if not state_ids or max_steps < 1 or execute < 1:
        raise DrivetrainError(f"nothing to run: {len(state_ids)} states, {max_steps} steps, {execute} actions a chunk.")


def _run_all(act: Act, info: SuiteInfo, pool: list[Worker], plan: _Plan) -> Iterator[tuple[_Episode, Outcome, str]]:
    """Yield each episode once it is over, with its outcome and what is known of a crash. Replaces workers that died."""
    waiting = list(plan.state_ids)
    while True:
        for worker in pool:
            if worker.job is None and waiting:
                worker.job = _Episode(waiting.pop(0))
                worker.start(begin_episode, worker.job.state_id, seconds=plan.patience)
        busy = [worker for worker in pool if worker.job is not None]
        if not busy:
            return
        asking = []
        for worker in first_answers(busy):
            episode: _Episode = worker.job
            try:
                outcome = _take(worker.answer(), episode, plan.max_steps)
            except WorkerFailed as failure:
                worker.job = None
                yield episode, "crash", str(failure)
                if not worker.process.is_alive():
                    pool[pool.index(worker)] = _replacement(worker)
                continue
            if outcome is None:
                asking.append(worker)
            else:
                worker.job = None
                yield episode, outcome, ""
        if asking:
            _ask(act, info, [w.job for w in asking], plan)
            for worker in asking:
                remaining = plan.max_steps - len(worker.job.actions)
                actions = worker.job.asked[: min(plan.execute, remaining)]
                is_last = len(actions) == remaining
                worker.start(run_actions, actions, is_last, seconds=plan.patience)


def _take(answer: Observation | ChunkOutcome, episode: _Episode, max_steps: int) -> Outcome | None:
    """Note what a simulator answered; the outcome if that ended the episode."""
    if isinstance(answer, Observation):
        episode.observation = answer
        return None
    assert episode.asked is not None
    episode.actions += list(episode.asked[: len(answer.rewards)])
    episode.rewards += answer.rewards
    episode.observation = answer.observation
    if answer.success:
        return "success"
    return "time-out" if answer.done or len(episode.actions) >= max_steps else None


def _ask(act: Act, info: SuiteInfo, episodes: list[_Episode], plan: _Plan) -> None:
    """Ask the policy for one chunk for each episode."""
    observations = [e.observation for e in episodes if e.observation is not None]
    assert len(observations) == len(episodes)
    if plan.blind:
        observations = [replace(o, images={c: np.zeros_like(i) for c, i in o.images.items()}) for o in observations]
    began = time.perf_counter()
    chunks = act(observations, [chunk_seed(plan.seed, e.state_id, e.chunk) for e in episodes])
    latency = 1000 * (time.perf_counter() - began)
    assert len(chunks) == len(episodes), "the policy answers every observation"
    for episode, chunk in zip(episodes, chunks, strict=True):
        where = f"initial state {episode.state_id}, step {len(episode.actions)} of {info.suite}"
        if chunk.ndim != 2 or chunk.shape[0] < plan.execute or chunk.shape[1] != len(info.action_names):
            wanted = f"[at least {plan.execute}, {len(info.action_names)}]"
            raise DrivetrainError(f"the policy gave actions {list(chunk.shape)} where {wanted} are due ({where}).")
        if not np.isfinite(chunk[: plan.execute]).all():
            raise DrivetrainError(f"the policy gave actions that are not finite ({where}). Look at the training loss.")
        episode.asked = np.asarray(chunk, np.float32)
        episode.latencies.append(latency)
        episode.chunk += 1


def _replacement(worker: Worker) -> Worker:
    """A new worker for the suite as it was named, which a simulator of one's own need not repeat in its `info`."""
    worker.stop()
    (fresh,) = spawn_workers(worker.suite, worker.image_size, 1)
    await_ready([fresh])
    return fresh


def _result(episode: _Episode, suite: str, seed: int, outcome: Outcome, detail: str) -> EpisodeResult:
    return EpisodeResult(
        suite=suite,
        state_id=episode.state_id,
        seed=seed,
        outcome=outcome,
        steps=len(episode.actions),
        total_reward=float(sum(episode.rewards)),
        max_reward=float(max(episode.rewards, default=0.0)),
        latency_ms=fmean(episode.latencies) if episode.latencies else 0.0,
        detail=detail,
    )


def _with_videos(
    pool: list[Worker],
    results: list[EpisodeResult],
    actions_of: dict[int, np.ndarray],
    folder: Path,
    videos_per_outcome: int,
    progress: Callable[[str], None],
) -> list[EpisodeResult]:
    """The results, the first few of each outcome with a video. A video that shows another ending is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, int] = defaultdict(int)
    filmed: dict[int, str] = {}
    chosen = []
    for result in results:
        if kept[result.outcome] < videos_per_outcome:
            kept[result.outcome] += 1
            chosen.append(result)
    while chosen or any(w.job is not None for w in pool):
        for worker in pool:
            if worker.job is None and chosen:
                worker.job = chosen.pop(0)
                name = f"state-{worker.job.state_id:05d}-{worker.job.outcome}.mp4"
                actions = actions_of[worker.job.state_id]
                worker.start(replay, worker.job.state_id, actions, folder / name, seconds=60.0 + len(actions))
        for worker in first_answers([w for w in pool if w.job is not None]):
            result, worker.job = worker.job, None
            name = f"state-{result.state_id:05d}-{result.outcome}.mp4"
            try:
                agrees = worker.answer() == result.success
            except WorkerFailed as failure:
                agrees = False
                progress(f"  no video of initial state {result.state_id}: {str(failure).strip().splitlines()[-1]}")
            if agrees:
                filmed[result.state_id] = name
            else:
                (folder / name).unlink(missing_ok=True)
    return [replace(result, video=filmed.get(result.state_id, "")) for result in results]
