"""Runs the PTX of ``digest.ptx`` in Python, thread by thread: what it computes can be looked at without a GPU.

It knows the instructions that this kernel has, and no others.
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
    "xor": lambda a, b: a ^ b,
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


class Program:
    """One entry of a PTX file, whose only vectors are pairs of 64 bits."""

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

    def run(self, memory: bytes, parameters: dict[str, int], blocks: int, threads: int) -> dict[int, tuple[int, int]]:
        """Run a grid on some global memory, which begins at address 0; return what was stored, by address."""
        stored: dict[int, tuple[int, int]] = {}
        for block in range(blocks):
            shared = bytearray(SHARED)
            ids = {"%ntid.x": threads, "%ctaid.x": block, "%nctaid.x": blocks}
            running = [
                self._thread(memory, shared, stored, parameters | ids | {"%tid.x": thread, "partial": 0})
                for thread in range(threads)
            ]
            while running:
                waiting = [thread for thread in running if next(thread, None)]
                assert len(waiting) in (0, len(running)), "some threads do not come to a barrier"
                running = waiting
        return stored

    def _thread(
        self, memory: bytes, shared: bytearray, stored: dict[int, tuple[int, int]], registers: dict[str, int]
    ) -> Iterator[bool]:
        """Run one thread; stops at each barrier."""

        def value(operand: str) -> int:
            name = operand.strip("[] ")
            return registers[name] if name in registers else int(name, 0)

        def pair(operand: str) -> list[str]:
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
            if kind == "bar":
                yield True
            elif kind == "bra":
                place = self.labels[operands[0]]
            elif kind == "ld" and more[0] == "param":
                registers[operands[0]] = value(operands[1])
            elif kind == "ld":
                source, address = shared if more[0] == "shared" else memory, value(operands[1])
                registers.update(zip(pair(operands[0]), PAIR.unpack_from(source, address), strict=True))
            elif kind == "st":
                first, second = map(value, pair(operands[1]))
                if more[0] == "shared":
                    PAIR.pack_into(shared, value(operands[0]), first, second)
                else:
                    stored[value(operands[0])] = first, second
            else:
                compute = _ARITHMETIC[more[0] if kind == "setp" else kind]
                width = "64" if "wide" in more else operation[-2:]
                registers[operands[0]] = int(compute(*map(value, operands[1:]))) & WIDTH[width]
