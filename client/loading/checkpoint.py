"""A checkpoint: its open files, the tensors that they hold, and where each of them lies.

The files are in the safetensors format. Another one is a module beside :mod:`.safetensors` with the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Self

from cubroker.client.loading.safetensors import (
    expand,
    file_error,
    open_regular,
    read_header,
    read_index,
    refusal,
)
from cubroker.protocol.errors import Invalid, NotFound

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RENAME = "write checkpoints beside the old one and rename them into place"


class CheckpointFile:
    """One open file, its tensors in the order of their bytes, and its state when its header was read."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self.tensors = read_header(self._file, path, index)
            self._stamp = self._state()
        except BaseException:
            self._file.close()
            raise

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        return self._file.fileno()

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill ``buffers``, in order, with the file's bytes from ``offset`` on; raises ``Invalid`` if it cannot."""
        try:
            while buffers:
                got = os.preadv(self.descriptor, buffers, offset)
                if not got:
                    raise refusal(
                        self.path,
                        f"it ended at byte {offset} while it was read, and was longer when it was opened; {RENAME}",
                    )
                offset += got
                buffers = _unfilled(buffers, got)
        except OSError as error:
            raise file_error(self.path, error) from error

    def check_unchanged(self) -> None:
        """Raise ``Invalid`` if the file was written to since its header was read: its bytes may be of both states."""
        if self._state() != self._stamp:
            raise refusal(self.path, f"it was changed while it was read; {RENAME}")

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        self._file.close()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns


class Checkpoint:
    """The open files of a checkpoint, and all tensors in them: by file, then by place in the file; names are unique."""

    def __init__(self, files: tuple[CheckpointFile, ...]) -> None:
        self.files = files
        self.entries = tuple(chain.from_iterable(file.tensors for file in files))

    @classmethod
    def open(cls, paths: Paths) -> Self:
        """Open a checkpoint and check all of its headers.

        Args:
            paths: one path or several: a safetensors file, the ``*.json`` index of a sharded checkpoint, or a folder,
                which stands for its ``model.safetensors.index.json`` if it has one, else for all its ``*.safetensors``.

        Raises:
            NotFound: a file, a shard or a tensor that the index names does not exist.
            Denied: a file may not be read.
            Invalid: a file breaks the format, a name appears twice, or there is no tensor at all.
        """
        listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        names: list[Path] = []
        indexes: list[tuple[Path, dict[str, Path]]] = []
        for path in map(Path, listed):
            found = expand(path)
            if found[0].suffix == ".json":
                indexes.append((found[0], read_index(found[0])))
                found = list(dict.fromkeys(indexes[-1][1].values()))
            names += found
        with ExitStack() as undo:
            files = []
            for number, name in enumerate(names):
                files.append(CheckpointFile(name, number))
                undo.callback(files[-1].close)
            checkpoint = cls(tuple(files))
            checkpoint._check(listed, indexes)
            undo.pop_all()
        return checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without any padding."""
        return sum(entry.nbytes for entry in self.entries)

    def check_unchanged(self) -> None:
        """Raise ``Invalid`` if one of the files was written to since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, listed: list[str | os.PathLike[str]], indexes: list[tuple[Path, dict[str, Path]]]) -> None:
        if not self.entries:
            raise Invalid(f"there is no tensor in {', '.join(map(str, listed)) or 'an empty list of paths'}")
        holders: dict[str, Path] = {}
        for entry in self.entries:
            path = self.files[entry.file].path
            if (first := holders.setdefault(entry.name, path)) is not path:
                raise Invalid(
                    f"tensor {entry.name!r} is in {first} and again in {path}; load files that do not repeat each other"
                )
        for index, weights in indexes:
            for name, shard in weights.items():
                if holders.get(name) != shard:
                    raise NotFound(
                        f"cannot load {index}: it says that {name!r} is in {shard.name}, and it is not; the index and"
                        f" its shards are of different checkpoints, fetch them again"
                    )


def _unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of ``buffers`` after ``count`` bytes went into them."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
