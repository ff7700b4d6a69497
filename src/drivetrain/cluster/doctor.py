"""`drivetrain doctor`: is this machine, or this cluster, fit to train? Measured, with what to fix.

Alone it examines one node: all of its GPUs, if it has several, by one process each. Under a launcher (torchrun and all
that set its variables) it examines all nodes together. What needs hardware that is absent is `not here`, never a guess.

doctor_machine, _gpu, _fabric, _settings, _network, _storage each look at one part and judge it; doctor_links judges what
_network measured; doctor_report turns the checks into a verdict, doctor_page into a page.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.cluster.doctor_report import Check, Report, verdict
from drivetrain.types import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.cluster.doctor_network import Peers


def doctor(lake: str | None, out: Path, html: Path | None) -> Report:
    """Examine and judge; the same report on every rank. Rank 0 writes the page.

    lake: is read the way training reads it, where one is given.   out: a folder on the disk that checkpoints go to.
    """
    with _a_process_per_gpu(lake, out):
        report = examine(lake, out)
    if html is not None and os.environ.get("RANK", "0") == "0":
        from drivetrain.cluster.doctor_page import write_page

        write_page(html, report)
    return report


def examine(lake: str | None, out: Path) -> Report:
    """This process's part of the examination, and the whole report."""
    from drivetrain.cluster import doctor_network as network

    started = time.perf_counter()
    with network.joined() as peers:
        say = _speaker(peers, started)
        say(f"{peers.size} process(es)")
        nodes = _node_names(peers)
        parts = _measure(peers, nodes, lake, out, say)
        report = _judge(parts, nodes, time.perf_counter() - started)
        peers.meet()
    return report


def _measure(peers: Peers, nodes: list[str], lake: str | None, out: Path, say: Callable[[str], None]) -> dict:
    """All that is measured, by name; complete on every rank. nodes: the node of each rank."""
    from drivetrain.cluster import doctor_fabric, doctor_gpu, doctor_links, doctor_machine, doctor_storage
    from drivetrain.cluster import doctor_network as network

    node, lead = nodes[peers.rank], peers.rank == nodes.index(nodes[peers.rank])
    leaders = [nodes.index(n) for n in dict.fromkeys(nodes)]
    names = [nodes[r] for r in leaders]
    within = nodes[: peers.rank].count(node)
    mine = doctor_machine.machine(out, node, peers.rank, within, nodes.count(node))
    parts: dict = {"machines": peers.gather(mine), "faults": []}

    def part(name: str, here: bool, work: Callable[[], object]) -> None:
        """`work` on the ranks where `here` holds, all at once. Where it fails, that is a finding and no end."""
        outcomes = peers.gather(_outcome(name, node, work) if here else None)
        parts[name] = [x for x in outcomes if x is not None and not isinstance(x, Check)]
        parts["faults"] += [x for x in outcomes if isinstance(x, Check)]

    part("fabric", lead, lambda: doctor_fabric.fabric(node))
    if peers.cuda:
        say("GPUs: products and copies, all at once")
    part("gpu", peers.cuda, lambda: doctor_gpu.measure_gpu(node, peers.rank, peers.local_rank))
    say(f"storage: {len(names)} node(s) write and read in {out}")
    part("storage", lead, lambda: doctor_storage.measure_disk(node, out))
    if lake is not None:
        say(f"lake: {len(names)} node(s) read {lake}")
        part("lake", lead, lambda: doctor_storage.measure_lake(node, lake, peers.rank))
    if peers.size > 1:
        say(f"clocks and links of {len(names)} node(s), {peers.size} ranks, by {peers.backend}")
        parts["clocks"] = peers.gather(network.clocks(peers, leaders, names))[0]
        groups = [(network.BETWEEN, leaders, names)] if len(names) > 1 else []
        for n in names:
            ranks = [r for r in range(peers.size) if nodes[r] == n]
            if len(ranks) > 1:
                groups.append((n, ranks, [f"{n} rank {r}" for r in ranks]))
        parts["pairs"] = network.pairs(peers, groups, doctor_links.SHARE, doctor_links.FLOOR)
        say("collectives: all-reduce, all-gather, reduce-scatter")
        parts["collectives"] = network.collectives(peers)
    return parts


