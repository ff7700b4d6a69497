"""Environment variables that make collectives slower or break them, and the ones worth setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.cluster.doctor_fabric import Fabric
from drivetrain.cluster.doctor_machine import Machine
from drivetrain.cluster.doctor_report import Check, Status


@dataclass(frozen=True)
class Situation:
    """What decides whether a setting hurts. gpus: in one node; nvlink, rdma: whether there is any."""

    nodes: int
    gpus: int
    nvlink: bool
    rdma: bool


@dataclass(frozen=True)
class Rule:
    """A value of a variable that hurts.

    hurts: whether it is such a value.   matters: where it costs something now; elsewhere it is told as a warning.
    """

    variable: str
    hurts: Callable[[str], bool]
    matters: Callable[[Situation], bool]
    why: str
    remedy: str = "unset it"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "off", "false")


def _off(value: str) -> bool:
    return value.strip() == "0"


RULES = [
    Rule("NCCL_P2P_DISABLE", _on, lambda s: s.gpus > 1 and s.nvlink,
         "GPUs of a node then talk through host memory instead of NVLink, ten times slower or more"),
    Rule("NCCL_P2P_LEVEL", lambda v: v.strip().upper() in ("LOC", "0"), lambda s: s.gpus > 1 and s.nvlink,
         "this level forbids every direct path between GPUs"),
    Rule("NCCL_SHM_DISABLE", _on, lambda s: s.gpus > 1 and not s.nvlink,
         "GPUs without a direct path then talk through network sockets even within a node"),
    Rule("NCCL_IB_DISABLE", _on, lambda s: s.nodes > 1 and s.rdma,
         "the RDMA cards stay idle and traffic between nodes goes over TCP"),
    Rule("NCCL_NET_GDR_LEVEL", lambda v: v.strip().upper() in ("LOC", "0"), lambda s: s.nodes > 1 and s.rdma,
         "it forbids GPUDirect RDMA: every byte takes a detour through the host's memory"),
    Rule("NCCL_ALGO", _on, lambda s: False, "one algorithm for all sizes is seldom the best; NCCL chooses by size and topology"),
    Rule("NCCL_PROTO", _on, lambda s: False, "one protocol for all sizes is slow for small or for large messages"),
    Rule("NCCL_MAX_NCHANNELS", lambda v: v.strip().isdigit() and 0 < int(v) < 8, lambda s: s.gpus > 1 and s.nvlink,
         "so few channels cannot fill NVLink"),
    Rule("NCCL_NTHREADS", _on, lambda s: False, "NCCL chooses the number of threads better itself"),
    Rule("NCCL_BUFFSIZE", lambda v: v.strip().isdigit() and int(v) < 1 << 20, lambda s: False,
         "buffers under 1 MiB slow large messages (default 4 MiB)"),
    Rule("NCCL_DEBUG", lambda v: v.strip().upper() == "TRACE", lambda s: False, "tracing slows every collective",
         "set NCCL_DEBUG=WARN"),
    Rule("NCCL_BLOCKING_WAIT", _on, lambda s: False, "the training thread waits for every collective",
         "unset it, TORCH_NCCL_BLOCKING_WAIT too"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on, lambda s: False, "the training thread waits for every collective"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", _off, lambda s: s.nodes > 1,
         "a lost rank then hangs all others for ever instead of ending the run"),
    Rule("TORCH_DISTRIBUTED_DEBUG", lambda v: v.strip().upper() == "DETAIL", lambda s: False,
         "every collective is checked by another one first", "unset it once the fault is found"),
    Rule("CUDA_LAUNCH_BLOCKING", _on, lambda s: s.gpus > 0, "the processor waits for every kernel: nothing overlaps"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", lambda v: v.strip() == "1", lambda s: False,
         "one queue serialises compute and communication, which FSDP wants side by side"),
]  # fmt: skip


def settings_checks(machines: list[Machine], fabrics: list[Fabric], gpus: int) -> list[Check]:
    """machines: one entry a rank; fabrics: one a node; gpus: the most of one node."""
    situation = Situation(
        nodes=len(fabrics),
        gpus=gpus,
        nvlink=any(how.startswith("NV") for f in fabrics if f.topology for how in f.topology.links.values()),
        rdma=any(f.rate for f in fabrics),
    )
    leaders = [m for m in machines if m.local_rank == 0]
    checks = [c for m in leaders for c in [*_harmful(m, situation), *_interfaces(m), *_memlock(m, situation)]]
    checks += _unequal(leaders)
    if not checks:
        told = ", ".join(f"{k}={v}" for k, v in leaders[0].variables.items() if k.startswith(("NCCL_", "GLOO_")))
        text = f"nothing harmful ({told or 'no NCCL or gloo variable is set'})"
        checks.append(Check("settings", "communication", "", "ok", text))
    return checks


def _harmful(m: Machine, situation: Situation) -> list[Check]:
    checks = []
    for rule in RULES:
        value = m.variables.get(rule.variable)
        if value is None or not rule.hurts(value):
            continue
        matters = rule.matters(situation)
        status: Status = "unfit" if matters else "warning"
        text = f"{rule.variable}={value}: {rule.why}" + ("" if matters else " (where there is such hardware)")
        remedy = f"Type: unset {rule.variable}" if rule.remedy == "unset it" else f"Now: {rule.remedy}."
        checks.append(Check("settings", "communication", m.node, status, text, remedy))
    return checks


def _interfaces(m: Machine) -> list[Check]:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name what there is. NCCL's may be prefixes, =exact or ^excluded."""
    checks = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = m.variables.get(variable, "")
        if not value or value.startswith("^"):
            continue
        names = [n.strip() for n in value.removeprefix("=").split(",")]
        exact = variable.startswith("GLOO") or value.startswith("=")
        there = [i for i in m.interfaces for n in names if (i == n if exact else i.startswith(n))]
        if not there:
            text = f"{variable}={value}, and there is no such interface"
            remedy = f"Name one of: {', '.join(m.interfaces)}."
            checks.append(Check("settings", "communication", m.node, "unfit", text, remedy))
    return checks


def _memlock(m: Machine, situation: Situation) -> list[Check]:
    if not situation.rdma or m.memlock < 0 or m.memlock >= 4 << 30:
        return []
    text = f"a process may pin {m.memlock} bytes"
    remedy = "RDMA pins its buffers. Type: ulimit -l unlimited (in Slurm: PropagateResourceLimits; in systemd: LimitMEMLOCK)."
    return [Check("settings", "pinned memory", m.node, "unfit", text, remedy)]


def _unequal(leaders: list[Machine]) -> list[Check]:
    """A variable of NCCL that only some nodes set gives ranks different ideas of one collective."""
    checks = []
    for name in sorted({k for m in leaders for k in m.variables if k.startswith(("NCCL_", "TORCH_NCCL"))}):
        values = {m.variables.get(name) for m in leaders}
        if len(values) > 1 and not name.endswith("_IFNAME"):
            text = f"{name} differs between nodes: " + ", ".join(sorted(v or "not set" for v in values))
            remedy = "Set it on all nodes or on none; ranks that disagree hang."
            checks.append(Check("settings", "communication", "", "warning", text, remedy))
    return checks
