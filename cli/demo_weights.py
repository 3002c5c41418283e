"""Weights for the demo where no model is at hand: the tensors of all-MiniLM-L6-v2, with random values.

That model is an encoder of six layers: 104 tensors, 86.6 MiB. The names, types and shapes are those of its checkpoint
(sentence-transformers/all-MiniLM-L6-v2 on Hugging Face). The values are random and small, so sharing them costs what
sharing the model's costs, and computing with them yields nonsense.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

MODEL = "all-MiniLM-L6-v2"

LAYERS, HIDDEN, INNER, WORDS, POSITIONS = 6, 384, 1536, 30522, 512

HIGH_BYTES = bytes.fromhex("3c3dbcbd") * 64
"""For each byte the high byte of a float32 in its place: magnitudes from 1/128 to 1/8, of both signs."""

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


def write(folder: Path) -> Path:
    """Write the weights as ``model.safetensors`` into a folder, which is made, and return the file's path.

    Every call writes the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    random = Random(MODEL)  # noqa: S311  # values, not secrets
    with path.open("wb") as file:
        file.write(_header())
        for _, dtype, shape in tensors():
            count = math.prod(shape)
            file.write(struct.pack(f"<{count}q", *range(count)) if dtype == "I64" else _floats(random, count))
    return path


def _header() -> bytes:
    """Return the beginning of a safetensors file: the length of a JSON object, and that, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors():
        begin, end = end, end + math.prod(shape) * (8 if dtype == "I64" else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _floats(random: Random, count: int) -> bytearray:
    data = bytearray(random.randbytes(4 * count))
    data[3::4] = data[3::4].translate(HIGH_BYTES)
    return data