def _outcome(part: str, node: str, work: Callable[[], object]) -> object:
    """What `work` returns; or, where it fails, the check that says so."""
    try:
        return work()
    except (DrivetrainError, OSError, RuntimeError) as fault:  # torch raises RuntimeError for all that CUDA finds
        text = str(fault).strip().partition("\n")[0]
        remedy = {
            "gpu": "Look at dmesg for Xid errors; reset the GPU or leave the node out.",
            "storage": "Give an --out that every node can write to.",
            "lake": "Check address, access and mounts on this node.",
        }.get(part, "Repair it, or leave the node out.")
        return Check("storage" if part == "lake" else part, "works at all", node, "unfit", text, remedy)


def _judge(parts: dict, nodes: list[str], seconds: float) -> Report:
    from drivetrain.cluster.doctor_fabric import fabric_checks
    from drivetrain.cluster.doctor_gpu import gpu_checks, slowest_gpu
    from drivetrain.cluster.doctor_links import clock_checks, collective_checks, pair_checks, slowest_link
    from drivetrain.cluster.doctor_machine import machine_checks
    from drivetrain.cluster.doctor_settings import settings_checks
    from drivetrain.cluster.doctor_storage import slowest_disk, storage_checks

    machines, fabrics, gpus, disks = (parts[k] for k in ("machines", "fabric", "gpu", "storage"))
    pairs, lakes = parts.get("pairs", []), parts.get("lake", [])
    clocks, collectives = parts.get("clocks", []), parts.get("collectives", [])
    per_node = max(Counter(g.node for g in gpus).values(), default=0)
    checks: list[Check] = [
        *parts["faults"],
        *machine_checks(machines),
        *gpu_checks(gpus),
        *fabric_checks(fabrics, bool(gpus)),
        *settings_checks(machines, fabrics, per_node),
        *clock_checks(clocks),
        *pair_checks(pairs, machines, fabrics),
        *collective_checks(collectives, len(fabrics), fabrics, gpus),
        *storage_checks(disks, lakes, per_node),
    ]
    slowest = {}
    if gpus:
        slowest["gpu"] = slowest_gpu(gpus)
    if pairs:
        slowest["link"] = slowest_link(pairs)
    if disks:
        slowest["disk"] = slowest_disk(disks)
    fit, sentence = verdict(checks)
    return Report(
        fit=fit,
        verdict=sentence,
        slowest=slowest,
        checks=tuple(checks),
        nodes=tuple(machines),
        gpus=tuple(gpus),
        collectives=tuple(collectives),
        pairs=tuple(pairs),
        clocks=tuple(clocks),
        disks=tuple(disks),
        lakes=tuple(lakes),
        seconds=seconds,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _node_names(peers: Peers) -> list[str]:
    """The node of each rank: the host's name, with a number where several nodes of the launcher share one."""
    host = socket.gethostname()
    group = next((os.environ[k] for k in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID") if k in os.environ), "0")
    seen: list[tuple[str, str]] = peers.gather((host, group))
    shared = {h for h in {h for h, _ in seen} if len({g for other, g in seen if other == h}) > 1}
    return [f"{h}#{g}" if h in shared else h for h, g in seen]


def _speaker(peers: Peers, started: float) -> Callable[[str], None]:
    """Says on rank 0 what is being done, one line each."""

    def say(text: str) -> None:
        if peers.main:
            print(f"doctor: {time.perf_counter() - started:5.1f} s  {text}", file=sys.stderr, flush=True)

    return say


@contextlib.contextmanager
def _a_process_per_gpu(lake: str | None, out: Path) -> Iterator[None]:
    """Alone on a node of several GPUs, processes for the others join; this one becomes rank 0. Otherwise nothing."""
    import torch

    count = torch.cuda.device_count() if "RANK" not in os.environ else 0
    if count < 2:
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    common |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    code = (
        "import sys, pathlib, drivetrain.cluster.doctor as d; d.examine(sys.argv[1] or None, pathlib.Path(sys.argv[2]))"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", code, lake or "", str(out)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, count)
    ]
    os.environ.update(common | {"RANK": "0", "LOCAL_RANK": "0"})
    try:
        yield
    finally:
        for process in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
