"""The safetensors format: what a header and the index of a sharded checkpoint say. Bytes in, no files.

A file is 8 bytes of length (little endian), a header of that many bytes of JSON, then the data of all tensors without
holes. A header is checked against the size of its file.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, TypeVar

import msgspec

from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_RANK, nbytes

INDEX = "model.safetensors.index.json"
"""The name of a sharded checkpoint's index in its folder."""

SUFFIX = ".safetensors"
"""The end of a file's name."""

MAX_HEADER = 100_000_000
"""The most bytes of a header: the limit of the format. An index may have as many."""

LENGTH_BYTES = 8

T = TypeVar("T")

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class FormatError(Exception):
    """A file breaks the format; the text says how, as the end of a sentence about the file."""


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """A header's entry for one tensor; offsets count from the end of the header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


wire.prepare(TensorInfo)
wire.prepare(_ShardIndex)
_SECTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(TensorInfo)


def header_length(first: bytes, size: int) -> int:
    """Return the header's number of bytes, which the first ``LENGTH_BYTES`` of a file of ``size`` bytes give."""
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise FormatError(f"it is no safetensors file: its header claims {length} bytes, and {MAX_HEADER} is the most")
    if LENGTH_BYTES + length > size:
        raise FormatError(f"its header claims {length} bytes, and the file has {size}; it is truncated, fetch it again")
    return length


def parse_header(header: bytes, room: int) -> dict[str, TensorInfo]:
    """Return the tensors of a file in the order of their data; ``room`` is the number of bytes after the header."""
    tensors, end = dict(sorted(_entries(header).items(), key=lambda item: item[1].data_offsets)), 0
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # the layers of a model have tensors of the same forms
    for name, info in tensors.items():
        first, last = info.data_offsets
        form = info.dtype, info.shape
        if first != end or last > room or last - first != sizes.get(form):
            if mistake := _mistake(info, end, room):
                raise FormatError(f"tensor {name!r}{mistake}")
            sizes[form] = last - first
        end = last
    if end < room:
        raise FormatError(
            f"{room - end} bytes follow its last tensor; it was not written as its header says, write it again"
        )
    return tensors


def parse_index(raw: bytes) -> dict[str, str]:
    """Return the name of the shard of every tensor that an index names."""
    return parse_json(raw, _ShardIndex).weight_map


def _entries(header: bytes) -> dict[str, TensorInfo]:
    """Return the header's entry of each tensor; only the form of ``__metadata__`` is checked."""
    if not header.startswith(b"{"):
        raise FormatError("its header does not begin with '{'; it is no safetensors file")
    return _usual_entries(header) or _strict_entries(header)


def _usual_entries(header: bytes) -> dict[str, TensorInfo] | None:
    """Return the entries of a header that surely repeats no key, in half the time; None if it may repeat one.

    The format forbids to repeat a key, but the decoder accepts it and keeps the last value. A colon follows each key,
    so no key is repeated if there are no more colons than keys. A colon in a tensor's name counts, too.
    """
    try:
        sections = _SECTIONS.decode(header)
        metadata = bytes(sections.pop("__metadata__", b""))
        entries = {name: _ENTRY.decode(section) for name, section in sections.items()}
        if metadata:
            parse_json(metadata, dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FormatError):
        return None
    keys = bool(metadata) + (1 + len(TensorInfo.__struct_fields__)) * len(entries)
    return entries if header.count(b":") - metadata.count(b":") == keys else None


def _strict_entries(header: bytes) -> dict[str, TensorInfo]:
    sections = parse_json(header, dict[str, Any])
    try:
        msgspec.convert(sections.pop("__metadata__", None), dict[str, str] | None)
        return msgspec.convert(sections, dict[str, TensorInfo])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a key with half a surrogate pair
        raise FormatError(f"its header has an entry of the wrong form: {error}") from None


def _mistake(info: TensorInfo, end: int, room: int) -> str | None:
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
        need = nbytes(info.dtype, info.shape)
    except Invalid as error:
        return f": {error.message}"
    if need != last - first:
        return f" is {info.dtype} {list(info.shape)}, which takes {need} bytes, and its offsets span {last - first}"
    return None


def parse_json(raw: bytes, form: type[T]) -> T:
    """Decode JSON as a ``form``; refuse a key that appears twice, as the format demands."""
    try:
        return msgspec.convert(json.loads(raw.decode(), object_pairs_hook=_unique), form)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise FormatError(f"its JSON cannot be used: {str(error)[:300]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:100]!r} appears twice")
    return found
