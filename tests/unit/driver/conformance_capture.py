"""What every driver does while somebody captures a stream, and what cubroker's own calls then do: nothing to it.

The rules are those that one H200 showed (driver 580.159, CUDA 13.0).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.kernels import digest
from tests.unit.driver.conformance import BLOCK, refused
from tests.unit.driver.other_process import OtherProcess

UNSUPPORTED = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
IMPLICIT = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
INVALIDATED = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
PAGE = 4096


class Capture:
    """A stream that is captured, and memory that the captured work writes."""

    def __init__(self, context: Context, mode: str, flags: int) -> None:
        self.context = context
        self.calls = context.calls
        self._target = int(self.calls.cuMemAlloc(PAGE))
        self.stream = self.calls.cuStreamCreate(flags)
        modes = self.calls.module.CUstreamCaptureMode
        self.calls.cuStreamBeginCapture(self.stream, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))
        self.add()

    def add(self) -> None:
        """Have one more piece of work captured."""
        self.calls.cuMemsetD8Async(self._target, 1, PAGE, self.stream)

    def finish(self) -> None:
        """Capture some more, and end; raises ``DriverError`` if the capture is broken."""
        self.add()
        self.calls.cuGraphDestroy(self.calls.cuStreamEndCapture(self.stream))

    def close(self) -> None:
        """Give everything back."""
        with suppress(DriverError):  # it was ended, or is broken
            self.calls.cuGraphDestroy(self.calls.cuStreamEndCapture(self.stream))
        self.calls.cuStreamDestroy(self.stream)
        self.calls.cuMemFree(self._target)


def flags(context: Context, name: str) -> int:
    return int(getattr(context.calls.module.CUstream_flags, f"CU_STREAM_{name}"))


@contextmanager
def capturing(context: Context, mode: str, stream: str) -> Iterator[Capture]:
    """Capture a stream as an engine does: the context is current, and the thread's capture mode as it was."""
    context.calls.cuCtxPushCurrent(context.handle)
    try:
        capture = Capture(context, mode, flags(context, stream))
        try:
            yield capture
        finally:
            capture.close()
    finally:
        context.calls.cuCtxPopCurrent()


