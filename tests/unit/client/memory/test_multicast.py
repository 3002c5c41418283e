"""Driver calls that are given up, and objects that are mapped by such a call after all."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cubroker.client.memory.mapping import LeasedMemory
from cubroker.client.memory.multicast import AbandonableCall, MulticastMapping, Windows
from cubroker.driver import Context, DriverError, Window
from cubroker.protocol.errors import TimedOut, Unsupported
from cubroker.protocol.messages import Rebound, Team

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


NEWS = Rebound(0, (), TEAM)


def mapping(window: LateWindow) -> tuple[MulticastMapping, LeasedMemory, Windows]:
    """What a lease without any memory has mapped, which stores through a window."""
    receiver = SimpleNamespace(later=lambda lease, notice: False, close=lambda given: None)
    session: Any = SimpleNamespace(receiver=receiver, losses={}, timeout=0.0, check_may_wait=lambda: None, driver=None)
    memory = LeasedMemory("pool 'p' version 1", (), "multicast", readonly=False, finish=lambda: None)
    multicast = MulticastMapping(session, memory, ("p", 1), ())
    multicast.outlet = windows = Windows(cast(Context, None), [cast(Window, window)])
    return multicast, memory, windows


@pytest.mark.timeout(60)
def test_an_object_that_is_mapped_late_gives_way_to_that_of_the_next_broker() -> None:
    window = LateWindow()
    multicast, memory, windows = mapping(window)
    first = threading.Thread(target=lambda: multicast.rebound(NEWS, (1,)))
    first.start()
    assert window.begun.wait(60)
    multicast.give_up()
    first.join()
    with pytest.raises(TimedOut, match="not bound together again"):
        multicast.usable(lambda: memory)
    multicast.rebound(NEWS, (2,))
    assert multicast.usable(lambda: memory) is windows
    assert window.held == 2


def test_nothing_is_mapped_any_more_into_addresses_that_were_given_back() -> None:
    window = LateWindow()
    window.told.set()
    window.done.set()
    multicast, memory, _ = mapping(window)
    multicast.close()
    multicast.rebound(NEWS, (2,))
    assert window.held is None
    del memory  # which was there all the time


def test_what_a_call_raises_is_raised_and_what_returns_is_over() -> None:
    done = []
    abandonable = AbandonableCall(lambda: done.append(threading.current_thread().name))
    assert abandonable.run()
    abandonable.give_up()  # too late
    assert done == ["cubroker-call"]
    with pytest.raises(ValueError, match="no"):
        AbandonableCall(lambda: int("no")).run()  # type: ignore[arg-type]

    def fail() -> None:
        raise DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")

    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        AbandonableCall(fail).run()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [MemoryError("none is left"), KeyError("of a bug")], ids=repr)
def test_an_error_of_any_type_ends_the_wait_for_a_call(error: Exception) -> None:
    def fail() -> None:
        raise error

    call = AbandonableCall(fail)
    with pytest.raises(type(error), match=str(error.args[0])):
        call.run()
    assert call.returned.is_set()


def test_a_process_without_memory_for_a_new_object_stores_no_more_and_says_so() -> None:
    window = LateWindow()
    multicast, memory, _ = mapping(window)

    def fail(source: int) -> None:
        raise MemoryError

    window.map = fail  # type: ignore[method-assign]
    multicast.rebound(NEWS, (2,))
    with pytest.raises(Unsupported, match=r"this process has no memory left.*attach again"):
        multicast.usable(lambda: memory)


def test_a_call_that_is_given_up_holds_nobody_up() -> None:
    begun, release = threading.Event(), threading.Event()
    over: list[threading.Thread] = []

    def call() -> None:
        over.append(threading.current_thread())
        begun.set()
        release.wait()

    abandonable = AbandonableCall(call)
    giver = threading.Thread(target=lambda: begun.wait() and abandonable.give_up())
    giver.start()
    assert not abandonable.run()
    release.set()
    for thread in (giver, *over):
        thread.join()
    never = AbandonableCall(over.clear)
    never.give_up()
    assert not never.run()
    assert over, "it was not even begun"


def test_where_threads_have_run_out_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert AbandonableCall(lambda: done.append(threading.current_thread())).run()
    assert done == [threading.current_thread()]


WITHOUT_MEMORY = """
import resource
from pathlib import Path
from threading import current_thread, main_thread

from cubroker.client.memory.multicast import AbandonableCall

done = []
call = AbandonableCall(lambda: done.append(current_thread()))
stack = 8 << 20
resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
pages = int(Path("/proc/self/statm").read_text().split()[0]) + 3
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + stack,) * 2)
assert call.run()
assert done == [main_thread()]
"""


def test_where_a_thread_has_no_memory_beyond_its_stack_the_call_is_made_here() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], check=True, timeout=60)
