"""An event loop for tests that drive a part of the broker in their own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cubroker.server.event_queue import Event, EventQueue
from cubroker.server.transport import framing
from cubroker.server.transport.framing import Part
from tests.brokers import PATIENCE


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own, for as long as a test may take."""
    asyncio.run(asyncio.wait_for(test, PATIENCE))


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until ``condition()`` is true; :func:`run` bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


class Recorder:
    """A queue, and the events that were put into it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.queue = EventQueue()
        self.queue.attach(self)

    def step(self, event: Event) -> None:
        """Note an event."""
        self.events.append(event)


class Gateway:
    """Takes batches of replies, as a gateway process does."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.behind = False

    def send(self, frames: Sequence[Part]) -> bool:
        """Note a batch, as it travels; return whether the gateway is behind."""
        self.sent += framing.BatchDecoder().feed(framing.encode(frames)) if frames else []
        return self.behind

    def obstacle(self) -> str:
        """It listens."""
        return ""
