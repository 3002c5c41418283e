"""The 723 tensors of a decoder model with 80 layers, at any size, and a file of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from math import prod, sqrt
from pathlib import Path

from cubroker.cli.demo import weights_header
from cubroker.client import Broker
from cubroker.client.loading.verify import verify

PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))
"""Where files are written: in memory if there is room, else on disk, where they are in the page cache."""

LAYERS = 80
BLOCK = 64 << 20

Tensors = list[tuple[str, str, tuple[int, ...]]]


def tensors(nbytes: int) -> Tensors:
    """Return (name, dtype, shape) of 723 BF16 tensors with about ``nbytes`` bytes in all.

    The proportions are those of Llama 3 with 70 billion parameters: 1052 times the width squared.
    """
    width = max(16, round(sqrt(nbytes / 2 / 1052) / 16) * 16)
    narrow, inner, words = width // 8, width * 7 // 2, width * 16
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    result: Tensors = [("model.embed_tokens.weight", "BF16", (words, width))]
    for number in range(LAYERS):
        result += ((f"model.layers.{number}.{name}.weight", "BF16", shape) for name, shape in layer.items())
    return [*result, ("model.norm.weight", "BF16", (width,)), ("lm_head.weight", "BF16", (words, width))]


def total(of: Tensors) -> int:
    """Return the bytes of all tensors, which have two bytes an element."""
    return sum(2 * prod(shape) for _, _, shape in of)


@contextmanager
def in_memory(of: Tensors) -> Iterator[Path]:
    """Yield a safetensors file of random bytes: in memory if there is room, else on disk, in the page cache."""
    with folder(total(of)) as place:
        write_file(place / "model.safetensors", of)
        yield place / "model.safetensors"


@contextmanager
def folder(nbytes: int, places: Sequence[Path] = PLACES) -> Iterator[Path]:
    """Yield an empty folder in the first of these places that has room for ``nbytes`` bytes."""
    for place in places:
        if place.is_dir() and shutil.disk_usage(place).free > nbytes * 5 // 4:
            with tempfile.TemporaryDirectory(prefix="cubroker-bench-", dir=place) as made:
                yield Path(made)
            return
    raise RuntimeError(f"no room for files of {nbytes} bytes in {' or '.join(map(str, places))}; use --size")


def parts(of: Tensors, count: int) -> list[Tensors]:
    """Cut tensors into ``count`` runs of about equal bytes, none of them empty."""
    ends = [total(of) * (number + 1) / count for number in range(count)]
    cut: list[Tensors] = [[]]
    done = 0
    for left, tensor in zip(range(len(of), 0, -1), of, strict=True):
        behind = count - len(cut)
        if cut[-1] and behind and (done >= ends[len(cut) - 1] or left <= behind):
            cut.append([])
        cut[-1].append(tensor)
        done += total([tensor])
    return cut


def write_file(path: Path, of: Tensors) -> None:
    """Write a safetensors file of random bytes: header size, header, tensors end to end."""
    end = total(of)
    with path.open("wb") as file:
        file.write(weights_header(of))
        # Each block begins with its offset, so that a check notices tensors that are mixed up.
        for number, block in zip(range(0, end, BLOCK), cycle([_noise()]), strict=False):
            piece = number.to_bytes(8, "little") + block[8:]
            file.write(memoryview(piece)[: end - number])


@cache
def _noise() -> bytes:
    return os.urandom(BLOCK)


def check(broker: Broker, pool: str, paths: Path | Sequence[Path], device: str | None = None) -> None:
    """Raise ``RuntimeError`` unless a pool has the content of its files."""
    if differences := verify(broker, pool, paths, device=device).differences:
        raise RuntimeError(f"the pool differs from its files: {differences[:3]}")
