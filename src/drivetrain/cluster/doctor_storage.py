"""The disk that checkpoints go to, and the lake as training reads it. Measured on all nodes at once, as training does."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drivetrain.cluster.doctor_machine import file_system
from drivetrain.cluster.doctor_report import Check, Status, laggards, size, spread

SECONDS = 1.5  # that one measurement may take
WRITTEN = 256 << 20  # bytes written at most
CHUNK = 32 << 20
BLOCK = 64 << 10  # bytes of a random read: about a row of a lake with two cameras
READERS = 4  # threads that read at random
PACK, HORIZON = 64, 16  # samples and actions per sample that are read from a lake at once

# bytes a second. 36 GB (a policy of 3 billion parameters with Adam's moments) then take 6 minutes; a disk that cannot
# write 10 MB/s is broken or shared to death.
WRITE_WARNING, UNFIT = 100e6, 10e6
FILES_UNFIT, FILES_WARNING = 20, 200  # files made, renamed and removed a second
SHARE = 0.33  # of the median of the other nodes' figures
GPU_SAMPLES = 200  # a second that one H200 trains on: GR00T-N1.5 with two cameras (bench/results/policy_step.jsonl)


@dataclass(frozen=True)
class Disk:
    """One node's disk under --out. write: with fsync; read, random: not from memory, as far as the system lets us.

    Bytes a second, but `random_reads` and `files`, which count operations a second.
    """

    node: str
    folder: str
    kind: str
    write: float
    read: float
    random: float
    random_reads: float
    files: float

    @property
    def label(self) -> str:
        return f"{self.node} {self.folder}"


@dataclass(frozen=True)
class LakeReads:
    """One node's reading of the lake, by one reader. samples: a second, at random; rows: a second, in order.

    bytes: of a sample.   open: seconds until the first row can be read.   pack: median and slowest seconds of a pack.
    """

    node: str
    uri: str
    open: float
    samples: float
    bytes: float
    rows: float
    pack: tuple[float, float]


def measure_disk(node: str, out: Path) -> Disk:
    """About six seconds of writing and reading in a temporary folder in `out`, which is made and removed if need be."""
    with _existing(out), tempfile.TemporaryDirectory(prefix=".doctor-", dir=out) as name:
        folder, file = Path(name), Path(name) / "data"
        write = _write(file)
        blocks = [at * BLOCK for at in range(file.stat().st_size // BLOCK)]
        random.Random(0).shuffle(blocks)
        _forget(file)
        started = time.perf_counter()
        reads = _random_reads(file, blocks)
        per_second = reads / (time.perf_counter() - started)
        _forget(file)
        read = _read(file)
        files = _files(folder)
    return Disk(node, str(out), file_system(out), write, read, per_second * BLOCK, per_second, files)


@contextlib.contextmanager
def _existing(folder: Path) -> Iterator[None]:
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # another node still works there, or has put something in
                path.rmdir()


def _write(file: Path) -> float:
    """bytes a second with every chunk on the disk before the next; the chunks grow, so that a slow disk is not waited for."""
    data, written, started = memoryview(os.urandom(CHUNK)), 0, time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        count = 1 << 20
        while written < WRITTEN and time.perf_counter() - started < SECONDS:
            written += stream.write(data[:count])
            os.fsync(stream.fileno())
            count = min(2 * count, CHUNK)
    return written / (time.perf_counter() - started)


def _read(file: Path) -> float:
    data, total, started = bytearray(8 << 20), 0, time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while time.perf_counter() - started < SECONDS and (count := stream.readinto(data)):
            total += count
    return total / (time.perf_counter() - started)


def _random_reads(file: Path, blocks: list[int]) -> int:
    """How many blocks were read in the time; none twice."""
    descriptor, deadline = os.open(file, os.O_RDONLY), time.perf_counter() + SECONDS
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead

    def work(mine: list[int]) -> int:
        for done, at in enumerate(mine):
            if time.perf_counter() > deadline:
                return done
            os.pread(descriptor, BLOCK, at)
        return len(mine)

    try:
        with ThreadPoolExecutor(READERS) as pool:
            return sum(pool.map(work, [blocks[k::READERS] for k in range(READERS)]))
    finally:
        os.close(descriptor)


def _forget(file: Path) -> None:
    """Take a file out of the page cache, where the system knows how; otherwise reads may come from memory."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> float:
    """Files made, looked at, renamed and removed, a second."""
    done, started = 0, time.perf_counter()
    while done < 500 and time.perf_counter() - started < SECONDS / 2:
        first, second = folder / f"a{done}", folder / f"b{done}"
        first.write_bytes(b"x")
        first.stat()
        os.replace(first, second)
        second.unlink()
        done += 1
    return done / (time.perf_counter() - started)


