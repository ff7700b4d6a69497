"""`drivetrain launch`: a training run on many machines, as files to read first, or started at once.

Every launcher starts the same command, `drivetrain train ... --resume auto`, as one process per GPU: whatever stops a run
(a time limit, a preemption, a lost node), being started again is enough for it to go on where it was.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drivetrain.types import DrivetrainError, UsageError

if TYPE_CHECKING:
    from drivetrain.run import Run

RENDEZVOUS_PORT = 29400  # torchrun's own default


@dataclass(frozen=True)
class Slurm:
    """What Slurm is told beyond the number of nodes."""

    time_limit: str = "24:00:00"
    """Wall time of one life of the job; it is requeued before the limit and goes on."""
    partition: str = ""
    """Partition to submit to; the cluster's default if left out."""
    account: str = ""
    """Account to charge."""
    exclude: tuple[str, ...] = ()
    """Nodes never to use, as in gpu-[07,31]: the ones that `drivetrain doctor` found unfit."""
    grace: int = 300
    """Seconds before the time limit at which the run is told to save and stop."""
    options: tuple[str, ...] = ()
    """More options of sbatch, without their dashes: qos=high reservation=robots."""


@dataclass(frozen=True)
class Ray:
    """Which Ray cluster."""

    address: str = "auto"
    """Of the cluster: auto on one of its machines, or host:port."""
    min_nodes: int = 1
    """Go on with as few nodes as this when others are lost."""


@dataclass(frozen=True)
class Kuberay:
    """What the pods of a Ray cluster on Kubernetes are made of."""

    image: str = ""
    """Container image with drivetrain in it; the repository's Dockerfile builds one."""
    volume: str = ""
    """CLAIM:/PATH: the persistent volume claim that holds --out, and where pods mount it."""
    namespace: str = "default"
    """Kubernetes namespace."""
    secrets: tuple[str, ...] = ()
    """Names of Kubernetes secrets whose keys become environment variables, as in s3-credentials. Never the values."""
    rdma: str = ""
    """RESOURCE=COUNT: RDMA devices of a GPU pod, as the cluster's device plug-in names them: rdma/hca=8."""
    host_network: bool = False
    """GPU pods use their host's network, as RDMA without an SR-IOV plug-in needs it."""
    shared_memory: str = "64Gi"
    """Size of /dev/shm of a GPU pod, taken from its memory. NCCL and loader processes need it."""
    memory: str = "256Gi"
    """Memory of a GPU pod."""
    data_workers: tuple[int, int] = (0, 8)
    """Fewest and most CPU pods; Ray adds them while data tasks wait, and takes them away when they idle."""
    data_cpus: int = 8
    """CPU cores of a data pod, with 4 GiB of memory each."""
    ingest: tuple[str, ...] = ()
    """LeRobot data sets to ingest into the lake first, on the data pods."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a GPU pod's node must have."""


@dataclass(frozen=True)
class Job:
    """A training run as launchers see it.

    overrides: flags of `drivetrain train` that change the recipe.
    cpus_per_node: 0 where the launcher takes whole nodes anyway.
    """

    recipe: str
    overrides: tuple[str, ...]
    lake: str
    out: Path
    nodes: int
    gpus_per_node: int
    cpus_per_node: int = 0
    restarts: int = 3
    interface: str = ""

    @property
    def processes_per_node(self) -> int:
        """One per GPU; without GPUs, one."""
        return max(1, self.gpus_per_node)

    @property
    def name(self) -> str:
        """As DNS and Slurm take it."""
        return self.recipe.replace("_", "-")

    def train(self) -> list[str]:
        """What follows `drivetrain`."""
        place = ["--lake", self.lake, "--out", str(self.out), "--resume", "auto"]
        return ["train", self.recipe, *place, *self.overrides]


@dataclass(frozen=True)
class Launched:
    """files: name -> text. written: where they are, if anywhere.   next: what to type to start them; empty once started."""

    files: dict[str, str]
    written: list[Path]
    next: str

    def __str__(self) -> str:
        if self.written:
            start = [f"start it with: {self.next}"] if self.next else ["started"]
            return "\n".join([*(f"wrote {path}" for path in self.written), *start])
        return "\n".join(f"# --- {name}\n{text}" for name, text in self.files.items())


