"""One process's view of its node: cores, memory, shared memory, open files, disk, versions. And what of it is amiss."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from drivetrain.cluster.doctor_report import Check, size, spread

PACKAGES = ("torch", "numpy", "safetensors", "pylance", "pyarrow", "ray", "lerobot", "transformers", "nvidia-nccl-cu13")
PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "TORCH_", "PYTORCH_", "TP_SOCKET", "UCX_", "FI_")

# A rank opens a few connections to every other one: gloo twice (training, checkpoints) and NCCL's sockets.
FILES, FILES_PER_RANK = 512, 8
# A loader hands packs over in shared memory: a full pack of 64 samples with 3 cameras is 29 MB, and a few are in flight.
SHM_UNFIT, SHM_WARNING = 256e6, 1e9
# Weights and Adam's two moments in float32 of a policy of 3 billion parameters; a new one is written before an old one goes.
CHECKPOINT = 36e9


@dataclass(frozen=True)
class Machine:
    """Facts of one process and of the node it runs on. Bytes; None where this kind of machine does not say.

    node:       the host's name, with its number among the nodes where several nodes have one name.
    cores:      that this process may use, by affinity and by the container's quota.
    open_files: soft and hard limit.     memlock: most bytes it may pin, -1 for no limit.
    address, interface, speed: where the other nodes are reached from; speed in bit/s, None for virtual interfaces.
    """

    node: str
    rank: int
    local_rank: int
    local_size: int
    cores: int
    threads: int
    memory: int | None
    memory_free: int | None
    shm: int | None
    shm_free: int | None
    open_files: tuple[int, int]
    memlock: int
    disk: str
    disk_kind: str
    disk_free: int
    address: str
    interface: str
    interfaces: tuple[str, ...]
    speed: float | None
    versions: dict[str, str]
    variables: dict[str, str]


def machine(out: Path, node: str, rank: int, local_rank: int, local_size: int) -> Machine:
    """What this process sees. Touches nothing. out: a folder on the disk that checkpoints go to; it need not exist."""
    import torch

    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = _meminfo("MemAvailable")
    address, interface = _way_out()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Machine(
        node=node,
        rank=rank,
        local_rank=local_rank,
        local_size=local_size,
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory=_memory(),
        memory_free=free,
        shm=shm and shm.total,
        shm_free=shm and shm.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        disk=str(out),
        disk_kind=file_system(existing),
        disk_free=shutil.disk_usage(existing).free,
        address=address,
        interface=interface,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        speed=_speed(interface),
        versions=_versions(),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
    )


def machine_checks(machines: list[Machine]) -> list[Check]:
    """What of the gathered facts, one entry a rank, is amiss."""
    leaders = [m for m in machines if m.local_rank == 0]
    return [
        *_core_checks(leaders),
        *_shm_checks(leaders),
        *_file_checks(machines),
        *_disk_checks(leaders),
        *_version_checks(machines),
    ]


def _core_checks(leaders: list[Machine]) -> list[Check]:
    checks = [
        Check(
            "node", "cores and memory", "", "ok",
            f"{_nodes(leaders)}, {spread([m.cores for m in leaders])} cores, "
            f"{_bytes(m.memory for m in leaders)} memory, {_bytes(m.memory_free for m in leaders)} of it available",
        )
    ]  # fmt: skip
    usual = Counter((m.local_size, m.cores) for m in leaders).most_common(1)[0][0]
    for m in leaders:
        if (m.local_size, m.cores) != usual:
            found = f"{m.local_size} processes and {m.cores} cores, most nodes have {usual[0]} and {usual[1]}"
            checks.append(
                Check("node", "equal nodes", m.node, "warning", found, "The others wait for it. Use nodes of one kind.")
            )
        wanted = m.threads * m.local_size
        if wanted > m.cores:
            found = f"{m.local_size} processes of {m.threads} threads share {m.cores} cores"
            good = max(1, m.cores // m.local_size)
            how = f"Type: export OMP_NUM_THREADS={good}" if m.threads > good else "Start fewer, or take a larger node."
            remedy = f"They take turns, slower than fewer would be. {how}"
            checks.append(Check("settings", "threads", m.node, "warning", found, remedy))
    return checks


def _shm_checks(leaders: list[Machine]) -> list[Check]:
    known = [(m, m.shm / m.local_size, m.shm_free / m.local_size) for m in leaders if m.shm and m.shm_free is not None]
    if not known:
        return [Check("node", "shared memory", "", "not here", "this system has no /dev/shm")]
    checks = []
    for m, _, free in known:
        if free < SHM_WARNING:
            status = "unfit" if free < SHM_UNFIT else "warning"
            found = f"/dev/shm has {size(m.shm_free or 0)} free of {size(m.shm or 0)}, for {m.local_size} process(es)"
            remedy = (
                "Loader workers hand packs over there and NCCL's rings live there; a full one is a bus error. "
                f"Give {size(SHM_WARNING * m.local_size)}: docker run --shm-size, an emptyDir with medium: Memory in "
                "Kubernetes, or mount -o remount,size=... /dev/shm."
            )
            checks.append(Check("node", "shared memory", m.node, status, found, remedy))
    if not checks:
        checks.append(Check("node", "shared memory", "", "ok", f"/dev/shm {_bytes(m.shm for m in leaders)}"))
    return checks


def _file_checks(machines: list[Machine]) -> list[Check]:
    needed = FILES + FILES_PER_RANK * len(machines)
    checks = []
    for m in machines:
        soft, hard = m.open_files
        if 0 <= soft < needed and m.local_rank == 0:
            found = f"{soft} open files allowed, {len(machines)} process(es) need {needed}"
            how = (
                "ulimit -n 65536"
                if hard < 0 or hard >= 65536
                else f"raise the hard limit too (it is {hard}): LimitNOFILE"
            )
            remedy = f"Sockets and tables fail with `too many open files`. Type: {how}"
            checks.append(Check("settings", "open files", m.node, "unfit", found, remedy))
    limits = [m.open_files[0] if m.open_files[0] >= 0 else sys.maxsize for m in machines]
    if not checks:
        checks.append(Check("settings", "open files", "", "ok", f"{min(limits)} allowed, {needed} needed"))
    return checks


def _disk_checks(leaders: list[Machine]) -> list[Check]:
    checks = []
    for m in leaders:
        if m.disk_free < 2e9:
            found = f"{size(m.disk_free)} free in {m.disk}"
            checks.append(Check("storage", "free disk", m.node, "unfit", found, "Free some, or give another --out."))
    if not checks:
        least = min(leaders, key=lambda m: m.disk_free)
        fits = int(least.disk_free / CHECKPOINT)
        found = (
            f"{size(least.disk_free)} free in {least.disk} ({least.disk_kind}): room for {fits} checkpoint(s) of a policy "
            f"of 3 billion parameters ({size(CHECKPOINT)} each)"
        )
        checks.append(Check("storage", "free disk", "", "ok", found))
    return checks


def _version_checks(machines: list[Machine]) -> list[Check]:
    """Everything must be equal on all ranks; the drivetrain's own code too, not only its version."""
    checks = []
    for name in sorted({n for m in machines for n in m.versions}):
        found = [m.versions.get(name, "absent") for m in machines]
        usual = Counter(found).most_common(1)[0][0]
        if odd := [(m, v) for m, v in zip(machines, found, strict=True) if v != usual]:
            m, version = odd[0]
            where = m.node if len(odd) == 1 else f"{m.node} and {len(odd) - 1} more rank(s)"
            status = "unfit" if name in ("python", "torch", "drivetrain code", "nvidia-nccl-cu13") else "warning"
            text = f"{name} {version} on rank {m.rank}, {usual} elsewhere"
            remedy = "Ranks of different versions hang or differ silently. Install the same lock file on all nodes."
            checks.append(Check("settings", "versions", where, status, text, remedy))
    if not checks:
        v = machines[0].versions
        named = ", ".join(f"{n} {v[n]}" for n in ("python", "torch", "numpy") if n in v)
        same = f"equal on all {len(machines)} ranks: " if len(machines) > 1 else ""
        checks.append(Check("settings", "versions", "", "ok", f"{same}{named}"))
    return checks


