"""How the GPUs of a node hang together and reach the network: NVLink and PCIe, RDMA devices, GPUDirect."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.cluster.doctor_report import Check
from drivetrain.types import DrivetrainError

# From near to far, as the legend of `nvidia-smi topo -m` has it; NV# stands for that many NVLinks.
FAR = ("SYS", "NODE", "PHB")  # the traffic passes the processor
WORDS = {
    "SYS": "through the link between the processors", "NODE": "through one processor's host bridges",
    "PHB": "through a PCIe host bridge", "PXB": "through several PCIe switches", "PIX": "through one PCIe switch",
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m` as read. links: (device, device) -> NV18, PIX, SYS, ...   nics: NIC0 -> mlx5_0."""

    links: dict[tuple[str, str], str]
    nics: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        names = {a for a, _ in self.links if a.startswith("GPU")}
        return sorted(names, key=lambda n: int(n[3:]))


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. rate: bit/s.  state: ACTIVE, DOWN, ...  layer: InfiniBand or Ethernet."""

    device: str
    port: str
    state: str
    rate: float
    layer: str


@dataclass(frozen=True)
class Fabric:
    """What one node has. topology: None where nvidia-smi cannot be asked. gpudirect: how, or empty for not at all."""

    node: str
    topology: Topology | None
    ports: tuple[Port, ...]
    gpudirect: str

    @property
    def rate(self) -> float:
        """bit/s that all active ports carry together."""
        return sum(p.rate for p in self.ports if p.state == "ACTIVE")


def fabric(node: str, root: Path = Path("/")) -> Fabric:
    """What this node has. root: where /sys and /proc are."""
    return Fabric(node, _ask_nvidia_smi(), tuple(rdma_ports(root)), gpudirect(root))


def parse_topology(text: str) -> Topology:
    """The matrix and the NIC legend that `nvidia-smi topo -m` prints.

    Raises DrivetrainError where there is no matrix in `text`.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    device = r"(?:GPU|NIC)\d+"
    head = next((i for i, line in enumerate(lines) if re.match(rf"\s+{device}\b", line)), None)
    if head is None:
        raise DrivetrainError("`nvidia-smi topo -m` printed no matrix of devices. Type it and see what it says.")
    names = re.findall(rf"\b{device}\b", lines[head])
    links: dict[tuple[str, str], str] = {}
    for line in lines[head + 1 :]:
        row, *cells = line.split()[: len(names) + 1] or [""]
        if not re.fullmatch(device, row):
            break
        links |= {(row, name): cell for name, cell in zip(names, cells, strict=False) if cell != "X"}
        if len(names) == 1:
            links.setdefault((row, row), "X")
    nics = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    return Topology(links, nics)


def rdma_ports(root: Path = Path("/")) -> list[Port]:
    """The ports under /sys/class/infiniband, in the order of their names."""
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):

        def read(name: str, folder: Path = folder) -> str:
            try:
                return (folder / name).read_text().strip()
            except OSError:
                return ""

        state = read("state").rpartition(":")[2].strip() or "unknown"  # as in `4: ACTIVE`
        rate = re.match(r"([\d.]+)\s*Gb/sec", read("rate"))  # as in `400 Gb/sec (4X NDR)`
        gigabits = float(rate.group(1)) if rate else 0.0
        ports.append(Port(folder.parent.parent.name, folder.name, state, gigabits * 1e9, read("link_layer")))
    return ports


def gpudirect(root: Path = Path("/")) -> str:
    """How RDMA devices can reach GPU memory here: `nvidia_peermem`, `dmabuf`, both, or nothing (empty).

    dmabuf needs the driver's open kernel modules and Linux 5.12 (NCCL's documentation of NCCL_DMABUF_ENABLE).
    """
    ways = []
    if (root / "sys/module/nvidia_peermem").exists() or (root / "sys/module/nv_peer_mem").exists():
        ways.append("nvidia_peermem")
    try:
        driver = (root / "proc/driver/nvidia/version").read_text()
        release = (root / "proc/sys/kernel/osrelease").read_text()
    except OSError:
        driver = release = ""
    kernel = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    if "Open Kernel Module" in driver and kernel >= (5, 12):
        ways.append("dmabuf")
    return " and ".join(ways)


def _ask_nvidia_smi() -> Topology | None:
    if not shutil.which("nvidia-smi"):
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
        return parse_topology(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, DrivetrainError):
        return None


# --- what of it is amiss ----------------------------------------------------------------------------------------------


def fabric_checks(fabrics: list[Fabric], gpus: bool) -> list[Check]:
    """One entry a node. gpus: whether any of them has a GPU."""
    return [*_topology_checks(fabrics, gpus), *_rdma_checks(fabrics), *_gpudirect_checks(fabrics, gpus)]


