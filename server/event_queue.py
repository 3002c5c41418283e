"""The broker's one queue of events, for the ledger and for the stages around it.

Each source (a device thread, the gateway, a session, the listener, a timer, the store, the journal) has a reference to
the queue and puts events into it. The broker takes one at a time (:meth:`cubroker.server.broker.Broker.step`). No
source knows the broker. No stage of the broker calls back into an earlier one: an outcome is another event.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cubroker.server.ledger.events import LedgerEvent, ProcessMemory
from cubroker.server.store.store import StoreReplied
from cubroker.server.transport.unix_sockets import Peer


class BatchReceived(NamedTuple):
    """The gateway forwarded requests, or can take replies again."""

    #: Routing id and frame of each. They end early once the gateway is too far behind with replies; another event has
    #: the rest.
    requests: Iterable[tuple[bytes, bytes]]


class GatewayStarted(NamedTuple):
    """A new gateway listens in place of the one before, with which requests may have been lost."""


class ClientGreeted(NamedTuple):
    """A client asks for a session. The receiver owns the connection and the peer's pidfd."""

    connection: socket.socket
    peer: Peer
    #: The protocol version that both sides speak.
    version: int
    #: Whether the client wants no session, only to know whether the broker serves.
    ping: bool = False


class Restored(NamedTuple):
    """The broker has taken over what an earlier one left."""

    #: What happened while no broker ran.
    news: Sequence[LedgerEvent]


class FdsDelivered(NamedTuple):
    """All descriptors of a lease were sent."""

    lease: int


class JournalRetryDue(NamedTuple):
    """The journal had no room; it is time to try again."""


class TurnDue(NamedTuple):
    """The event loop has time for the next step of expensive requests."""


class MappedCheckDue(NamedTuple):
    """It is time to compare what processes have mapped with their leases."""


class MappedCheckDone(NamedTuple):
    """The check of what processes have mapped is done."""

    #: Process id and user of each process that had a session when the check began.
    clients: frozenset[tuple[int, int]]
    found: tuple[ProcessMemory, ...]
    #: Seconds that the check took.
    seconds: float


Event = (
    LedgerEvent
    | BatchReceived
    | GatewayStarted
    | ClientGreeted
    | Restored
    | FdsDelivered
    | StoreReplied
    | JournalRetryDue
    | TurnDue
    | MappedCheckDue
    | MappedCheckDone
)


class EventQueue:
    """The events of one event loop, in the order in which they were put.

    A :meth:`put` outside a step starts a step immediately, so a batch of requests does not wait for another round of
    the loop. Events that are put during a step wait for its end. Events that are put before :meth:`attach` wait for it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Event] = deque()
        self._step: Callable[[Event], None] | None = None
        self._stepping = False

    def attach(self, step: Callable[[Event], None]) -> None:
        """Pass all events to ``step`` from now on, first those that wait; it handles one completely, then returns."""
        self._step = step
        self.put()

    def put(self, *events: Event) -> None:
        """Add events. Only the event loop's thread may call this."""
        self._waiting.extend(events)
        if self._stepping or self._step is None:
            return
        self._stepping = True
        try:
            while self._waiting:
                self._step(self._waiting.popleft())
        finally:
            self._stepping = False
            if self._waiting:  # a step raised; the events that wait must still be handled
                self._loop.call_soon(self.put)

    def put_threadsafe(self, event: Event) -> None:
        """Add an event in the loop's next round. Any thread may call this."""
        self._loop.call_soon_threadsafe(self.put, event)