def measure_lake(node: str, uri: str, seed: int) -> LakeReads:
    """Reads the lake as a loader does: packs of random samples with their actions, then rows in order. Three seconds."""
    from drivetrain.data.plan import Pack  # Lance is needed where a lake is given, and nowhere else
    from drivetrain.data.read import read_steps
    from drivetrain.lake.lake import open_lake

    started = time.perf_counter()
    lake = open_lake(uri)
    spans = lake.spans()
    if lake.folder.local:
        for file in Path(lake.uri).rglob("*.lance"):
            if file.is_file():
                _forget(file)
    lake.read(np.array([0]), ["state"])
    opened = time.perf_counter() - started
    generator = np.random.default_rng(seed)
    ends = np.cumsum(spans.length)
    volumes: list[int] = []

    def random_pack() -> int:
        sample = generator.choice(ends[-1], min(PACK, ends[-1]), replace=False)
        span = np.searchsorted(ends, sample, side="right")
        row = spans.first_row[span] + sample - (ends - spans.length)[span]
        pack = Pack(sample, np.zeros_like(sample), row, spans.last_row[span], span)
        steps = read_steps(lake, spans, pack, HORIZON)
        volumes.append(sum(s.state.nbytes + s.actions.nbytes + sum(map(len, s.images)) for s in steps))
        return len(steps)

    times, samples = _for_a_while(random_pack)
    total = int(spans.last_row.max()) + 1
    place = iter(range(0, total, 256))

    def next_rows() -> int:
        first = next(place, None)
        rows = np.arange(first, min(first + 256, total)) if first is not None else np.arange(0)
        return len(lake.read(rows, ["state", "action", "images"]))

    in_order, rows = _for_a_while(next_rows)
    return LakeReads(
        node=node,
        uri=lake.uri,
        open=opened,
        samples=samples / sum(times),
        bytes=sum(volumes) / samples,
        rows=rows / sum(in_order),
        pack=(statistics.median(times), max(times)),
    )


def _for_a_while(work: Callable[[], int]) -> tuple[list[float], int]:
    """(seconds of each call, sum of what they returned), until the time is over or a call returns nothing."""
    times: list[float] = []
    total = 0
    while sum(times) < SECONDS:
        started = time.perf_counter()
        done = work()
        if not done:
            break
        total += done
        times.append(time.perf_counter() - started)
    return times, total


# --- what of it is amiss ----------------------------------------------------------------------------------------------


def storage_checks(disks: list[Disk], lakes: list[LakeReads], gpus: int) -> list[Check]:
    """One entry a node each. gpus: the most of one node."""
    return [*_disk_checks(disks, gpus), *_lake_checks(lakes, gpus)]


