"""What a check found in a data set, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the quarantine, or a notice that changes nothing.

    episode, frame: -1 where the finding is about the whole data set, or the whole episode.
    check:          the name of the check, stable across versions (see `validate.CHECKS`).
    file:           the file it was found in, relative to the data set's folder.
    """

    source: str
    episode: int
    frame: int
    check: str
    file: str
    found: str
    remedy: str
    severity: Literal["error", "notice"] = "error"

    def __str__(self) -> str:
        where = self.source
        if self.episode >= 0:
            where += f", episode {self.episode}"
        if self.frame >= 0:
            where += f", frame {self.frame}"
        if self.file:
            where += f" ({self.file})"
        return f"{where}: {self.check}: {self.found}. {self.remedy}"


class RefusedError(Exception):
    """An episode cannot be taken; `finding` says why. Raised by the checks, caught where the episode is ingested."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding
