"""Processes and devices. Nobody else divides by the number of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.types import DrivetrainError


@dataclass(frozen=True)
class World:
    """This process among the others.

    mesh: two axes, `replicate` x `shard`: parameters are split along `shard` and copied along `replicate` (HSDP).
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


@contextlib.contextmanager
def world(shard: int = 0, threads: int = 0) -> Iterator[World]:
    """Join the processes that torchrun started, or be a world of one.

    shard:   processes that share one copy of the parameters; 0: all of them.
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
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        size = dist.get_world_size()
        shard = shard or size
        if size % shard:
            raise DrivetrainError(f"{size} processes cannot be split into groups of {shard}; change --shard.")
        mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
        yield World(dist.get_rank(), size, device, mesh)
    finally:
        dist.destroy_process_group()
