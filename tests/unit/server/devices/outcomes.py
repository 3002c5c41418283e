"""A queue without an event loop, for tests of the devices' threads."""

from __future__ import annotations

from queue import SimpleQueue

from cubroker.server.event_queue import Event, EventQueue
from tests.brokers import PATIENCE


class Outcomes(EventQueue):
    """What the threads put into the broker's queue waits here for the test."""

    def __init__(self) -> None:
        self._outcomes = SimpleQueue[Event]()

    def put_threadsafe(self, event: Event) -> None:
        """Add an event."""
        self._outcomes.put(event)

    def next(self) -> Event:
        """Return the next event."""
        return self._outcomes.get(timeout=PATIENCE)
