"""The broker's side of the store: the descriptors that outlive the broker, and the journal, a memfd among them.

The event loop never waits for the service manager, which keeps the descriptors: an :class:`AsyncNotifier` queues
messages, in order, until there is room.

The journal has keys and values. Its writer may be killed between any two bytes, so committed bytes are never
overwritten::

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

import asyncio
import logging
import mmap
import os
import re
import select
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, Protocol, Self
from zlib import crc32

from cubroker.driver import system_calls
from cubroker.protocol.errors import CorruptJournal, Unavailable, explain
from cubroker.protocol.layout import round_up
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Manager, close_all

log = logging.getLogger(__name__)

JOURNAL = "ledger"  #: The name under which the journal is stored.
MOST = 256  #: Names whose descriptors may wait to be stored, with about two duplicates each.
PAUSE = 0.05  #: Seconds between two attempts while the kernel does not report when there is room.

_OURS = re.compile(r"s[0-9]+|m[0-9]+\.[0-9]+")
"""The names of sessions and of memory, neither of which is stored before the journal."""

MAGIC = b"cubroker"  #: The first bytes of a slot of the journal.
FORMAT = 1  #: The format of the journal.

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


class StoreReplied(NamedTuple):
    """The outcome for descriptors that had to wait for the store."""

    #: The name under which they were to be stored.
    name: str
    #: Why they are not stored; None if they are.
    error: Unavailable | None


class ReplyQueue(Protocol):
    """Takes replies of the store: the broker's queue."""

    def put(self, reply: StoreReplied, /) -> None:
        """Add a reply."""


@dataclass(slots=True)
class _Message:
    """A message that waits for room; one that stores descriptors has all fields."""

    text: str
    #: Duplicates, closed once they were sent.
    descriptors: Sequence[int] = ()
    #: Ends the wait.
    timer: asyncio.TimerHandle | None = None
    #: Gets the outcome, with the name under which the descriptors are stored.
    replies: ReplyQueue | None = None
    name: str = ""
    #: Its place among all messages that ever waited, from 1 on.
    number: int = 0

    def conclude(self, error: Unavailable | None) -> None:
        """Report the outcome of the message."""
        if self.replies:
            self.replies.put(StoreReplied(self.name, error))
        elif error:
            log.warning("%s", error.message)


