"""The journal: a record of keys and values in a memfd, which outlives the process that writes it.

Its writer may be killed between any two bytes. So what is committed is never written over::

    0        slot 0: the newest commit, or the one before it
    2048     slot 1: the other of the two
    4096 …   one *area*: frames of changes, one behind the other, from the start and for the length that a slot says

A commit appends a frame behind the committed length, and then writes the slot of the commit before the last one: with
the last byte of that it counts, all of it. Once most of an area was replaced since, the content is written to
another place, one slot switches over, and the memory of the old place is given back.

Slots and frames carry checksums. A slot that does not fit its own is a commit that was never finished; anything else
that does not fit is damage, and is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from struct import Struct
from typing import NamedTuple, Self
from zlib import crc32

from cubroker.driver import linux
from cubroker.server.store.damaged import Damaged

MAGIC = b"cubroker"
FORMAT = 1

SLOTS = (0, 2048)
"""Where the two slots are; they are written in turn."""

AREA = mmap.PAGESIZE
"""Where the first area begins; every one begins with a page, so that its memory can be given back."""

SLACK = 1 << 20
"""Bytes that were replaced and are not worth a compaction."""

CHUNK = 1 << 20
"""Bytes of content after which a compaction begins another frame."""

DELETED = (1 << 32) - 1
"""The length that an entry says its value has if it deletes its key."""

_SUM = Struct("<I")
_SLOT = Struct("<8sIQQQ")  # magic, format, and a Slot; then its checksum
_FRAME = Struct("<Q")  # the bytes of its entries; then the checksum of both, then the entries
_ENTRY = Struct("<II")  # the bytes of the key and of the value; then these
_ENTRY_HEAD = _ENTRY.size
HEAD = _FRAME.size + _SUM.size

Change = tuple[bytes, bytes | None]
Place = tuple[int, int]
"""Where a value is: its offset in the file, and its bytes."""


class Slot(NamedTuple):
    """What is committed: the number of the commit, where the area starts, and its bytes that count."""

    sequence: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """The first byte that does not count."""
        return self.start + self.length


class Index:
    """Where the values are, by key, and how many bytes their entries take."""

    def __init__(self) -> None:
        self.places: dict[bytes, Place] = {}
        self.nbytes = 0

    def note(self, at: int, changes: Iterable[Change]) -> None:
        """Take note of entries that begin ``at``."""
        places, nbytes = self.places, self.nbytes
        try:
            for key, value in changes:
                before = _ENTRY_HEAD + len(key)
                at += before
                if value is None:
                    known = places.pop(key, None)
                else:
                    known, size = places.get(key), len(value)
                    places[key] = at, size
                    nbytes += before + size
                    at += size
                if known is not None:
                    nbytes -= before + known[1]
        finally:  # there may be no memory for a place: then all is noted again, with the next commit
            self.nbytes = nbytes


class Journal:
    """Keys and values that are committed as they change. :meth:`create` makes one, :meth:`open` finds one again.

    Only the keys and the places of their values are kept in the memory of this process.
    """

    def __init__(self, descriptor: int, slot: Slot) -> None:
        self.descriptor = descriptor
        self._slot = slot
        self._index = Index()

    @classmethod
    def create(cls) -> Self:
        """Return a new journal without content; raises ``OSError``."""
        journal = cls(linux.memfd_create("cubroker-ledger", linux.MFD_CLOEXEC), Slot(0, AREA, 0))
        try:
            journal._switch(AREA, AREA)
        except OSError:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, descriptor: int) -> Self:
        """Return the journal behind a descriptor, which belongs to it from then on.

        Raises:
            Damaged: it is none, of another format, or damaged; the descriptor stays the caller's.
        """
        journal = cls(descriptor, _newest(descriptor))
        journal._load()
        journal._give_back(AREA, journal._slot.start)
        journal._give_back(_page(journal._slot.end), os.fstat(descriptor).st_size)
        return journal

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return what is committed; commit nothing in between."""
        for key, place in self._index.places.items():
            yield key, _read(self.descriptor, *place)

    def commit(self, changes: Iterable[Change]) -> None:
        """Have values replaced (None: deleted), all of them or, if this process ends before, none.

        Raises:
            OSError: there is no memory for them; nothing has changed.
        """
        changes, at = tuple(changes), self._slot.end
        if not changes:
            return
        self._switch(self._slot.start, self._append(at, changes))
        self._index.note(at + HEAD, changes)
        if self._slot.length > 2 * self._index.nbytes + SLACK:
            with suppress(OSError):  # no memory for it now: the next commit tries again
                self._compact()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def _append(self, at: int, changes: Iterable[Change]) -> int:
        """Write a frame that does not count yet; return where it ends."""
        entries = b"".join(map(_entry, changes))
        size = _FRAME.pack(len(entries))
        _write(self.descriptor, at, b"".join((size, _checksum(size, entries), entries)))
        return at + HEAD + len(entries)

    def _switch(self, start: int, end: int) -> None:
        """Make an area count, from ``start`` to ``end``."""
        slot = Slot(self._slot.sequence + 1, start, end - start)
        data = _SLOT.pack(MAGIC, FORMAT, *slot)
        _write(self.descriptor, SLOTS[slot.sequence % 2], data + _checksum(data))
        self._slot = slot

    def _load(self) -> None:
        """Find the values of all frames."""
        at = self._slot.start
        while at < self._slot.end:
            entries = self._entries(at)
            self._index.note(at + HEAD, _changes(entries))
            at += HEAD + len(entries)

    def _entries(self, at: int) -> bytes:
        """Return the entries of the frame ``at``."""
        head, room = _read(self.descriptor, at, HEAD), self._slot.end - at - HEAD
        (size,) = _FRAME.unpack_from(head)
        if size > room:
            raise Damaged(
                f"the journal is damaged: the frame at byte {at} claims {size} bytes, and {max(room, 0)} follow"
            )
        entries = _read(self.descriptor, at + HEAD, size)
        if head[_FRAME.size :] != _checksum(head[: _FRAME.size], entries):
            raise Damaged(f"the journal is damaged: the frame at byte {at} does not fit its checksum")
        return entries

    def _compact(self) -> None:
        """Write the content alone to another place, before this one if it fits there, and give this one back."""
        old, most = self._slot, self._index.nbytes + HEAD * (self._index.nbytes // CHUNK + 1)
        start = at = AREA if AREA + most <= old.start else _page(old.end)
        index = Index()
        for chunk in self._chunks():
            end = self._append(at, chunk)
            index.note(at + HEAD, chunk)
            at = end
        self._switch(start, at)
        self._index = index
        self._give_back(old.start, old.end)

    def _chunks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Return the content in parts of at least so many bytes, but for the last one."""
        chunk, nbytes = [], 0
        for key, value in self.items():
            chunk.append((key, value))
            nbytes += len(key) + len(value)
            if nbytes >= CHUNK:
                yield chunk
                chunk, nbytes = [], 0
        yield chunk

    def _give_back(self, start: int, end: int) -> None:
        """Give the memory of pages back in which nothing counts; ``start`` begins one."""
        end = min(end, os.fstat(self.descriptor).st_size)
        if start < end:
            with mmap.mmap(self.descriptor, end - start, offset=start) as pages:
                pages.madvise(mmap.MADV_REMOVE)


def _newest(descriptor: int) -> Slot:
    """Return the slot that counts."""
    found = [slot for slot in (_slot(descriptor, at) for at in SLOTS) if slot is not None]
    if not found:
        raise Damaged("this is no journal, or both of its slots are damaged")
    number, newest = max(found, key=lambda slot: slot[1].sequence)
    if number != FORMAT:
        raise Damaged(f"the journal has format {number}, and this build knows {FORMAT}; start the build that wrote it")
    size = os.fstat(descriptor).st_size
    if newest.start < AREA or newest.start % mmap.PAGESIZE or (newest.length and newest.end > size):
        raise Damaged(f"the journal is damaged: what counts is to be at {newest.start} to {newest.end}")
    return newest


def _slot(descriptor: int, at: int) -> tuple[int, Slot] | None:
    """Return the format and the content of a slot, None if nothing was written there, or not all."""
    try:
        data = os.pread(descriptor, _SLOT.size + _SUM.size, at)
    except OSError as error:  # a pipe or a socket has no such bytes
        raise Damaged(f"this is no journal: {error}") from None
    if len(data) < _SLOT.size + _SUM.size or data[_SLOT.size :] != _checksum(data[: _SLOT.size]):
        return None
    magic, number, *slot = _SLOT.unpack_from(data)
    return (number, Slot(*slot)) if magic == MAGIC else None


def _entry(change: Change) -> bytes:
    key, value = change
    if value is None:
        return _ENTRY.pack(len(key), DELETED) + key
    return _ENTRY.pack(len(key), len(value)) + key + value


def _changes(entries: bytes) -> Iterator[Change]:
    """Return what a frame that fits its checksum changes."""
    at = 0
    while at < len(entries):
        nkey, nvalue = _ENTRY.unpack_from(entries, at)
        at += _ENTRY_HEAD + nkey
        key = entries[at - nkey : at]
        value = None if nvalue == DELETED else entries[at : at + nvalue]
        at += 0 if value is None else nvalue
        yield key, value


def _checksum(*parts: bytes) -> bytes:
    value = 0
    for part in parts:
        value = crc32(part, value)
    return _SUM.pack(value)


def _page(at: int) -> int:
    """Return where the next page begins."""
    return -(-at // mmap.PAGESIZE) * mmap.PAGESIZE


def _read(descriptor: int, at: int, nbytes: int) -> bytes:
    """Return bytes that are there: what counts was written once, and the file is as long as that."""
    return os.pread(descriptor, nbytes, at)


def _write(descriptor: int, at: int, data: bytes) -> None:
    """Write all of ``data``; raises ``OSError`` when there is no memory for some of it."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written
