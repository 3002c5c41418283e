"""An event loop for tests that drive a part of the broker in their own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

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


class Planned(NamedTuple):
    """What a loop is to call at some time."""

    handle: asyncio.TimerHandle
    call: Callable[..., object]
    args: tuple[object, ...]

    @property
    def left(self) -> float:
        """Seconds until it is called; none if that is over or cancelled."""
        now = asyncio.get_running_loop().time()
        return 0.0 if self.handle.cancelled() else max(0.0, self.handle.when() - now)


def plans() -> list[Planned]:
    """Return what the running loop is told from now on to call at some time."""
    loop, found = asyncio.get_running_loop(), list[Planned]()
    plan = loop.call_at

    def noting(when: float, call: Callable[..., object], *args: Any, **options: Any) -> asyncio.TimerHandle:
        handle = plan(when, call, *args, **options)
        found.append(Planned(handle, call, args))
        return handle

    loop.call_at = noting  # type: ignore[method-assign]
    return found


class Recorder:
    """A queue, and the events that were put into it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.queue = EventQueue()
        self.queue.attach(self.step)

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


class Checks:
    """Counts how often a check of what processes have mapped is to be made soon, and makes none."""

    def __init__(self) -> None:
        self.wanted = 0

    def joined(self, uid: int) -> None:
        """Note that a user has a session."""

    def soon(self) -> None:
        """Count a check."""
        self.wanted += 1

    def stop(self) -> None:
        """Nothing runs."""
