"""Layouts: where tensors lie, and what is no layout; and element types: the names and sizes of safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from cubroker.protocol import Layout, TensorSpec, layout, wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import BITS, DTYPES_BY_NAME, Outline, dtype_named, nbytes
from tests.measuring import unmeasured

Triple = tuple[str, str, tuple[int, ...]]

MIB = 1 << 20

deserialize: Any = safetensors.deserialize


@st.composite
def triples(draw: st.DrawFn) -> list[Triple]:
    """Tensors of every dtype, with and without elements; packed dtypes fill whole bytes."""
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), unique=True, max_size=12))
    tensors = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        tensors.append((name, dtype, shape if BITS[dtype] >= 8 else (*shape, 4)))
    return tensors


@pytest.mark.slow
@given(triples(), st.none() | st.integers(layout.ALIGNMENT, 4096))
def test_packed_tensors_lie_aligned_whole_and_apart(tensors: list[Triple], slab: int | None) -> None:
    packed = Layout.pack(tensors, slab=slab)
    assert [(spec.name, spec.dtype, spec.shape) for spec in packed.tensors] == tensors
    used = [np.zeros(size, dtype=np.uint8) for size in packed.allocations]
    for spec in packed.tensors:
        place = used[spec.allocation][spec.offset : spec.offset + spec.nbytes]
        assert len(place) == spec.nbytes == nbytes(spec.dtype, spec.shape)
        assert spec.offset % 256 == 0
        assert not place.any()
        place[:] = 1
    assert all(size % 256 == 0 for size in packed.allocations)
    waste = packed.nbytes - sum(spec.nbytes for spec in packed.tensors)
    assert waste <= 256 * (len(packed.tensors) + len(packed.allocations))


@pytest.mark.slow
@given(triples(), st.none() | st.integers(layout.ALIGNMENT, 4096), st.integers(1, 3))
def test_a_layout_that_travelled_is_the_same(tensors: list[Triple], slab: int | None, count: int) -> None:
    """A packed layout is not checked where it was packed; the broker that gets it checks it."""
    groups = {name: number % count for number, (name, *_) in enumerate(tensors)}
    tied = {f"the other name of {name}": name for name in groups}
    groups |= {other: groups[name] for other, name in tied.items()}
    again = [(other, *form) for other, (_, *form) in zip(tied, tensors, strict=True)]
    packed = Layout.pack([*tensors, *again], slab=slab, groups=groups, tied=tied)
    assert Layout.decode(packed.encode()) == packed


@pytest.mark.slow
@given(triples(), st.integers(layout.ALIGNMENT, 4096))
def test_a_slab_is_kept_to_unless_one_tensor_alone_exceeds_it(tensors: list[Triple], slab: int) -> None:
    packed = Layout.pack(tensors, slab=slab)
    for index, size in enumerate(packed.allocations):
        inside = [spec for spec in packed.tensors if spec.allocation == index]
        assert inside
        assert size <= slab or sum(spec.nbytes > 0 for spec in inside) == 1


def test_by_default_there_is_one_allocation_in_the_order_given() -> None:
    packed = Layout.pack([("b", "F32", (3,)), ("a", "BF16", (257,)), ("scalar", "I64", ()), ("none", "F32", (0, 7))])
    assert [(spec.allocation, spec.offset, spec.nbytes) for spec in packed.tensors] == [
        (0, 0, 12),
        (0, 256, 514),
        (0, 1024, 8),
        (0, 1280, 0),
    ]
    assert packed.allocations == (1280,)
    assert packed.nbytes == 1280


def test_a_mapping_packs_like_the_triples() -> None:
    assert Layout.pack({"x": ("F4", (2, 2)), "y": ("U8", [])}) == Layout.pack([("x", "F4", [2, 2]), ("y", "U8", ())])


def test_tensors_without_elements_alone_still_get_an_address() -> None:
    assert Layout.pack([("x", "F32", (0,)), ("y", "F32", (0,))]).allocations == (256,)


def test_no_tensors_take_no_memory() -> None:
    assert Layout.decode(Layout.pack([]).encode()) == Layout((), ())


def test_a_tensor_larger_than_a_slab_stays_whole() -> None:
    packed = Layout.pack([("a", "U8", (100,)), ("big", "U8", (3 * MIB,)), ("b", "U8", (100,))], slab=MIB)
    assert packed.allocations == (256, 3 * MIB, 256)


def test_a_slab_is_filled_to_its_last_byte() -> None:
    packed = Layout.pack([(name, "U8", (MIB,)) for name in "abcde"], slab=2 * MIB)
    assert packed.allocations == (2 * MIB, 2 * MIB, MIB)


def test_a_layout_travels_that_takes_as_many_bytes_as_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Layout.pack([("x", "U8", (1,))])
    monkeypatch.setattr(layout, "MAX_ENCODED", len(packed.encode()))
    assert Layout.decode(packed.encode()) == packed


def test_shapes_may_come_as_other_integers() -> None:
    packed = Layout.pack([("x", "F32", np.array([2, 3])), ("y", "F32", [np.uint8(4), True])])
    assert [spec.shape for spec in packed.tensors] == [(2, 3), (4, 1)]
    assert Layout.decode(packed.encode()) == packed


def test_the_shape_of_a_spec_may_be_a_list() -> None:
    made = TensorSpec("x", "F32", [2, 3], 0, 0)  # type: ignore[arg-type]
    assert made.nbytes == 24
    assert Layout.decode(Layout((made,), (256,)).encode()).tensors == (TensorSpec("x", "F32", (2, 3), 0, 0),)


def spec(name: str = "x", dtype: str = "U8", shape: tuple[int, ...] = (8,), at: tuple[int, int] = (0, 0)) -> TensorSpec:
    return TensorSpec(name, dtype, shape, *at)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Layout((spec(), spec(at=(0, 256))), (512,)), "'x' appears twice"),
        (Layout((spec(""),), (512,)), "name of 0 characters"),
        (Layout((spec("n" * 513),), (512,)), "name of 513 characters"),
        (Layout((spec(shape=(1,) * 33),), (512,)), "rank 33"),
        (Layout((spec(shape=(0, layout.MAX_EXTENT + 1)),), (512,)), "largest dimension of 281474976710657"),
        (Layout((spec(shape=(-8, -1)),), (512,)), "tensor 'x': shape .* negative"),
        (Layout((spec(dtype="U7"),), (512,)), "tensor 'x': unknown dtype"),
        (Layout((spec(dtype="F4", shape=(3,)),), (512,)), "tensor 'x': .* 12 bits"),
        (Layout((spec(at=(1, 0)),), (512,)), "lies in allocation 1 of 1"),
        (Layout((spec(at=(-1, 0)),), (512,)), "lies in allocation -1 of 1"),
        (Layout((spec(),), ()), "lies in allocation 0 of 0"),
        (Layout((spec(at=(0, -256)),), (512,)), "starts at byte -256"),
        (Layout((spec(at=(0, 128)),), (512,)), "starts at byte 128"),
        (Layout((spec(at=(0, 512)),), (512,)), "ends at byte 520 of an allocation of 512"),
        (Layout((spec(shape=(layout.MAX_EXTENT,) * 32),), (512,)), "ends at byte"),
        (Layout((spec(shape=(0,), at=(0, 768)),), (512,)), "ends at byte 768"),
        (Layout((), (0,)), "allocation of 0 bytes"),
        (Layout((), (-5,)), "allocation of -5 bytes"),
        (Layout((), (layout.MAX_EXTENT, 1)), "layout of 281474976710657 bytes"),
        (Layout((spec("a", shape=(257,)), spec("b", at=(0, 256))), (512,)), "'a' and 'b' overlap in allocation 0"),
        (Layout((spec("a", at=(0, 256)), spec("b", shape=(512,))), (512,)), "'b' and 'a' overlap in allocation 0"),
        (Layout((spec("a"), spec("b", "I8")), (512,)), "'a' and 'b' overlap"),
        (Layout((spec("a"), spec("b", shape=(2, 4))), (512,)), "'a' and 'b' overlap"),
        (Layout((spec("a", shape=(512,)), spec("b", shape=(256,), at=(0, 256))), (512,)), "'a' and 'b' overlap"),
    ],
)
def test_what_is_no_layout_is_refused(bad: Layout, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        bad.check()
    with pytest.raises(Invalid, match=f"{message}|cannot be read as Layout"):
        in_steps(wire.pack(bad))


def in_steps(data: bytes) -> Outline:
    """Check an encoded layout as the broker does."""
    steps = layout.outline(data)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outline: Outline = end.value
            return outline


@pytest.mark.parametrize("count", [0, 1, layout.STEP, 2 * layout.STEP + 1])
def test_a_layout_that_is_checked_in_steps_has_the_outline_that_it_has_as_a_whole(count: int) -> None:
    made = Layout.pack([(str(number), "U8", (number, 100)) for number in range(count)], slab=4096)
    assert in_steps(made.encode()) == made.outline
    assert (made.outline.nbytes, made.outline.tensors) == (made.nbytes, count)
    with pytest.raises(Invalid, match="cannot be read as _Encoded"):
        in_steps(made.encode()[:-1])


def test_what_is_wrong_with_one_tensor_is_found_in_its_step() -> None:
    tensors = [["x", "U8", [8], 0, 0]] * layout.STEP + [["x", "U8", "none", 0, 0]]
    with pytest.raises(Invalid, match="'x' appears twice"):
        in_steps(wire.pack([tensors, [256]]))
    with pytest.raises(Invalid, match="cannot be read as Layout"):
        in_steps(wire.pack([tensors[-1:], [256]]))


PLACES = st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(0, 1300))


@given(st.lists(PLACES, max_size=12))
def test_tensors_overlap_if_they_have_a_byte_in_common_and_are_not_the_same(places: list[tuple[int, int, int]]) -> None:
    spans = [(at, 256 * start, 256 * start + size) for at, start, size in places]
    tensors = [spec(str(n), shape=(end - start,), at=(at, start)) for n, (at, start, end) in enumerate(spans)]
    made = Layout(tuple(tensors), (8192, 8192))
    clashes = {
        frozenset((str(n), str(m)))
        for n, (at, start, end) in enumerate(spans)
        for m, (other, begin, finish) in enumerate(spans[:n])
        if at == other and max(start, begin) < min(end, finish) and (start, end) != (begin, finish)
    }
    if clashes:
        with pytest.raises(Invalid, match="overlap") as refused:
            made.check()
        assert frozenset(re.findall(r"'(\d+)'", refused.value.message)) in clashes
    else:
        made.check()


def test_neighbours_that_touch_do_not_overlap() -> None:
    Layout((spec("b", at=(0, 256)), spec("a", shape=(256,)), spec("c", shape=(512,), at=(1, 0))), (264, 512)).check()


def test_tensors_without_elements_may_share_a_place_even_inside_another() -> None:
    Layout(
        (spec("a", shape=(512,)), spec("b", shape=(0,), at=(0, 256)), spec("c", shape=(0,), at=(0, 512))), (512,)
    ).check()


def test_a_tensor_may_have_several_names() -> None:
    packed = Layout.pack(
        [("embed", "F32", (3, 4)), ("none", "F32", (0,)), ("norm", "F32", (4,)), ("head", np.float32, [3, 4])],
        tied={"head": "embed"},
    )
    embed, _, norm, head = packed.tensors
    assert (head.dtype, head.shape, head.allocation, head.offset) == (embed.dtype, embed.shape, 0, embed.offset)
    assert packed.allocations == (512,)
    assert norm.offset == 256
    assert Layout.decode(packed.encode()) == packed
    assert in_steps(packed.encode()) == packed.outline


def test_names_of_one_tensor_may_be_many_and_far_apart() -> None:
    count = layout.STEP + 9
    made = Layout(tuple(spec(str(number), at=(0, 256 * (number % 2))) for number in range(count)), (512,))
    assert in_steps(made.encode()) == made.outline
    made.check()
    bad = Layout((*made.tensors, spec("last", "BOOL")), (512,))
    with pytest.raises(Invalid, match=r"and 'last' overlap in allocation 0"):
        in_steps(wire.pack(bad))


def test_a_layout_whose_tensors_all_lie_in_one_place_is_checked_by_looking_at_each_twice_at_most() -> None:
    looked: list[int] = []
    names = [spec(str(number)) for number in range(1000)]

    def look(number: int) -> TensorSpec:
        looked.append(number)
        return names[number]

    check = layout._Check((256,), len(names), look)
    for each in names:
        check.add(each)
    assert looked == [0] * 999


def test_dtypes_may_be_named_as_libraries_do() -> None:
    packed = Layout.pack(
        {"a": (torch.bfloat16, (2,)), "b": (np.dtype("<i8"), ()), "c": ("float8_e5m2", torch.Size([4]))}
    )
    assert [(spec.dtype, spec.shape) for spec in packed.tensors] == [("BF16", (2,)), ("I64", ()), ("F8_E5M2", (4,))]


def test_shapes_of_a_type_of_pairs_count_pairs() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (packed,) = Layout.pack([("x", tensor.dtype, tensor.shape)]).tensors
    assert (packed.dtype, packed.shape, packed.nbytes) == ("F4", (3, 8), 12)


untyped_pack: Any = Layout.pack
A_AND_B = [("a", "U8", (1,)), ("b", "U8", (1,))]


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: Layout.pack([("x", "U8", (1,))], slab=255), "slab of 255 bytes"),
        (lambda: Layout.pack([("x", "U8", (1,)), ("x", "U8", (1,))]), "appears twice"),
        (lambda: Layout.pack([("x", "float", (1,))]), "tensor 'x': unknown dtype 'float'"),
        (lambda: untyped_pack([("x", "U8", (1.0,))]), "no sequence of integers"),
        (lambda: untyped_pack([("x", "U8", 5)]), "no sequence of integers"),
        (lambda: untyped_pack([("x", "U8", ("1",))]), "no sequence of integers"),
        (lambda: untyped_pack({"x": (1,)}), "tensor 'x' of the layout has no name, dtype and shape: pass .name, dtype"),
        (lambda: untyped_pack({"x": np.ones((2, 2))}), "tensor 'x' of the layout .* publish.. takes tensors as they"),
        (lambda: untyped_pack({"x": "U8"}), "tensor 'x' of the layout"),
        (lambda: untyped_pack({7: ("U8", (1,))}), "tensor number 0 of the layout"),
        (lambda: untyped_pack([("x", "U8", (1,)), ("y", "U8")]), "tensor 'y' of the layout"),
        (lambda: untyped_pack([("x", "U8", (1,)), ()]), "tensor number 1 of the layout"),
        (lambda: untyped_pack("x"), "tensor 'x' of the layout"),
        (lambda: untyped_pack(None), "tensor number 0 of the layout"),
        (lambda: Layout.pack([("x", "U8", (1 << 47,)), ("y", "U8", (1 << 47,)), ("z", "U8", ())]), "layout of"),
        (lambda: Layout.pack((str(i), "U8", ()) for i in range(layout.MAX_TENSORS + 1)), "100001 tensors"),
        (lambda: Layout.pack([(str(i), "U8", ()) for i in range(4097)], slab=256), "4097 allocations"),
        (lambda: Layout.pack(A_AND_B, tied={"a": "b"}), "'a' cannot be 'b' by another name: that has to come before"),
        (lambda: Layout.pack([*A_AND_B, ("c", "I8", (1,))], tied={"c": "b"}), "with the same dtype, shape and device"),
        (lambda: Layout.pack(A_AND_B, tied={"b": "a"}, groups={"a": 0, "b": 1}), "'b' cannot be 'a' by another name"),
        (lambda: Layout.pack(A_AND_B, tied={"c": "a"}), "no tensor 'c' to be tied"),
        (lambda: Layout.pack([("\ud800", "U8", (1,))]).encode(), "cannot be sent"),
        (lambda: Layout((TensorSpec(np.str_("x"), "U8", (), 0, 0),), (256,)).encode(), "cannot be sent: .*str_"),
        (lambda: Layout.pack([(f"{i:0300}", "U8", ()) for i in range(50_000)]).encode(), "50000 tensors takes"),
    ],
)
def test_what_cannot_be_packed_or_sent_is_refused(pack: Callable[[], object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        pack()


@pytest.mark.slow
def test_the_largest_layout_can_be_sent_and_read() -> None:
    with unmeasured():
        largest = Layout.pack((f"{i:080}", "BF16", (1,) * 8) for i in range(layout.MAX_TENSORS))
        assert Layout.decode(largest.encode()) == largest


@pytest.mark.parametrize(
    "plain",
    [
        [[["x", "U8", [8], 0, 0]], [8], 0, "extra"],
        [[["x", "U8", [8], 0, 0, "extra"]], [256]],
    ],
)
def test_what_a_later_version_adds_at_the_end_is_passed_over(plain: list[object]) -> None:
    assert Layout.decode(wire.pack(plain)).tensors == (spec(),)


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        [[]],
        [[["x", "U8", [8], 0]], [256]],
        [[["x", "U8", 8, 0, 0]], [256]],
        [[["x", "U8", [8.0], 0, 0]], [256]],
        [[["x", "U8", [True], 0, 0]], [256]],
        [[["x", "U8", [8], None, 0]], [256]],
        [[[b"x", "U8", [8], 0, 0]], [256]],
        [[["n" * 513, "U8", [8], 0, 0]], [256]],
        [[["x", "U" * 99, [8], 0, 0]], [256]],
        [[["x", "U8", [1] * 33, 0, 0]], [256]],
        [[["x", "U8", [8], 0, 0]], [1 << 63]],
        [[["x", "U8", [8], 0, 0]], [256] * 4097],
    ],
)
def test_bytes_that_are_no_layout_are_refused_shortly(plain: object) -> None:
    with pytest.raises(Invalid) as caught:
        Layout.decode(wire.pack(plain))
    assert len(caught.value.message) < 600


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.slow
@given(triples(), st.none() | st.integers(layout.ALIGNMENT, 4096), st.integers(1, 3))
def test_groups_share_no_allocation_and_are_found_again(tensors: list[Triple], slab: int | None, count: int) -> None:
    groups = {name: number % count for number, (name, _, _) in enumerate(tensors)}
    packed = Layout.pack(tensors, slab=slab, groups=groups)
    assert [(spec.name, spec.dtype, spec.shape) for spec in packed.tensors] == tensors
    assert [packed.spread(groups)[spec.allocation] for spec in packed.tensors] == list(groups.values())
    for group in range(count):
        alone = Layout.pack([each for each in tensors if groups[each[0]] == group], slab=slab)
        sizes = zip(packed.allocations, packed.spread(groups), strict=True)
        assert tuple(size for size, mine in sizes if mine == group) == alone.allocations


THREE = [("a", "U8", (1,)), ("b", "U8", (1,)), ("c", "U8", (1,))]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"a": 0, "b": 0, "c": 1}, r"tensors 'a' \(0\) and 'c' \(1\) share allocation 0; .* groups="),
        ({"a": 0, "b": 0}, "nothing says where tensor 'c' belongs"),
        ({"a": 0, "b": 0, "c": 0, "e": 1, "d": 1}, "the layout has no tensor 'd'"),
    ],
)
def test_groups_that_do_not_fit_a_layout_are_refused(groups: dict[str, int], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        Layout.pack(THREE).spread(groups)


def test_each_allocation_has_the_group_of_its_tensors() -> None:
    groups = {"a": 1, "b": 0, "c": 1}
    packed = Layout.pack(THREE, groups=groups)
    assert [packed.spread(groups)[spec.allocation] for spec in packed.tensors] == [1, 0, 1]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Layout.pack([("a", "U8", (1,)), ("b", "I8", (1,))]), r"its tensor 'b' \(U8 .* 0\) is 'b' \(I8 .* 0\) here"),
        (Layout.pack(THREE[:2]), "it has 3 tensors, and not 2"),
        (Layout(Layout.pack(THREE).tensors, (1 << 20,)), r"its allocation 0 has \d+ bytes, and not 1048576"),
    ],
)
def test_a_layout_says_in_what_it_differs_first(other: Layout, says: str) -> None:
    assert re.fullmatch(says, Layout.pack(THREE).difference(other))


def test_an_allocation_without_tensors_has_no_group() -> None:
    packed = Layout.pack(THREE)
    with pytest.raises(Invalid, match="allocation 1 has no tensor"):
        Layout(packed.tensors, (*packed.allocations, 512)).spread(dict.fromkeys("abc", 0))


def test_a_tensor_without_a_group_is_not_packed() -> None:
    with pytest.raises(Invalid, match="nothing says where tensor 'b' belongs"):
        Layout.pack(THREE, groups={"a": 0})


# -- element types -------------------------------------------------------------------------------------


def parsed(dtype: str, shape: list[int], size: int) -> list[object]:
    """What safetensors itself says of a file with one such tensor."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    return list(deserialize(len(header).to_bytes(8, "little") + header + bytes(size)))


