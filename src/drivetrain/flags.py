"""The fields of a recipe's Run as command-line flags: `--batch.samples 64`, with help from the docstrings."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import types
import typing
from dataclasses import field
from typing import Annotated, Any

import tyro

FILLED_IN = ("recipe", "lake", "lake_version")  # by the recipe, and when the run starts


def mirror(value: Any) -> type:
    """A dataclass with the fields of the dataclass `value`, their values as defaults, and help from its docstring."""
    hints, helps = typing.get_type_hints(type(value)), help_texts(type(value))
    mirrored = []
    for f in dataclasses.fields(value):
        kind, default = hints[f.name], getattr(value, f.name)
        if f.name in FILLED_IN or _is_nested_dict(kind):
            continue
        if dataclasses.is_dataclass(default):
            mirrored.append((f.name, inner := mirror(default), field(default_factory=inner)))
            continue
        if (inner := _optional_dataclass(kind)) is not None:  # --batch.shape 4096 32 32
            kind = tuple[tuple(typing.get_type_hints(inner).values())] | None  # type: ignore[misc]
        kind = Annotated[kind, tyro.conf.arg(help=helps.get(f.name, ""))]
        mirrored.append((f.name, kind, field(default_factory=lambda default=default: default)))
    return dataclasses.make_dataclass(type(value).__name__, mirrored, frozen=True, kw_only=True)


def as_run(value: Any, mirrored: Any) -> Any:
    """`value` with the fields that the parsed `mirrored` has."""
    changes = {}
    for f in dataclasses.fields(mirrored):
        new, old = getattr(mirrored, f.name), getattr(value, f.name)
        if dataclasses.is_dataclass(old):
            new = as_run(old, new)
        elif isinstance(new, tuple) and (inner := _optional_dataclass(typing.get_type_hints(type(value))[f.name])):
            new = inner(*new)
        changes[f.name] = new
    return dataclasses.replace(value, **changes)


def _is_nested_dict(kind: Any) -> bool:
    """A dict of dicts has no form as a flag; it is set in a recipe."""
    return typing.get_origin(kind) is dict and typing.get_origin(typing.get_args(kind)[1]) is dict


def _optional_dataclass(kind: Any) -> type | None:
    """D for the annotation `D | None` where D is a dataclass."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return None
    return next((a for a in typing.get_args(kind) if dataclasses.is_dataclass(a)), None)  # type: ignore[return-value]


def help_texts(kind: type) -> dict[str, str]:
    """Field -> what the docstring says of it, where it says `field: text`, `field, field: text` or `prefix_*: text`."""
    fields = [f.name for f in dataclasses.fields(kind)]
    text = " ".join((kind.__doc__ or "").split())
    parts = re.split(r"(?<!\S)([a-z]\w*\*?(?:, [a-z]\w*\*?)*): ", text)
    texts: dict[str, str] = {}
    for listed, said in zip(parts[1::2], parts[2::2], strict=True):
        for pattern in listed.split(", "):
            texts.update(dict.fromkeys(fnmatch.filter(fields, pattern), said.strip()))
    return texts
