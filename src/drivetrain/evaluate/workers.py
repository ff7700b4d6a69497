"""Simulators in processes of their own: MuJoCo is CPU-bound, and may take its process down with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from drivetrain.evaluate.metaworld import choose_renderer, rendering_remedy
from drivetrain.evaluate.simulator import Simulator, SuiteInfo, check_suite, open_simulator
from drivetrain.types import DrivetrainError

START_SECONDS = 180.0
"""How long a worker may take to import its simulator and draw one picture."""


class WorkerFailed(Exception):
    """A simulator raised, fell silent or lost its process; the message says which. It need not end the run."""


@dataclass
class Worker:
    """One simulator in one spawned process, doing at most one job at a time.

    deadline: the time.monotonic() by which the present job must have answered.
    late:     it missed one and its process was stopped.
    job:      the caller's note about what is running; None when idle.
    """

    process: BaseProcess
    connection: Connection
    suite: str
    image_size: int
    info: SuiteInfo | None = None
    deadline: float = 0.0
    late: bool = False
    job: Any = field(default=None)

    def start(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> None:
        """Run `function(simulator, *arguments)` over there; its answer must come within `seconds`."""
        self.deadline = time.monotonic() + seconds
        # Where the process is gone, the pipe reads as ended, and answer() says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send((function, arguments))

    def answer(self) -> Any:
        """What the job returned. Call when `first_answers` named this worker. Raises WorkerFailed."""
        if self.late:
            raise WorkerFailed("the simulator fell silent, and its process was stopped")
        try:
            failed, value = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join(5)
            raise WorkerFailed(f"the simulator's process ended with exit code {self.process.exitcode}") from error
        if failed:
            raise WorkerFailed(value)
        return value

    def stop(self) -> None:
        """End the process, politely first."""
        self.connection.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def spawn_workers(suite: str, image_size: int, count: int) -> list[Worker]:
    """Start `count` workers without waiting for them. Errors: unknown suite."""
    check_suite(suite)
    choose_renderer()
    context = multiprocessing.get_context("spawn")
    workers = []
    for _ in range(count):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, suite, image_size), daemon=True)
        process.start()
        there.close()
        workers.append(Worker(process, here, suite, image_size, deadline=time.monotonic() + START_SECONDS))
    return workers


def await_ready(workers: list[Worker]) -> SuiteInfo:
    """Wait until each worker has drawn a picture; the suite's description. Errors: rendering fails or hangs; a remedy."""
    for worker in workers:
        if not first_answers([worker]):
            raise AssertionError("unreachable: a worker answers, ends or is past its deadline")
        try:
            worker.info = worker.answer()
        except WorkerFailed as failure:
            for other in workers:
                other.stop()
            raise DrivetrainError(f"the simulator drew no picture: {failure}\n{rendering_remedy()}") from failure
    assert workers and workers[0].info is not None
    return workers[0].info


def first_answers(workers: list[Worker]) -> list[Worker]:
    """Wait for the first workers that answered, whose process ended, or whose deadline passed (stopped here)."""
    remaining = max(0.0, min(w.deadline for w in workers) - time.monotonic())
    ready = set(map(id, wait([w.connection for w in workers], timeout=remaining)))
    late = [w for w in workers if id(w.connection) not in ready and time.monotonic() >= w.deadline]
    for worker in late:
        worker.late = True
        worker.process.kill()
        worker.process.join()
    return [w for w in workers if id(w.connection) in ready] + late


def _serve(connection: Connection, suite: str, image_size: int) -> None:
    """The worker's life: open the simulator, draw one picture, then answer jobs until the other side hangs up."""
    simulator: Simulator | None = None
    try:
        simulator = open_simulator(suite, image_size)
        simulator.reset(0)
        connection.send((False, simulator.info))
        while True:
            function, arguments = connection.recv()
            try:
                connection.send((False, function(simulator, *arguments)))
            except Exception:
                connection.send((True, traceback.format_exc(limit=-3)))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        pass
    except Exception:
        connection.send((True, traceback.format_exc(limit=-3)))
    finally:
        if simulator is not None:
            simulator.close()
