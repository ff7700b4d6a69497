"""Who does the work of an ingest: a Ray cluster, a Ray on this machine, or this process for work that is less."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from drivetrain.lake.episode import Done, Work, ingest_episodes
from drivetrain.lake.rows import refuse
from drivetrain.types import DrivetrainError

OBJECT_STORE_BYTES = 100_000_000  # tasks return metadata only
START_ATTEMPTS = 3  # a busy machine makes Ray miss its own deadlines
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
RETRIES = 4  # of a task whose worker or node was lost

type Run = Callable[[list[Work]], Iterator[Done]]


def here(pieces: list[Work]) -> Iterator[Done]:
    """The pieces one after another in this process."""
    return map(ingest_episodes, pieces)


def through_ray(pieces: list[Work], function: Callable[[Work], Done] = ingest_episodes) -> Iterator[Done]:
    """The results in the order of the pieces, with about twice as many tasks under way as the cluster has cores.

    More tasks than cores is what an autoscaling cluster grows by. A lost node's tasks run again elsewhere. An episode
    that kills its worker again and again, as a broken video may do to a decoder, is refused and the others go on.
    """
    import ray
    from ray.exceptions import RayError, WorkerCrashedError

    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
    waiting: deque = deque()
    todo = iter(pieces)
    more = True
    while more or waiting:
        while more and len(waiting) < 2 * cores() + 2:
            piece = next(todo, None)
            more = piece is not None
            if piece is not None:
                waiting.append((piece, remote.remote(piece)))
        if waiting:
            piece, reference = waiting.popleft()
            try:
                yield ray.get(reference)
            except WorkerCrashedError:
                yield from _one_by_one(piece, remote)
            except RayError as error:
                if isinstance(getattr(error, "cause", None), DrivetrainError):
                    raise error.cause from None  # type: ignore[attr-defined]
                numbers = f"{piece.episodes[0].index} to {piece.episodes[-1].index}"
                raise DrivetrainError(
                    f"{piece.source.folder.uri}: the worker of episodes {numbers} failed: {last_line(error)}. "
                    "What was committed before is safe; type the same command again to go on."
                ) from error


def _one_by_one(piece: Work, remote) -> Iterator[Done]:
    """The episodes of a piece that crashed its worker, each alone."""
    import ray
    from ray.exceptions import WorkerCrashedError

    for episode in piece.episodes:
        alone = replace(piece, episodes=(episode,))
        try:
            yield ray.get(remote.options(max_retries=1).remote(alone))
        except WorkerCrashedError:
            refusal = refuse(
                piece.source, episode, "crash", "reading it kills the process, twice", "Encode its videos again."
            )
            yield Done(alone, findings=[refusal.finding])


def cores() -> int:
    """Of the cluster that this process is connected to, at this moment."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def ray_at(address: str | None) -> Iterator[None]:
    """A Ray to work with: the one already connected to, the one at `address`, or one started here for the occasion."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    with warnings.catch_warnings():  # Ray forks only to replace the copy by another program at once
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        if address and address != "local":
            _connect(address)
        else:
            _start()
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    """Ray itself waits for minutes where nobody answers, so the port is tried first."""
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **QUIET)
    except Exception as error:
        ray.shutdown()
        raise DrivetrainError(
            f"Ray cannot be reached at {address}: {last_line(error)}. "
            "Check the address, or leave it out to work on this machine."
        ) from error


def _start() -> None:
    import ray

    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **QUIET)
            return
        except Exception as error:  # Ray raises plain Exception where its own processes start too slowly
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise DrivetrainError(
                    f"Ray cannot be started: {last_line(error)}. Close other programs, or give --ray-address."
                ) from error
            time.sleep(2.0)


def last_line(error: Exception) -> str:
    return str(getattr(error, "cause", None) or error).strip().splitlines()[-1][:300]
