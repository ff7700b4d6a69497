"""Reading a lake: what is in it, where its samples are, and any rows of any columns."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cached_property

import lance
import numpy as np
import pyarrow as pa

from drivetrain.lake.folder import Folder, folder_of
from drivetrain.lake.tables import Manifest, open_table, read_manifest
from drivetrain.types import DatasetInfo, DrivetrainError, FeatureStatistics, Spans


class Lake:
    """A lake at one version, which never changes. Tables open on first use, in the process that uses them.

    May be pickled: the copy opens its own handles, since Lance's must not cross a fork or a spawn.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def __reduce__(self):
        return Lake, (self.folder, self.manifest)

    @property
    def uri(self) -> str:
        return self.folder.uri

    @property
    def version(self) -> int:
        return self.manifest.version

    def table(self, name: str) -> lance.LanceDataset:
        """One of the tables datasets, episodes, steps and quarantine, at this version."""
        return open_table(self.folder, self.manifest, name)

    @cached_property
    def datasets(self) -> dict[str, DatasetInfo]:
        """Name -> description, in the order in which the data sets were first ingested."""
        columns = [f for f in self.table("datasets").schema.names if not f.endswith("_sketch")]
        return {row["name"]: dataset_info(row) for row in self.table("datasets").to_table(columns).to_pylist()}

    def spans(self, datasets: list[str] | None = None, *, held_out: int = 0, only_held_out: bool = False) -> Spans:
        """Where the samples are, in the order of `datasets` (all by default) and of their rows.

        held_out: the last so many episodes of each data set, by number, are left out; with `only_held_out` only they
        stay.
        Raises DrivetrainError for a data set that is not there, or of which nothing would be left.
        """
        names = list(self.datasets) if datasets is None else list(datasets)
        if unknown := [n for n in names if n not in self.datasets]:
            raise DrivetrainError(
                f"{self.uri} has no data set {unknown[0]!r} at version {self.version}; "
                f"it has {', '.join(self.datasets) or 'none'}."
            )
        table = self._episodes
        chosen = []
        for name in names:
            rows = np.flatnonzero(table["dataset"] == name)
            kept = _hold_out(rows, table["episode"][rows], held_out, only_held_out)
            if not len(kept):
                raise DrivetrainError(
                    f"the data set {name} has {len(rows)} episodes, and held_out = {held_out} leaves none. "
                    "Lower held_out."
                )
            chosen.append(kept)
        return _spans(names, chosen, table)

    def read(self, rows: np.ndarray, columns: list[str]) -> pa.Table:
        """The given rows of `steps`, in the given order, which may repeat. rows: int64 [n], as in `Spans`."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return pa.schema([self._steps.schema.field(c) for c in columns]).empty_table()
        return self._steps.take(rows, columns=columns)

    @cached_property
    def _steps(self) -> lance.LanceDataset:
        return self.table("steps")

    @cached_property
    def _episodes(self) -> dict[str, np.ndarray]:
        """Columns of `episodes`, with the row of each episode's first step: both tables have one order."""
        table = self.table("episodes").to_table(["dataset", "episode", "length", "spans"])
        length = table["length"].to_numpy()
        return {
            "dataset": table["dataset"].to_numpy(),
            "episode": table["episode"].to_numpy(),
            "length": length,
            "first_row": np.cumsum(length) - length,
            "spans": table["spans"].to_numpy(),
        }


def open_lake(uri: str, version: int | None = None) -> Lake:
    """The lake at `uri`, at its latest version or at the given one.

    Raises DrivetrainError where there is no lake, or no such version.
    """
    folder = folder_of(uri)
    try:
        manifest = read_manifest(folder, version)
    except OSError as error:
        raise DrivetrainError(
            f"the lake {folder.uri} cannot be read: {error}. Check the address and the access."
        ) from None
    if manifest is None:
        raise DrivetrainError(
            f"{folder.uri} is not a lake, or nothing was ingested yet. "
            f"Type: drivetrain ingest DATASET --lake {folder.uri}"
        )
    return Lake(folder, manifest)


def dataset_info(row: dict) -> DatasetInfo:
    """A row of `datasets` as the rest of drivetrain knows it."""
    statistics = {
        feature: FeatureStatistics(
            count=values["count"],
            **{f.name: np.array(values[f.name]) for f in fields(FeatureStatistics) if f.name != "count"},
        )
        for feature, values in json.loads(row["statistics"])["features"].items()
    }
    return DatasetInfo(
        name=row["name"],
        source=row["source"],
        robot=row["robot"],
        fps=row["fps"],
        cameras=tuple(row["cameras"]),
        image_size=row["image_size"],
        state_names=tuple(row["state_names"]),
        action_names=tuple(row["action_names"]),
        episodes=row["episodes"],
        steps=row["steps"],
        statistics=statistics,
    )


def _hold_out(rows: np.ndarray, episode: np.ndarray, held_out: int, only_held_out: bool) -> np.ndarray:
    """Those of `rows` that are (not) among the `held_out` highest episode numbers, in their order."""
    last = np.argsort(episode)[len(rows) - min(held_out, len(rows)) :]
    held = np.zeros(len(rows), bool)
    held[last] = True
    return rows[held if only_held_out else ~held]


def _spans(names: list[str], chosen: list[np.ndarray], table: dict[str, np.ndarray]) -> Spans:
    tasks: dict[str, int] = {}
    columns = []
    for dataset, rows in enumerate(chosen):
        for row in rows:
            first, last = table["first_row"][row], table["first_row"][row] + table["length"][row] - 1
            for span in table["spans"][row]:
                task = tasks.setdefault(span["task"], len(tasks))
                columns.append((dataset, task, table["episode"][row], first + span["start"], span["length"], last))
    values = np.array(columns, dtype=np.int64).T
    return Spans(tuple(names), tuple(tasks), *values)
