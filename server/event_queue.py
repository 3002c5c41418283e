"""Everything that happens to the broker, in one queue: what the ledger is told, and what the stages around it are told.

Each source (a device thread, the gateway, a session, the listener, a timer, the store, the journal) has the queue and
puts events into it. The broker takes one at a time (:meth:`cubroker.server.broker.Broker.step`). No source knows the
broker, and no stage of the broker calls back into an earlier one: what a stage learns later is another event.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from cubroker.server.ledger.events import LedgerEvent, ProcessMemory
from cubroker.server.store.fdstore import StoreReplied
from cubroker.server.transport.peer_credentials import Peer


class BatchReceived(NamedTuple):
    """The gateway brought requests, or can take replies again."""

    #: Routing ids and frames, alternating. The broker stops reading while the gateway is too far behind with replies;
    #: the rest comes with another event.
    frames: Iterable[bytes]


class GatewayStarted(NamedTuple):
    """A gateway that is not the broker's first listens; requests may have been lost with the one before."""


class ClientGreeted(NamedTuple):
    """A client asks for a session. The receiver owns the connection and the peer's pidfd."""

    connection: socket.socket
    peer: Peer
    #: The protocol version that both sides speak.
    version: int
    #: Whether it only asks whether the broker serves.
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
    """What processes have mapped was looked at."""

    #: Process id and user of each process that had a session when the check began.
    clients: frozenset[tuple[int, int]]
    found: tuple[ProcessMemory, ...]
    #: Seconds that the look took.
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


class Consumer(Protocol):
    """What takes the events: the broker."""

    def step(self, event: Event) -> None:
        """Take one event, and finish all that it leads to at once."""


class EventQueue:
    """The events of one event loop, in the order in which they were put.

    A :meth:`put` outside a step begins one at once: a batch of requests does not wait for another round of the loop.
    A :meth:`put` during a step waits for the end of that step. Before :meth:`attach` all events wait.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Event] = deque()
        self._consumer: Consumer | None = None
        self._stepping = False

    def attach(self, consumer: Consumer) -> None:
        """Have ``consumer`` take all events from now on, those that wait first."""
        self._consumer = consumer
        self.put()

    def put(self, *events: Event) -> None:
        """Add events. Only the event loop's thread may call this."""
        self._waiting.extend(events)
        if self._stepping or self._consumer is None:
            return
        self._stepping = True
        try:
            while self._waiting:
                self._consumer.step(self._waiting.popleft())
        finally:
            self._stepping = False
            if self._waiting:  # a step failed; the events of other sources still count
                self._loop.call_soon(self.put)

    def put_threadsafe(self, event: Event) -> None:
        """Add an event in the loop's next round. Any thread may call this."""
        self._loop.call_soon_threadsafe(self.put, event)
