"""What lies in a run's folder, and whether it is whole.

OUT/lock                                held by the process that writes here, with its host and process id
OUT/checkpoints/step_00000100/          model and optimizer (torch DCP), run.json, datasets.json, SHA256SUMS
OUT/checkpoints/latest                  the name of the newest complete one, replaced atomically
OUT/checkpoints/step_00000150.partial   being written, or left by a process that died; removed at the next start

A folder named step_N is complete, because only a rename makes one; whether its bytes are still those that were written is
what SHA256SUMS tells (`sha256sum -c SHA256SUMS` checks it without drivetrain).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from drivetrain.types import DrivetrainError

SUMS = "SHA256SUMS"


def step_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen."""
    return int(checkpoint.name.removeprefix("step_"))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's output folder, newest first."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted((p for p in found if re.fullmatch(r"step_\d+", p.name) and p.is_dir()), key=step_of, reverse=True)


def faults(checkpoint: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; empty if it is whole.

    part, parts: check every `parts`-th file from the `part`-th on, so that many processes share the reading.
    """
    try:
        listed = (checkpoint / SUMS).read_text()
    except OSError as fault:
        return [f"{checkpoint.name}/{SUMS} cannot be read: {fault.strerror}"]
    if not (sums := re.findall(r"^([0-9a-f]{64})  (.+)$", listed, re.MULTILINE)):
        return [f"{checkpoint.name}/{SUMS} lists no file"]
    found = []
    for wanted, name in sums[part::parts]:
        try:
            with (checkpoint / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    found.append(f"{checkpoint.name}/{name} is damaged: its SHA-256 is not the one it was written with")
        except OSError as fault:
            found.append(f"{checkpoint.name}/{name} cannot be read: {fault.strerror}")
    return found


def newest_whole(
    candidates: list[Path], say: Callable[[str], None], check: Callable[[Path], list[str]] = faults
) -> Path | None:
    """The first of `candidates`, newest first, that verifies; None where there are none.

    say: is told what was passed over, and why.   check: what is wrong with a checkpoint, as `faults` tells it.
    Raises DrivetrainError where there are checkpoints and none is whole.
    """
    passed = []
    for checkpoint in candidates:
        if wrong := check(checkpoint):
            passed.append(wrong[0])
            continue
        for line in passed:
            say(f"passed over a checkpoint: {line}")
        if (named := _named(checkpoint.parent)) != checkpoint.name:
            say(f"took {checkpoint.name}, though `latest` " + (f"names {named}" if named else "is missing"))
        return checkpoint
    if passed:
        raise DrivetrainError(
            f"no checkpoint in {candidates[0].parent} is whole: {'; '.join(passed)}. "
            "Restore one from a copy, or give another --out."
        )
    return None


def find(path: Path) -> Path:
    """The checkpoint that a user means by `path`: itself, or the newest whole one of a run's folder. It is verified."""
    if re.fullmatch(r"step_\d+", path.name) and path.is_dir():
        if wrong := faults(path):
            raise DrivetrainError(f"{path.parent}/{wrong[0]}. Give another checkpoint, or the folder of the run.")
        return path
    found = newest_whole(complete(path), lambda line: print(f"drivetrain: {line}", file=sys.stderr))
    if found is None:
        raise DrivetrainError(f"{path} holds no complete checkpoint. Give a folder made by `drivetrain train --out`.")
    return found


def point_at(checkpoint: Path) -> None:
    """Make `latest` name a complete checkpoint."""
    write_atomically(checkpoint.parent / "latest", checkpoint.name)


def write_atomically(file: Path, text: str) -> None:
    """Replace `file`; whoever reads it, and whatever fails, it holds the old text or the new one."""
    temporary = file.with_name(file.name + ".new")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against other trainings. The lock goes with its process, so one that was left is taken over.

    Raises DrivetrainError that names host and process where another one holds it.
    """
    file = folder / "lock"
    while True:
        with file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as fault:
                if fault.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    lock.seek(0)
                    raise DrivetrainError(
                        f"another training writes to {folder}: {_holder(lock.read())}. Wait for it, or give another --out."
                    ) from None
                text = f"drivetrain: {folder} cannot be locked ({fault.strerror}); start no second run in it."
                print(text, file=sys.stderr)
            if not file.exists() or not os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                continue  # its holder has just removed it
            lock.truncate(0)
            lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
            lock.flush()
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _holder(text: str) -> str:
    try:
        held = json.loads(text)
        return f"process {held['pid']} on {held['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name yet"


def _named(checkpoints: Path) -> str | None:
    pointer = checkpoints / "latest"
    return pointer.read_text().strip() if pointer.is_file() else None
