"""The tables of a lake, and the versions that tie them together.

A lake is a folder or bucket with four Lance tables and a folder `versions/`. A lake version is one small file that
names one version of each table. Creating that file is the only act by which anything becomes visible, and it is atomic:
on a disk by a hard link, on an object store by a conditional put. Table versions are Lance's detached ones, which never
compete for a table's own latest version, so whatever a killed process left behind is seen by nobody.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import lance
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from drivetrain.lake.folder import Folder
from drivetrain.types import DrivetrainError

_TEXTS = pa.list_(pa.string())
_SPAN = pa.struct([("task", pa.string()), ("start", pa.int64()), ("length", pa.int64())])

SCHEMAS = {
    "datasets": pa.schema(
        [
            ("name", pa.string()),
            ("source", pa.string()),
            ("format", pa.string()),
            ("robot", pa.string()),
            ("fps", pa.float64()),
            ("cameras", _TEXTS),
            ("image_size", pa.int64()),
            ("image_encoding", pa.string()),
            ("state_names", _TEXTS),
            ("action_names", _TEXTS),
            ("episodes", pa.int64()),
            ("steps", pa.int64()),
            ("statistics", pa.string()),
            ("statistics_hash", pa.string()),
            ("state_sketch", pa.large_binary()),
            ("action_sketch", pa.large_binary()),
            ("ingested_by", pa.string()),
        ]
    ),
    "episodes": pa.schema(
        [
            ("dataset", pa.string()),
            ("episode", pa.int64()),
            ("length", pa.int64()),
            ("spans", pa.list_(_SPAN)),
            ("data_file", pa.string()),
            ("video_files", _TEXTS),
        ]
    ),
    "steps": pa.schema(
        [
            ("dataset", pa.string()),
            ("episode", pa.int64()),
            ("frame", pa.int64()),
            ("timestamp", pa.float64()),
            ("task", pa.string()),
            ("state", pa.list_(pa.float32())),
            ("action", pa.list_(pa.float32())),
            ("images", pa.list_(pa.large_binary())),
        ]
    ),
    "quarantine": pa.schema(
        [
            ("dataset", pa.string()),
            ("source", pa.string()),
            ("episode", pa.int64()),
            ("frame", pa.int64()),
            ("check", pa.string()),
            ("file", pa.string()),
            ("found", pa.string()),
            ("remedy", pa.string()),
        ]
    ),
}


class VersionTakenError(Exception):
    """Another writer published this lake version first."""


@dataclass(frozen=True)
class Manifest:
    """One lake version. `tables`: table name -> Lance version.   `what`: in words, what made it."""

    version: int
    tables: dict[str, int]
    created: str
    what: str


# --- versions


def versions(lake: Folder) -> list[int]:
    """All published lake versions, in order."""
    lake.fs.invalidate_cache()
    return sorted(int(f.split("/")[-1].removesuffix(".json")) for f in lake.glob("versions/*.json"))


def read_manifest(lake: Folder, version: int | None = None) -> Manifest | None:
    """A version's manifest, the latest by default; None where the lake has no version yet.

    Raises DrivetrainError where the asked version does not exist.
    """
    known = versions(lake)
    if version is None and not known:
        return None
    if version is not None and version not in known:
        raise DrivetrainError(f"{lake.uri} has no version {version}; it has {_listed(known)}.")
    return Manifest(**json.loads(lake.read_text(_manifest_file(version or known[-1]))))


def publish(lake: Folder, after: Manifest | None, tables: dict[str, int], what: str) -> Manifest:
    """Make a new lake version visible, at once and whole. Raises VersionTakenError where another writer was faster."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = Manifest(version=(after.version if after else 0) + 1, tables=tables, created=created, what=what)
    data = json.dumps(asdict(manifest), indent=1).encode()
    target = lake.path(_manifest_file(manifest.version))
    try:
        if lake.local:
            _create_file(target, data)
        else:
            lake.fs.pipe_file(target, data, mode="create")
    except FileExistsError:
        raise VersionTakenError from None
    return manifest


