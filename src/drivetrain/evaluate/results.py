"""What an evaluation found: one row per episode, success with its interval, and the files others read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["success", "time-out", "crash"]

BARE_PERCENTAGE_FROM = 50
"""Episodes below which a percentage alone would claim more than was measured, so it is never printed."""


@dataclass(frozen=True)
class EpisodeResult:
    """One episode. A crash of the simulator is an outcome of its own: never a success, never left out of the count.

    state_id: the initial state.      seed:       of the evaluation; with the state id it decides the policy's noise.
    steps:    actions carried out.    latency_ms: mean wall time of the policy calls this episode waited for.
    total_reward, max_reward: of the suite's own reward, summed (the return) and at its best step.
    video:    file name beside episodes.parquet, or empty.      detail: what is known of a crash, or empty.
    """

    suite: str
    state_id: int
    seed: int
    outcome: Outcome
    steps: int
    total_reward: float
    max_reward: float
    latency_ms: float
    video: str = ""
    detail: str = ""

    @property
    def success(self) -> bool:
        """Whether the suite itself says that the task was done."""
        return self.outcome == "success"


def wilson_interval(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """Bounds of the success rate, each in [0, 1]: Wilson's score interval, 95 % unless another z is given.

    Unlike the normal approximation it is honest for few episodes: 5 of 5 gives 0.57 to 1, not 1 to 1.
    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).
    """
    assert 0 <= successes <= episodes and episodes > 0, (successes, episodes)
    rate = successes / episodes
    centre = (rate + z * z / (2 * episodes)) / (1 + z * z / episodes)
    half = z * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2)) / (1 + z * z / episodes)
    return max(0.0, centre - half), min(1.0, centre + half)


def success_text(successes: int, episodes: int) -> str:
    """'17 of 20, 95 % interval 64 to 95 %'; the percentage itself only from 50 episodes on."""
    if episodes == 0:
        return "no episodes"
    low, high = wilson_interval(successes, episodes)
    rate = f" ({100 * successes / episodes:.0f} %)" if episodes >= BARE_PERCENTAGE_FROM else ""
    return f"{successes} of {episodes}{rate}, 95 % interval {100 * low:.0f} to {100 * high:.0f} %"


def count_successes(results: Sequence[EpisodeResult]) -> int:
    """How many episodes succeeded."""
    return sum(result.success for result in results)


def write_results(folder: Path, results: Sequence[EpisodeResult], seconds: float) -> None:
    """Write `episodes.parquet` and `eval_info.json` (the keys that LeRobot's own evaluation writes) into `folder`.

    seconds: wall time of the evaluation.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) | {"success": result.success} for result in results]
    pq.write_table(pa.Table.from_pylist(rows), folder / "episodes.parquet")
    (folder / "eval_info.json").write_text(json.dumps(_eval_info(folder, results, seconds), indent=2))


def read_results(folder: Path) -> list[EpisodeResult]:
    """The rows that `write_results` wrote."""
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "episodes.parquet").drop_columns(["success"]).to_pylist()
    return [EpisodeResult(**row) for row in rows]


def _eval_info(folder: Path, results: Sequence[EpisodeResult], seconds: float) -> dict:
    group = results[0].suite.partition("/")[0] if results else ""
    videos = [str(folder / result.video) for result in results if result.video]
    summary = {
        "avg_sum_reward": statistics.fmean(r.total_reward for r in results),
        "avg_max_reward": statistics.fmean(r.max_reward for r in results),
        "pc_success": 100 * count_successes(results) / len(results),
        "n_episodes": len(results),
        "video_paths": videos,
    }
    metrics = {
        "sum_rewards": [r.total_reward for r in results],
        "max_rewards": [r.max_reward for r in results],
        "successes": [r.success for r in results],
        "video_paths": videos,
        "state_ids": [r.state_id for r in results],
        "outcomes": [r.outcome for r in results],
    }
    low, high = wilson_interval(count_successes(results), len(results))
    return {
        "per_task": [{"task_group": group, "task_id": 0, "task": results[0].suite, "metrics": metrics}],
        "per_group": {group: summary},
        "overall": summary
        | {"eval_s": seconds, "eval_ep_s": seconds / len(results), "pc_success_interval_95": [100 * low, 100 * high]},
    }
