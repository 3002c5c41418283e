"""Element types: the names and sizes of safetensors."""

from __future__ import annotations

import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch

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


def test_a_size_is_a_plain_int_whatever_integers_a_shape_had_that_was_asked_for_before() -> None:
    assert type(dtypes.nbytes("F32", (np.int64(31), np.int64(7)))) is int
    assert type(dtypes.nbytes("F32", (31, 7))) is int
    assert dtypes.nbytes("U8", (np.int32(1 << 20), np.int32(1 << 20))) == 1 << 40


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


@pytest.mark.parametrize(("name", "dtype"), dtypes.NAMES.items())
def test_every_library_s_name_for_a_type_is_known(name: str, dtype: str) -> None:
    together = 2 if dtype == "F4" else 1
    made = [getattr(torch, name)]
    if dtype != "F4":  # numpy has whole bytes only
        made += [np.dtype(getattr(ml_dtypes, name, name)), np.dtype(getattr(ml_dtypes, name, name)).type]
        assert made[1].itemsize * 8 == dtypes.BITS[dtype]
    for each in (name, *made, *map(str, made[:2])):
        assert dtypes.named(each) == (dtype, together)
    assert dtypes.named(dtype) == (dtype, 1)
    assert torch.empty(4, dtype=made[0]).nbytes == dtypes.nbytes(dtype, (4 * together,))


@pytest.mark.parametrize(
    "dtype",
    [
        *("F33", "", ">f4", float, int, torch.complex128, torch.qint8, np.dtype("U3"), np.dtype("i4,i4"), None, 3),
        *(ml_dtypes.float4_e2m1fn, np.dtype(ml_dtypes.int4)),  # whose elements take a byte each
    ],
)
def test_a_type_that_pools_do_not_have_is_refused_with_those_that_they_have(dtype: object) -> None:
    with pytest.raises(
        Invalid, match=r"unknown dtype .*; known are BOOL, F4, .* as torch, numpy and ml_dtypes name them"
    ):
        dtypes.named(dtype)


def test_elements_of_the_other_byte_order_are_refused() -> None:
    with pytest.raises(Invalid, match=r"dtype\('>f4'\) has the other byte order; convert it"):
        dtypes.named(np.dtype(">f4"))
