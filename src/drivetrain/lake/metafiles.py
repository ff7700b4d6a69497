"""Metadata files written by others, read with distrust: whatever is wrong in them is named with its file and line."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from drivetrain.lake.folder import Folder, missing_content
from drivetrain.types import DrivetrainError


def read_schema(folder: Folder, file: str) -> pa.Schema:
    """The columns of a Parquet file. Raises DrivetrainError that names the file."""
    return _parquet(folder, file, pq.read_schema)


def read_parquet(
    folder: Folder, file: str, columns: list[str] | None = None, filters: pc.Expression | None = None
) -> pa.Table:
    """A Parquet file, or the rows of it that pass `filters`. Raises DrivetrainError that names the file."""
    return _parquet(folder, file, lambda data: pq.read_table(data, columns=columns, filters=filters))


def _parquet[T](folder: Folder, file: str, read: Callable[[BinaryIO], T]) -> T:
    if reason := missing_content(folder, file):
        raise DrivetrainError(f"{folder.path(file)}: {reason}.")
    try:
        with folder.open(file) as data:
            return read(data)
    except (pa.ArrowInvalid, OSError) as error:
        raise DrivetrainError(
            f"{folder.path(file)} is not a readable Parquet file ({_first_line(error)}): its writer was cut off, or "
            "the copy is damaged. Copy it again, or remove its episodes."
        ) from None


def read_json(folder: Folder, file: str) -> Any:
    try:
        return json.loads(folder.read_text(file))
    except json.JSONDecodeError as error:
        raise DrivetrainError(f"{folder.path(file)}, line {error.lineno}: {error.msg}. Correct the line.") from None


def json_objects(folder: Folder, file: str) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; objects spread over several lines, or in one list, are taken too."""
    if not folder.exists(file):
        raise DrivetrainError(f"{folder.path(file)} is missing. Copy the whole meta folder of the data set.")
    text = folder.read_text(file)
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DrivetrainError(f"{folder.path(file)}, line {error.lineno}: {error.msg}. Correct the line.") from None
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, dict) for v in values):
            line = text.count("\n", 0, at) + 1
            raise DrivetrainError(f"{folder.path(file)}, line {line}: not a JSON object. Correct the line.")
        found += values
    return found


def integer(folder: Folder, file: str, row: Mapping[str, Any], key: str, number: int) -> int:
    """Counts and indices are never floats: a float may be a null in disguise, or have lost digits."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DrivetrainError(f"{folder.path(file)}, row {number}: {key} is {value!r}, not a whole number from 0 on.")
    return value


def fill(folder: Folder, template: str, values: Mapping[str, Any]) -> str:
    """`str.format` for templates written by others: plain names only, no attributes, no indexing."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if unknown := [n for n in names if n not in values]:
            raise ValueError(f"it asks for {unknown[0]!r}")
        return template.format(**values)
    except ValueError as error:
        raise DrivetrainError(
            f"{folder.path('meta/info.json')}: the path template {template!r} cannot be filled: {error}. Correct it."
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
