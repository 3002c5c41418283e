"""Objects that are mapped late, by a driver call that nobody waits for any more, keep no others from being mapped."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from cubroker.client.broadcast import Unbound, Windows
from cubroker.client.mapping import Mapped
from cubroker.client.reach import Offer, Reach
from cubroker.driver import Context, DriverError, Window
from cubroker.protocol.messages import Team

TEAM = Team("multicast", "", (100,))


class LateWindow:
    """Addresses at which one object can be mapped; the object 1 is there only when it is told to be."""

    nbytes, pointer = 100, 0

    def __init__(self) -> None:
        self.mapped = False
        self.held: int | None = None
        self.begun, self.told, self.done = (threading.Event() for _ in range(3))

    def map(self, source: int) -> None:
        if source == 1:
            self.begun.set()
            assert self.told.wait(60)
        elif not self.told.is_set():
            self.told.set()  # the driver goes on with the first in the very moment of the second
            assert self.done.wait(60)
        if self.held is not None:
            raise DriverError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE")
        self.held, self.mapped = source, True
        self.done.set()

    def unmap(self) -> None:
        self.held, self.mapped = None, False


def offer(source: int) -> Offer:
    return Offer(TEAM, (), (source,), lambda: False)


@pytest.mark.timeout(60)
def test_an_object_that_is_mapped_late_gives_way_to_that_of_the_next_broker() -> None:
    window = LateWindow()
    windows = Windows(cast(Context, None), [cast(Window, window)])
    reach = Reach(None, (), ())  # type: ignore[arg-type]
    outlets: list[object] = []
    first = threading.Thread(target=lambda: outlets.append(reach._bind(windows, offer(1))))
    first.start()
    assert window.begun.wait(60)
    reach.give_up()
    first.join()
    assert isinstance(outlets[0], Unbound)
    assert reach._bind(windows, offer(2)) is windows
    assert window.held == 2


def test_nothing_is_mapped_any_more_into_addresses_that_were_given_back() -> None:
    window = LateWindow()
    window.told.set()
    window.done.set()
    outlet = Windows(cast(Context, None), [cast(Window, window)])
    mapped = cast(Mapped, SimpleNamespace(outlet=outlet, asleep=False, holder=lambda: None))
    reach = Reach(None, (), ())  # type: ignore[arg-type]
    reach.close()
    assert reach.replace(mapped, offer(2)) is None
    assert window.held is None
