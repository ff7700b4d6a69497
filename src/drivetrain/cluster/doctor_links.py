"""What of the measured clocks, collectives and links is amiss."""

from __future__ import annotations

from collections import Counter

from drivetrain.cluster.doctor_fabric import Fabric
from drivetrain.cluster.doctor_gpu import Gpu
from drivetrain.cluster.doctor_machine import Machine
from drivetrain.cluster.doctor_network import BETWEEN, Clock, Collective, Pairs
from drivetrain.cluster.doctor_report import Check, Status, laggards, size

SHARE = 0.5  # of the median of the other links of its kind
FLOOR = 20e6  # bytes a second between nodes: the gradients of a policy of 3 billion parameters then take ten minutes
TCP = 10e9 / 8  # bytes a second that one TCP stream of gloo may be asked for, however fast the card is
LINE_UNFIT, LINE_WARNING = 0.1, 0.3  # of the card's rate (or TCP, if less), by gloo
RDMA_UNFIT, RDMA_WARNING = 0.3, 0.6  # of the card's rate, by NCCL over RDMA
SKEW_UNFIT, SKEW_WARNING = 5.0, 0.5  # seconds; torchrun's rendezvous takes nodes for dead by comparing their clocks
NVLINK = [
    (("H100", "H200"), 450e9),
    (("B200",), 900e9),
    (("A100",), 300e9),
]  # bytes a second in one direction, datasheets


def clock_checks(clocks: list[Clock]) -> list[Check]:
    """Every node's clock against the first one's."""
    if len(clocks) < 2:
        return [Check("links", "clocks", "", "not here", "one node")]
    checks = []
    for c in clocks:
        if abs(c.ahead) - c.error > SKEW_WARNING:
            status: Status = "unfit" if abs(c.ahead) - c.error > SKEW_UNFIT else "warning"
            text = f"{abs(c.ahead):.2f} s {'ahead of' if c.ahead > 0 else 'behind'} {clocks[0].node} (give or take {c.error:.1g})"
            remedy = (
                "Rendezvous takes its nodes for dead, and logs do not line up. Start chrony or systemd-timesyncd there."
            )
            checks.append(Check("links", "clocks", c.node, status, text, remedy))
    if not checks:
        worst = max(clocks, key=lambda c: abs(c.ahead))
        text = f"within {max(abs(worst.ahead), worst.error) * 1e3:.2g} ms of each other"
        checks.append(Check("links", "clocks", "", "ok", text))
    return checks


def collective_checks(found: list[Collective], nodes: int, fabrics: list[Fabric], gpus: list[Gpu]) -> list[Check]:
    """The largest message of each collective, against the link's limit where that is known."""
    if not found:
        return [Check("links", "collectives", "", "not here", "one process; run under torchrun or `drivetrain launch`")]
    checks = []
    limit, source = _limit(found[0].backend, nodes, fabrics, gpus)
    for kind in dict.fromkeys(c.kind for c in found):
        mine = [c for c in found if c.kind == kind]
        small, large = mine[0], max(mine, key=lambda c: c.bus)
        text = (
            f"{size(large.bus)}/s bus ({size(large.algorithm)}/s algorithm) at {size(large.bytes)} by {large.backend}, "
            f"{small.seconds * 1e6:.0f} us at {size(small.bytes)}"
        )
        status, remedy = "ok", ""
        if limit:
            text += f"; {100 * large.bus / limit:.0f} % of {size(limit)}/s, {source}"
            if large.bus < RDMA_UNFIT * limit:
                status = "unfit"
            elif large.bus < RDMA_WARNING * limit:
                status = "warning"
        if status != "ok":
            remedy = "See which link is slow below; then NCCL_DEBUG=INFO says which paths and transports NCCL took."
        checks.append(Check("links", kind, "", status, text, remedy))  # type: ignore[arg-type]
    return checks


