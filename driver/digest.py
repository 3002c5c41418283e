"""Digests of device memory: whether bytes are those that they were.

``cubroker-128-1`` is defined over the ``nbytes`` bytes of one allocation, in unsigned integers of 64 bits that wrap:

- The bytes are pieces of two words, u[0] and v[0], u[1] and v[1] and so on, of eight bytes each, little-endian; the
  last piece is filled up with zero bytes.
- fold(x, n) is x XOR (x >> n).
- U = fold(P * (u[i] XOR (i + 1) * K), 29), V = fold(Q * (v[i] XOR U), 32), X[i] = fold(R * (U XOR V), 32), and
  Y[i] = X[i] XOR V.
- A is the sum of all X[i], and B that of all Y[i].
- The digest is fmix64(A XOR nbytes), then fmix64(B XOR nbytes), each as eight bytes, little-endian.

P = 0xff51afd7ed558ccd and Q = 0xc4ceb9fe1a85ec53 are the factors of MurmurHash3's finaliser, fmix64 (Austin Appleby,
public domain), R = 0x9fb21c651e98df25 is that of rrmxmx (Pelle Evensen), and K = 0x9e3779b97f4a7c15 is 2 ** 64 over the
golden ratio.

Every piece is mixed with its position, and none waits for another one, so any number of threads work on them in any
order. There are three multiplications for sixteen bytes, few enough that a GPU waits for its memory and not for them.
A fold by 32 costs the least; with three of them the same high bits would cancel out, so the first is another one.

What becomes of a piece is a bijection: a change within one always changes the digest. A change of several pieces, of
their order, or of the length goes unnoticed by chance alone, which 128 bits make small; there is no proof of how small.

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

PIECE = 16
"""Bytes of a piece."""

_STEP = 1 << 12
"""Pieces that numpy works on at once: they stay in a core's cache."""

_MASK = (1 << 64) - 1
_K, _P, _Q, _R = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9FB21C651E98DF25

Sums = tuple[int, int]
"""A and B, or the part of them that some of the pieces have."""


def digest(data: ReadableBuffer) -> bytes:
    """Return the digest of bytes in host memory."""
    with memoryview(data) as view:
        return finish(sums(view), view.nbytes)


def sums(data: ReadableBuffer, first: int = 0) -> Sums:
    """Return what bytes in host memory add to A and B, of which the first piece is number ``first``."""
    import numpy as np

    given = np.frombuffer(memoryview(data), np.uint8)
    rest = given.size % PIECE
    pieces = given[: given.size - rest].view("<u8")
    last = np.zeros(PIECE, np.uint8)
    last[:rest] = given[given.size - rest :]
    end = _sums(last.view("<u8"), first + pieces.size // 2) if rest else (0, 0)
    return add(_sums(pieces, first), end)


def add(*parts: Sums) -> Sums:
    """Return the sums of all pieces of several parts."""
    return sum(a for a, _ in parts) & _MASK, sum(b for _, b in parts) & _MASK


def finish(total: Sums, nbytes: int) -> bytes:
    """Return the digest of ``nbytes`` bytes with these sums."""
    return b"".join(_fmix64(value ^ nbytes).to_bytes(8, "little") for value in total)


def _fmix64(value: int) -> int:
    value ^= value >> 33
    value = value * _P & _MASK
    value ^= value >> 33
    value = value * _Q & _MASK
    return value ^ value >> 33


def _sums(words: NDArray[np.uint64], first: int) -> Sums:
    import numpy as np

    count = words.size // 2
    keys = np.arange(1, min(_STEP, count) + 1, dtype=np.uint64) * np.uint64(_K)
    values, others, spare = (np.empty_like(keys) for _ in range(3))
    found_a = found_b = 0
    for start in range(0, count, _STEP):
        chunk = words[2 * start : 2 * (start + _STEP)]
        n = chunk.size // 2
        u, v, room = values[:n], others[:n], spare[:n]
        np.add(keys[:n], np.uint64((first + start) * _K & _MASK), out=u)
        np.bitwise_xor(u, chunk[::2], out=u)
        _mix(u, _P, 29, room)
        np.bitwise_xor(u, chunk[1::2], out=v)
        _mix(v, _Q, 32, room)
        np.bitwise_xor(u, v, out=u)
        _mix(u, _R, 32, room)
        np.bitwise_xor(u, v, out=v)
        found_a += int(u.sum(dtype=np.uint64))
        found_b += int(v.sum(dtype=np.uint64))
    return found_a & _MASK, found_b & _MASK


def _mix(values: NDArray[np.uint64], factor: int, shift: int, spare: NDArray[np.uint64]) -> None:
    """Multiply and fold values in place, with room for as many."""
    import numpy as np

    np.multiply(values, np.uint64(factor), out=values)
    np.right_shift(values, np.uint64(shift), out=spare)
    np.bitwise_xor(values, spare, out=values)