def launch(
    recipe: str,
    overrides: tuple[str, ...],
    run: Run,
    lake: str,
    out: Path,
    on: Literal["torchrun", "slurm", "ray", "kuberay"],
    nodes: int,
    gpus_per_node: int,
    *,
    cpus_per_node: int = 0,
    restarts: int = 3,
    interface: str = "",
    head: str = "",
    write: Path | None = None,
    start: bool = False,
    slurm: Slurm = Slurm(),
    ray: Ray = Ray(),
    kuberay: Kuberay = Kuberay(),
) -> Launched | None:
    """Files that start `drivetrain train` of `run` on many machines: printed, written to a folder, or started.

    run: the recipe with its overrides, to refuse here what could only fail on the machines.
    head: torchrun on several nodes: the host (or host:port) where they meet.
    """
    if on != "kuberay":  # whose pods see other folders than this machine does
        lake, out = lake if "://" in lake else str(Path(lake).absolute()), out.absolute()
    job = Job(recipe, overrides, lake, out, nodes, gpus_per_node, cpus_per_node, restarts, interface)
    check_processes(run, nodes * job.processes_per_node)
    if on == "ray" and start:
        from drivetrain.cluster.ray_train import train_on_ray

        smallest = min(ray.min_nodes, nodes) * job.processes_per_node
        train_on_ray(
            run, lake, out, workers=(smallest, nodes * job.processes_per_node), gpu=gpus_per_node > 0,
            address=ray.address, restarts=restarts,
            environment={name: value for name, value, _ in environment(job, str(out / "logs"))},
        )  # fmt: skip
        return None
    if on == "torchrun":
        files, name, starter = {"node.sh": node_script(job, head)}, "node.sh", ["bash"]
    elif on == "slurm":
        from drivetrain.cluster.launch_slurm import batch_script

        files, name, starter = {"job.sbatch": batch_script(job, slurm)}, "job.sbatch", ["sbatch"]
    elif on == "ray":
        files, name, starter = {"ray_job.sh": ray_script(job, ray)}, "ray_job.sh", ["bash"]
    else:
        from drivetrain.cluster.launch_kuberay import manifests

        files, name, starter = manifests(job, ray, kuberay), "rayjob.yaml", ["kubectl", "apply", "-f"]
    if start and write is None:
        write = out / "launch" if on != "kuberay" else Path("launch")
    if write is None:
        return Launched(files, [], "")
    written = _write(files, write)
    command = [*starter, str(write / name)]
    if not start:
        return Launched(files, written, shlex.join(command))
    if on == "slurm":
        (job.out / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folders for what a job prints
    _start(command)
    return Launched(files, written, "")


def check_processes(run: Run, processes: int) -> None:
    """Every process needs a pack of every step, and shards of equal size. Raises UsageError."""
    packs = run.batch.packs
    if processes > packs:
        raise UsageError(
            f"{processes} processes cannot share {packs} packs a step. Give --batch.packs {processes} or more (the same "
            "samples are trained on in every step), or fewer nodes."
        )
    if run.shard and processes % run.shard:
        raise UsageError(f"{processes} processes cannot be split into groups of {run.shard}. Give another --shard.")


# --- what all launchers share -----------------------------------------------------------------------------------------


def environment(job: Job, logs: str) -> list[tuple[str, str, str]]:
    """(name, value, why) of what every training process is started with. Nothing here is a guess about the network."""
    settings = [
        ("PYTHONUNBUFFERED", "1", "the last lines before a crash are in the log"),
        ("PYTHONFAULTHANDLER", "1", "a crash in native code leaves a stack"),
    ]
    if job.nodes > 1:
        settings.append(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", "restarted processes meet in a store of their own"))
    if job.gpus_per_node:
        settings += [
            ("NCCL_DEBUG", "WARN", "NCCL says why it failed; it is silent while it works"),
            ("TORCH_FR_DUMP_TEMP_FILE", f"{logs}/collectives_rank_", "after a hang: who waited in which collective"),
        ]
    if job.interface:
        why = "processes find each other through this network, not through the first one that has an address"
        settings += [("NCCL_SOCKET_IFNAME", job.interface, why), ("GLOO_SOCKET_IFNAME", job.interface, why)]
    return settings


def exports(job: Job, logs: str) -> list[str]:
    """`environment` as lines of a shell script. `logs` may hold shell variables."""
    return [f'export {name}="{value}"  # {why}' for name, value, why in environment(job, logs)]


def node_script(job: Job, head: str) -> str:
    """A script that starts one node's processes under torchrun; the same script runs on every node."""
    python, train = sys.executable, shlex.join(job.train())
    logs = job.out / "logs"
    if job.nodes == 1:
        meeting = ["--standalone"]
    elif not head:
        raise UsageError("torchrun on several nodes needs --head: Give the name of the node where they meet.")
    else:
        host, _, port = head.partition(":")
        meeting = [f"--nnodes={job.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={job.name}",
                   f"--rdzv-endpoint={host}:{port or RENDEZVOUS_PORT}"]  # fmt: skip
    where = "on this machine" if job.nodes == 1 else f"run this on each of the {job.nodes} nodes; they meet at {head}"
    options = [
        *map(shlex.quote, meeting), f"--nproc-per-node={job.processes_per_node}", f"--max-restarts={job.restarts}",
        '--log-dir="$logs"', "--redirects=3", "--tee=3", "--local-ranks-filter=0",
    ]  # fmt: skip
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.recipe} under torchrun: {where}.",
            "set -eu",
            f'logs={shlex.quote(str(logs))}/"$(hostname)"',
            'mkdir -p "$logs"',
            *exports(job, "$logs"),
            f"exec {shlex.quote(python)} -m torch.distributed.run \\",
            *(f"    {option} \\" for option in options),
            f"    -m drivetrain {train}",
            "",
        ]
    )


def ray_command(job: Job, address: str, min_nodes: int) -> list[str]:
    """The command that trains on a Ray cluster, from one of its machines."""
    return [
        "drivetrain", "launch", job.recipe, "--on", "ray", "--run", "--nodes", str(job.nodes),
        "--gpus-per-node", str(job.gpus_per_node), "--restarts", str(job.restarts), "--ray.address", address,
        "--ray.min-nodes", str(min_nodes), "--lake", job.lake, "--out", str(job.out), *job.overrides,
    ]  # fmt: skip


def ray_script(job: Job, ray: Ray) -> str:
    """A script that trains on a running Ray cluster, from one of its machines."""
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {job.recipe} on a Ray cluster: run this on one of its machines, or hand it to `ray job submit --`.",
            "set -eu",
            f"exec {shlex.join(ray_command(job, ray.address, ray.min_nodes))}",
            "",
        ]
    )


def _write(files: dict[str, str], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def _start(command: list[str]) -> None:
    """Run what starts the files; its output is the user's to read."""
    try:
        code = subprocess.run(command, env=os.environ).returncode
    except FileNotFoundError:
        raise DrivetrainError(
            f"there is no {command[0]!r} on this machine. Type `{shlex.join(command)}` where there is one."
        ) from None
    if code:
        raise DrivetrainError(f"`{shlex.join(command)}` ended with exit code {code}; its own words stand above.")