# --- reading the system ------------------------------------------------------------------------------------------------


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory() -> int | None:
    total = _meminfo("MemTotal")
    limit = _first_line("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if total and limit.isdigit() else total


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def file_system(folder: Path) -> str:
    """The kind of file system that holds `folder` (ext4, nfs4, tmpfs, ...), or `unknown`."""
    best = ("", "unknown")
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return best[1]
    real = f"{folder.resolve()}/"
    for line in mounts:
        _, place, kind, *_ = line.split()
        if real.startswith(f"{place.rstrip('/')}/") and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def _way_out() -> tuple[str, str]:
    """(address, interface) from which the others are reached; the loopback for a process that is alone."""
    target = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect((target, 9))
            address = probe.getsockname()[0]
    except OSError:
        return "", ""
    return address, next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _address_of(interface: str) -> str:
    import fcntl

    request = interface.encode()[:15].ljust(256, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR; Linux only, others raise
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _speed(interface: str) -> float | None:
    """bit/s of a network card; None for a virtual interface, whose figure means nothing."""
    if not interface or not os.path.exists(f"/sys/class/net/{interface}/device"):
        return None
    megabits = _first_line(f"/sys/class/net/{interface}/speed")
    return int(megabits) * 1e6 if megabits.isdigit() and int(megabits) > 0 else None


def _first_line(file: str) -> str:
    try:
        return Path(file).read_text().strip().partition("\n")[0]
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "drivetrain code": _code_hash()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _code_hash() -> str:
    """A fingerprint of drivetrain's own source: nodes that run different states of one version are found too."""
    import drivetrain

    root, total = Path(drivetrain.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return total.hexdigest()[:12]


def _nodes(leaders: list[Machine]) -> str:
    return leaders[0].node if len(leaders) == 1 else f"{len(leaders)} nodes"


def _bytes(values: Iterable[int | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "unknown"
    return size(min(known)) if size(min(known)) == size(max(known)) else f"{size(min(known))} to {size(max(known))}"
