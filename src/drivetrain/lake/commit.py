"""How finished work becomes a lake version: the only writer of versions during an ingest.

A commit is built on the latest published version and published by an atomic create. Where another ingest was faster, it
is built again on that one's version: files are not rewritten, only the lists of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, fields
from importlib.metadata import version as package_version

import numpy as np
import pyarrow as pa

from drivetrain.lake.episode import Done
from drivetrain.lake.findings import Finding
from drivetrain.lake.folder import Folder
from drivetrain.lake.images import JPEG_QUALITY
from drivetrain.lake.lake import Lake
from drivetrain.lake.sources import ACTION, STATE, Source
from drivetrain.lake.statistics import METHOD, Sketch, from_bytes, merge, statistics, to_bytes
from drivetrain.lake.tables import (
    SCHEMAS,
    Manifest,
    VersionTakenError,
    append,
    create_tables,
    open_table,
    publish,
    read_manifest,
    replace_rows,
    write_rows,
)
from drivetrain.types import DrivetrainError

REMOVED = "removed"  # the check under which episodes that were taken out on purpose stand in quarantine
SKETCHES = {STATE: "state_sketch", ACTION: "action_sketch"}


def check_compatible(lake: Folder, sources: list[Source], image_size: int) -> None:
    """Raise DrivetrainError where the lake has another data set of a source's name, or another shape of the same."""
    try:
        manifest = read_manifest(lake)
    except Exception as error:  # every kind of storage has errors of its own
        raise DrivetrainError(
            f"the lake {lake.uri} cannot be read: {error}. Check the address and your access."
        ) from None
    known = Lake(lake, manifest).datasets if manifest else {}
    for source in sources:
        if source.name not in known:
            continue
        info = known[source.name]
        if info.source != source.folder.uri:
            raise DrivetrainError(
                f"the lake {lake.uri} has a data set {source.name!r} from {info.source}. "
                f"Give this one another name: NAME={source.folder.uri}"
            )
        here = {
            "image_size": image_size,
            "fps": source.fps,
            "cameras": tuple(c.name for c in source.cameras),
            "state_names": source.state_names,
            "action_names": source.action_names,
        }
        for name, value in here.items():
            if getattr(info, name) != value:
                raise DrivetrainError(
                    f"the lake {lake.uri} has {source.name!r} with {name} = {getattr(info, name)}; now it is {value}. "
                    f"Give the changed data set another name: NAME={source.folder.uri}"
                )


