"""Runs the PTX of the kernels in Python, thread by thread: what they compute can be looked at without a GPU.

It knows the instructions that ``digest.ptx``, ``batched_copy.ptx`` and ``batched_compare.ptx`` have, and no others.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

WIDTH = {"32": (1 << 32) - 1, "64": (1 << 64) - 1}
SHARED = 4096
"""Bytes of shared memory that a block has."""

PAIR = struct.Struct("<QQ")

_INSTRUCTION = re.compile(r"(?:@(?P<guard>%\w+)\s+)?(?P<operation>[\w.]+)\s*(?P<operands>.*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")

_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "mad": lambda a, b, c: a * b + c,
    "mul": lambda a, b: a * b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "min": min,
    "or": lambda a, b: a | b,
    "sub": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
    "ne": lambda a, b: a != b,
}

_FORMATS = {"v2.u64": "<2Q", "v4.u32": "<4I", "u64": "<Q", "u32": "<I", "u16": "<H", "u8": "<B"}


class Program:
    """One entry of a PTX file."""

    def __init__(self, file: Path) -> None:
        text = re.sub(r"//.*", "", file.read_text())
        body = text[text.index("\n{") + 2 : text.rindex("}")]
        self.code: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for line in map(str.strip, body.splitlines()):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line and not line.startswith("."):
                found = _INSTRUCTION.fullmatch(line)
                assert found, line
                self.code.append((found["guard"] or "", found["operation"], _OPERAND.findall(found["operands"])))

    def run(
        self, memory: bytes, parameters: dict[str, int], blocks: int, threads: int, table: bytes = b""
    ) -> list[tuple[int, bytes]]:
        """Run a grid on some global memory, which begins at address 0; return what was stored where, in order.

        Args:
            memory: what is loaded from; a load beyond it fails.
            parameters: those that are numbers.
            blocks: of the grid.
            threads: of a block.
            table: the parameter of that name, an array.
        """
        stored: list[tuple[int, bytes]] = []
        for block in range(blocks):
            shared, votes = bytearray(SHARED), list[int]()
            ids = {"%ntid.x": threads, "%ctaid.x": block, "%nctaid.x": blocks}
            spaces = {"global": memory, "shared": shared, "param": table}
            running = [
                self._thread(spaces, stored, votes, parameters | ids | {"%tid.x": thread, "partial": 0, "table": 0})
                for thread in range(threads)
            ]
            while running:
                waiting = [thread for thread in running if next(thread, None)]
                assert len(waiting) in (0, len(running)), "some threads do not come to a barrier"
                running = waiting
        return stored

    def _thread(
        self,
        spaces: dict[str, bytes | bytearray],
        stored: list[tuple[int, bytes]],
        votes: list[int],
        registers: dict[str, int],
    ) -> Iterator[bool]:
        """Run one thread; stops at each barrier. The threads of a block vote once, if at all."""

        def value(operand: str) -> int:
            name, _, offset = operand.strip("[] ").partition("+")
            return (registers[name] if name in registers else int(name, 0)) + int(offset or 0)

        def names(operand: str) -> list[str]:
            return [name.strip() for name in operand.strip("{}").split(",")]

        place = 0
        while True:
            guard, operation, operands = self.code[place]
            place += 1
            if guard and not registers[guard]:
                continue
            kind, *more = operation.split(".")
            if kind == "ret":
                return
            if kind == "bar" and more[0] == "red":
                votes.append(value(operands[2]))
                yield True
                registers[operands[0]] = int(any(votes))
            elif kind == "bar":
                yield True
            elif kind == "bra":
                place = self.labels[operands[0]]
            elif kind == "ld" and more[0] == "param" and not operands[1].startswith("[%"):
                registers[operands[0]] = value(operands[1])
            elif kind == "ld":
                form = struct.Struct(_FORMATS[".".join(more[1:]).removeprefix("nc.")])
                address = value(operands[1])
                assert address % form.size == 0, "a load beside its alignment"
                registers.update(zip(names(operands[0]), form.unpack_from(spaces[more[0]], address), strict=True))
            elif kind == "st":
                form = struct.Struct(_FORMATS[".".join(more[1:])])
                address, data = value(operands[0]), form.pack(*map(value, names(operands[1])))
                assert address % form.size == 0, "a store beside its alignment"
                if more[0] == "shared":
                    spaces["shared"][address : address + form.size] = data  # type: ignore[index]
                else:
                    stored.append((address, data))
            else:
                compute = _ARITHMETIC[more[0] if kind == "setp" else kind]
                width = "64" if "wide" in more else more[0][-2:] if kind == "cvt" else operation[-2:]
                registers[operands[0]] = int(compute(*map(value, operands[1:]))) & WIDTH[width]
