"""Checkpoints: which tensors some safetensors files hold, and where each of them lies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Self

import msgspec

from cubroker.client import header
from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid, NotFound

INDEX = "model.safetensors.index.json"
"""The name of the index that a folder with a sharded checkpoint has."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


wire.prepare(_Index)


@dataclass(frozen=True, slots=True)
class Entry(header.Stored):
    """One tensor of a checkpoint: it is stored in ``Checkpoint.files[file]``."""

    file: int


class File:
    """One open safetensors file, remembered as it was when its header was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = header.open_regular(path)
        try:
            self.tensors = header.read(self._file, path)
            self._stamp = self._state()
        except BaseException:
            self._file.close()
            raise

    @property
    def descriptor(self) -> int:
        """The file descriptor, for ``preadv``."""
        return self._file.fileno()

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill ``buffers``, in order, with the file's bytes from ``offset`` on.

        Raises:
            Invalid: the file has become shorter, or it cannot be read.
        """
        try:
            while buffers:
                got = os.preadv(self.descriptor, buffers, offset)
                if not got:
                    raise Invalid(
                        f"cannot load {self.path}: it ended at byte {offset} while it was read, and was longer when it"
                        f" was opened; write checkpoints beside the old one and rename them into place"
                    )
                offset += got
                buffers = _unfilled(buffers, got)
        except OSError as error:
            raise header.failure(self.path, error) from error

    def check_unchanged(self) -> None:
        """Raise ``Invalid`` if the file was written to since its header was read: its bytes may be of both."""
        if self._state() != self._stamp:
            raise Invalid(
                f"cannot load {self.path}: it was changed while it was read; write checkpoints beside the old one and"
                f" rename them into place"
            )

    def close(self) -> None:
        """Close the descriptor; more than once does no harm."""
        self._file.close()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns


class Checkpoint:
    """The open files of a checkpoint and the tensors in them: first by file, then by place within it.

    Attributes:
        files: the open :class:`File` objects.
        entries: every tensor, an :class:`Entry` each; names are unique.
    """

    def __init__(self, files: tuple[File, ...]) -> None:
        self.files = files
        self.entries = tuple(
            Entry(stored.name, stored.dtype, stored.shape, stored.offset, stored.nbytes, index)
            for index, file in enumerate(files)
            for stored in file.tensors
        )

    @classmethod
    def open(cls, paths: Paths) -> Self:
        """Open a checkpoint and check all of its headers.

        Args:
            paths: one path or several: a safetensors file, the ``*.json`` index of a sharded checkpoint, or a folder,
                which stands for its ``model.safetensors.index.json`` if it has one, else for all its ``*.safetensors``.

        Raises:
            NotFound: a file, a shard or a tensor that the index names is not there.
            Denied: a file may not be read.
            Invalid: a file is not what the format allows, a name appears twice, or there is no tensor at all.
        """
        listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        names: list[Path] = []
        promised: list[tuple[Path, dict[str, Path]]] = []
        for path in map(Path, listed):
            found = _files(path)
            if found[0].suffix == ".json":
                promised.append((found[0], _read_index(found[0])))
                found = list(dict.fromkeys(promised[-1][1].values()))
            names += found
        with ExitStack() as undo:
            files = tuple(_opened(undo, name) for name in names)
            checkpoint = cls(files)
            checkpoint._check(listed, promised)
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

    def _check(self, listed: list[str | os.PathLike[str]], promised: list[tuple[Path, dict[str, Path]]]) -> None:
        if not self.entries:
            raise Invalid(f"there is no tensor in {', '.join(map(str, listed)) or 'an empty list of paths'}")
        holders = {entry.name: self.files[entry.file].path for entry in self.entries}
        if len(holders) < len(self.entries):
            self._refuse_twins()
        for index, weights in promised:
            for name, shard in weights.items():
                if holders.get(name) != shard:
                    raise NotFound(
                        f"cannot load {index}: it says that {name!r} is in {shard.name}, and it is not; the index and"
                        f" its shards are of different checkpoints, fetch them again"
                    )

    def _refuse_twins(self) -> None:
        counts = Counter(entry.name for entry in self.entries)
        name = next(name for name, count in counts.items() if count > 1)
        first, second = [self.files[entry.file].path for entry in self.entries if entry.name == name][:2]
        raise Invalid(f"tensor {name!r} is in {first} and again in {second}; load files that do not repeat each other")


def _opened(undo: ExitStack, path: Path) -> File:
    file = File(path)
    undo.callback(file.close)
    return file


def _files(path: Path) -> list[Path]:
    """Return what a path stands for: itself, or of a folder the index alone, else all safetensors files."""
    try:
        inside = sorted(path.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return [path]
    except OSError as error:
        raise header.failure(path, error) from error
    found = [entry for entry in inside if entry.name == INDEX]
    found = found or [entry for entry in inside if entry.suffix == ".safetensors"]
    if not found:
        raise NotFound(f"cannot load {path}: the folder has neither {INDEX} nor any *.safetensors file")
    return found


def _read_index(path: Path) -> dict[str, Path]:
    """Return the shard of every tensor that an index names."""
    with header.open_regular(path) as file:
        raw = _all(file, path)
    weights = header.parse_json(path, raw, _Index).weight_map
    for shard in dict.fromkeys(weights.values()):
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise Invalid(f"cannot load {path}: the shard {shard[:100]!r} does not lie in the index's own folder")
        try:
            (path.parent / pure).stat()
        except FileNotFoundError:
            raise NotFound(f"cannot load {path}: its shard {shard[:100]!r} is not there; fetch it again") from None
        except OSError as error:
            raise header.failure(path.parent / pure, error) from error
        except ValueError as error:  # a zero byte, or half a surrogate pair
            raise Invalid(f"cannot load {path}: {shard[:100]!r} cannot name a file ({error}); fetch it again") from None
    return {name: path.parent / shard for name, shard in weights.items()}


def _all(file: FileIO, path: Path) -> bytes:
    """Read a file that should be short; never more memory than it has bytes is taken for it."""
    try:
        size = os.fstat(file.fileno()).st_size
        if size > header.MAX_HEADER:
            raise Invalid(f"cannot load {path}: the index has over {header.MAX_HEADER} bytes, which is the most")
        return file.read(size) or b""
    except OSError as error:
        raise header.failure(path, error) from error


def _unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``buffers`` once ``count`` bytes have gone into them."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
