"""What outlives the broker: descriptors in the hands of the service manager, and the journal among them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from cubroker.protocol.errors import Unavailable
from cubroker.server.store.damaged import Damaged
from cubroker.server.store.journal import Journal
from cubroker.server.store.outbox import Done, Outbox

log = logging.getLogger(__name__)

JOURNAL = "ledger"
"""The name under which the journal is stored."""

_OURS = re.compile(r"s[0-9]+|m[0-9]+\.[0-9]+")
"""The names of sessions and of memory, neither of which is stored before the journal."""


class Store:
    """The descriptors that an earlier broker left, and those that a later one is to find.

    Sessions are stored and dropped from the event loop, which never waits for the manager; everything else from threads
    that may. No name is stored by both, so there is nothing for one to overtake; what a thread could not drop in time
    is dropped from the event loop.

    Args:
        outbox: leads to the service manager, which has room for descriptors.
        inherited: what it handed over, by name; owned by this object from now on, until it is taken.

    Attributes:
        limit: descriptors that the manager keeps.
        inherited: whether an earlier broker left a journal.

    Raises:
        Damaged: the journal cannot be read, is missing, or there are two. Everything stays stored.
    """

    def __init__(self, outbox: Outbox, inherited: Mapping[str, Sequence[int]]) -> None:
        assert outbox.manager.limit is not None
        self.limit = outbox.manager.limit
        self._outbox = outbox
        self._manager = outbox.manager
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = {name: list(descriptors) for name, descriptors in inherited.items()}
        journals = self._left.pop(JOURNAL, [])
        if len(journals) > 1:
            raise Damaged(f"the store has {len(journals)} journals, and nothing says which of them is true")
        if not journals and (orphans := sorted(filter(_OURS.fullmatch, self._left))):
            raise Damaged(f"the store has no journal, and nothing says whose {', '.join(orphans[:8])} may be")
        self.inherited = bool(journals)
        self._journal = Journal.open(journals[0]) if journals else Journal.create()

    def begin(self) -> None:
        """Store the journal, unless it is; before anything that is in it. Raises as :meth:`hold`."""
        if not self.inherited:
            self.hold(JOURNAL, [self._journal.descriptor])

    def attend(self) -> None:
        """Drop from the event loop that runs now what threads cannot drop; they end before it does."""
        self._loop = asyncio.get_running_loop()

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        """Return everything in the journal."""
        return self._journal.items()

    def commit(self, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write changes to the journal, all or none; None deletes. Raises ``OSError`` if it has no room."""
        self._journal.commit(changes)

    def hold(self, name: str, descriptors: Sequence[int]) -> None:
        """Store descriptors under a name. Any thread may; it waits while the manager has no room.

        Raises:
            Unavailable: the manager does not take them in time.
        """
        self._manager.store(name, descriptors, poll=False)

    def drop(self, name: str) -> None:
        """Store what has this name no longer; as :meth:`hold`.

        What cannot be said is logged, and said when there is room, or else dropped by the next broker, which finds it.
        """
        try:
            self._manager.remove(name)
        except Unavailable as error:
            log.warning("the store was not told to forget %s: %s", name, error.message)
            if self._loop:
                self._loop.call_soon_threadsafe(self.drop_soon, name)

    def hold_soon(self, name: str, descriptors: Sequence[int], done: Done) -> bool:
        """Store descriptors under a name until their other end is closed, from the event loop.

        Returns whether that is done; else ``done`` is called later, unless :meth:`drop_soon` is before. Raises as
        :meth:`Outbox.store`.
        """
        return self._outbox.store(name, descriptors, done)

    def drop_soon(self, name: str) -> None:
        """Store what has this name no longer, from the event loop; as :meth:`drop`."""
        self._outbox.remove(name)

    def replace(self, name: str, descriptor: int) -> None:
        """Store a descriptor in place of what has its name. Raises as :meth:`hold`."""
        self._manager.remove(name)
        self.hold(name, [descriptor])

    def take(self, name: str) -> list[int]:
        """Return what an earlier broker stored under a name, for the caller to close; it stays stored."""
        return self._left.pop(name, [])

    def close(self) -> None:
        """Close the journal here; everything stays stored."""
        self._journal.close()

    def sweep(self) -> None:
        """Close and drop what nobody took, from the event loop: it was to be freed, or its request never answered."""
        for name in list(self._left):
            log.info("the store has %s, which belongs to nothing any more; it is dropped", name)
            self.drop_soon(name)
            for descriptor in self._left.pop(name):
                os.close(descriptor)
