"""Scripted experts recorded as a LeRobot v3.0 data set.

What is stored and what is done differ on purpose. The expert's action is *executed* with temporally correlated noise
and *stored* clean, so that the data show how to come back from states a clean expert never visits. A policy that imitates
data recorded without noise drifts into such states and has never seen the way out.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.evaluate.simulator import Simulator, SuiteInfo, check_suite
from drivetrain.evaluate.workers import Worker, WorkerFailed, await_ready, first_answers, spawn_workers
from drivetrain.types import DrivetrainError

NOISE_CORRELATION = 0.9
"""Of the noise from one step to the next: half of a push is gone after seven steps."""

ATTEMPTS = 4
"""An initial state whose expert fails under noise is tried again with half the noise, and the last time with none."""

EPISODE_SECONDS = 300.0


@dataclass(frozen=True)
class RecordReport:
    """What `record` did.

    states, failed: the initial states stored, in episode order, and those whose expert never succeeded (not stored).
    noise:          the noise under which each stored episode succeeded.
    """

    suite: str
    out: str
    image_size: int
    seed: int
    states: tuple[int, ...]
    failed: tuple[int, ...]
    noise: tuple[float, ...]
    steps: int
    seconds: float


@dataclass(frozen=True)
class ExpertEpisode:
    """One successful demonstration of T steps; `states[t]` and `images[camera][t]` are what `actions[t]` answers.

    images: camera -> uint8 [T, size, size, 3].   states: float32 [T, D].   actions: float32 [T, A], without the noise.
    """

    images: dict[str, np.ndarray]
    states: np.ndarray
    actions: np.ndarray
    noise: float


def record(
    suite: str,
    episodes: int,
    out: Path,
    *,
    first_state: int = 0,
    image_size: int = 96,
    noise: float = 0.7,
    max_steps: int = 250,
    seed: int = 0,
    workers: int = 2,
    progress: Callable[[str], None] = print,
) -> RecordReport:
    """Record the expert from initial states first_state .. first_state + episodes - 1 into the new folder `out`.

    noise: standard deviation of the noise on the executed motion, as a share of an action's largest value; the last
    action dimension, the gripper, gets none. The result depends on the arguments alone, not on `workers`.
    Errors: unknown suite, `out` exists, no picture can be drawn, every expert failed.
    """
    began = time.monotonic()
    check_suite(suite)
    if out.exists():
        raise DrivetrainError(f"{out} exists already. Give --out another folder, or type: rm -r {out}")
    if episodes < 1:
        raise DrivetrainError(f"{episodes} episodes are nothing to record. Give --episodes 1 or more.")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    pool = spawn_workers(suite, image_size, min(workers, episodes))
    writer = None
    try:
        progress(f"recording {episodes} episodes of {suite} with {len(pool)} simulators")
        import lerobot.datasets.lerobot_dataset  # noqa: F401  (seconds of import, while the simulators start)

        info = await_ready(pool)
        writer = _create(partial, out.name, info, image_size, max_steps)
        states = range(first_state, first_state + episodes)
        stored, failed, levels, steps = [], [], [], 0
        for state_id, episode in _demonstrations(pool, states, (noise, seed, max_steps)):
            if episode is None:
                failed.append(state_id)
            else:
                _write(writer, info, episode)
                stored.append(state_id)
                levels.append(episode.noise)
                steps += len(episode.actions)
            _report_progress(progress, len(stored), failed, episodes, steps, began)
        if not stored:
            raise DrivetrainError(f"the expert of {suite} failed from all {episodes} initial states. Give --noise 0.")
        writer.finalize()
        seconds = time.monotonic() - began
        done = tuple(stored), tuple(failed), tuple(levels)
        report = RecordReport(suite, str(out), image_size, seed, *done, steps, seconds)
        (partial / "recording.json").write_text(json.dumps(asdict(report), indent=2))
        partial.rename(out)
    finally:
        for worker in pool:
            worker.stop()
        if writer is not None and partial.exists():  # cut short: its threads must not write into what is being removed
            with contextlib.suppress(Exception):
                writer.finalize()
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"{len(stored)} episodes, {steps} steps in {out} ({report.seconds:.0f} s)")
    return report


def demonstrate(simulator: Simulator, state_id: int, noise: float, seed: int, max_steps: int) -> ExpertEpisode | None:
    """The expert's episode from one initial state, or None where it failed even without noise. Runs in a worker.

    Physics is cheap and pictures are not, so an attempt is first run blind; the one that succeeds is run again, with the
    same executed actions, for its images.
    """
    for attempt in range(ATTEMPTS):
        level = noise / 2**attempt if attempt < ATTEMPTS - 1 else 0.0
        clean, executed = _attempt(simulator, state_id, level, seed, attempt, max_steps)
        if executed is not None:
            return _with_images(simulator, state_id, clean, executed, level)
    return None


def _attempt(
    simulator: Simulator, state_id: int, noise: float, seed: int, attempt: int, max_steps: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """The expert's actions and those executed, float32 [T, A] each; None for the latter without success."""
    random = np.random.default_rng((seed, state_id, attempt))
    width = len(simulator.info.action_names)
    moving = np.arange(width) < width - 1
    disturbance = random.normal(size=width)
    clean, executed = [], []
    simulator.reset(state_id)
    for _ in range(max_steps):
        clean.append(simulator.expert_action())
        executed.append(np.clip(clean[-1] + noise * disturbance * moving, -1, 1).astype(np.float32))
        progress = simulator.step(executed[-1])
        if progress.success:
            return np.stack(clean), np.stack(executed)
        if progress.done:
            break
        fresh = np.sqrt(1 - NOISE_CORRELATION**2) * random.normal(size=width)
        disturbance = NOISE_CORRELATION * disturbance + fresh
    return np.stack(clean), None


