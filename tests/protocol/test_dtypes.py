"""Element types: the names and sizes of safetensors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import safetensors

from cubroker.protocol import dtypes
from cubroker.protocol.errors import Invalid

deserialize: Any = safetensors.deserialize


def parse(dtype: str, shape: list[int], nbytes: int) -> list[object]:
    """What safetensors itself says of a file with one such tensor."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    return list(deserialize(len(header).to_bytes(8, "little") + header + bytes(nbytes)))


def test_the_dtypes_are_those_of_the_installed_safetensors() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        parse("NONE", [1], 1)
    assert set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value))) - {"NONE"} == set(dtypes.BITS)


@pytest.mark.parametrize("dtype", dtypes.BITS)
@pytest.mark.parametrize("shape", [[3, 8], [8], [0], [5, 0], [1, 1, 4]])
def test_sizes_are_those_of_safetensors(dtype: str, shape: list[int]) -> None:
    nbytes = dtypes.nbytes(dtype, shape)
    assert parse(dtype, shape, nbytes)
    with pytest.raises(safetensors.SafetensorError):
        parse(dtype, shape, nbytes + 1)


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert [dtypes.nbytes(dtype, ()) for dtype in ("U8", "BF16", "F32", "C64")] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F4", (), "takes 4 bits"),
        ("F6_E2M3", (3, 2), "takes 36 bits"),
        ("float32", (1,), "unknown dtype 'float32'; known are BOOL"),
        ("U8", (-1,), "negative dimension"),
        ("U8", (-1, -1), "negative dimension"),
        ("U8", (0, -1), "negative dimension"),
    ],
)
def test_what_has_no_size_is_refused(dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        dtypes.nbytes(dtype, shape)
