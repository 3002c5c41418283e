"""A checkpoint: its open files, the tensors that they hold, and where each of them lies.

The files are in the safetensors format (:mod:`.safetensors`). Another format would be a module like it, and
:func:`read_header` would tell the formats apart. Headers are read under limits, and checked before anything else is
read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Self

import msgspec

from cubroker.client.loading.safetensors import (
    INDEX,
    LENGTH_BYTES,
    MAX_HEADER,
    SUFFIX,
    FormatError,
    header_length,
    parse_header,
    parse_index,
)
from cubroker.protocol import CubrokerError
from cubroker.protocol.errors import Denied, Invalid, NotFound, reason, remedy

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

SHARD = re.compile(rf"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+){re.escape(SUFFIX)}")
"""The name of a shard, as transformers and others give it; they count from 1."""

RENAME = "write checkpoints beside the old one and rename them into place"


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor as a file stores it."""

    name: str
    #: its element type, by its safetensors name
    dtype: str
    #: its dimensions, in elements
    shape: tuple[int, ...]
    #: where its bytes begin in the file
    offset: int
    nbytes: int
    #: index of the file in its checkpoint
    file: int


class CheckpointFile:
    """One open file, its tensors in the order of their bytes, and its state before its header was read."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self._stamp = self._state()  # first: to check a header may take longer than to rewrite the file
            self.tensors = read_header(self._file, path, index)
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
        """Raise ``Invalid`` if the file was written to since its header was read: the bytes read may be a mixture."""
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
                which stands for its ``model.safetensors.index.json`` if it has one, else for all its ``*.safetensors``
                that are not hidden.

        Raises:
            NotFound: a file, or a shard or a tensor that the index names, does not exist; or a folder without an index
                lacks a shard that the names of its other shards tell of.
            Denied: a file may not be read.
            Invalid: a file breaks the format, a name appears twice, there is no tensor at all, or something else than a
                path was given.
        """
        listed = list(map(_path, _several(paths)))
        names: list[Path] = []
        indexes: list[tuple[Path, dict[str, Path]]] = []
        for path in listed:
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

    def _check(self, listed: list[Path], indexes: list[tuple[Path, dict[str, Path]]]) -> None:
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
                        f"cannot read {index}: it says that {name!r} is in {shard.name}, and it is not; the index and"
                        f" its shards are of different checkpoints, fetch them again"
                    )


def _several(paths: object) -> Iterator[object]:
    if not isinstance(paths, str | bytes | os.PathLike):
        with suppress(TypeError):  # it cannot be iterated, as an array of numpy without dimensions
            return iter(paths)  # type: ignore[call-overload, no-any-return]
    return iter((paths,))


def _path(given: object) -> Path:
    with suppress(TypeError):
        name = os.fspath(given)  # type: ignore[call-overload]
        if isinstance(name, str) and name:  # Path("") is the current folder
            return Path(name)
    raise Invalid(f"{given!r:.60} is no path of a checkpoint; pass a file, a folder or an index, or several")


def _unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of ``buffers`` after ``count`` bytes went into them."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


# -- files ---------------------------------------------------------------------------------------------


def read_header(file: FileIO, path: Path, index: int = 0) -> tuple[StoredTensor, ...]:
    """Read and check the header of ``file``, which was opened as ``path``; return its tensors in the order of bytes.

    ``index`` becomes the ``file`` of each tensor. Raises ``Invalid`` if the file breaks the format.
    """
    size = os.fstat(file.fileno()).st_size
    with _said_of(path):
        length = header_length(_take(file, path, LENGTH_BYTES, size), size)
        start = LENGTH_BYTES + length
        tensors = parse_header(_take(file, path, length, size), size - start)
    return tuple(
        StoredTensor(name, info.dtype, info.shape, start + first, end - first, index)
        for name, info in tensors.items()
        for first, end in [info.data_offsets]
    )