def _limit(backend: str, nodes: int, fabrics: list[Fabric], gpus: list[Gpu]) -> tuple[float | None, str]:
    """(bytes a second that the bus cannot exceed, what sets it); None where it is not known."""
    if backend != "nccl":
        return None, ""
    if nodes > 1:
        rate = min(f.rate for f in fabrics) / 8
        return rate or None, "what a node's active RDMA ports carry"
    linked = any(how.startswith("NV") for f in fabrics if f.topology for how in f.topology.links.values())
    for names, rate in NVLINK:
        if linked and all(any(n in g.name for n in names) for g in gpus):
            return rate, "what a GPU's NVLinks carry in one direction"
    return None, ""


def pair_checks(pairs: list[Pairs], machines: list[Machine], fabrics: list[Fabric]) -> list[Check]:
    """Links against the others of their kind, and between nodes against the card and against what training needs."""
    if not pairs:
        return [Check("links", "pairs", "", "not here", "one process; run under torchrun or `drivetrain launch`")]
    checks = []
    for p in pairs:
        links = {f"{a} - {b}": rate for (a, b), rate in p.links().items()}
        between = p.scope == BETWEEN
        behind = laggards(links, SHARE) if len(links) > 2 else {}
        line, what = _line(p.backend, machines, fabrics) if between else (None, "")
        found = []
        for link, rate in links.items():
            status, why = _judge(rate, p.backend, line, what, between, behind.get(link))
            if status != "ok":
                remedy = _remedy(p, links, behind, link)
                found.append(Check("links", "pairs", link, status, f"{size(rate)}/s by {p.backend}, {why}", remedy))
        checks += sorted(found, key=lambda c: links[c.where])
        if not found:
            text = f"{p.scope}: {len(links)} link(s) of {size(min(links.values()))}/s"
            text += f" to {size(max(links.values()))}/s by {p.backend}" if len(links) > 1 else f" by {p.backend}"
            checks.append(Check("links", "pairs", "", "ok", text))
    return checks


def _line(backend: str, machines: list[Machine], fabrics: list[Fabric]) -> tuple[float | None, str]:
    """(bytes a second that one link between nodes should be measured by, what sets it)."""
    if backend == "nccl" and any(f.rate for f in fabrics):
        port = max(p.rate for f in fabrics for p in f.ports if p.state == "ACTIVE")
        return port / 8, f"a port's {port / 1e9:g} Gb/s"
    speeds = [m.speed for m in machines if m.speed]
    if not speeds:
        return None, ""
    return min(min(speeds) / 8, TCP), f"the card's {min(speeds) / 1e9:g} Gb/s"


def _judge(
    rate: float, backend: str, line: float | None, what: str, between: bool, others: float | None
) -> tuple[Status, str]:
    if others is not None:
        return "unfit", f"the other links {size(others)}/s"
    if between and rate < FLOOR:
        return "unfit", f"less than the {size(FLOOR)}/s that training across nodes needs at least"
    if line:
        unfit, warning = (RDMA_UNFIT, RDMA_WARNING) if backend == "nccl" else (LINE_UNFIT, LINE_WARNING)
        if rate < warning * line:
            return (
                "unfit" if rate < unfit * line else "warning"
            ), f"{100 * rate / line:.0f} % of what {what} should give"
    return "ok", ""


def _remedy(p: Pairs, links: dict[str, float], behind: dict[str, float], link: str) -> str:
    """A node all of whose links are slow is the fault itself."""
    names = Counter(name for slow in behind for name in slow.split(" - "))
    whole = [name for name, n in names.items() if n == len(p.names) - 1 and name in link.split(" - ")]
    if whole and len(p.names) > 2:
        return f"All links of {whole[0]} are slow: check its card, cable and switch port, or leave {whole[0]} out."
    if p.scope == BETWEEN:
        return "Only this path is slow: check the switch and the route between the two; then iperf3 between them."
    return "Check the link between the two: nvidia-smi topo -m, nvidia-smi nvlink -s."


def slowest_link(pairs: list[Pairs]) -> str:
    """The slowest link between nodes, or within the node where there is one, in words."""
    chosen = next((p for p in pairs if p.scope == BETWEEN), pairs[0])
    (a, b), rate = min(chosen.links().items(), key=lambda item: item[1])
    return f"{a} - {b}: {size(rate)}/s by {chosen.backend}"
