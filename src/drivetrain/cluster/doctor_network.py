"""Between processes: clocks, collectives by message size, and every link by itself. Over NCCL or gloo, whatever is there.

Bandwidths as nccl-tests define them. For a message of S bytes on n ranks that takes t seconds, `algorithm` is S / t, and
`bus` is that times 2(n-1)/n for all-reduce and (n-1)/n for all-gather and reduce-scatter: what the slowest link carried,
whatever n is. S is the whole buffer: what all ranks hold together after an all-gather, and before a reduce-scatter.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drivetrain.types import DrivetrainError

BETWEEN = "between nodes"
PATIENCE = 90  # seconds that processes wait for each other before it is called a fault
SIZES = tuple(4096 << 2 * k for k in range(10))  # 4 KiB to 1 GiB
LARGEST = {"gloo": 64 << 20, "nccl": 1 << 30}
LONGEST = 0.8  # seconds that one collective may take; larger messages are then left out
FIRST, PAYLOAD = 256 << 10, {"gloo": 16 << 20, "nccl": 256 << 20}  # bytes of a link's first and largest message


@dataclass(frozen=True)
class Collective:
    """One collective at one size. algorithm, bus: bytes a second; seconds: of the slowest rank."""

    kind: str
    backend: str
    bytes: int
    seconds: float
    algorithm: float
    bus: float


@dataclass(frozen=True)
class Pairs:
    """Links of some processes, each measured by itself.

    scope:     BETWEEN, or the node within which they are.
    bandwidth: bytes a second from row to column.   latency: seconds one way.   None on the diagonal.
    """

    scope: str
    backend: str
    names: tuple[str, ...]
    bandwidth: tuple[tuple[float | None, ...], ...]
    latency: tuple[tuple[float | None, ...], ...]

    def links(self) -> dict[tuple[str, str], float]:
        """(name, name) -> the slower direction's bandwidth, once for each pair."""
        b, n = self.bandwidth, len(self.names)
        return {
            (self.names[i], self.names[j]): min(b[i][j] or 0.0, b[j][i] or 0.0)
            for i in range(n)
            for j in range(i + 1, n)
        }


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of the first node's, in seconds, give or take `error`."""

    node: str
    ahead: float
    error: float


