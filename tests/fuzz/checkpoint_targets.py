"""Targets that read checkpoints: one safetensors header, and a folder with an index."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import FileIO
from itertools import pairwise
from pathlib import Path

from cubroker.client.loading.checkpoint import Checkpoint, read_header
from cubroker.client.loading.safetensors import INDEX

SHARD = "model-00001.safetensors"

PLACE = "CUBROKER_FUZZ_DIR"
"""The variable that says where folders are made."""


def _file(sections: object, data: int) -> bytes:
    raw = sections if isinstance(sections, bytes) else json.dumps(sections).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def _tensor(first: int, last: int, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> dict[str, object]:
    shape = ((last - first) // 4,) if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


HEADERS = (
    _file({"a": _tensor(0, 16)}, 16),
    _file({"__metadata__": {"format": "pt"}, "a": _tensor(0, 8), "b": _tensor(8, 16), "none": _tensor(8, 8)}, 16),
    _file({"a": _tensor(0, 2, "F4", (2, 2)), "b": _tensor(2, 5, "F6_E2M3", (4,)), "c": _tensor(5, 6, "BOOL", ())}, 6),
    _file({f"layer.{number}": _tensor(4 * number, 4 * number + 4) for number in range(20)}, 80),
    _file({}, 0),
    _file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}   ', 0),
)
TOKENS = (
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"F4"', b'"weight_map"', b'"a"', b"{}"),
    *(b"[", b"]", b"{", b"}", b",", b":", b"null", b"true", b"-1", b"1e9", b"1e999", b"NaN", b"0.0", b"[" * 99),
    *(b"9223372036854775807", b"9223372036854775808", b"340282366920938463463374607431768211456", b"9" * 5000),
    *(b"\\ud800", b"\\u0000", b"\xed\xa0\x80", b"\xff", b"../", b"/etc/passwd", SHARD.encode(), bytes(8)),
    *((1 << bits).to_bytes(8, "little") for bits in (20, 26, 31, 63)),
)


def header(data: bytes) -> None:
    """A file's header: what is read of it covers the file's data once, in order."""
    with FileIO(os.memfd_create("fuzz"), "r+") as file:
        os.pwrite(file.fileno(), data, 0)
        found = read_header(file, Path("fuzz.safetensors"))
    ends = [(tensor.offset, tensor.offset + tensor.nbytes) for tensor in found]
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    assert not ends or ends[-1][1] == len(data)


def _indexed(index: object, shard: bytes) -> bytes:
    raw = json.dumps(index).encode()
    return len(raw).to_bytes(2, "little") + raw + shard


CHECKPOINTS = (
    _indexed({"weight_map": {"a": SHARD}}, HEADERS[0]),
    _indexed({"metadata": {"total_size": 16}, "weight_map": {"a": SHARD, "b": SHARD, "none": SHARD}}, HEADERS[1]),
    _indexed({"weight_map": {"a": f"./{SHARD}"}}, HEADERS[0]),
    _indexed({"weight_map": {}}, HEADERS[0]),
)


def checkpoint(data: bytes) -> None:
    """A folder with an index and one shard: nothing outside of the folder is opened."""
    folder = Path(_folder().name)
    length = int.from_bytes(data[:2], "little")
    (folder / INDEX).write_bytes(data[2 : 2 + length])
    (folder / SHARD).write_bytes(data[2 + length :])
    with Checkpoint.open(folder) as opened:
        assert all(file.path.parent == folder for file in opened.files)
        assert opened.nbytes <= len(data)
        assert len({entry.name for entry in opened.entries}) == len(opened.entries)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="cubroker-fuzz-", dir=_place())
    atexit.register(folder.cleanup)
    return folder


@contextmanager
def scratch() -> Iterator[None]:
    """Have the folders of all processes that are started meanwhile in one, which is removed at the end.

    A process of multiprocessing, and one that atheris ends, removes nothing itself.
    """
    with tempfile.TemporaryDirectory(prefix="cubroker-fuzz-", dir=_place()) as folder:
        os.environ[PLACE] = folder
        try:
            yield
        finally:
            del os.environ[PLACE]


def _place() -> str | None:
    # In memory where there is such a place: it is written millions of times.
    return os.environ.get(PLACE) or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
