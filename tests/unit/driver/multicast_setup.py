"""A multicast object in use, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cubroker.driver import Context, Driver, Multicast, Window
from tests.unit.driver.conformance_vmm import GRANULE

TEXT = b"to all of them; "


@dataclass
class MulticastSetup:
    """A multicast object of both devices; on each, memory that is bound to it, and mapped here at ``places``."""

    team: Multicast
    contexts: list[Context]
    places: list[int]
    window: Window
    descriptor: int
    source: int

    def stored(self, offset: int = 0, nbytes: int = len(TEXT)) -> list[bytes]:
        """What each device has there."""
        return [context.read(place + offset, nbytes) for context, place in zip(self.contexts, self.places, strict=True)]


@contextmanager
def set_up_multicast(driver: Driver) -> Iterator[MulticastSetup]:
    """Make one, for as long as the block runs."""
    with ExitStack() as undo:
        contexts = [driver.context(index) for index in (0, 1)]
        source = contexts[0].allocate(GRANULE)
        undo.callback(contexts[0].free, source)
        team = undo.enter_context(driver.multicast((0, 1), GRANULE))
        places = [replicate(driver, team, context, undo) for context in contexts]
        descriptor = team.export()
        undo.callback(os.close, descriptor)
        window = undo.enter_context(contexts[0].window(team.nbytes))
        window.map(descriptor)
        contexts[0].write(source, TEXT)
        yield MulticastSetup(team, contexts, places, window, descriptor, source)


def replicate(driver: Driver, team: Multicast, context: Context, undo: ExitStack, offset: int = 0) -> int:
    """Bind new memory of a device and map it here; return its address."""
    physical = driver.create(context.device.index, GRANULE)
    descriptor = physical.export()
    team.bind(physical, offset=offset)
    reservation = undo.enter_context(context.reserve(GRANULE))
    reservation.map(descriptor, readonly=False)
    os.close(descriptor)
    return reservation.pointer
