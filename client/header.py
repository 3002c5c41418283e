"""The header of one safetensors file: read under limits, and checked against the file that it heads.

Format: 8 bytes of length (little endian), that many bytes of JSON, then the data, without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from cubroker.protocol import CubrokerError, dtypes, wire
from cubroker.protocol.errors import Denied, Invalid, NotFound
from cubroker.protocol.layout import MAX_RANK
from cubroker.protocol.system_errors import reason, remedy

MAX_HEADER = 100_000_000
"""Bytes that a header may have: the limit of the format."""

_LENGTH = 8
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
T = TypeVar("T")


class _Info(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


wire.prepare(_Info)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as its file stores it: ``nbytes`` bytes from byte ``offset`` of the file on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def open_regular(path: Path) -> FileIO:
    """Open ``path`` for reading, and never wait for a pipe's writer.

    Raises:
        NotFound: nothing is there.
        Denied: this process may not read it.
        Invalid: it is no regular file, or the system cannot open it.
    """
    try:
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise failure(path, error) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Invalid(f"cannot load {path}: it is no regular file; name a safetensors file, a folder or an index")
    return file


def failure(path: Path, error: OSError) -> CubrokerError:
    """Return the error that tells a user what ``error`` means for ``path``."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"cannot load {path}: there is no such file; check the path")
    why = f"cannot load {path}: {reason(error, path)}"
    if isinstance(error, PermissionError):
        return Denied(f"{why}; user {os.geteuid()} needs to be allowed to read it")
    return Invalid(f"{why}; {remedy(error) or 'check the file and the disk that it is on'}")


def read(file: FileIO, path: Path) -> tuple[Stored, ...]:
    """Read and check the header of ``file``, which was opened as ``path``; return its tensors in the order of bytes.

    Raises:
        Invalid: the file is truncated, or is not what the format allows; the text says where.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_take(file, path, _LENGTH, size), "little")
    if length > MAX_HEADER:
        _refuse(path, f"its header claims {length} bytes, and {MAX_HEADER} is the most; it is no safetensors file")
    if _LENGTH + length > size:
        _refuse(path, f"its header claims {length} bytes, and the file has {size}; it is truncated, fetch it again")
    infos = _sections(path, _take(file, path, length, size))
    start = _LENGTH + length
    checked = _check(path, infos, size - start)
    return tuple(Stored(name, i.dtype, i.shape, start + i.data_offsets[0], _extent(i)) for name, i in checked)


def parse_json(path: Path, raw: bytes, shape: type[T]) -> T:
    """Decode JSON that came from ``path`` as a ``shape``; a key that appears twice is refused, as the format asks."""
    try:
        return msgspec.convert(json.loads(raw.decode(), object_pairs_hook=_unique), shape)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise Invalid(f"cannot load {path}: its JSON cannot be used: {str(error)[:300]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} appears twice")
    return found


def _refuse(path: Path, what: str) -> NoReturn:
    raise Invalid(f"cannot load {path}: {what}")


def _take(file: FileIO, path: Path, count: int, size: int) -> bytes:
    """Read ``count`` bytes of the header; the kernel may hand over fewer at a time."""
    taken = bytearray()
    try:
        while len(taken) < count:
            if not (part := file.read(count - len(taken))):
                _refuse(path, f"it ends inside its header, after {size} bytes; it is truncated, fetch it again")
            taken += part
    except OSError as error:
        raise failure(path, error) from error
    return bytes(taken)


def _sections(path: Path, raw: bytes) -> dict[str, _Info]:
    """Return what the header says of each tensor; of ``__metadata__`` only the form is checked."""
    if not raw.startswith(b"{"):
        _refuse(path, "its header does not begin with '{'; it is no safetensors file")
    sections = parse_json(path, raw, dict[str, Any])
    try:
        msgspec.convert(sections.pop("__metadata__", None), dict[str, str] | None)
        return msgspec.convert(sections, dict[str, _Info])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a key with half a surrogate pair
        raise Invalid(f"cannot load {path}: its header has an entry of the wrong form: {error}") from None


def _extent(info: _Info) -> int:
    return info.data_offsets[1] - info.data_offsets[0]


def _check(path: Path, infos: dict[str, _Info], room: int) -> Iterator[tuple[str, _Info]]:
    """Yield the tensors in the order of their bytes, having checked that these cover the file's data exactly once."""
    end = 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        _check_one(path, name, info, end, room)
        end = info.data_offsets[1]
        yield name, info
    if end < room:
        _refuse(
            path, f"{room - end} bytes follow its last tensor; it was not written as its header says, write it again"
        )


def _check_one(path: Path, name: str, info: _Info, end: int, room: int) -> None:
    first, last = info.data_offsets
    what = f"tensor {name!r}"
    if last < first:
        _refuse(path, f"{what} ends at byte {last} of the data, before it begins at {first}")
    if first < end:
        _refuse(path, f"{what} begins at byte {first} of the data, inside the one before it, which ends at {end}")
    if first > end:
        _refuse(path, f"{what} begins at byte {first} of the data and the one before it ends at {end}: a hole")
    if last > room:
        _refuse(
            path, f"{what} ends at byte {last} of the data, and the file has {room}; it is truncated, fetch it again"
        )
    try:
        need = dtypes.nbytes(info.dtype, info.shape)
    except Invalid as error:
        _refuse(path, f"{what}: {error.message}")
    if need != last - first:
        shape = list(info.shape)
        _refuse(path, f"{what} is {info.dtype} {shape}, which takes {need} bytes, and its offsets span {last - first}")
