"""Elastic training on Ray Train: the run goes on when workers or nodes are lost, with as many as are left.

A run does not depend on the number of its processes: the global batch is a number of packs, and a checkpoint resumes on
any world size. So elasticity needs no code of its own. Ray Train starts `train` anew on whatever workers there are,
and `train` goes on from the newest complete checkpoint. Losing a node costs the updates since then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from drivetrain.types import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.run import Run

RESIZE_SECONDS = 60.0  # between looks at whether the cluster has room for more workers


def train_on_ray(
    run: Run,
    lake: str,
    out: Path,
    *,
    workers: tuple[int, int],
    gpu: bool = False,
    cpus: float = 1,
    address: str = "auto",
    restarts: int = 3,
    environment: dict[str, str] | None = None,
    resize_seconds: float = RESIZE_SECONDS,
) -> None:
    """Train `run` on `lake` into `out`, on a running Ray cluster, until it is finished.

    workers: fewest and most processes; the run starts, shrinks and grows within them.
    gpu, cpus: what each process takes: one GPU or none, and so many cores.
    restarts: failures of workers or nodes to survive.
    resize_seconds: how often to look for room for more workers; growing restarts from the newest checkpoint.

    `lake` and `out` must mean the same place on every node, whatever the folder. Raises DrivetrainError with the cause
    of the last failure.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    from drivetrain.lake.pool import ray_at

    with ray_at(address):
        trainer = DataParallelTrainer(
            _train,
            train_loop_config={"run": run, "lake": lake, "out": out},
            backend_config=OwnProcessGroup(),
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers if workers[0] < workers[1] else workers[1],
                use_gpu=gpu,
                resources_per_worker={"CPU": cpus, **({"GPU": 1} if gpu else {})},
                elastic_resize_monitor_interval_s=resize_seconds,
            ),
            run_config=ray.train.RunConfig(
                name="ray",
                storage_path=str(out),
                failure_config=ray.train.FailureConfig(max_failures=restarts),
                worker_runtime_env={"env_vars": environment or {}},
            ),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as failed:
            raise DrivetrainError(_cause(failed, restarts)) from failed


def _train(settings: dict[str, Any]) -> None:
    """What every worker does."""
    from drivetrain.train.main import train

    train(settings["run"], settings["lake"], settings["out"], resume="auto")


def _cause(failed: Exception, restarts: int) -> str:
    failures: dict[int, Exception] = getattr(failed, "worker_failures", {})
    said = [f"rank {rank}: {_last_line(fault)}" for rank, fault in sorted(failures.items())]
    return (
        f"the run stopped on Ray after {restarts} restarts: {'; '.join(said) or _last_line(failed)}. "
        "Type the same command again to go on from the newest checkpoint."
    )


def _last_line(fault: Exception) -> str:
    return str(fault).strip().splitlines()[-1][:300]


@dataclass
class OwnProcessGroup(BackendConfig):
    """Tells each worker who it is, as torchrun does, and leaves the process group to `parallel.mesh.world`.

    Ray's backend for torch would make the group itself, before the run can say which backends and mesh it needs.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        return _Environment


class _Environment(Backend):
    share_cuda_visible_devices = True  # processes of a node reach each other's GPUs, as NCCL needs it

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        host, port = worker_group.execute_single(0, _meeting_point)
        worker_group.execute(_set_environment, host, port)


def _meeting_point() -> tuple[str, int]:
    """An address of this worker and a port that is free on it."""
    import socket

    host = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _set_environment(host: str, port: int) -> None:
    context = ray.train.get_context()
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
    )
