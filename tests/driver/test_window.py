"""Windows into which the driver maps late: whoever asked for it did not wait, and has given the addresses back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cubroker.driver import Driver, Window, load
from cubroker.driver.host import BLOCK
from cubroker.driver.vmm import Reservation

TIMEOUT = 60.0


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = load("host:2")
    yield driver
    driver.close()


def test_addresses_into_which_something_is_still_mapped_late_are_nobody_elses(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told, really = threading.Event(), threading.Event(), Reservation.map

    def late(window: Window, source: int, *, readonly: bool) -> None:
        begun.set()
        assert told.wait(TIMEOUT)
        really(window, source, readonly=readonly)

    with driver.multicast((0, 1), BLOCK) as team, ThreadPoolExecutor(1) as threads:
        descriptor = team.export()
        try:
            window = driver.context(0).window(team.nbytes)
            with monkeypatch.context() as patched:
                patched.setattr(Reservation, "map", late)
                mapping = threads.submit(window.map, descriptor)
                assert begun.wait(TIMEOUT)
            window.close()
            with driver.context(0).window(team.nbytes) as other:
                told.set()
                mapping.result(TIMEOUT)
                assert other.pointer != window.pointer
                assert not window.mapped
                other.map(descriptor)
            with driver.context(0).window(team.nbytes) as again:  # what was given back late is there again
                again.map(descriptor)
        finally:
            told.set()
            os.close(descriptor)