class Committer:
    """Collects the work done on one source at a time and publishes it."""

    def __init__(self, lake: Folder, image_size: int) -> None:
        self.lake = lake
        self.image_size = image_size

    def begin(self, source: Source) -> int:
        """Turn to a source; returns how many of its episodes the lake has already."""
        self.source = source
        self.findings: list[Finding] = list(source.findings)
        self.pending: list[Done] = []
        self.added_episodes = self.added_steps = 0
        self.start_clock()
        there = self.episodes(source.name)
        return sum(e.index in there for e in source.episodes)

    def episodes(self, dataset: str) -> set[int]:
        """The episodes of a data set that the latest lake version has."""
        manifest = read_manifest(self.lake)
        return self._episodes(manifest, dataset) if manifest else set()

    def removed(self, dataset: str) -> set[int]:
        """Episodes that were taken out on purpose, and stay out."""
        rows = self._rows(read_manifest(self.lake), "quarantine")
        return {row["episode"] for row in rows if (row["dataset"], row["check"]) == (dataset, REMOVED)}

    def add(self, done: Done) -> None:
        self.pending.append(done)
        self.findings += done.findings
        self.added_episodes += len(done.episodes)
        self.added_steps += sum(e["length"] for e in done.episodes)

    def start_clock(self) -> None:
        self.last_commit = time.perf_counter()

    def seconds_since_commit(self) -> float:
        return time.perf_counter() - self.last_commit

    def flush(self) -> None:
        """Publish what is pending, if it changes anything."""
        while True:
            before = read_manifest(self.lake)
            try:
                self._commit(before)
            except VersionTakenError:
                continue
            break
        self.pending = []
        self.start_clock()

    def finish(self) -> Manifest:
        """The lake version after the ingest."""
        manifest = read_manifest(self.lake)
        assert manifest is not None, "every source has episodes or findings, and either is committed"
        return manifest

    def _commit(self, before: Manifest | None) -> None:
        there = self._episodes(before, self.source.name) if before else set()
        new, lost = [], []
        for done in self.pending:
            (lost if any(e["episode"] in there for e in done.episodes) else new).append(done)
        for done in lost:  # another ingest brought some of these episodes; what is still missing is done again
            self.added_episodes -= len(done.episodes)
            self.added_steps -= sum(e["length"] for e in done.episodes)
        self.pending = new
        old = before.tables if before else create_tables(self.lake)
        tables = dict(old)
        if episodes := [row for done in new for row in done.episodes]:
            fragments = [f for done in new for f in done.fragments]
            tables["steps"] = append(self.lake, "steps", old["steps"], fragments)
            rows = pa.Table.from_pylist(episodes, SCHEMAS["episodes"])
            tables["episodes"] = append(
                self.lake, "episodes", old["episodes"], write_rows(self.lake, "episodes", rows.to_batches())
            )
            tables["datasets"] = replace_rows(self.lake, "datasets", old["datasets"], self._datasets(before, new))
        quarantine = self._rows(before, "quarantine")
        kept = self._quarantine(quarantine, there | {e["episode"] for e in episodes})
        if kept != quarantine:
            rows = pa.Table.from_pylist(kept, SCHEMAS["quarantine"])
            tables["quarantine"] = replace_rows(self.lake, "quarantine", old["quarantine"], rows)
        if tables != old or before is None:
            what = f"ingest {self.source.name}: {len(episodes)} episodes"
            publish(self.lake, before, tables, what)

    def _episodes(self, manifest: Manifest, dataset: str) -> set[int]:
        name = dataset.replace("'", "''")
        table = open_table(self.lake, manifest, "episodes").to_table(["episode"], filter=f"dataset = '{name}'")
        return set(table["episode"].to_pylist())

    def _rows(self, manifest: Manifest | None, name: str) -> list[dict]:
        return open_table(self.lake, manifest, name).to_table().to_pylist() if manifest else []

    def _quarantine(self, rows: list[dict], accepted: set[int]) -> list[dict]:
        """The quarantine with what is now known of this source: repaired episodes leave it, none is in it twice."""
        mine = [f for f in self.findings if f.severity == "error" and f.episode not in accepted]
        seen = {f.episode for f in mine}
        kept = [
            row
            for row in rows
            if row["source"] != self.source.folder.uri or not (row["episode"] in seen or row["episode"] in accepted)
        ]
        fresh = [{"dataset": self.source.name, **{k: v for k, v in asdict(f).items() if k != "severity"}} for f in mine]
        same = [row for row in rows if row not in kept]
        return rows if sorted(map(str, same)) == sorted(map(str, fresh)) else kept + fresh

    def _datasets(self, before: Manifest | None, new: list[Done]) -> pa.Table:
        """All rows of `datasets`, with this source's counts and statistics brought up to date."""
        rows = self._rows(before, "datasets")
        old = next((row for row in rows if row["name"] == self.source.name), None)
        sketches = {feature: from_bytes(old[column]) for feature, column in SKETCHES.items()} if old else {}
        for done in new:
            for feature, s in done.sketches.items():
                sketches[feature] = merge(sketches[feature], s) if feature in sketches else s
        row = dataset_row(
            self.source,
            self.image_size,
            episodes=(old["episodes"] if old else 0) + sum(len(d.episodes) for d in new),
            sketches=sketches,
        )
        rows = [row if r["name"] == self.source.name else r for r in rows] if old else [*rows, row]
        return pa.Table.from_pylist(rows, SCHEMAS["datasets"])


def dataset_row(source: Source, image_size: int, episodes: int, sketches: dict[str, Sketch]) -> dict:
    """A row of the `datasets` table."""
    return {
        "name": source.name,
        "source": source.folder.uri,
        "format": source.version,
        "robot": source.robot,
        "fps": source.fps,
        "cameras": [c.name for c in source.cameras],
        "image_size": image_size,
        "image_encoding": f"JPEG, quality {JPEG_QUALITY}, 4:4:4",
        "state_names": list(source.state_names),
        "action_names": list(source.action_names),
        "episodes": episodes,
        "steps": sketches[STATE].count,
        **statistics_columns(sketches),
        "ingested_by": f"drivetrain {package_version('drivetrain')}",
    }


def statistics_columns(sketches: dict[str, Sketch]) -> dict:
    """The columns of a row of `datasets` that follow from the sketches of its features."""
    text = statistics_json(sketches)
    return {
        "statistics": text,
        "statistics_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        **{column: to_bytes(sketches[feature]) for feature, column in SKETCHES.items()},
    }


def statistics_json(sketches: dict[str, Sketch]) -> str:
    """FeatureStatistics of each feature as JSON, with how they were computed and how exact the quantiles are."""
    features = {}
    for feature, s in sketches.items():
        values = statistics(s)
        features[feature] = {
            f.name: v.tolist() if isinstance(v := getattr(values, f.name), np.ndarray) else v for f in fields(values)
        }
        features[feature]["quantile_rank_error"] = s.rank_error
    return json.dumps({"method": METHOD, "features": features}, sort_keys=True)
