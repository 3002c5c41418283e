"""The recipes' calls fit the real bindings, which check arguments before they look for libcuda."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver
import pytest

from cubroker.driver import Context, Driver, DriverError, checked_calls
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK
from cubroker.driver.host.virtual_memory import CHANNEL

BINDINGS = cuda.bindings.driver


@pytest.fixture(autouse=True)
def no_libcuda() -> None:
    try:
        BINDINGS.cuDriverGetVersion()
    except RuntimeError:
        return
    pytest.skip("with libcuda the calls would be real")


class Both:
    """The host driver, which also offers every call to the bindings first."""

    def __init__(self) -> None:
        self.host = HostModule(2, 8 * BLOCK)
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        ours = getattr(self.host, name)
        offered = name.startswith("cu") and not name.startswith(checked_calls.MULTICAST_PREFIX)  # those may be refused
        return self._both(name, ours) if offered else ours

    def _both(self, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with pytest.raises(RuntimeError, match="cuda"):  # not TypeError: the arguments are right
                getattr(BINDINGS, name)(*args)
            self.called.add(name)
            return ours(*args)

        return call


def use(context: Context) -> None:
    """Call every method of a context, a stream, an event and pinned memory."""
    pointer = context.allocate(BLOCK)
    context.clear(pointer, BLOCK)
    context.write(pointer, b"bytes")
    assert context.read(pointer, 5) == b"bytes"
    assert context.memory() == (7 * BLOCK, 8 * BLOCK)
    for call in (lambda: context.open(context.export(pointer)), lambda: context.close(pointer)):
        with pytest.raises(DriverError, match=r"cuIpc.* failed"):
            call()
    with context.pin(10) as pinned, context.stream() as stream, context.event() as event:
        stream.copy_in(pointer, pinned.pointer, 10)
        stream.record(event)
        event.wait()
        assert event.done()
        stream.wait(event)
        stream.copy(pointer, pointer + 10, 10)
    with context.event(shared=True) as event, pytest.raises(DriverError, match=r"cuIpcOpenEventHandle failed"):
        context.open_event(event.export())
    assert len(context.digests([(pointer, BLOCK)])) == 1
    context.synchronize()
    context.free(pointer)


def share(driver: Driver) -> None:
    """Create memory, export it and map it, by descriptor and by fabric handle."""
    physical = driver.create(0, driver.granularity(0), fabric=True)
    descriptor, handle = physical.export(), physical.export_fabric()
    assert handle
    for source in (descriptor, handle):
        with driver.context(0).reserve(physical.nbytes) as reservation:
            reservation.map(source, readonly=True)
    os.close(descriptor)
    physical.release()


def cast(driver: Driver) -> None:
    """Store to two devices at once; of this the bindings are offered all but the multicast functions."""
    with driver.multicast((0, 1), BLOCK) as team, driver.context(0).window(team.nbytes) as window:
        for index in (0, 1):
            team.bind(driver.create(index, BLOCK))
        descriptor = team.export()
        window.map(descriptor)
        os.close(descriptor)
        source = driver.context(0).allocate(BLOCK)
        window.broadcast(source, window.pointer, BLOCK)
        driver.context(0).free(source)


def link(driver: Driver) -> None:
    """Ask everything about two devices, and enable and disable access between them."""
    assert len(driver.peers.matrix()) == 2
    assert driver.peers.can_access(0, 1)
    assert driver.peers.atomics(0, 1)
    driver.peers.enable(driver.context(0), 1)
    driver.peers.disable(driver.context(0), 1)


def test_the_bindings_accept_what_the_recipes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNEL, "0")
    both = Both()
    driver = Driver(both, "host:2", host=True)
    use(driver.context(0))
    share(driver)
    link(driver)
    cast(driver)
    driver.close()
    assert len(both.called) > 30
    assert "cuLaunchKernel" in both.called
    assert not [name for name in both.called if name.startswith(checked_calls.MULTICAST_PREFIX)]


def test_every_function_of_the_host_driver_is_one_of_the_bindings() -> None:
    functions = [name for name in dir(HostModule) if name.startswith("cu") and name[2].isupper()]
    assert len(functions) > 30
    assert [name for name in functions if not hasattr(BINDINGS, name)] == []
