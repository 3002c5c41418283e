"""The journal: keys and values in a memfd, which outlives the process that writes it.

Its writer may be killed between any two bytes. So committed bytes are never overwritten::

    0        slot 0: the newest commit, or the one before it
    2048     slot 1: the other of the two
    4096 …   one *area*: frames of changes, one after the other; a slot has its start and its length

A commit appends a frame after the committed length, and then overwrites the older slot. The commit counts once the last
byte of the slot is written. Once most of an area is obsolete, the content is written to another place, the next slot
refers to that, and the memory of the old place is released.

Slots and frames carry checksums. A slot with a wrong checksum is a commit that was never finished; any other wrong
checksum is damage, and the journal is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from struct import Struct
from typing import NamedTuple, Self
from zlib import crc32

from cubroker.driver import system_calls
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.layout import round_up

MAGIC = b"cubroker"
FORMAT = 1

SLOTS = (0, 2048)  #: Offsets of the two slots; they are written in turn.
AREA = mmap.PAGESIZE  #: Offset of the first area; each begins with a page, so that its memory can be released.
SLACK = 1 << 20  #: Obsolete bytes that are not worth a compaction.
CHUNK = 1 << 20  #: Bytes of content after which a compaction begins another frame.
DELETED = (1 << 32) - 1  #: The length of the value in an entry that deletes its key.

_SUM = Struct("<I")
_SLOT = Struct("<8sIQQQ")  # magic, format, and a Slot; then its checksum
_FRAME = Struct("<Q")  # the size of its entries; then the checksum of size and entries, then the entries
_ENTRY = Struct("<II")  # the sizes of the key and of the value; then key and value
ENTRY_HEAD = _ENTRY.size
HEAD = _FRAME.size + _SUM.size

Change = tuple[bytes, bytes | None]
Place = tuple[int, int]  #: The offset of a value in the file, and its bytes.


class Slot(NamedTuple):
    """A commit: its number, the offset of the area, and the bytes there that count."""

    sequence: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the first byte that does not count."""
        return self.start + self.length


class JournalIndex:
    """The places of the values, by key, in the order in which they were written, and the bytes of their entries."""

    def __init__(self) -> None:
        self.places: dict[bytes, Place] = {}
        self.nbytes = 0

    def note(self, at: int, changes: Iterable[Change]) -> None:
        """Note the places of entries that begin at the offset ``at``."""
        places, nbytes = self.places, self.nbytes
        try:
            for key, value in changes:
                before = ENTRY_HEAD + len(key)
                at += before
                if (known := places.pop(key, None)) is not None:
                    nbytes -= before + known[1]
                if value is not None:
                    size = len(value)
                    places[key] = at, size
                    nbytes += before + size
                    at += size
        finally:  # if there was no memory for a place, the caller commits all changes again
            self.nbytes = nbytes


