"""Safetensors files for tests: right ones of known bytes, and wrong ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cubroker.protocol.layout import BITS, nbytes

Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]
"""Name to dtype, shape and bytes."""

EVERY_DTYPE: tuple[tuple[str, str, tuple[int, ...]], ...] = tuple((f"of.{dtype}", dtype, (3, 4, 2)) for dtype in BITS)
"""A small tensor of every dtype there is."""

ODD_SHAPES: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("scalar", "F32", ()),
    ("empty", "BF16", (0, 7)),
    ("one", "U8", (1,)),
    ("odd", "I8", (257,)),
    ("matrix", "F16", (33, 65)),
    ("long", "U8", (300_001,)),
)
"""Tensors whose sizes fit no alignment."""


def filled(
    tensors: Sequence[tuple[str, str, Sequence[int]]], seed: int = 0
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Give every tensor random bytes, the same ones for the same seed."""
    source = random.Random(seed)
    return {name: (dtype, tuple(shape), source.randbytes(nbytes(dtype, shape))) for name, dtype, shape in tensors}


def encode(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Join a header (an object, or bytes as they are) and data; ``length`` is what the file claims, if it lies."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def header_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Build the header that belongs to ``tensors``, laid out in their order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    return header


def write(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """Write one right file, and return its path."""
    path.write_bytes(encode(header_of(tensors, metadata), b"".join(data for _, _, data in tensors.values())))
    return path


def write_sharded(folder: Path, shards: Sequence[Tensors]) -> Path:
    """Write a sharded checkpoint with its index into ``folder``, and return the index's path."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


VARIED = filled(
    (
        *EVERY_DTYPE,
        *ODD_SHAPES,
        ("large", "F32", (700, 1001)),
        *((f"small.{n}", "U8", (n % 5,)) for n in range(3000)),
    )
)
"""One large tensor among many small ones, of every dtype, with and without elements."""