class Peers:
    """This process among those that examine the machines together; alone, all of it is trivial."""

    def __init__(self) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.cuda = torch.cuda.is_available() and self.local_rank < torch.cuda.device_count()
        self.device = torch.device("cuda", self.local_rank) if self.cuda else torch.device("cpu")
        self.backend = "gloo"

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, value: object) -> list:
        """One picklable object of each process, in rank order, on every process."""
        out: list = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(out, value)
        return out

    def most(self, value: float) -> float:
        """The largest over all processes."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def meet(self) -> None:
        """Return when everybody is here."""
        self.most(0.0)


@contextlib.contextmanager
def joined() -> Iterator[Peers]:
    """The processes that a launcher started, or this one alone.

    Raises DrivetrainError, instead of waiting for ever, where they do not find each other or one is lost on the way.
    """
    peers = Peers()
    if peers.size == 1:
        yield peers
        return
    try:
        # the backend must be the same everywhere, and each process knows only of its own GPU
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
        if all(peers.gather(peers.cuda)) and dist.is_nccl_available():
            dist.destroy_process_group()
            torch.cuda.set_device(peers.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=PATIENCE))
            peers.backend = "nccl"
        yield peers
    except (dist.DistError, RuntimeError, ConnectionError) as fault:
        raise DrivetrainError(_lost(peers, fault)) from fault
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # the fault that ended the work is the one to tell
                dist.destroy_process_group()


def _lost(peers: Peers, fault: BaseException) -> str:
    import socket

    first = str(fault).strip().partition("\n")[0]
    names = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"rank {peers.rank} of {peers.size} on {socket.gethostname()} lost the others: {first}. "
        "Look for the rank that spoke first. If all are up, a firewall or the wrong network card is between them: type "
        f"export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME with a card that all nodes reach each other by "
        f"(here: {names})."
    )


# --- clocks -----------------------------------------------------------------------------------------------------------


def clocks(peers: Peers, leaders: list[int], nodes: list[str]) -> list[Clock]:
    """Every node's clock against the first one's: the quickest of some question-and-answer rounds counts.

    leaders: the rank that speaks for each node.   Called on all ranks; the first leader's answer is the one to use.
    """
    found = [Clock(nodes[0], 0.0, 0.0)]
    asked = torch.zeros(1, dtype=torch.float64)
    for leader, node in zip(leaders[1:], nodes[1:], strict=True):
        if peers.rank == leader:
            for _ in range(12):
                dist.recv(asked, leaders[0])
                dist.send(torch.tensor([time.time()], dtype=torch.float64), leaders[0])
        elif peers.rank == leaders[0]:
            rounds = []
            for _ in range(12):
                sent, started = time.time(), time.perf_counter()
                dist.send(asked, leader)
                dist.recv(asked, leader)
                took = time.perf_counter() - started
                rounds.append((took, asked.item() - (sent + took / 2)))
            took, ahead = min(rounds)
            found.append(Clock(node, ahead, took / 2))
    return found


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives(peers: Peers) -> list[Collective]:
    """All-reduce, all-gather and reduce-scatter over all ranks, from 4 KiB up while time allows. Called on all ranks."""
    if peers.size == 1:
        return []
    found = []
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        for count in SIZES:
            if count > LARGEST[peers.backend]:
                break
            work, total = _collective(kind, count, peers)
            first = peers.most(_timed(work, 1, peers))
            repeats = max(1, min(20, int(0.15 / first)))
            # the better of two: the first call also sets up connections and buffers
            seconds = min(peers.most(_timed(work, repeats, peers)) for _ in range(2))
            factor = (peers.size - 1) / peers.size * (2 if kind == "all-reduce" else 1)
            rate = total / seconds
            found.append(Collective(kind, peers.backend, total, seconds, rate, rate * factor))
            if 4 * seconds > LONGEST:
                break
    return found


def _collective(kind: str, count: int, peers: Peers) -> tuple[Callable[[], object], int]:
    """(the call, bytes of the whole buffer)."""
    part = torch.zeros(max(1, count // 4 // peers.size), device=peers.device)
    whole = torch.zeros(len(part) * peers.size, device=peers.device)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    return calls[kind], whole.nbytes


def _timed(work: Callable[[], object], repeats: int, peers: Peers) -> float:
    """Seconds of one call, on this rank."""
    peers.meet()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if peers.cuda:
        torch.cuda.synchronize(peers.device)
    return (time.perf_counter() - started) / repeats


# --- links ------------------------------------------------------------------------------------------------------------


def pairs(peers: Peers, groups: list[tuple[str, list[int], list[str]]], share: float, floor: float) -> list[Pairs]:
    """Every link by itself, in both directions. Called on all ranks; complete on every rank.

    groups: (scope, ranks, their names). Rounds of a tournament: in each one every process talks to one other, so n
    processes need n - 1 rounds. What then looks slow (below `share` of the median, or `floor` bytes a second) is
    measured again with nothing else on the wire, and the better figure counts.
    """
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for stage in (True, False):  # links between nodes, then those within nodes: of all nodes at once
        rounds = [_tournament(ranks) for scope, ranks, _ in groups if (scope == BETWEEN) == stage]
        for k in range(max((len(r) for r in rounds), default=0)):
            measured |= _round(peers, [pair for r in rounds if k < len(r) for pair in r[k]])
    everything = _everybody_knows(peers, measured)
    for _ in range(2):
        again = _suspicious(groups, everything, share, floor)
        for pair in again:
            for link, (bandwidth, latency) in _everybody_knows(peers, _round(peers, [pair])).items():
                before = everything[link]
                everything[link] = max(bandwidth, before[0]), min(latency, before[1])
    return [_matrix(scope, peers.backend, ranks, names, everything) for scope, ranks, names in groups]


def _tournament(ranks: list[int]) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs that let everybody meet everybody once (the circle method)."""
    circle: list[int | None] = [*ranks, None] if len(ranks) % 2 else [*ranks]
    n, rounds = len(circle), []
    for _ in range(n - 1):
        drawn = [(circle[i], circle[n - 1 - i]) for i in range(n // 2)]
        rounds.append([(a, b) for a, b in drawn if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _round(peers: Peers, drawn: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[float, float]]:
    """(from, to) -> (bytes a second, seconds of latency), of the links that leave this rank."""
    found = {}
    for a, b in drawn:
        for sender, receiver in ((a, b), (b, a)):
            if peers.rank == sender:
                found[sender, receiver] = _send(peers, receiver)
            elif peers.rank == receiver:
                _receive(peers, sender)
    peers.meet()
    return found


def _send(peers: Peers, to: int) -> tuple[float, float]:
    """Messages that end with a word of thanks: the time is what both took, less the small ones' latency."""
    _exchange(peers, to, 8)  # connections are made
    latency = min(_exchange(peers, to, 8) for _ in range(5)) / 2
    count, best = FIRST, 0.0
    for _ in range(3):
        took = _exchange(peers, to, count)
        best = max(best, count / max(took - latency, 1e-6))
        count = int(min(max(best * 0.08, FIRST), PAYLOAD[peers.backend]))
    dist.send(torch.tensor([0]), to)
    return best, latency


def _exchange(peers: Peers, to: int, count: int) -> float:
    dist.send(torch.tensor([count]), to)
    payload, thanks = torch.zeros(count, dtype=torch.uint8, device=peers.device), torch.zeros(1)
    dist.recv(thanks, to)  # the buffer is ready
    started = time.perf_counter()
    dist.send(payload, to)
    dist.recv(thanks, to)
    return time.perf_counter() - started


def _receive(peers: Peers, sender: int) -> None:
    count, thanks = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    while True:
        dist.recv(count, sender)
        if not (size := int(count.item())):
            return
        payload = torch.empty(size, dtype=torch.uint8, device=peers.device)
        dist.send(thanks, sender)
        dist.recv(payload, sender)
        if peers.cuda:
            torch.cuda.synchronize(peers.device)
        dist.send(thanks, sender)


def _everybody_knows(peers: Peers, measured: dict) -> dict:
    return {link: figures for part in peers.gather(measured) for link, figures in part.items()}


def _suspicious(
    groups: list[tuple[str, list[int], list[str]]], measured: dict, share: float, floor: float
) -> list[tuple[int, int]]:
    from statistics import median

    found = []
    for _, ranks, _ in groups:
        links = {(a, b): min(measured[a, b][0], measured[b, a][0]) for a in ranks for b in ranks if a < b}
        if links:
            middle = median(links.values())
            found += [pair for pair, rate in links.items() if rate < max(share * middle, floor)]
    return found[:32]  # of more than these nobody asks which


def _matrix(scope: str, backend: str, ranks: list[int], names: list[str], measured: dict) -> Pairs:
    def table(which: int) -> tuple[tuple[float | None, ...], ...]:
        return tuple(tuple(None if a == b else measured[a, b][which] for b in ranks) for a in ranks)

    return Pairs(scope, backend, tuple(names), table(0), table(1))