@pytest.fixture(params=["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["NON_BLOCKING", "DEFAULT"])
def capture(context: Context, mode: str, request: pytest.FixtureRequest) -> Iterator[Capture]:
    with capturing(context, mode, request.param) as capture:
        yield capture


def elsewhere(call: Callable[[], object]) -> None:
    """Make a call on a thread of its own, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  whatever it is, the test's own thread raises it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


HERE: tuple[Callable[[Callable[[], object]], object], ...] = (lambda call: call(), elsewhere)
"""Ways to make a call: on the thread that captures, and on another."""


# -- what our own calls do: nothing --------------------------------------------------------------------


def copies(context: Context) -> None:
    pointer = context.allocate(BLOCK)
    context.clear(pointer, BLOCK)
    context.write(pointer, b"captured or not")
    assert context.read(pointer, 15) == b"captured or not"
    context.synchronize()
    context.free(pointer)


def streams(context: Context) -> None:
    with context.pin(PAGE) as pinned, context.stream() as stream, context.event() as event:
        pointer = context.allocate(BLOCK)
        pinned.view[:4] = b"ring"
        stream.copy_in(pointer, pinned.pointer, PAGE)
        stream.copy(pointer + PAGE, pointer, PAGE)
        stream.record(event)
        event.wait()
        assert event.done()
        stream.wait(event)
        stream.synchronize()
        assert context.read(pointer + PAGE, 4) == b"ring"
        context.free(pointer)


def events(context: Context) -> None:
    with context.event(shared=True) as event, context.stream() as stream:
        event.export()
        event.record(stream.handle)
        event.hold(stream.handle)
        event.wait()


def exports(context: Context) -> None:
    pointer = context.allocate(BLOCK)
    context.export(pointer)
    context.memory()
    context.free(pointer)


def digests(context: Context) -> None:
    pointer = context.allocate(BLOCK)
    context.clear(pointer, BLOCK)
    assert context.digests([(pointer, BLOCK)]) == [digest(bytes(BLOCK))]
    context.free(pointer)


@pytest.mark.parametrize("calls", [copies, streams, events, exports, digests])
@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_no_call_of_a_context_ends_a_capture(
    capture: Capture, calls: Callable[[Context], None], make: Callable[[Callable[[], object]], object]
) -> None:
    make(lambda: calls(capture.context))
    capture.finish()


@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_memory_by_descriptor_is_mapped_and_unmapped_during_a_capture(
    driver: Driver, capture: Capture, make: Callable[[Callable[[], object]], object]
) -> None:
    context = capture.context
    nbytes = driver.granularity(context.device.index)

    def map_and_unmap() -> None:
        physical = driver.create(context.device.index, nbytes)
        with context.reserve(nbytes) as reservation, open(physical.export(), "rb") as file:
            reservation.map(file.fileno(), readonly=False)
            reservation.unmap()
            reservation.map(file.fileno(), readonly=True)
        physical.release()

    make(map_and_unmap)
    capture.finish()


@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_another_processs_memory_and_events_are_opened_and_closed_during_a_capture(
    capture: Capture, other_process: OtherProcess, make: Callable[[Callable[[], object]], object]
) -> None:
    pointer, number = other_process.ask("allocate", BLOCK), other_process.ask("make_event")
    other_process.ask("write", pointer, b"theirs")
    handle, made = other_process.ask("export", pointer), other_process.ask("export_event", number)
    context = capture.context

    def open_and_close() -> None:
        opened = context.open(handle)
        assert context.read(opened, 6) == b"theirs"
        context.close(opened)
        with context.open_event(made) as event, context.stream() as stream:
            event.hold(stream.handle)

    make(open_and_close)
    capture.finish()
    other_process.ask("close_event", number)
    other_process.ask("free", pointer)


def test_a_full_device_can_still_be_waited_for_during_a_capture(capture: Capture) -> None:
    context, taken, size = capture.context, list[int](), 1 << 36
    try:
        while size:
            try:
                taken.append(context.allocate(size))
            except DriverError as error:
                size //= 2
                full = error.out_of_memory
        assert full
        context.synchronize()
        capture.finish()
    finally:
        for pointer in taken:
            context.free(pointer)


def test_the_thread_has_its_own_capture_mode_again(context: Context) -> None:
    modes = context.calls.module.CUstreamCaptureMode
    local = modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    before = context.calls.cuThreadExchangeStreamCaptureMode(local)
    try:
        with refused("CUDA_ERROR_INVALID_VALUE"), context.current():
            context.free(1)
    finally:
        assert context.calls.cuThreadExchangeStreamCaptureMode(before) == local


def test_an_event_is_not_recorded_into_a_capture_nor_waited_for_in_it(capture: Capture) -> None:
    with capture.context.event(shared=True) as event:
        for call in (event.record, event.hold):
            with refused("an event that processes share has no place in a graph"):
                call(int(capture.stream))
    capture.finish()


def test_an_event_in_the_default_stream_is_refused_while_a_blocking_stream_is_captured(
    context: Context, mode: str
) -> None:
    with capturing(context, mode, "DEFAULT") as capture, context.event(shared=True) as event:
        for call in (event.record, event.hold):
            with refused("the default stream waits for all blocking streams: name another stream"):
                call(0)
        capture.finish()
    with capturing(context, mode, "NON_BLOCKING") as capture, context.event(shared=True) as event:
        event.record()
        event.hold(0)
        capture.finish()


# -- what the driver's calls do by themselves --------------------------------------------------------


def unsafe(context: Context) -> dict[str, Callable[[], object]]:
    """Calls that a capture forbids to a thread in the default mode, by name; each leaves nothing if it is refused."""
    calls = context.calls
    stream, event = calls.cuStreamCreate(flags(context, "NON_BLOCKING")), calls.cuEventCreate(2)
    return {
        "cuMemAlloc": lambda: calls.cuMemAlloc(512),
        "cuMemHostAlloc": lambda: calls.cuMemHostAlloc(PAGE, 0),
        "cuStreamSynchronize": lambda: calls.cuStreamSynchronize(stream),
        "cuEventQuery": lambda: calls.cuEventQuery(event),
        "cuEventSynchronize": lambda: calls.cuEventSynchronize(event),
    }


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize"]
)
@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_what_waits_or_allocates_ends_a_capture_unless_a_mode_lets_it(
    context: Context, mode: str, call: str, make: Callable[[Callable[[], object]], object]
) -> None:
    def run() -> None:
        context.calls.cuCtxPushCurrent(context.handle)
        try:
            calls[call]()
        finally:
            context.calls.cuCtxPopCurrent()

    with context.current():
        calls = unsafe(context)
    with capturing(context, mode, "NON_BLOCKING") as capture:
        if mode == "RELAXED" or (mode == "THREAD_LOCAL" and make is elsewhere):
            make(run)
            capture.finish()
        else:
            with refused(UNSUPPORTED):
                make(run)
            with refused(INVALIDATED):
                capture.finish()


def test_synchronizing_the_context_ends_every_capture(capture: Capture) -> None:
    with refused(UNSUPPORTED), capture.context.current():
        capture.calls.cuCtxSynchronize()
    with refused(INVALIDATED):
        capture.finish()


@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_a_synchronous_copy_ends_a_capture_of_a_blocking_stream(
    context: Context, mode: str, make: Callable[[Callable[[], object]], object]
) -> None:
    pointer = context.allocate(BLOCK)

    def copy() -> None:
        with context.current():
            context.calls.cuMemsetD8(pointer, 0, 1)

    with capturing(context, mode, "NON_BLOCKING") as capture:
        make(copy)
        capture.finish()
    with capturing(context, mode, "DEFAULT") as capture:
        with refused(IMPLICIT):
            make(copy)
        with refused(INVALIDATED):
            capture.finish()
    context.free(pointer)


def test_a_shared_event_ends_no_capture_when_recorded_but_does_when_waited_for(capture: Capture) -> None:
    calls: Any = capture.calls
    with capture.context.event(shared=True) as event, capture.context.stream() as stream:
        event.record(stream.handle)
        with refused(UNSUPPORTED):
            calls.cuEventRecord(event.handle, capture.stream)
        capture.add()
        with refused(UNSUPPORTED):
            calls.cuStreamWaitEvent(capture.stream, event.handle, 0)
        with refused(INVALIDATED):
            capture.finish()