class AsyncNotifier:
    """Sends messages immediately if the manager has room, and otherwise queues them until it has.

    A newer sign of life or status replaces one that waits. Descriptors wait for a limited time. Removals wait for ever,
    since descriptors that are never removed would fill the store. Threads that may block use ``manager`` itself. There
    is no order between the two ways, so neither is used for names of the other; a thread that stores may call
    :meth:`await_turn`. :meth:`close` closes ``manager``.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._messages: dict[object, _Message] = {}
        self._posted = 0
        #: The number of the message that is sent next. Threads wait for its change.
        self._next = 1
        self._progress = threading.Condition()
        self._waits = False
        #: The descriptor that the event loop watches for room; None while it watches none.
        self._watched: int | None = None

    def say(self, text: str, kind: str = "") -> None:
        """Send a message, which replaces a waiting one of the same ``kind``. Failures are logged."""
        if text == sd_notify.WATCHDOG and self._overtakes(text):
            return
        if waiting := self._messages.get(kind):
            waiting.text = text
        else:
            self._add(kind or object(), _Message(text))
        self._send()

    def store(self, name: str, descriptors: Sequence[int], replies: ReplyQueue) -> bool:
        """Store descriptors until they hang up, under a name that is used once; return whether the message was sent.

        If it was not, ``replies`` gets the outcome later, unless :meth:`remove` is called before.

        Raises:
            Unavailable: the manager is gone, or too many messages wait.
            OSError: no descriptors are left for duplicates, which a waiting message has.
        """
        text = sd_notify.storing(name, poll=True)
        if not self._messages and self.manager.offer(text, descriptors):
            return True
        if sum(message.replies is not None for message in self._messages.values()) >= MOST:
            raise Unavailable(f"{MOST} sessions wait for the service manager already, which hangs, or is flooded")
        duplicates: list[int] = []
        try:
            duplicates.extend(os.dup(descriptor) for descriptor in descriptors)
        except OSError:
            close_all(duplicates)
            raise
        timer = asyncio.get_running_loop().call_later(sd_notify.PATIENCE, self._expire, name)
        self._add(name, _Message(text, duplicates, timer, replies, name))
        self._wait()
        return False

    def remove(self, name: str) -> None:
        """Remove what is stored under a name, or drop its message if that was not sent yet. Failures are logged."""
        if name in self._messages:
            self._take(name)
            if not self.manager.has_above:
                return
        try:
            self._add(object(), _Message(sd_notify.removing(name)))
        except MemoryError:  # the next broker alone would remove it, and until then the memory is in use
            asyncio.get_running_loop().call_later(PAUSE, self.remove, name)
            return
        self._send()

    def await_turn(self, seconds: float) -> bool:
        """Wait until all messages that wait now were sent or dropped; False if it takes longer. Any thread.

        It does not wait for messages that are posted later.
        """
        with self._progress:
            last = self._posted
            return self._progress.wait_for(lambda: self._next > last, seconds)

    def close(self) -> None:
        """Forget unsent messages, and close the manager's socket."""
        for key in list(self._messages):
            self._take(key)
        self.manager.close()

    def _overtakes(self, sign: str) -> bool:
        """Send a sign of life to a keeper, past messages for which the manager above has no room; return whether so."""
        with suppress(Unavailable):
            return self._waits and self.manager.has_above and self.manager.offer(sign)
        return False

    def _add(self, key: object, message: _Message) -> None:
        message.number = self._posted + 1
        self._messages[key] = message
        with self._progress:  # last: had there been no memory for the message, its number would never be reached
            self._posted = message.number

    def _send(self) -> None:
        """Send messages while there is room, and the rest when there is room again."""
        while self._messages and not self._waits:
            key, message = next(iter(self._messages.items()))
            error = None
            try:
                if not self.manager.offer(message.text, message.descriptors):
                    self._wait()
                    return
            except Unavailable as failure:
                error = failure
            self._take(key)  # first: the outcome may remove the name
            message.conclude(error)

    def _wait(self) -> None:
        """Resume when there is room, or after a pause while too many are in flight, since their end is not reported."""
        if self._waits:
            return
        loop, poll = asyncio.get_running_loop(), select.poll()
        poll.register(self.manager, select.POLLOUT)
        try:
            if not poll.poll(0):
                watched = self.manager.fileno()
                loop.add_writer(watched, self._resume)
                self._watched = watched
                self._waits = True  # last: without memory to wait, the next message has all of them sent
                return
        except OSError as error:
            log.debug("this user may watch no more files: %s", error)
        loop.call_later(PAUSE, self._resume)
        self._waits = True

    def _resume(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_writer(self._watched)
            self._watched = None
        self._waits = False
        self._send()

    def _expire(self, name: str) -> None:
        message = self._take(name)
        message.conclude(self.manager.late(message.text))

    def _take(self, key: object) -> _Message:
        message = self._messages.pop(key)
        first = next(iter(self._messages.values()), None)
        with self._progress:
            self._next = first.number if first else self._posted + 1
            self._progress.notify_all()
        close_all(message.descriptors)
        if message.timer:
            message.timer.cancel()
        return message


class Store:
    """The descriptors that an earlier broker left, and those for a later one.

    The event loop stores and drops sessions through the ``notifier``. Threads, which may wait for the manager, store
    and drop everything else through this object. No name is stored both ways, so no message overtakes another about its
    name. If a thread cannot drop a name in time, the event loop drops it.

    Args:
        notifier: sends to the service manager, which has a store.
        inherited: the stored descriptors, by name; this object owns them until they are taken.

    Raises:
        CorruptJournal: the journal cannot be read, is missing, or there are two. Everything stays stored.
    """

    def __init__(self, notifier: AsyncNotifier, inherited: Mapping[str, Sequence[int]]) -> None:
        assert notifier.manager.limit is not None
        self.limit = notifier.manager.limit  # descriptors that the manager keeps
        self.notifier = notifier
        self._manager = notifier.manager
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = {name: list(descriptors) for name, descriptors in inherited.items()}
        journals = self._left.pop(JOURNAL, [])
        while len(journals) > 1 and system_calls.file_id(journals[-1]) == system_calls.file_id(journals[0]):
            os.close(journals.pop())  # a manager that cannot compare open files stores one twice
        if len(journals) > 1:
            raise CorruptJournal(f"the store has {len(journals)} journals, and it is unknown which one is valid")
        if not journals and (orphans := sorted(filter(_OURS.fullmatch, self._left))):
            raise CorruptJournal(f"the store has no journal, so the owners of {', '.join(orphans[:8])} are unknown")
        self.inherited = bool(journals)  # whether an earlier broker left a journal
        #: That journal, or a new one. The caller closes it; it stays stored.
        self.journal = Journal.open(journals[0]) if journals else Journal.create()

    def begin(self) -> None:
        """Store the journal, unless it is stored, before anything that it names. Raises as :meth:`hold`."""
        if not self.inherited or self.notifier.manager.has_above:  # a kill may have come between the two
            self.hold(JOURNAL, [self.journal.descriptor])

    def attend(self) -> None:
        """Let the running event loop drop the names that threads fail to drop; the threads must end before the loop."""
        self._loop = asyncio.get_running_loop()

    def hold(self, name: str, descriptors: Sequence[int]) -> None:
        """Store descriptors under a name. Any thread may call this; it waits while the manager has no room.

        The messages that wait in the ``notifier`` are sent first: the store may be full until they remove sessions.

        Raises ``Unavailable`` if the manager does not take them in time.
        """
        text = sd_notify.storing(name, poll=False)
        if not self.notifier.await_turn(sd_notify.PATIENCE):
            raise self._manager.late(text)
        self._manager.say(text, descriptors)

    def drop(self, name: str) -> None:
        """Remove a name from the store. Any thread may call this; it waits while the manager has no room.

        A failure is logged, and the event loop tries again, if :meth:`attend` was called; else the next broker does.
        """
        try:
            self._manager.say(sd_notify.removing(name))
        except (Unavailable, MemoryError) as error:
            if self._loop:
                self._loop.call_soon_threadsafe(self.notifier.remove, name)
            log.warning("cannot remove %s from the store now: %s", name, explain(error))

    def replace(self, name: str, descriptor: int) -> None:
        """Store a descriptor in place of those with its name. Raises as :meth:`hold`."""
        self._manager.say(sd_notify.removing(name))
        self.hold(name, [descriptor])

    def take(self, name: str) -> list[int]:
        """Return the descriptors that an earlier broker stored under a name; the caller closes these duplicates."""
        return self._left.pop(name, [])

    def sweep(self) -> None:
        """Close and drop the names that were not taken: their pool or session has ended. For the event loop only."""
        for name in list(self._left):
            log.info("dropping %s from the store: its pool or session has ended", name)
            self.notifier.remove(name)
            close_all(self._left.pop(name))


# -- the journal ---------------------------------------------------------------------------------------


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