def _take(file: FileIO, path: Path, count: int, size: int) -> bytes:
    """Read ``count`` bytes of the header; the kernel may hand over fewer at a time."""
    taken = bytearray()
    while len(taken) < count:
        if not (part := file.read(count - len(taken))):
            raise refusal(path, f"it ends inside its header, after {size} bytes; it is truncated, fetch it again")
        taken += part
    return bytes(taken)


def expand(path: Path) -> list[Path]:
    """Return the files of a path: of a file itself; of a folder its index alone, or else all its safetensors files.

    Hidden files of a folder are left out: other systems leave ``._model.safetensors``, which holds no tensors.
    """
    try:
        inside = sorted(path.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return [path]
    except OSError as error:
        raise file_error(path, error) from error
    except ValueError as error:  # a zero byte, or half a surrogate pair
        raise Invalid(f"{str(path)!r} cannot name a file ({error}); check the path") from None
    found = [entry for entry in inside if entry.name == INDEX]
    if not found:
        found = [entry for entry in inside if entry.suffix == SUFFIX and not entry.name.startswith(".")]
        _check_shards(path, found)
    if not found:
        raise NotFound(f"cannot read {path}: the folder has neither {INDEX} nor any *.safetensors file")
    return found


def _check_shards(folder: Path, files: Iterable[Path]) -> None:
    """Raise ``NotFound`` if the names of a folder's shards say that there are more of them."""
    present: dict[tuple[str, str], set[int]] = {}
    for name in filter(None, (SHARD.fullmatch(file.name) for file in files)):
        present.setdefault((name["stem"], name["count"]), set()).add(int(name["number"]))
    for (stem, count), numbers in present.items():
        if len(numbers) < int(count):
            missing = next(number for number in range(1, int(count) + 1) if number not in numbers)
            raise NotFound(
                f"cannot read {folder}: it has {len(numbers)} of {int(count)} shards, and not"
                f" {stem}-{missing:0{len(count)}}-of-{count}{SUFFIX}; fetch it again"
            )


def read_index(path: Path) -> dict[str, Path]:
    """Return the shard of every tensor that an index names; each shard exists and lies in the index's folder."""
    with open_regular(path) as file, _said_of(path):
        if (size := os.fstat(file.fileno()).st_size) > MAX_HEADER:
            raise refusal(path, f"the index is larger than {MAX_HEADER} bytes, the limit")
        weights = parse_index(file.read(size) or b"")  # takes no more memory than the file has bytes
    for shard in dict.fromkeys(weights.values()):
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise refusal(path, f"the shard {shard[:100]!r} does not lie in the index's own folder")
        try:
            (path.parent / pure).stat()
        except FileNotFoundError:
            raise NotFound(f"cannot read {path}: its shard {shard[:100]!r} is not there; fetch it again") from None
        except OSError as error:
            raise file_error(path.parent / pure, error) from error
        except ValueError as error:  # a zero byte, or half a surrogate pair
            raise refusal(path, f"{shard[:100]!r} cannot name a file ({error}); fetch it again") from None
    return {name: path.parent / shard for name, shard in weights.items()}


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; never waits for a pipe's writer."""
    with _said_of(path):
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise refusal(path, "it is no regular file; name a safetensors file, a folder or an index")
    return file


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Turn a ``FormatError``, or an error of the system, into one about a file."""
    try:
        yield
    except FormatError as error:
        raise refusal(path, str(error)) from None
    except OSError as error:
        raise file_error(path, error) from error


def refusal(path: Path, why: str) -> Invalid:
    """Return the error for a file that cannot be used."""
    return Invalid(f"cannot read {path}: {why}")


def file_error(path: Path, error: OSError) -> CubrokerError:
    """Return the error for a file that the system does not open or read."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"cannot read {path}: there is no such file; check the path")
    why = f"cannot read {path}: {reason(error, path)}"
    if isinstance(error, PermissionError):
        return Denied(f"{why}; user {os.geteuid()} needs to be allowed to read it")
    return Invalid(f"{why}; {remedy(error) or 'check the file and the disk that it is on'}")
