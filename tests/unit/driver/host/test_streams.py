"""Events of host devices between processes: they exist while their maker lives and has not closed them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Context, Driver, DriverError, Event
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.other_process import OtherProcess
from tests.unit.server.processes import files

GONE = "CUDA_ERROR_INVALID_HANDLE"


@pytest.fixture
def maker() -> Iterator[OtherProcess]:
    """A process whose events this one opens; it may be ended."""
    with OtherProcess(SPEC) as maker:
        yield maker


def offer(maker: OtherProcess) -> tuple[int, bytes]:
    number = maker.ask("make_event")
    handle = maker.ask("export_event", number)
    assert isinstance(handle, bytes)
    return number, handle


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads come in anywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def until_refused(event: Event) -> str:
    """Ask whether an event is done until there is an error; return its name."""
    try:
        while event.done():
            pass
    except DriverError as error:
        return error.name
    return "not done"


@pytest.mark.parametrize("end", ["closed", "died"])
def test_an_event_ends_with_its_maker_and_can_still_be_closed(context: Context, maker: OtherProcess, end: str) -> None:
    number, handle = offer(maker)
    before = files(os.getpid())
    with context.open_event(handle) as event, context.stream() as stream:
        assert event.done()
        if end == "closed":
            maker.ask("close_event", number)
        else:
            maker.kill()
        for use in (event.done, event.wait, lambda: stream.wait(event), lambda: stream.record(event)):
            with pytest.raises(DriverError, match=GONE):
                use()
        with pytest.raises(DriverError, match=GONE):
            context.open_event(handle)
    assert files(os.getpid()) <= before


def test_an_event_that_was_opened_is_not_handed_on(context: Context, maker: OtherProcess) -> None:
    with context.open_event(offer(maker)[1]) as event, pytest.raises(DriverError, match=GONE):
        event.export()


def test_events_and_memory_have_handles_of_their_own(context: Context, maker: OtherProcess) -> None:
    before = files(os.getpid())
    with pytest.raises(DriverError, match="cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE"):
        context.open(offer(maker)[1])
    memory = maker.ask("export", maker.ask("allocate", BLOCK))
    with pytest.raises(DriverError, match=f"cuIpcOpenEventHandle failed with {GONE}"):
        context.open_event(memory)
    assert files(os.getpid()) <= before


def test_closing_the_driver_ends_its_events(driver: Driver, context: Context, maker: OtherProcess) -> None:
    before = files(os.getpid())
    handle = context.event(shared=True).export()
    theirs = maker.ask("open_event", handle)
    context.open_event(offer(maker)[1])
    driver.close()
    assert files(os.getpid()) <= before
    with pytest.raises(DriverError, match=GONE):
        maker.ask("event_done", theirs)


def test_a_forked_child_does_not_keep_an_event_alive(context: Context, maker: OtherProcess) -> None:
    """The parent's end of the pipe is closed in the child, which outlives it."""
    number, handle = offer(maker)
    with context.open_event(handle) as event:
        child = maker.ask("fork_and_stay")
        maker.ask("close_event", number)
        with pytest.raises(DriverError, match=GONE):
            event.done()
        maker.ask("end_child", child)


@pytest.mark.slow
def test_an_event_is_there_or_gone_for_a_thread_that_asks_while_another_closes_it(
    context: Context, maker: OtherProcess, switching: None
) -> None:
    handle = offer(maker)[1]
    asked: list[str] = []
    for _ in range(300):
        event = context.open_event(handle)
        asking = threading.Thread(target=lambda event=event: asked.append(until_refused(event)))
        asking.start()
        event.close()
        asking.join()
    assert asked == [GONE] * 300


def test_a_shareable_event_keeps_no_time() -> None:
    module = HostModule(1, BLOCK)
    module.cuInit(0)
    module.cuCtxPushCurrent(module.cuDevicePrimaryCtxRetain(0)[1])
    flags = cuda.CUevent_flags
    assert module.cuEventCreate(int(flags.CU_EVENT_INTERPROCESS))[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    event = module.cuEventCreate(flags.CU_EVENT_INTERPROCESS | flags.CU_EVENT_DISABLE_TIMING)[1]
    assert module.cuEventDestroy(event) == (cuda.CUresult.CUDA_SUCCESS,)
    assert module.cuEventDestroy(event) == (cuda.CUresult.CUDA_ERROR_INVALID_HANDLE,)
