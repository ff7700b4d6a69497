"""The numbers of one episode, read from Parquet in the order of its frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from drivetrain.lake.findings import Finding, RefusedError
from drivetrain.lake.folder import missing_content
from drivetrain.lake.metafiles import read_parquet, read_schema
from drivetrain.lake.sources import ACTION, STATE, EpisodeSource, Source
from drivetrain.types import DrivetrainError


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of an episode, sorted by frame.

    frame, task: int64 [n].   timestamp: float64 [n], seconds.   state, action: float32 [n, dimensions].
    images: camera name -> encoded files, for cameras whose images are in Parquet.
    """

    frame: np.ndarray
    timestamp: np.ndarray
    task: np.ndarray
    state: np.ndarray
    action: np.ndarray
    images: dict[str, list[bytes]]


def read_rows(source: Source, episode: EpisodeSource) -> EpisodeRows:
    """The rows of `episode`. Raises RefusedError where they cannot be read as what the metadata say they are."""
    stills = [c for c in source.cameras if not c.video]
    columns = ["episode_index", "frame_index", "timestamp", "task_index", STATE, ACTION, *(c.key for c in stills)]
    table = _read(source, episode, columns)
    frame = _integers(source, episode, table, "frame_index")
    order = np.argsort(frame, kind="stable")
    table = table.take(pa.array(order))
    return EpisodeRows(
        frame=frame[order],
        timestamp=_floats(source, episode, table, "timestamp", 1)[:, 0].astype(np.float64),
        task=_integers(source, episode, table, "task_index"),
        state=_floats(source, episode, table, STATE, len(source.state_names)).astype(np.float32),
        action=_floats(source, episode, table, ACTION, len(source.action_names)).astype(np.float32),
        images={c.name: _stills(source, episode, table, c.key) for c in stills},
    )


def refuse(
    source: Source, episode: EpisodeSource, check: str, found: str, remedy: str, frame: int = -1, file: str = ""
) -> RefusedError:
    """The exception that puts an episode into quarantine."""
    where = file or episode.data_file
    return RefusedError(Finding(source.folder.uri, episode.index, frame, check, where, found, remedy))


def _read(source: Source, episode: EpisodeSource, columns: list[str]) -> pa.Table:
    if reason := missing_content(source.folder, episode.data_file):
        raise refuse(source, episode, "data-file", reason, "Copy the file again.")
    try:
        there = read_schema(source.folder, episode.data_file).names
        if missing := [c for c in columns if c not in there]:
            remedy = "Write the column, or remove the feature from meta/info.json."
            raise refuse(source, episode, "columns", f"the column {missing[0]!r} is missing", remedy)
        mine = pc.field("episode_index") == episode.index
        table = read_parquet(source.folder, episode.data_file, columns, filters=mine)
    except DrivetrainError as error:
        raise refuse(source, episode, "data-file", str(error), "Copy the file again.") from None
    if table.num_rows != episode.length:
        if table.num_rows == 0:
            found = f"no row of episode {episode.index} is in the file to which its metadata point"
            remedy = "Correct the episode's chunk and file index in meta/episodes, or record it again."
        else:
            found = f"the metadata say {episode.length} rows, the file has {table.num_rows}"
            remedy = "Correct the length in meta/episodes, or record the episode again."
        raise refuse(source, episode, "length", found, remedy)
    if table.num_rows == 0:
        raise refuse(source, episode, "empty", "the episode has no frames", "Remove it from meta/episodes.")
    return table


def _integers(source: Source, episode: EpisodeSource, table: pa.Table, name: str) -> np.ndarray:
    """int64 [n]; smaller integers and whole floats are widened, nothing is rounded."""
    column = table[name].combine_chunks()
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    if column.null_count:
        raise _null(source, episode, name, column)
    try:
        return column.cast(pa.int64(), safe=True).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        found = f"{name} has the type {column.type}: {str(error).splitlines()[0]}"
        raise refuse(source, episode, "columns", found, f"Write {name} as int64.") from None


def _floats(source: Source, episode: EpisodeSource, table: pa.Table, name: str, dimensions: int) -> np.ndarray:
    """[n, dimensions], of the file's own precision; nulls become NaN, which the check of values then names."""
    column = table[name].combine_chunks()
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        if column.null_count:
            raise _null(source, episode, name, column)
        lengths = pc.call_function("list_value_length", [column]).to_numpy(zero_copy_only=False)
        if len(wrong := np.flatnonzero(lengths != dimensions)):
            found = f"{name} has {lengths[wrong[0]]} values, meta/info.json says {dimensions}"
            remedy = "Correct the shape in meta/info.json, or write the row again."
            raise refuse(source, episode, "shape", found, remedy, frame=int(wrong[0]))
        values = column.flatten()
    else:
        values = column
        if dimensions != 1:
            found = f"{name} is a column of single values, meta/info.json says {dimensions} dimensions"
            raise refuse(source, episode, "shape", found, "Correct the shape in meta/info.json.")
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        raise refuse(source, episode, "columns", f"{name} has the type {values.type}", f"Write {name} as float32.")
    return values.to_numpy(zero_copy_only=False).reshape(-1, dimensions)


def _stills(source: Source, episode: EpisodeSource, table: pa.Table, key: str) -> list[bytes]:
    """Encoded image files: in the rows, or in files of the data set's folder that the rows name."""
    images = []
    for frame, cell in enumerate(table[key].to_pylist()):
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data and isinstance(cell, dict) and cell.get("path"):
            try:
                data = source.folder.read(str(cell["path"]))
            except (OSError, DrivetrainError) as error:
                raise refuse(source, episode, "image", f"{key}: {error}", "Copy the image file.", frame) from None
        if not isinstance(data, bytes) or not data:
            raise refuse(source, episode, "image", f"{key} holds no image", "Record the episode again.", frame)
        images.append(data)
    return images


def _null(source: Source, episode: EpisodeSource, name: str, column: pa.Array) -> RefusedError:
    frame = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
    return refuse(source, episode, "non-finite", f"{name} is null", "Remove the episode or write the value.", frame)
