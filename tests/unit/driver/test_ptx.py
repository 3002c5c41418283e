"""The kernels as files: they are shipped, and every assembler that is here takes them."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import tomllib
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from cubroker.driver.context import KERNEL_FOLDER as HERE
from cubroker.driver.kernels import CHUNK, THREADS, add, digest, finish, tables
from tests.sampling import daily
from tests.unit.driver.ptx import PAIR, Program

ROOT = Path(__file__).parents[3]
SINCE_VOLTA = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
KERNELS = {
    "multimem.ptx": ("sm_90", "sm_100"),
    "digest.ptx": SINCE_VOLTA,
    "batched_copy.ptx": SINCE_VOLTA,
    "batched_compare.ptx": SINCE_VOLTA,
}
"""The files, and architectures that each is for."""

BASE = 1 << 40
"""Where the targets of copies begin."""


def test_the_kernels_are_a_part_of_the_package() -> None:
    assert {path.name for path in HERE.glob("*.ptx")} == {path.name for path in (ROOT / "driver").glob("*.ptx")}
    for name in KERNELS:
        assert resources.files("cubroker.driver").joinpath(name).read_bytes() == (HERE / name).read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.ptx" in project["tool"]["setuptools"]["package-data"]["*"]


@pytest.mark.parametrize(("name", "architecture"), [(name, each) for name, found in KERNELS.items() for each in found])
def test_a_kernel_assembles(name: str, architecture: str, tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("there is no ptxas here")
    command = [
        ptxas,
        f"-arch={architecture}",
        "-Werror",
        "-o",
        str(tmp_path / "kernel.cubin"),
        str(HERE / name),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("pieces", "grid"),
    daily(product((1, 2, 5, 63, 64, 65, 300), ((1, 1), (1, 8), (3, 4), (2, 16), (1, 256))), 12),
)
def test_the_kernel_of_digests_adds_up_every_piece_whatever_the_grid(pieces: int, grid: tuple[int, int]) -> None:
    blocks, threads = grid
    data, sums = random.Random(pieces).randbytes(16 * pieces), 1 << 40
    parameters = {"source": 0, "pieces": pieces, "sums": sums}
    stored = Program(HERE / "digest.ptx").run(data, parameters, blocks, threads)
    assert [address for address, _ in stored] == [sums + PAIR.size * block for block in range(blocks)]
    assert finish(add(*(PAIR.unpack(pair) for _, pair in stored)), len(data)) == digest(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "beside"),
    daily(product(([1], [16, 100], [17, 5, CHUNK + 9, 1, 2000], [3, 2 * CHUNK, 40_000]), (0, 1, 2, 4, 8)), 7),
)
def test_the_kernel_of_copies_stores_every_byte_once(beside: int, sizes: list[int]) -> None:
    segments, start = [], beside
    for nbytes in sizes:
        segments.append((BASE + 2 * start, start, nbytes))
        start += -(-nbytes // 16) * 16 + 32
    end = sum(segments[-1][1:])  # no byte beyond the last segment may be loaded
    data = random.Random(beside).randbytes(end)
    ((table, count, blocks),) = tables(((to - BASE, at, nbytes) for to, at, nbytes in segments), BASE)
    program = Program(HERE / "batched_copy.ptx")
    found: dict[int, int] = {}
    for address, stored in program.run(data, {"count": count}, blocks, THREADS, bytes(table)):
        for place, byte in enumerate(stored, address):
            assert place not in found, "a byte is stored twice"
            found[place] = byte
    assert found == {to + place: data[at + place] for to, at, nbytes in segments for place in range(nbytes)}


@pytest.mark.parametrize(
    ("beside", "sizes"), [(0, [17, 0, 5, CHUNK + 9, 1]), (0, [16, 5000, 0]), (1, [16, 100, 0, 1, 300]), (8, [24])]
)
def test_the_kernel_of_comparisons_finds_any_byte_and_no_other(beside: int, sizes: list[int]) -> None:
    segments, start = [], beside
    for nbytes in sizes:
        segments.append((start, nbytes))
        start += -(-nbytes // 16) * 16 + 32
    row, flags = -(-start // 16) * 16, 1 << 40
    first = random.Random(beside).randbytes(row)
    ends = sorted({start + at for start, nbytes in segments for at in (0, nbytes - 1) if nbytes})
    between, within = [segments[0][0] + sizes[0]], random.Random(beside).sample(ends, 2)
    for changed in (between, within):
        second = bytearray(first)
        for place in changed:
            second[place] ^= 0x40
        ((table, count, blocks),) = tables((start, row + start, nbytes) for start, nbytes in segments)
        program, parameters = Program(HERE / "batched_compare.ptx"), {"count": count, "flags": flags}
        stored = program.run(first + second, parameters, blocks, THREADS, bytes(table))
        expected = {n for n, (start, nbytes) in enumerate(segments) for at in changed if start <= at < start + nbytes}
        assert {(address - flags) // 4 for address, _ in stored} == expected
        assert all(data == struct.pack("<I", 1) for _, data in stored)


@pytest.mark.parametrize(("name", "beside"), [("batched_copy.ptx", 8), ("batched_compare.ptx", 16)])
def test_a_table_has_the_size_that_the_kernel_declares(name: str, beside: int) -> None:
    declared = re.search(r"\.b8 table\[(\d+)\]", (HERE / name).read_text())
    assert declared
    ((table, _, _),) = tables([(0, 0, 1)])
    assert len(bytes(table)) == int(declared[1]) <= 4096 - beside
