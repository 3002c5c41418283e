"""Weights for the demo if no model is installed: the tensors of all-MiniLM-L6-v2, with random values.

That model is an encoder of six layers: 104 tensors, 86.6 MiB. The names, types and shapes are those of its checkpoint
(sentence-transformers/all-MiniLM-L6-v2 on Hugging Face). The values are random and small, so sharing them costs what
sharing the model's costs, and computing with them yields nonsense.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import BinaryIO

from cubroker.protocol import dtypes
from cubroker.protocol.errors import Exists, about

MODEL = "all-MiniLM-L6-v2"

FILE = "model.safetensors"
"""The name of the file that is written."""

UNLINKABLE = frozenset({errno.EPERM, errno.EOPNOTSUPP})
"""Errors of link(2) on a file system that has no hard links."""

LAYERS, HIDDEN, INNER, WORDS, POSITIONS = 6, 384, 1536, 30522, 512

HIGH_BYTES = bytes.fromhex("3c3dbcbd") * 64
"""For each value of a byte the high byte of a float32 that replaces it: magnitudes from 1/128 to 1/8, of both signs."""

Entry = tuple[str, str, tuple[int, ...]]
"""A tensor's name, its dtype and its shape."""


def tensors() -> Iterator[Entry]:
    """Yield the tensors of the checkpoint."""
    yield "embeddings.position_ids", "I64", (1, POSITIONS)
    for name, rows in (("word_embeddings", WORDS), ("position_embeddings", POSITIONS), ("token_type_embeddings", 2)):
        yield f"embeddings.{name}.weight", "F32", (rows, HIDDEN)
    yield from _pair("embeddings.LayerNorm", (HIDDEN,))
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _pair(f"{layer}.attention.{name}", (HIDDEN, HIDDEN))
        yield from _pair(f"{layer}.attention.output.LayerNorm", (HIDDEN,))
        yield from _pair(f"{layer}.intermediate.dense", (INNER, HIDDEN))
        yield from _pair(f"{layer}.output.dense", (HIDDEN, INNER))
        yield from _pair(f"{layer}.output.LayerNorm", (HIDDEN,))
    yield from _pair("pooler.dense", (HIDDEN, HIDDEN))


def _pair(module: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield f"{module}.weight", "F32", shape
    yield f"{module}.bias", "F32", shape[:1]


def write(folder: Path, seed: int = 0) -> Path:
    """Write the weights as ``model.safetensors`` into a folder, which is made if needed, and return the file's path.

    Every call with the same ``seed`` writes the same bytes. The file has its name once it is whole; a write that fails
    leaves no file.

    Raises:
        Exists: there is a file or a link of that name, which stays as it is.
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if os.path.lexists(path):
        raise _exists(path)
    unfinished = folder / f".{FILE}.{secrets.token_hex(4)}"
    with about(path), unfinished.open("xb") as file:
        try:
            _fill(file, Random(f"{MODEL} {seed}"))  # noqa: S311  # values, not secrets
            file.flush()
            _name(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _fill(file: BinaryIO, random: Random) -> None:
    file.write(header(tensors()))
    for _, dtype, shape in tensors():
        count = math.prod(shape)
        file.write(struct.pack(f"<{count}q", *range(count)) if dtype == "I64" else _floats(random, count))


def _name(unfinished: Path, path: Path) -> None:
    """Give a file its name; raises ``Exists`` if the name is taken. A rename alone would replace an existing file."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        if os.path.lexists(path):
            raise _exists(path) from None
        unfinished.rename(path)


def _exists(path: Path) -> Exists:
    return Exists(f"{path} is there already and is not replaced; name another folder, or delete it first")


def header(entries: Iterable[Entry]) -> bytes:
    """Return the beginning of a safetensors file: the length of a JSON object, and the object, padded to 8 bytes."""
    found: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + dtypes.nbytes(dtype, shape)
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _floats(random: Random, count: int) -> bytearray:
    data = bytearray(random.randbytes(4 * count))
    data[3::4] = data[3::4].translate(HIGH_BYTES)
    return data
