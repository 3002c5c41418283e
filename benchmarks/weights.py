"""The tensors of a decoder model with 80 layers, 723 of them, at any size; and a file of them."""

from __future__ import annotations

import json
import os
from itertools import cycle
from math import prod, sqrt
from pathlib import Path

LAYERS = 80
BLOCK = 64 << 20

Tensors = list[tuple[str, str, tuple[int, ...]]]


def tensors(nbytes: int) -> Tensors:
    """Return (name, dtype, shape) of 723 BF16 tensors with about ``nbytes`` bytes together.

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
    """Bytes of all tensors, which have two bytes an element."""
    return sum(2 * prod(shape) for _, _, shape in of)


def write_file(path: Path, of: Tensors) -> None:
    """Write a safetensors file of random bytes, as the format says: header size, header, tensors end to end."""
    header: dict[str, object] = {}
    end = 0
    for name, dtype, shape in of:
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Blocks begin differently, so that tensors mixed up with each other would be noticed.
        for number, block in zip(range(0, end, BLOCK), cycle([os.urandom(BLOCK)]), strict=False):
            piece = number.to_bytes(8, "little") + block[8:]
            file.write(memoryview(piece)[: end - number])
