"""What the doctor says: checks, the verdict they add up to, and both as text for a terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from drivetrain.cluster.doctor_gpu import Gpu
    from drivetrain.cluster.doctor_machine import Machine
    from drivetrain.cluster.doctor_network import Clock, Collective, Pairs
    from drivetrain.cluster.doctor_storage import Disk, LakeReads

Status = Literal["ok", "warning", "unfit", "not here"]
AREAS = ("node", "settings", "gpu", "fabric", "links", "storage")
SHOWN = 8  # lines of one kind before the rest is counted


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    area:   the heading it stands under, one of AREAS.
    where:  the node, GPU, link or disk; empty where it holds for all.
    found:  what was measured or read, with its unit and what was expected.
    remedy: what to change; empty where nothing has to be.
    """

    area: str
    what: str
    where: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Everything the doctor found.

    slowest: gpu, link, disk -> the slowest one by name with its figure, where it was measured at all.
    nodes:   one entry a process; pairs: the links that were measured, node by node and within nodes.
    """

    fit: bool
    verdict: str
    slowest: dict[str, str]
    checks: tuple[Check, ...]
    nodes: tuple[Machine, ...]
    gpus: tuple[Gpu, ...]
    collectives: tuple[Collective, ...]
    pairs: tuple[Pairs, ...]
    clocks: tuple[Clock, ...]
    disks: tuple[Disk, ...]
    lakes: tuple[LakeReads, ...]
    seconds: float
    date: str

    @property
    def exit_code(self) -> int:
        """What the command line exits with."""
        return 0 if self.fit else 1

    def __str__(self) -> str:
        lines = []
        for area in AREAS:
            if mine := [c for c in self.checks if c.area == area]:
                lines += ["", area, *_lines(mine)]
        if self.slowest:
            lines += ["", "slowest", *(f"  {kind:<8}  {name}" for kind, name in self.slowest.items())]
        lines += ["", *textwrap.wrap(self.verdict, 118, break_long_words=False)]
        return "\n".join(lines[1:])


def verdict(checks: list[Check]) -> tuple[bool, str]:
    """(fit, the sentence that says so). Unfit is what has an unfit check; warnings are counted and do not decide."""
    unfit = [c for c in checks if c.status == "unfit"]
    warnings = [c for c in checks if c.status == "warning"]
    also = f" {_count(len(warnings), 'warning')}." if warnings else ""
    if not unfit:
        return True, f"FIT to train.{also}"
    first = unfit[0]
    place = f"{first.where}: " if first.where else ""
    more = f" And {_count(len(unfit) - 1, 'more fault')}." if len(unfit) > 1 else ""
    return False, f"UNFIT. {place}{first.found}. {first.remedy}{more}{also}"


def laggards(values: dict[str, float], share: float) -> dict[str, float]:
    """Those of `values` that are below `share` of the median of the others -> that median."""
    slow = {}
    for name, value in values.items():
        others = [v for other, v in values.items() if other != name]
        if others and value < share * (middle := statistics.median(others)):
            slow[name] = middle
    return slow


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The range of some figures in words: `781 to 790`, or one figure where they print alike."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def size(count: float) -> str:
    """Bytes for a person, in powers of 1000 as links and disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


MARKS = {"ok": "  ok      ", "warning": "  warning ", "unfit": "  UNFIT   ", "not here": "  not here"}


def _lines(checks: list[Check]) -> list[str]:
    """One area. Of many alike only the first are shown, then their number."""
    lines: list[str] = []
    shown: dict[tuple[str, str], int] = {}
    for check in checks:
        kind = (check.what, check.status)
        shown[kind] = shown.get(kind, 0) + 1
        if shown[kind] > SHOWN:
            continue
        place = f"{check.where}: " if check.where else ""
        lines += _paragraph(f"{MARKS[check.status]}  {check.what}: {place}{check.found}")
        if check.remedy:
            lines += _paragraph(f"{'':12}-> {check.remedy}")
    lines += [f"{'':12}{n - SHOWN} more: {what} ({status})" for (what, status), n in shown.items() if n > SHOWN]
    return lines


def _paragraph(text: str) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    body = textwrap.wrap(
        text.strip(), 118 - len(lead), subsequent_indent=" " * (12 - len(lead)), break_long_words=False
    )
    return [lead + line for line in body]
