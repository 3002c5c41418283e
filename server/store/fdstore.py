"""The descriptors that outlive the broker, the journal's among them: the service manager keeps them.

The event loop never waits for the manager: an :class:`AsyncNotifier` queues messages, in order, until there is room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cubroker.protocol.errors import CorruptJournal, Unavailable, explain
from cubroker.server.store import sd_notify
from cubroker.server.store.journal import Journal
from cubroker.server.store.sd_notify import Manager, close_all

log = logging.getLogger(__name__)

JOURNAL = "ledger"  #: The name under which the journal is stored.
MOST = 256  #: Names whose descriptors may wait to be stored, with about two duplicates each.
PAUSE = 0.05  #: Seconds between two attempts while the kernel does not report when there is room.

_OURS = re.compile(r"s[0-9]+|m[0-9]+\.[0-9]+")
"""The names of sessions and of memory, neither of which is stored before the journal."""


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

    def say(self, text: str, kind: str = "") -> None:
        """Send a message, which replaces a waiting one of the same ``kind``. Failures are logged."""
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
                loop.add_writer(self.manager, self._resume)
                self._waits = True  # last: without memory to wait, the next message has all of them sent
                return
        except OSError as error:
            log.debug("this user may watch no more files: %s", error)
        loop.call_later(PAUSE, self._resume)
        self._waits = True

    def _resume(self) -> None:
        asyncio.get_running_loop().remove_writer(self.manager)
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
        if len(journals) > 1:
            raise CorruptJournal(f"the store has {len(journals)} journals, and it is unknown which one is valid")
        if not journals and (orphans := sorted(filter(_OURS.fullmatch, self._left))):
            raise CorruptJournal(f"the store has no journal, so the owners of {', '.join(orphans[:8])} are unknown")
        self.inherited = bool(journals)  # whether an earlier broker left a journal
        #: That journal, or a new one. The caller closes it; it stays stored.
        self.journal = Journal.open(journals[0]) if journals else Journal.create()

    def begin(self) -> None:
        """Store the journal, unless it is stored, before anything that it names. Raises as :meth:`hold`."""
        if not self.inherited:
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
