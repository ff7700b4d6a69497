"""Processes and devices. Nobody else divides by the number of ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from drivetrain.types import DrivetrainError


@dataclass(frozen=True)
class World:
    """This process among the others.

    mesh: where parameters live. One axis, `shard`, or two, `replicate` x `shard`: split along the one, copied along the
          other (HSDP).
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def main(self) -> bool:
        """Whether this process is the one that talks and writes."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; no host synchronisation."""
        value = value.clone()
        dist.all_reduce(value)
        return value

    def gather(self, value: object) -> list:
        """One picklable object of each process, on every process, in rank order."""
        out: list = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def say(self, line: str) -> None:
        """A line for a person, once and not once for each process."""
        if self.main:
            print(f"drivetrain: {line}", file=sys.stderr, flush=True)

    def first[T](self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every process. What it raises there is raised on every process."""
        done: list = [None, None]
        if self.main:
            try:
                done[0] = work()
            except Exception as fault:
                done[1] = fault
        dist.broadcast_object_list(done, src=0)
        if done[1] is not None:
            raise done[1]
        return done[0]


@contextlib.contextmanager
def world(shard: int = 0, threads: int = 0) -> Iterator[World]:
    """Join the processes that torchrun started, or be a world of one.

    shard:   processes that share one copy of the parameters; 0: those of a node.
    threads: CPU threads of this process; 0 keeps torch's default.
    """
    if threads:
        torch.set_num_threads(threads)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    store, rank, size = _meeting_point()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device, make_mesh(device, size, shard))
    finally:
        dist.destroy_process_group()


def make_mesh(device: torch.device, size: int, shard: int) -> DeviceMesh:
    """The mesh of a `World` of `size` processes; shard as in `world`."""
    shard = shard or usual_shard(size)
    if size % shard:
        raise DrivetrainError(f"{size} processes cannot be split into groups of {shard}; change --shard.")
    axes = {"replicate": size // shard, "shard": shard}
    if axes["replicate"] == 1:  # an axis of one would still cost a reduction of every gradient
        del axes["replicate"]
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def usual_shard(size: int) -> int:
    """Processes that share one copy of the parameters when nothing is said: those of a node, which its fast links join.

    All of them where torchrun did not tell how many a node has, or nodes differ.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local if size % local == 0 else size


def _meeting_point() -> tuple[Store, int, int]:
    """(store, rank, world size) as torchrun set them, or of a world of one.

    On one node torchrun keeps one store over its restarts, so a restarted process would find the addresses of processes
    that are gone. Every restart gets its own part of the store; on several nodes, restart counts may differ.
    """
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        store = PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store, rank, size