def _create_file(target: str, data: bytes) -> None:
    """Create a local file with its content or not at all."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{uuid.uuid4().hex}.tmp"
    with open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, target)
    finally:
        os.unlink(temporary)


def _manifest_file(version: int) -> str:
    return f"versions/{version:010d}.json"


def _listed(known: list[int]) -> str:
    return "none" if not known else f"version {known[0]}" if len(known) == 1 else f"versions {known[0]} to {known[-1]}"


# --- tables


def create_tables(lake: Folder) -> dict[str, int]:
    """Create the tables that do not exist yet, empty; returns the first version of each."""
    for name, schema in SCHEMAS.items():
        if _is_table(lake, name):
            continue
        try:
            lance.write_dataset(schema.empty_table(), table_uri(lake, name), storage_options=storage(lake))
        except (OSError, ValueError, RuntimeError) as error:
            if _is_table(lake, name):  # another ingest was faster
                continue
            raise DrivetrainError(
                f"the lake {lake.uri} cannot be written: {str(error).splitlines()[0]}. "
                "Give a folder or bucket that you may write to."
            ) from None
    return dict.fromkeys(SCHEMAS, 1)


def _is_table(lake: Folder, name: str) -> bool:
    try:
        lance.dataset(table_uri(lake, name), version=1, storage_options=storage(lake))
    except (OSError, ValueError, RuntimeError):
        return False
    return True


def open_table(lake: Folder, manifest: Manifest, name: str) -> lance.LanceDataset:
    return lance.dataset(table_uri(lake, name), version=manifest.tables[name], storage_options=storage(lake))


def table_files(table: lance.LanceDataset) -> set[str]:
    """The names of the data files that a table's version is made of."""
    return {file.path.split("/")[-1] for fragment in table.get_fragments() for file in fragment.data_files()}


def write_rows(lake: Folder, name: str, batches: Iterable[pa.RecordBatch]) -> list[str]:
    """Write rows as files of the table, which nobody sees yet; returns the fragments as JSON, for `append`.

    What goes wrong in `batches` is raised as it is; a fault of the storage is a DrivetrainError.
    """
    faults: list[Exception] = []

    def watched() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except Exception as error:  # Arrow would hand it on as an OSError without its type
            faults.append(error)
            raise

    reader = pa.RecordBatchReader.from_batches(SCHEMAS[name], watched())
    try:
        fragments = write_fragments(reader, table_uri(lake, name), mode="append", storage_options=storage(lake))
    except (OSError, RuntimeError, ValueError) as error:
        if faults:
            raise faults[0] from None
        raise DrivetrainError(
            f"the lake {lake.uri} cannot be written: {str(error).splitlines()[0]}. Free space or correct the access; "
            "what was committed before is safe, and the same command goes on from there."
        ) from None
    assert isinstance(fragments, list)
    return [json.dumps(f.to_json()) for f in fragments]


def append(lake: Folder, name: str, version: int, fragments: list[str]) -> int:
    """The table's version that has the fragments behind the rows of `version`."""
    operation = lance.LanceOperation.Append([FragmentMetadata.from_json(f) for f in fragments])
    return _commit(lake, name, version, operation)


def replace_rows(lake: Folder, name: str, version: int, rows: pa.Table) -> int:
    """The table's version that has these rows only. For the small tables."""
    written = write_rows(lake, name, rows.to_batches()) if rows.num_rows else []
    operation = lance.LanceOperation.Overwrite(SCHEMAS[name], [FragmentMetadata.from_json(f) for f in written])
    return _commit(lake, name, version, operation)


def delete_rows(lake: Folder, name: str, version: int, predicate: str) -> int:
    """The table's version without the rows for which `predicate` holds. Nothing is rewritten."""
    changed, gone = [], []
    for fragment in lance.dataset(
        table_uri(lake, name), version=version, storage_options=storage(lake)
    ).get_fragments():
        left = fragment.delete(predicate)
        if left is None:
            gone.append(fragment.fragment_id)
        else:
            changed.append(left)
    return _commit(lake, name, version, lance.LanceOperation.Delete(changed, gone, predicate))


def table_uri(lake: Folder, name: str) -> str:
    return f"{lake.uri}/{name}.lance"


def storage(lake: Folder) -> dict[str, str]:
    """What Lance has to be told about an object store beyond the usual AWS_* variables."""
    options = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if lake.uri.startswith("s3://") and endpoint:
        options = {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}
    return options


def _commit(lake: Folder, name: str, version: int, operation: lance.LanceOperation.BaseOperation) -> int:
    return lance.LanceDataset.commit(
        table_uri(lake, name), operation, read_version=version, detached=True, storage_options=storage(lake)
    ).version