def _with_images(
    simulator: Simulator, state_id: int, clean: np.ndarray, executed: np.ndarray, noise: float
) -> ExpertEpisode:
    seen = [simulator.reset(state_id)]
    for action in executed[:-1]:
        simulator.step(action)
        seen.append(simulator.observe())
    last = simulator.step(executed[-1])
    if not last.success:
        raise DrivetrainError(
            f"{simulator.info.suite}, initial state {state_id}, did not play back as it was recorded."
        )
    images = {c: np.stack([s.images[c] for s in seen]) for c in simulator.info.cameras}
    return ExpertEpisode(images, np.stack([s.state for s in seen]), clean, noise)


def _demonstrations(
    pool: list[Worker], states: range, settings: tuple[float, int, int]
) -> Iterator[tuple[int, ExpertEpisode | None]]:
    """(state id, episode) in the order of `states`, made by all workers at once."""
    waiting, finished, due = list(states), {}, states.start
    ahead = 2 * len(pool)  # episodes held back because an earlier one is still running
    while due < states.stop:
        for worker in pool:
            if worker.job is None and waiting and waiting[0] < due + ahead:
                worker.job = waiting.pop(0)
                worker.start(demonstrate, worker.job, *settings, seconds=EPISODE_SECONDS)
        for worker in first_answers([w for w in pool if w.job is not None]):
            try:
                finished[worker.job] = worker.answer()
            except WorkerFailed as failure:
                raise DrivetrainError(f"recording initial state {worker.job} failed: {failure}") from failure
            worker.job = None
        while due in finished:
            yield due, finished.pop(due)
            due += 1


def _create(folder: Path, name: str, info: SuiteInfo, image_size: int, max_steps: int) -> Any:
    """LeRobot's writer for a new data set in `folder`, without the chatter of the libraries below it."""
    import av.logging
    import datasets
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    av.logging.set_libav_level(av.logging.ERROR)
    datasets.disable_progress_bars()
    image = {"dtype": "video", "shape": (image_size, image_size, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": (len(info.state_names),), "names": list(info.state_names)},
        "action": {"dtype": "float32", "shape": (len(info.action_names),), "names": list(info.action_names)},
        **{f"observation.images.{camera}": image for camera in info.cameras},
    }
    return LeRobotDataset.create(
        repo_id=f"drivetrain/{name}",
        fps=info.fps,
        features=features,
        root=folder,
        robot_type=info.robot,
        rgb_encoder=RGBEncoderConfig(vcodec="h264", g=2, crf=18, preset="veryfast"),
        streaming_encoding=True,
        # LeRobot drops frames that its encoder has no room for; a queue as long as an episode always has room.
        encoder_queue_maxsize=max_steps + 1,
    )


def _write(writer: Any, info: SuiteInfo, episode: ExpertEpisode) -> None:
    for t, action in enumerate(episode.actions):
        frame = {f"observation.images.{camera}": pixels[t] for camera, pixels in episode.images.items()}
        writer.add_frame(frame | {"observation.state": episode.states[t], "action": action, "task": info.instruction})
    writer.save_episode()


def _report_progress(
    progress: Callable[[str], None], stored: int, failed: list[int], episodes: int, steps: int, began: float
) -> None:
    done = stored + len(failed)
    if done % max(1, episodes // 10) == 0 or done == episodes:
        failures = f", {len(failed)} failed" if failed else ""
        progress(f"  {done} of {episodes} episodes, {steps} steps{failures}, {time.monotonic() - began:.0f} s")
