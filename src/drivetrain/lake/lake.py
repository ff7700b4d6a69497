"""Reading a lake: what is in it, where its samples are, and any rows of any columns."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
        if not names:
            raise DrivetrainError(f"{self.uri} holds no good episode. Type: drivetrain inspect {self.uri}")
        index = self._index
        chosen = []
        for name in names:
            rows = np.flatnonzero(index.dataset == index.datasets.index(name))
            kept = _hold_out(rows, index.episode[rows], held_out, only_held_out)
            if not len(kept):
                raise DrivetrainError(
                    f"the data set {name} has {len(rows)} episodes, and held_out = {held_out} leaves none. "
                    "Lower held_out."
                )
            chosen.append(kept)
        return _spans(names, chosen, index)

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
    def _index(self) -> EpisodeIndex:
        return _episode_index(self.table("episodes").to_table(["dataset", "episode", "length", "spans"]))


@dataclass(frozen=True)
class EpisodeIndex:
    """The `episodes` table as arrays: per episode, in the order of its rows, and per span of one instruction.

    first_row: of the episode's first step in `steps`; both tables have one order.
    dataset, span_task: indices into `datasets` and `tasks`.   span_offset: episode e owns the spans offset[e]:offset[e+1].
    """

    datasets: list[str]
    tasks: list[str]
    dataset: np.ndarray
    episode: np.ndarray
    length: np.ndarray
    first_row: np.ndarray
    span_offset: np.ndarray
    span_task: np.ndarray
    span_start: np.ndarray
    span_length: np.ndarray


def open_lake(uri: str, version: int | None = None) -> Lake:
    """The lake at `uri`, at its latest version or at the given one.

    Raises DrivetrainError where there is no lake, or no such version.
    """
    folder = folder_of(uri)
    try:
        manifest = read_manifest(folder, version)
    except DrivetrainError:
        raise
    except Exception as error:  # every kind of storage has errors of its own
        raise DrivetrainError(
            f"the lake {folder.uri} cannot be read: {error}. Check the address and your access."
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


def _episode_index(table: pa.Table) -> EpisodeIndex:
    """No loop over episodes: millions of them must open in seconds."""
    dataset = table["dataset"].combine_chunks().dictionary_encode()
    length = table["length"].to_numpy()
    counts = pc.call_function("list_value_length", [table["spans"]]).to_numpy()
    spans = table["spans"].combine_chunks().flatten()
    task = spans.field("task").dictionary_encode()
    return EpisodeIndex(
        datasets=dataset.dictionary.to_pylist(),
        tasks=task.dictionary.to_pylist(),
        dataset=dataset.indices.to_numpy(),
        episode=table["episode"].to_numpy(),
        length=length,
        first_row=np.cumsum(length) - length,
        span_offset=np.concatenate([[0], np.cumsum(counts)]),
        span_task=task.indices.to_numpy(),
        span_start=spans.field("start").to_numpy(),
        span_length=spans.field("length").to_numpy(),
    )


def _spans(names: list[str], chosen: list[np.ndarray], index: EpisodeIndex) -> Spans:
    """The spans of the chosen episodes, in their order; tasks are numbered as they first occur."""
    episodes = np.concatenate([np.empty(0, np.int64), *chosen])
    counts = np.diff(index.span_offset)[episodes]
    before = np.cumsum(counts) - counts
    span = np.repeat(index.span_offset[episodes] - before, counts) + np.arange(counts.sum())
    owner = np.repeat(episodes, counts)
    used, first, task = np.unique(index.span_task[span], return_index=True, return_inverse=True)
    order = np.argsort(first)
    first_row = index.first_row[owner]
    return Spans(
        datasets=tuple(names),
        tasks=tuple(index.tasks[t] for t in used[order]),
        dataset=np.repeat(np.repeat(np.arange(len(chosen)), [len(c) for c in chosen]), counts),
        task=np.argsort(order)[task].astype(np.int64),
        episode=index.episode[owner],
        first_row=first_row + index.span_start[span],
        length=index.span_length[span],
        last_row=first_row + index.length[owner] - 1,
    )
