"""How DCP writes one checkpoint here: checked for room first, checksummed on the way, published as its last act.

Publication is part of the write, so whatever fails in it fails the save, on every rank alike: DCP gathers the faults of
all ranks at each of its steps and raises them everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from drivetrain.checkpoint.folder import SUMS, point_at
from drivetrain.types import DrivetrainError


class Writer(FileSystemWriter):
    """Writes `final`, by way of `final`.partial."""

    def __init__(self, final: Path, size: int, texts: dict[str, str], publish: Callable[[], None], refusal: str = ""):
        """size: bytes that all ranks will write.   texts: further files, name -> text.
        publish: called on rank 0 when everything is written.
        refusal: why this rank's state must not be saved; the save then fails on every rank with it.
        """
        super().__init__(final.with_suffix(".partial"), overwrite=True)
        self.final, self.size, self.texts, self.publish, self.refusal = final, size, texts, publish, refusal
        self.fs = _SummingFileSystem()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.refusal:
            raise DrivetrainError(self.refusal)
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        check_room(self.final.parent, self.size)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        results = super().write_data(plan, planner).wait()
        with_sums: Future[Any] = Future()
        with_sums.set_result((results, self.fs.sums))
        return with_sums

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when every rank has written. results: what `write_data` gave on each rank."""
        super().finish(metadata, [written for written, _ in results])
        partial = cast(Path, self.path)
        sums = {name: value for _, of_rank in results for name, value in of_rank.items()}
        sums[".metadata"] = hashlib.sha256((partial / ".metadata").read_bytes()).hexdigest()
        for name, text in self.texts.items():
            sums[name] = hashlib.sha256(text.encode()).hexdigest()
            _write(partial / name, text)
        _write(partial / SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))
        _sync_folder(partial)
        replaced = self.final.with_suffix(".replaced")
        if self.final.exists():  # a damaged one, which this run was resumed behind
            os.replace(self.final, replaced)
        os.replace(partial, self.final)
        _sync_folder(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        point_at(self.final)
        self.publish()


def check_room(folder: Path, size: int) -> None:
    """Raise DrivetrainError where `size` more bytes do not fit."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size:
        raise DrivetrainError(
            f"no space left for a checkpoint in {folder}: it takes {bytes_text(size)}, {bytes_text(disk.free)} are free"
        )


def bytes_text(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def causes(fault: CheckpointException) -> str:
    """What went wrong on which rank, in one line; ranks with the same fault are counted, not listed."""
    by_text: dict[str, list[int]] = {}
    for rank, (cause, _) in sorted(fault.failures.items()):
        by_text.setdefault(_words(cause), []).append(rank)
    return "; ".join(
        (f"rank {ranks[0]}: " if len(ranks) == 1 else f"{len(ranks)} ranks from rank {ranks[0]} on: ") + text
        for text, ranks in by_text.items()
    )


def _words(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        text = cause.strerror[0].lower() + cause.strerror[1:]
        return f"{text} ({cause.filename})" if cause.filename else text
    return str(cause) if isinstance(cause, DrivetrainError) else f"{type(cause).__name__}: {cause}".splitlines()[0]


class _SummingFileSystem(FileSystem):
    """Files that are hashed as they are written. sums: name -> SHA-256 of the .distcp files written so far."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if path.suffix != ".distcp":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _SummingFile(path)
        try:
            yield cast(io.IOBase, file)
        except Exception:
            if file.fault:  # what the writer of archives makes of a full disk says nothing to anyone
                file.fault.filename = str(path)
                raise file.fault from None
            raise
        finally:
            file.close()
        self.sums[path.name] = file.hash.hexdigest()


class _SummingFile:
    """A file opened for writing from its start to its end."""

    def __init__(self, path: Path):
        self.raw, self.hash, self.fault = path.open("wb", buffering=0), hashlib.sha256(), None

    fault: OSError | None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hash.update(view)
        try:
            done = 0
            while done < len(view):
                done += self.raw.write(view[done:]) or 0
        except OSError as fault:
            self.fault = fault
            raise
        return len(view)

    def tell(self) -> int:
        return self.raw.tell()

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self.raw.fileno()

    def close(self) -> None:
        self.raw.close()


def _write(file: Path, text: str) -> None:
    with file.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