def _topology_checks(fabrics: list[Fabric], gpus: bool) -> list[Check]:
    what, checks = "NVLink and PCIe", []
    known = [(f, f.topology) for f in fabrics if f.topology]
    if not known:
        return [Check("fabric", what, "", "not here", "nvidia-smi cannot be asked" if gpus else "no GPU")]
    for f, topology in known:
        between = {pair: how for pair, how in topology.links.items() if all(d.startswith("GPU") for d in set(pair))}
        between = {(a, b): how for (a, b), how in between.items() if a < b}
        if len(topology.gpus) < 2:
            continue
        if far := sorted(pair for pair, how in between.items() if how in FAR):
            a, b = far[0]
            mixed = any(how.startswith("NV") for how in between.values())
            text = (
                f"{len(far)} of {len(between)} pairs of GPUs reach each other {WORDS[between[a, b]]}, first {a} and {b}"
            )
            remedy = (
                "Others have NVLink: a bridge or link is missing. See nvidia-smi nvlink -s."
                if mixed
                else "Without NVLink gradients pass the processor: keep replicas whole on one GPU where they fit."
            )
            checks.append(Check("fabric", what, f.node, "warning", text, remedy))
        links = Counter(how for how in between.values() if how.startswith("NV"))
        if len(links) > 1:
            text = "GPUs of one node have unequal NVLinks: " + ", ".join(f"{n} pairs {how}" for how, n in links.items())
            checks.append(
                Check("fabric", what, f.node, "warning", text, "See nvidia-smi nvlink -s for links that are down.")
            )
        checks += _nic_distance(f.node, topology)
    if not checks:
        kinds = Counter(
            how for _, t in known for pair, how in t.links.items() if pair[0] < pair[1] and "NIC" not in pair[1]
        )
        text = ", ".join(f"{n} pairs {how}" for how, n in kinds.items()) or "one GPU a node, so no link between GPUs"
        checks.append(Check("fabric", what, "", "ok", text))
    return checks


def _nic_distance(node: str, topology: Topology) -> list[Check]:
    """A GPU whose nearest network card is behind a processor cannot use GPUDirect at speed."""
    checks = []
    for gpu in topology.gpus:
        near = [how for (a, b), how in topology.links.items() if a == gpu and b.startswith("NIC")]
        if near and all(how in FAR for how in near):
            best = max(near, key=FAR.index)
            text = f"its nearest network card is reached {WORDS[best]}"
            remedy = (
                "NCCL will not use GPUDirect RDMA that far. Check slots, or that the container passes all cards on."
            )
            checks.append(Check("fabric", "GPU to network card", f"{node} {gpu}", "warning", text, remedy))
    return checks


def _rdma_checks(fabrics: list[Fabric]) -> list[Check]:
    if not any(f.ports for f in fabrics):
        text = "no device under /sys/class/infiniband: traffic between nodes is TCP"
        return [Check("fabric", "RDMA", "", "not here", text)]
    checks = []
    active = {f.node: [p for p in f.ports if p.state == "ACTIVE"] for f in fabrics}
    usual = Counter(len(ports) for ports in active.values()).most_common(1)[0][0]
    fastest = max(p.rate for f in fabrics for p in f.ports)
    for f in fabrics:
        for p in f.ports:
            where = f"{f.node} {p.device} port {p.port}"
            if p.state == "ACTIVE" and p.rate < fastest:
                text = f"runs at {p.rate / 1e9:g} Gb/s, others at {fastest / 1e9:g} Gb/s"
                remedy = "A worn cable or a wrong port setting: see ibstat and mlxlink; or name the cards to use in NCCL_IB_HCA."
                checks.append(Check("fabric", "RDMA", where, "warning", text, remedy))
            elif p.state != "ACTIVE":
                text = f"is {p.state}"
                remedy = "If it should carry traffic: cable, switch port, subnet manager. If not: leave it out of NCCL_IB_HCA."
                checks.append(Check("fabric", "RDMA", where, "warning", text, remedy))
        if len(active[f.node]) < usual:
            text = f"{len(active[f.node])} active RDMA ports, other nodes have {usual}"
            remedy = "All nodes run at this one's pace. Bring the ports up, or leave the node out."
            checks.append(Check("fabric", "RDMA", f.node, "unfit", text, remedy))
    if not checks:
        p = fabrics[0].ports[0]
        text = f"{usual} active ports a node of {p.rate / 1e9:g} Gb/s ({p.layer or 'unknown link layer'})"
        checks.append(Check("fabric", "RDMA", "", "ok", text))
    return checks


def _gpudirect_checks(fabrics: list[Fabric], gpus: bool) -> list[Check]:
    with_rdma = [f for f in fabrics if f.ports]
    if not with_rdma or not gpus:
        text = "needs an RDMA device and a GPU" if not with_rdma else "no GPU"
        return [Check("fabric", "GPUDirect RDMA", "", "not here", text)]
    if without := [f for f in with_rdma if not f.gpudirect]:
        text = "RDMA cards cannot reach GPU memory: every byte takes a detour through the host's memory"
        remedy = "Type: modprobe nvidia_peermem; or install the driver's open kernel modules, which bring dmabuf."
        return [Check("fabric", "GPUDirect RDMA", f.node, "warning", text, remedy) for f in without]
    return [Check("fabric", "GPUDirect RDMA", "", "ok", f"by {with_rdma[0].gpudirect}")]