class Journal:
    """Keys and values, committed as they change. :meth:`create` makes a journal, :meth:`open` opens one again.

    This process has only the keys and the places of their values in its own memory.
    """

    def __init__(self, descriptor: int, slot: Slot) -> None:
        self.descriptor = descriptor
        self._slot = slot
        self._index = JournalIndex()

    @classmethod
    def create(cls) -> Self:
        """Return an empty journal; raises ``OSError``."""
        journal = cls(system_calls.memfd_create("cubroker-ledger", system_calls.MFD_CLOEXEC), Slot(0, AREA, 0))
        try:
            journal._switch(AREA, AREA)
        except OSError:
            journal.close()
            raise
        return journal

    @classmethod
    def open(cls, descriptor: int) -> Self:
        """Return the journal behind a descriptor, which the journal owns from then on.

        Raises ``CorruptJournal`` if the file is no journal, has another format, or is damaged. The caller
        then keeps the descriptor.
        """
        journal = cls(descriptor, newest_slot(descriptor))
        journal._load()
        journal._give_back(AREA, journal._slot.start)
        journal._give_back(round_up(journal._slot.end, mmap.PAGESIZE), os.fstat(descriptor).st_size)
        return journal

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the committed keys and values, in the order in which they were written; do not commit during that."""
        for key, (at, nbytes) in self._index.places.items():
            yield key, os.pread(self.descriptor, nbytes, at)

    def commit(self, changes: Iterable[Change]) -> None:
        """Replace values, or delete those that are None: all of them or, if this process ends during it, none.

        Raises ``OSError`` if the system has no memory for them; nothing has changed then.
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
        parts = list[bytes]()
        for key, value in changes:
            parts += _ENTRY.pack(len(key), DELETED if value is None else len(value)), key, value or b""
        entries = b"".join(parts)
        size = _FRAME.pack(len(entries))
        _write(self.descriptor, at, size + _checksum(entries, size) + entries)
        return at + HEAD + len(entries)

    def _switch(self, start: int, end: int) -> None:
        """Write a slot with which the area from ``start`` to ``end`` counts."""
        slot = Slot(self._slot.sequence + 1, start, end - start)
        data = _SLOT.pack(MAGIC, FORMAT, *slot)
        _write(self.descriptor, SLOTS[slot.sequence % 2], data + _checksum(data))
        self._slot = slot

    def _load(self) -> None:
        """Note the values of all frames."""
        at = self._slot.start
        while at < self._slot.end:
            entries = self._entries(at)
            self._index.note(at + HEAD, _changes(entries))
            at += HEAD + len(entries)

    def _entries(self, at: int) -> bytes:
        """Return the entries of the frame at the offset ``at``."""
        head, room = os.pread(self.descriptor, HEAD, at), self._slot.end - at - HEAD
        (size,) = _FRAME.unpack_from(head)
        if size > room:
            raise CorruptJournal(
                f"the journal is damaged: the frame at byte {at} claims {size} bytes, and {max(room, 0)} follow"
            )
        entries = os.pread(self.descriptor, size, at + HEAD)
        if head[_FRAME.size :] != _checksum(entries, head[: _FRAME.size]):
            raise CorruptJournal(f"the journal is damaged: the frame at byte {at} does not fit its checksum")
        return entries

    def _compact(self) -> None:
        """Write the content to another place, before the old one if it fits there, and release the old one."""
        old, most = self._slot, self._index.nbytes + HEAD * (self._index.nbytes // CHUNK + 1)
        start = at = AREA if AREA + most <= old.start else round_up(old.end, mmap.PAGESIZE)
        index = JournalIndex()
        for chunk in self._chunks():
            end = self._append(at, chunk)
            index.note(at + HEAD, chunk)
            at = end
        self._switch(start, at)
        self._index = index
        self._give_back(old.start, old.end)

    def _chunks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the content in parts of at least :data:`CHUNK` bytes; the last may be smaller."""
        chunk, nbytes = [], 0
        for key, value in self.items():
            chunk.append((key, value))
            nbytes += len(key) + len(value)
            if nbytes >= CHUNK:
                yield chunk
                chunk, nbytes = [], 0
        yield chunk

    def _give_back(self, start: int, end: int) -> None:
        """Release the memory of pages without content; ``start`` is the offset of a page."""
        end = min(end, os.fstat(self.descriptor).st_size)
        if start < end:
            with mmap.mmap(self.descriptor, end - start, offset=start) as pages:
                pages.madvise(mmap.MADV_REMOVE)


def newest_slot(descriptor: int) -> Slot:
    """Return the slot that counts."""
    found = [slot for slot in (_slot(descriptor, at) for at in SLOTS) if slot is not None]
    if not found:
        raise CorruptJournal("this is no journal, or both of its slots are damaged")
    number, newest = max(found, key=lambda slot: slot[1].sequence)
    if number != FORMAT:
        raise CorruptJournal(
            f"the journal has format {number}, and this build knows {FORMAT}; start the build that wrote it"
        )
    size = os.fstat(descriptor).st_size
    if newest.start < AREA or newest.start % mmap.PAGESIZE or (newest.length and newest.end > size):
        raise CorruptJournal(
            f"the journal is damaged: the newest slot refers to bytes {newest.start} to {newest.end}, which is not"
            f" a valid area"
        )
    return newest


def _slot(descriptor: int, at: int) -> tuple[int, Slot] | None:
    """Return the format and the content of a slot; None if it was not written, or not fully."""
    try:
        data = os.pread(descriptor, _SLOT.size + _SUM.size, at)
    except OSError as error:  # a pipe or a socket has no such bytes
        raise CorruptJournal(f"this is no journal: {error}") from None
    if len(data) < _SLOT.size + _SUM.size or data[_SLOT.size :] != _checksum(data[: _SLOT.size]):
        return None
    magic, number, *slot = _SLOT.unpack_from(data)
    return (number, Slot(*slot)) if magic == MAGIC else None


def _changes(entries: bytes) -> Iterator[Change]:
    """Yield the changes in the entries of a frame whose checksum is right."""
    at = 0
    while at < len(entries):
        nkey, nvalue = _ENTRY.unpack_from(entries, at)
        at += ENTRY_HEAD + nkey
        key = entries[at - nkey : at]
        if nvalue == DELETED:
            yield key, None
        else:
            yield key, entries[at : at + nvalue]
            at += nvalue


def _checksum(data: bytes, before: bytes = b"") -> bytes:
    return _SUM.pack(crc32(data, crc32(before)))


def _write(descriptor: int, at: int, data: bytes) -> None:
    """Write all of ``data``; raises ``OSError`` if the system has no memory for some of it."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written
