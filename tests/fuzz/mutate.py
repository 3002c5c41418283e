"""A seeded engine that needs nothing: inputs are made from those that are in order, by changing them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.target import SAMPLE, Target, attempt, attempt_measured

MAX_INPUT = 8192
MAX_CHANGES = 6
INTERESTING = bytes((0x00, 0x01, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xD9, 0xDC, 0xDD, 0xDF, 0xFE, 0xFF))

Change = Callable[[random.Random, bytearray, Target], None]


@dataclass(frozen=True)
class Finding:
    """An input that did what no input may, and what that was."""

    target: str
    data: bytes
    error: str


def hunt(target: Target, inputs: int, seed: int) -> Finding | None:
    """Try ``inputs`` inputs; return the first that is a finding. The same seed gives the same inputs."""
    chance = random.Random(f"{target.name} {seed}")
    for number in range(inputs):
        data = make(chance, target)
        try:
            (attempt_measured if number % SAMPLE == 0 else attempt)(target, data)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what we look for
            return Finding(target.name, data, f"{type(error).__name__}: {error}"[:1000])
    return None


def make(chance: random.Random, target: Target) -> bytes:
    """Return an input: one of the seeds, changed in one to six ways."""
    data = bytearray(chance.choice(target.seeds))
    for _ in range(chance.randint(1, MAX_CHANGES)):
        chance.choice(CHANGES)(chance, data, target)
    return bytes(data[:MAX_INPUT])


def _flip(chance: random.Random, data: bytearray, target: Target) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(chance: random.Random, data: bytearray, target: Target) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice(INTERESTING)


def _any(chance: random.Random, data: bytearray, target: Target) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _delete(chance: random.Random, data: bytearray, target: Target) -> None:
    start = chance.randint(0, len(data))
    del data[start : start + chance.randint(1, 8)]


def _cut(chance: random.Random, data: bytearray, target: Target) -> None:
    if chance.random() < 0.2:
        del data[chance.randint(0, len(data)) :]


def _insert(chance: random.Random, data: bytearray, target: Target) -> None:
    place = chance.randint(0, len(data))
    data[place:place] = chance.choice(target.tokens) if target.tokens else chance.randbytes(chance.randint(1, 8))


def _overwrite(chance: random.Random, data: bytearray, target: Target) -> None:
    piece = chance.choice(target.tokens) if target.tokens else chance.randbytes(4)
    place = chance.randint(0, len(data))
    data[place : place + len(piece)] = piece


def _repeat(chance: random.Random, data: bytearray, target: Target) -> None:
    start = chance.randint(0, len(data))
    piece = data[start : start + chance.randint(1, 64)]
    data[start:start] = piece * chance.choice((1, 1, 2, 30))


def _splice(chance: random.Random, data: bytearray, target: Target) -> None:
    other = chance.choice(target.seeds)
    data[chance.randint(0, len(data)) :] = other[chance.randint(0, len(other)) :]


CHANGES: tuple[Change, ...] = (_flip, _flip, _set, _any, _delete, _cut, _insert, _overwrite, _repeat, _splice)
