"""Taking data out of a lake, and going back: each is a new lake version, and the older ones stay readable."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from drivetrain.lake.commit import REMOVED, SKETCHES, statistics_columns
from drivetrain.lake.folder import Folder
from drivetrain.lake.lake import Lake, open_lake
from drivetrain.lake.sources import ACTION, STATE
from drivetrain.lake.statistics import Sketch, merge, sketch
from drivetrain.lake.tables import (
    SCHEMAS,
    VersionTakenError,
    delete_rows,
    open_table,
    publish,
    read_manifest,
    replace_rows,
    table_files,
    versions,
)
from drivetrain.types import DrivetrainError

MIN_AGE_SECONDS = 24 * 3600.0  # a running ingest's files are younger


def remove(uri: str, dataset: str, episodes: list[int] | None = None, *, reason: str = "removed by hand") -> Lake:
    """The lake without some episodes of a data set, or without the whole data set where `episodes` is None.

    Removed episodes stay out when their source is ingested again, until `readmit`; a removed data set does not.
    Raises DrivetrainError, and changes nothing, where the data set or an episode is not there.
    """
    while True:
        lake = open_lake(uri)
        try:
            return _remove(lake, dataset, episodes, reason)
        except VersionTakenError:
            continue


def readmit(uri: str, dataset: str, episodes: list[int]) -> Lake:
    """Let the next ingest of the data set's source bring removed episodes back."""
    while True:
        lake = open_lake(uri)
        table = lake.table("quarantine").to_table()
        kept = [
            row
            for row in table.to_pylist()
            if (row["dataset"], row["check"]) != (dataset, REMOVED) or row["episode"] not in episodes
        ]
        if missing := len(episodes) - (table.num_rows - len(kept)):
            raise DrivetrainError(
                f"{missing} of the episodes {episodes} were not removed from {dataset!r} in {lake.uri}."
            )
        rows = pa.Table.from_pylist(kept, SCHEMAS["quarantine"])
        version = replace_rows(lake.folder, "quarantine", lake.manifest.tables["quarantine"], rows)
        tables = {**lake.manifest.tables, "quarantine": version}
        try:
            return Lake(
                lake.folder, publish(lake.folder, lake.manifest, tables, f"readmit {len(episodes)} of {dataset}")
            )
        except VersionTakenError:
            continue


def roll_back(uri: str, version: int) -> Lake:
    """A new version that is equal to the older `version`."""
    old = open_lake(uri, version)
    while True:
        latest = open_lake(uri)
        try:
            what = f"roll back to version {version}"
            return Lake(old.folder, publish(old.folder, latest.manifest, old.manifest.tables, what))
        except VersionTakenError:
            continue


def clean(uri: str, *, min_age_seconds: float = MIN_AGE_SECONDS) -> int:
    """Delete the data files that no lake version names, left by killed ingests; returns how many bytes that freed.

    Files younger than `min_age_seconds` stay, since an ingest that runs now has files that nobody names yet.
    """
    folder = open_lake(uri).folder
    freed = 0
    for name in SCHEMAS:
        named: set[str] = set()
        for version in versions(folder):
            manifest = read_manifest(folder, version)
            assert manifest is not None
            named |= table_files(open_table(folder, manifest, name))
        freed += _delete_unnamed(folder, f"{name}.lance/data", named, min_age_seconds)
    return freed


def _remove(lake: Lake, dataset: str, episodes: list[int] | None, reason: str) -> Lake:
    if dataset not in lake.datasets:
        raise DrivetrainError(f"{lake.uri} has no data set {dataset!r}; it has {', '.join(lake.datasets) or 'none'}.")
    there = set(lake.spans([dataset]).episode.tolist())
    if missing := sorted(set(episodes or ()) - there):
        raise DrivetrainError(f"{lake.uri}: {dataset!r} has no episode {missing[0]}. Nothing was removed.")
    gone = there if episodes is None else set(episodes)
    if not gone:
        return lake
    predicate = f"dataset = '{dataset.replace(chr(39), chr(39) * 2)}'"
    if gone != there:
        predicate += f" AND episode IN ({', '.join(map(str, sorted(gone)))})"
    tables = dict(lake.manifest.tables)
    for name in ("steps", "episodes"):
        tables[name] = delete_rows(lake.folder, name, tables[name], predicate)
    rest = Lake(lake.folder, type(lake.manifest)(lake.version, tables, "", ""))
    rows = lake.table("datasets").to_table().to_pylist()
    rows = [
        _recounted(rest, row) if row["name"] == dataset else row
        for row in rows
        if row["name"] != dataset or gone != there
    ]
    quarantine = lake.table("quarantine").to_table().to_pylist()
    source = lake.datasets[dataset].source
    if episodes is None:
        quarantine = [row for row in quarantine if row["dataset"] != dataset]
    else:
        quarantine += [_removed_row(dataset, source, e, reason) for e in sorted(gone)]
    for name, new in (("datasets", rows), ("quarantine", quarantine)):
        tables[name] = replace_rows(lake.folder, name, tables[name], pa.Table.from_pylist(new, SCHEMAS[name]))
    what = f"remove {dataset}" if episodes is None else f"remove {len(gone)} episodes of {dataset}: {reason}"
    return Lake(lake.folder, publish(lake.folder, lake.manifest, tables, what))


def _removed_row(dataset: str, source: str, episode: int, reason: str) -> dict:
    remedy = (
        f"To take it back: drivetrain.lake.edit.readmit(LAKE, {dataset!r}, [{episode}]), then ingest the source again."
    )
    row = {"dataset": dataset, "source": source, "episode": episode, "frame": -1, "check": REMOVED}
    return {**row, "file": "", "found": reason, "remedy": remedy}


def _recounted(lake: Lake, row: dict) -> dict:
    """A row of `datasets` with counts and statistics of the rows that are left; a sketch cannot forget."""
    condition = f"dataset = '{row['name'].replace(chr(39), chr(39) * 2)}'"
    sketches: dict[str, Sketch] = {}
    for batch in lake.table("steps").to_batches(["state", "action"], filter=condition):
        for feature, column in ((STATE, "state"), (ACTION, "action")):
            if batch.num_rows:
                values = batch.column(column).flatten().to_numpy().reshape(batch.num_rows, -1).astype(np.float32)
                new = sketch(values)
                sketches[feature] = merge(sketches[feature], new) if feature in sketches else new
    assert set(sketches) == set(SKETCHES), "a data set without rows has no row of its own"
    episodes = lake.table("episodes").count_rows(condition)
    return {**row, "episodes": episodes, "steps": sketches[STATE].count, **statistics_columns(sketches)}


def _delete_unnamed(folder: Folder, inside: str, named: set[str], min_age_seconds: float) -> int:
    freed = 0
    if not folder.exists(inside):
        return freed
    files: dict[str, dict] = folder.fs.find(folder.path(inside), detail=True)  # type: ignore[assignment]
    for path, entry in files.items():
        changed = entry.get("mtime") or entry.get("LastModified") or time.time()
        age = time.time() - (changed if isinstance(changed, int | float) else changed.timestamp())
        if path.rsplit("/", 1)[-1] not in named and age >= min_age_seconds:
            folder.fs.rm_file(path)
            freed += int(entry["size"])
    return freed
