"""The safetensors format: the header of a file, and the folder and index of a checkpoint of several files.

A file is 8 bytes of length (little endian), a header of that many bytes of JSON, then the data of all tensors without
holes. Headers are read under limits and checked against the size of their file before anything else is read.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

import msgspec

from cubroker.protocol import CubrokerError, dtypes, wire
from cubroker.protocol.errors import Denied, Invalid, NotFound, reason, remedy
from cubroker.protocol.layout import MAX_RANK

INDEX = "model.safetensors.index.json"
"""The name of a sharded checkpoint's index in its folder."""

MAX_HEADER = 100_000_000
"""The most bytes of a header: the limit of the format. An index may have as many."""

T = TypeVar("T")

_LENGTH_BYTES = 8
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _TensorInfo(msgspec.Struct, frozen=True):
    """A header's entry for one tensor; offsets count from the end of the header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


wire.prepare(_TensorInfo)
wire.prepare(_ShardIndex)


@dataclass(frozen=True, slots=True)
class StoredTensor:
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


def read_header(file: FileIO, path: Path, index: int = 0) -> tuple[StoredTensor, ...]:
    """Read and check the header of ``file``, which was opened as ``path``; return its tensors in the order of bytes.

    ``index`` is what the tensors have as their ``file``. Raises ``Invalid`` if the file breaks the format.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_take(file, path, _LENGTH_BYTES, size), "little")
    if length > MAX_HEADER:
        raise refusal(
            path, f"its header claims {length} bytes, and {MAX_HEADER} is the most; it is no safetensors file"
        )
    start = _LENGTH_BYTES + length
    if start > size:
        raise refusal(
            path, f"its header claims {length} bytes, and the file has {size}; it is truncated, fetch it again"
        )
    infos, room, end = _parse_header(path, _take(file, path, length, size)), size - start, 0
    tensors = []
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        if mistake := _mistake(info, end, room):
            raise refusal(path, f"tensor {name!r}{mistake}")
        first, end = info.data_offsets
        tensors.append(StoredTensor(name, info.dtype, info.shape, start + first, end - first, index))
    if end < room:
        raise refusal(
            path, f"{room - end} bytes follow its last tensor; it was not written as its header says, write it again"
        )
    return tuple(tensors)


def _take(file: FileIO, path: Path, count: int, size: int) -> bytes:
    """Read ``count`` bytes of the header; the kernel may hand over fewer at a time."""
    taken = bytearray()
    try:
        while len(taken) < count:
            if not (part := file.read(count - len(taken))):
                raise refusal(path, f"it ends inside its header, after {size} bytes; it is truncated, fetch it again")
            taken += part
    except OSError as error:
        raise file_error(path, error) from error
    return bytes(taken)


def _parse_header(path: Path, raw: bytes) -> dict[str, _TensorInfo]:
    """Return the header's entry of each tensor; only the form of ``__metadata__`` is checked."""
    if not raw.startswith(b"{"):
        raise refusal(path, "its header does not begin with '{'; it is no safetensors file")
    sections = _parse_json(path, raw, dict[str, Any])
    try:
        msgspec.convert(sections.pop("__metadata__", None), dict[str, str] | None)
        return msgspec.convert(sections, dict[str, _TensorInfo])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a key with half a surrogate pair
        raise refusal(path, f"its header has an entry of the wrong form: {error}") from None


def _mistake(info: _TensorInfo, end: int, room: int) -> str | None:
    """Return what is wrong with an entry, if the one before it ends at byte ``end`` of ``room`` bytes of data."""
    first, last = info.data_offsets
    if last < first:
        return f" ends at byte {last} of the data, before it begins at {first}"
    if first < end:
        return f" begins at byte {first} of the data, inside the one before it, which ends at {end}"
    if first > end:
        return f" begins at byte {first} of the data and the one before it ends at {end}: a hole"
    if last > room:
        return f" ends at byte {last} of the data, and the file has {room}; it is truncated, fetch it again"
    try:
        need = dtypes.nbytes(info.dtype, info.shape)
    except Invalid as error:
        return f": {error.message}"
    if need != last - first:
        return f" is {info.dtype} {list(info.shape)}, which takes {need} bytes, and its offsets span {last - first}"
    return None


# -- folders and indexes -------------------------------------------------------------------------------


def expand(path: Path) -> list[Path]:
    """Return the files that a path stands for: itself; or of a folder its index alone, else all safetensors files."""
    try:
        inside = sorted(path.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return [path]
    except OSError as error:
        raise file_error(path, error) from error
    found = [entry for entry in inside if entry.name == INDEX]
    found = found or [entry for entry in inside if entry.suffix == ".safetensors"]
    if not found:
        raise NotFound(f"cannot load {path}: the folder has neither {INDEX} nor any *.safetensors file")
    return found


def read_index(path: Path) -> dict[str, Path]:
    """Return the shard of every tensor that an index names; each shard exists and lies in the index's folder."""
    with open_regular(path) as file:
        try:
            if (size := os.fstat(file.fileno()).st_size) > MAX_HEADER:
                raise refusal(path, f"the index has over {MAX_HEADER} bytes, which is the most")
            raw = file.read(size) or b""  # takes no more memory than the file has bytes
        except OSError as error:
            raise file_error(path, error) from error
    weights = _parse_json(path, raw, _ShardIndex).weight_map
    for shard in dict.fromkeys(weights.values()):
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise refusal(path, f"the shard {shard[:100]!r} does not lie in the index's own folder")
        try:
            (path.parent / pure).stat()
        except FileNotFoundError:
            raise NotFound(f"cannot load {path}: its shard {shard[:100]!r} is not there; fetch it again") from None
        except OSError as error:
            raise file_error(path.parent / pure, error) from error
        except ValueError as error:  # a zero byte, or half a surrogate pair
            raise refusal(path, f"{shard[:100]!r} cannot name a file ({error}); fetch it again") from None
    return {name: path.parent / shard for name, shard in weights.items()}


# -- files ---------------------------------------------------------------------------------------------


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; never waits for a pipe's writer."""
    try:
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise file_error(path, error) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise refusal(path, "it is no regular file; name a safetensors file, a folder or an index")
    return file


def _parse_json(path: Path, raw: bytes, form: type[T]) -> T:
    """Decode JSON as a ``form``; refuses a key that appears twice, as the format asks."""
    try:
        return msgspec.convert(json.loads(raw.decode(), object_pairs_hook=_unique), form)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise refusal(path, f"its JSON cannot be used: {str(error)[:300]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:100]!r} appears twice")
    return found


def refusal(path: Path, why: str) -> Invalid:
    """Return the error for a file that cannot be used."""
    return Invalid(f"cannot load {path}: {why}")


def file_error(path: Path, error: OSError) -> CubrokerError:
    """Return the error for a file that the system does not open or read."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"cannot load {path}: there is no such file; check the path")
    why = f"cannot load {path}: {reason(error, path)}"
    if isinstance(error, PermissionError):
        return Denied(f"{why}; user {os.geteuid()} needs to be allowed to read it")
    return Invalid(f"{why}; {remedy(error) or 'check the file and the disk that it is on'}")