def _disk_checks(disks: list[Disk], gpus: int) -> list[Check]:
    if not disks:
        return []
    figures = {
        "write with fsync": ({d.label: d.write for d in disks}, WRITE_WARNING if gpus else 2 * UNFIT, UNFIT),
        "sequential read": ({d.label: d.read for d in disks}, 2 * UNFIT, UNFIT),
        "random read": ({d.label: d.random for d in disks}, UNFIT / 2, UNFIT / 10),
        "small files": ({d.label: d.files for d in disks}, FILES_WARNING, FILES_UNFIT),
    }
    checks = []
    for what, (values, warning, unfit) in figures.items():
        behind = laggards(values, SHARE)
        found = []
        for label, value in values.items():
            said = f"{value:.0f} a second" if what == "small files" else f"{size(value)}/s"
            if value < warning:
                status: Status = "unfit" if value < unfit else "warning"
                bound = f"{unfit if status == 'unfit' else warning:.0f} a second"
                if what != "small files":
                    bound = f"{size(unfit if status == 'unfit' else warning)}/s"
                found.append(Check("storage", what, label, status, f"{said}, less than {bound}", _remedy(what)))
            elif label in behind:
                others = size(behind[label]) if what != "small files" else f"{behind[label]:.0f}"
                found.append(
                    Check("storage", what, label, "warning", f"{said}, the other nodes {others}", _remedy(what))
                )
        checks += found or [Check("storage", what, "", "ok", _said(what, disks, values))]
    return checks


def _said(what: str, disks: list[Disk], values: dict[str, float]) -> str:
    if what == "small files":
        return f"{spread(list(values.values()))} made, renamed and removed a second"
    low, high = size(min(values.values())), size(max(values.values()))
    text = f"{low}/s" if low == high else f"{low}/s to {high}/s"
    if what == "random read":
        text += f" ({spread([d.random_reads for d in disks])} reads of {BLOCK >> 10} KiB a second, {READERS} at a time)"
    if any(d.kind == "tmpfs" for d in disks):
        text += "; tmpfs, which is memory and no disk"
    return text


def _remedy(what: str) -> str:
    if what == "write with fsync":
        return (
            "Checkpoints hold training up. Give --out on a local NVMe disk or a parallel file system; on a cloud disk "
            "raise its throughput."
        )
    if what == "small files":
        return "A file server far away, or overloaded. Checkpoints make few files, but each waits for it."
    return "Other work, a quota, or a failing disk (smartctl -a). Put data on a faster one."


def _lake_checks(lakes: list[LakeReads], gpus: int) -> list[Check]:
    if not lakes:
        return [Check("storage", "lake", "", "not here", "no lake was read; name one: drivetrain doctor --lake URI")]
    checks = []
    behind = laggards({x.node: x.samples for x in lakes}, SHARE)
    for x in lakes:
        if x.node in behind:
            text = f"{x.samples:.0f} samples/s from {x.uri}, the other nodes {behind[x.node]:.0f}"
            remedy = "All wait for this node's loader: look at its path to the storage."
            checks.append(Check("storage", "lake", x.node, "unfit", text, remedy))
    low = min(lakes, key=lambda x: x.samples)
    text = (
        f"{spread([x.samples for x in lakes])} samples/s at random ({size(low.samples * low.bytes)}/s, {size(low.bytes)} a "
        f"sample; a pack of {PACK} takes {low.pack[0] * 1e3:.0f} ms, {low.pack[1] * 1e3:.0f} at worst), "
        f"{spread([x.rows for x in lakes])} rows/s in order, open after {max(x.open for x in lakes):.2f} s, by one reader a node"
    )
    if not gpus:
        return [*checks, Check("storage", "lake", "", "ok", text)]
    needed = GPU_SAMPLES * gpus
    readers = -(-needed // max(1, int(low.samples)))
    text += f"; {gpus} GPU(s) train on up to {needed} samples/s, which {readers} reader(s) bring"
    status: Status = "warning" if readers > 16 * gpus else "ok"
    remedy = (
        "More workers a GPU than is sensible. Copy the lake nearer (a local disk, a cache)." if status != "ok" else ""
    )
    return [*checks, Check("storage", "lake", low.node if remedy else "", status, text, remedy)]


def slowest_disk(disks: list[Disk]) -> str:
    """The disk that the others' checkpoints wait for, in words."""
    slow = min(disks, key=lambda d: d.write)
    return f"{slow.label}: writes {size(slow.write)}/s, reads {size(slow.read)}/s"
