"""A folder, local or on an object store, whose paths cannot be left."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from typing import BinaryIO

import fsspec
from fsspec import AbstractFileSystem

from drivetrain.types import DrivetrainError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Folder:
    """`uri` is an absolute local path or a URL such as `s3://bucket/prefix`, without a slash at its end."""

    uri: str

    @property
    def fs(self) -> AbstractFileSystem:
        """The file system; fsspec keeps one instance per process and set of options."""
        return fsspec.core.url_to_fs(self.uri)[0]

    @property
    def local(self) -> bool:
        return "://" not in self.uri

    @property
    def name(self) -> str:
        return posixpath.basename(self.uri)

    def path(self, relative: str) -> str:
        """The address of a file inside this folder.

        Raises DrivetrainError where `relative` would leave the folder: metadata written by others must not choose
        what is read. Symbolic links are followed, as the Hugging Face cache is made of them.
        """
        parts = relative.replace("\\", "/").split("/")
        if relative.startswith("/") or ".." in parts or "://" in relative or re.match(r"^[A-Za-z]:", relative):
            raise DrivetrainError(
                f"{self.uri}: the path {relative!r} in its metadata leaves the folder. Correct the path."
            )
        return f"{self.uri}/{relative}"

    def exists(self, relative: str) -> bool:
        return self.fs.exists(self.path(relative))

    def size(self, relative: str) -> int:
        return int(self.fs.size(self.path(relative)) or 0)

    def read(self, relative: str) -> bytes:
        with self.open(relative) as file:
            return file.read()

    def read_text(self, relative: str) -> str:
        """The file as UTF-8, with or without a byte order mark."""
        try:
            return self.read(relative).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DrivetrainError(
                f"{self.path(relative)} is not UTF-8 at byte {error.start}. Save the file as UTF-8."
            ) from None

    def open(self, relative: str) -> BinaryIO:
        return self.fs.open(self.path(relative), "rb")  # type: ignore[return-value]

    def glob(self, pattern: str) -> list[str]:
        """The files that match, relative to the folder, in the order of their names."""
        root = self.fs._strip_protocol(self.uri)
        found = self.fs.glob(f"{root}/{pattern}")
        return sorted(posixpath.relpath(str(f), str(root)) for f in found)


def folder_of(uri: str) -> Folder:
    """A `Folder` from what a user typed: `~`, relative paths and `file://` become absolute local paths."""
    if uri.startswith("file://"):
        uri = uri.removeprefix("file://")
    if "://" not in uri:
        return Folder(os.path.abspath(os.path.expanduser(uri)))
    return Folder(uri.rstrip("/"))


def is_lfs_pointer(head: bytes) -> bool:
    """Whether the first bytes of a file say that Git LFS keeps its content elsewhere."""
    return head.startswith(LFS_POINTER)


def missing_content(folder: Folder, relative: str) -> str | None:
    """Why a data file cannot be read, found without opening its format; None if nothing speaks against it."""
    try:
        if not folder.exists(relative):
            return "the file is missing"
        size = folder.size(relative)
        if size == 0:
            return "the file is empty (0 bytes)"
        if size < 1024 and is_lfs_pointer(folder.read(relative)):
            return "the file is a Git LFS pointer, not the data; run `git lfs pull` in the data set's folder"
    except OSError as error:
        return f"the file cannot be read: {error}"
    return None
