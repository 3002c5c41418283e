"""Digests of device memory: whether bytes are those that they were.

``cubroker-128-1`` is defined over the ``nbytes`` bytes of one allocation, in unsigned integers of 64 bits that wrap:

- The bytes are words w[0], w[1], … of eight bytes, little-endian; the last one is filled up with zero bytes.
- mix(v) is MurmurHash3's finaliser ``fmix64`` (Austin Appleby, public domain): v ^= v >> 33; v *= 0xff51afd7ed558ccd;
  v ^= v >> 33; v *= 0xc4ceb9fe1a85ec53; v ^= v >> 33.
- x[i] = mix(w[i] XOR (i + 1) * 0x9e3779b97f4a7c15), and y[i] = mix(x[i]).
- A is the sum of all x[i], and B that of all y[i].
- The digest is mix(A XOR nbytes), then mix(B XOR nbytes), each as eight bytes, little-endian.

Every word is mixed with its position, and no word waits for another one, so any number of threads work on it in any
order. ``mix`` is a bijection: a change within one word always changes the digest. Any other change that was not made
for it, of several words, of their order, or of the length, goes unnoticed about once in 2 ** 128 times.

It shows accidents, and writers that do not know of it. It is not cryptographic: who knows it can make other bytes that
have the same digest. Against such a writer compare with files, which ``cubroker verify NAME PATH...`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

ALGORITHM = "cubroker-128-1"
"""The name of the definition above."""

SIZE = 16
"""Bytes of a digest."""

WORD = 8
"""Bytes of a word."""

_STEP = 1 << 13
"""Words that numpy works on at once: they stay in a core's cache."""

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_SHIFT = 33

Sums = tuple[int, int]
"""A and B, or the part of them that some of the words have."""


def digest(data: ReadableBuffer) -> bytes:
    """Return the digest of bytes in host memory."""
    with memoryview(data) as view:
        return finish(sums(view), view.nbytes)


def sums(data: ReadableBuffer, first: int = 0) -> Sums:
    """Return what bytes in host memory add to A and B, of which the first word is number ``first``."""
    import numpy as np

    given = np.frombuffer(memoryview(data), np.uint8)
    rest = given.size % WORD
    words = given[: given.size - rest].view("<u8")
    last = np.zeros(WORD, np.uint8)
    last[:rest] = given[given.size - rest :]
    end = _sums(last.view("<u8"), first + words.size) if rest else (0, 0)
    return add(_sums(words, first), end)


def add(*parts: Sums) -> Sums:
    """Return the sums of all words of several parts."""
    return sum(a for a, _ in parts) & _MASK, sum(b for _, b in parts) & _MASK


def finish(total: Sums, nbytes: int) -> bytes:
    """Return the digest of ``nbytes`` bytes with these sums."""
    return b"".join(_mix(value ^ nbytes).to_bytes(WORD, "little") for value in total)


def _mix(value: int) -> int:
    value ^= value >> _SHIFT
    value = value * _FIRST & _MASK
    value ^= value >> _SHIFT
    value = value * _SECOND & _MASK
    return value ^ value >> _SHIFT


def _sums(words: NDArray[np.uint64], first: int) -> Sums:
    import numpy as np

    steps = np.arange(1, min(_STEP, words.size) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    values, spare = np.empty_like(steps), np.empty_like(steps)
    parts = []
    for start in range(0, words.size, _STEP):
        chunk = words[start : start + _STEP]
        value, other = values[: chunk.size], spare[: chunk.size]
        np.add(steps[: chunk.size], np.uint64((first + start) * _GOLDEN & _MASK), out=value)
        np.bitwise_xor(value, chunk, out=value)
        found = []
        for _ in "xy":
            _mix_all(value, other)
            found.append(int(value.sum(dtype=np.uint64)))
        parts.append((found[0], found[1]))
    return add(*parts)


def _mix_all(values: NDArray[np.uint64], spare: NDArray[np.uint64]) -> None:
    """Mix values in place, with room for as many."""
    import numpy as np

    shift = np.uint64(_SHIFT)
    for factor in (_FIRST, _SECOND):
        np.right_shift(values, shift, out=spare)
        np.bitwise_xor(values, spare, out=values)
        np.multiply(values, np.uint64(factor), out=values)
    np.right_shift(values, shift, out=spare)
    np.bitwise_xor(values, spare, out=values)