def test_the_dtypes_are_those_of_the_installed_safetensors() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        parsed("NONE", [1], 1)
    assert set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value))) - {"NONE"} == set(BITS)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", [[3, 8], [8], [0], [5, 0], [1, 1, 4]])
def test_sizes_are_those_of_safetensors(dtype: str, shape: list[int]) -> None:
    size = nbytes(dtype, shape)
    assert parsed(dtype, shape, size)
    with pytest.raises(safetensors.SafetensorError):
        parsed(dtype, shape, size + 1)


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert [nbytes(dtype, ()) for dtype in ("U8", "BF16", "F32", "C64")] == [1, 2, 4, 8]


def test_a_size_is_a_plain_int_whatever_integers_a_shape_had_that_was_asked_for_before() -> None:
    assert type(nbytes("F32", (np.int64(31), np.int64(7)))) is int
    assert type(nbytes("F32", (31, 7))) is int
    assert nbytes("U8", (np.int32(1 << 20), np.int32(1 << 20))) == 1 << 40


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
        nbytes(dtype, shape)


@pytest.mark.parametrize(("name", "dtype"), DTYPES_BY_NAME.items())
def test_every_library_s_name_for_a_type_is_known(name: str, dtype: str) -> None:
    together = 2 if dtype == "F4" else 1
    made = [getattr(torch, name)]
    if dtype != "F4":  # numpy has whole bytes only
        made += [np.dtype(getattr(ml_dtypes, name, name)), np.dtype(getattr(ml_dtypes, name, name)).type]
        assert made[1].itemsize * 8 == BITS[dtype]
    for each in (name, *made, *map(str, made[:2])):
        assert dtype_named(each) == (dtype, together)
    assert dtype_named(dtype) == (dtype, 1)
    assert torch.empty(4, dtype=made[0]).nbytes == nbytes(dtype, (4 * together,))


@pytest.mark.parametrize(
    "dtype",
    [
        *(
            "F33",
            "",
            ">c16",
            ">f3",
            float,
            int,
            torch.complex128,
            torch.qint8,
            np.dtype("U3"),
            np.dtype("i4,i4"),
            None,
            3,
        ),
        *(ml_dtypes.float4_e2m1fn, np.dtype(ml_dtypes.int4)),  # whose elements take a byte each
    ],
)
def test_a_type_that_pools_do_not_have_is_refused_with_those_that_they_have(dtype: object) -> None:
    with pytest.raises(
        Invalid, match=r"unknown dtype .*; known are BOOL, F4, .* as torch, numpy and ml_dtypes name them"
    ):
        dtype_named(dtype)


@pytest.mark.parametrize("dtype", [np.dtype(">f4"), ">f4", ">i2", ">c8"], ids=repr)
def test_elements_of_the_other_byte_order_are_refused_with_how_to_convert_them(dtype: object) -> None:
    with pytest.raises(Invalid) as caught:
        dtype_named(dtype)
    assert caught.value.message == (
        f"the dtype {dtype!r} is big-endian, and elements of pools are little-endian; convert an array with"
        f' a.astype(a.dtype.newbyteorder("="))'
    )
