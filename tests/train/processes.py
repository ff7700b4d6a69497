"""A function on several processes that find each other as under torchrun, without the seconds that torchrun takes."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.fsdp"])


def run_on(processes: int, work: Callable, *arguments: Any, timeout: float = 200) -> list[Any]:
    """What `work(*arguments)` returns on each rank. Fails with the stack trace of a rank that raised."""
    return start_on(processes, work, *arguments).results(timeout)


def start_on(processes: int, work: Callable, *arguments: Any) -> "Started":
    """The same, running: `pids` can be sent signals."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        ours, theirs = CONTEXT.Pipe()
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        child = CONTEXT.Process(target=_on_rank, args=(theirs, world, work, arguments), daemon=False)
        child.start()
        theirs.close()
        started.append((child, ours))
    return Started(started)


class Started:
    def __init__(self, started: list[tuple[Any, Connection]]):
        self.started = started
        self.pids = [child.pid for child, _ in started]

    def results(self, timeout: float = 200) -> list[Any]:
        """What each rank returned; the failures of ranks that raised are raised here."""
        found = self.outcomes(timeout)
        for rank, (_value, trace) in enumerate(found):
            assert trace is None, f"rank {rank}: {trace}"
        return [value for value, _ in found]

    def outcomes(self, timeout: float = 200) -> list[tuple[Any, str | None]]:
        """(returned, None) or (None, stack trace) of each rank; a rank that was killed says so."""
        found = []
        for child, pipe in self.started:
            try:
                found.append(pipe.recv() if pipe.poll(timeout) else (None, f"no answer in {timeout} s"))
            except EOFError:
                child.join(timeout)
                found.append((None, f"ended with exit code {child.exitcode}"))
        for child, _ in self.started:
            child.join(10)
            if child.is_alive():
                child.kill()
        return found


def _on_rank(pipe: Connection, world: dict[str, Any], work: Callable, arguments: tuple) -> None:
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((work(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
