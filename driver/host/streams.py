"""Streams, graph captures and events of host devices.

Streams are always finished, since every call does its work before it returns. A GPU's driver records the work of a
captured stream instead of doing it, and forbids calls that a replay could not repeat. Host devices record nothing, and
the graphs cannot be launched. They imitate the prohibitions that one H200 showed (driver 580.159, CUDA 13.0), so that a
call which would end a capture on a GPU ends it here too:

| call, during a capture | threads that may make it |
| --- | --- |
| cuCtxSynchronize | none, in any mode |
| allocating and freeing; waiting for or querying a stream or an event | those that their mode and the capture's allow |
| anything in the legacy default stream | all, unless the captured stream is a blocking one |
| all others | all |

A forbidden call is refused, and ends the captures that forbid it.

Processes that share an event share only whether it exists. Its maker keeps a pipe open for writing, and processes that
opened its handle hold the reading end, which hangs up once the event was destroyed or its maker has ended. Using the
event then is undefined on GPUs; here it is refused.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.buffers import handle_bytes, handle_of
from cubroker.driver.host import shared_memory
from cubroker.driver.host.devices import DeviceFunctions, Refusal, Result, answers, check
from cubroker.driver.host.shared_memory import SharedFd

_DISABLE_TIMING = 2
_INTERPROCESS = 4
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

_Mode = cuda.CUstreamCaptureMode
_GLOBAL = _Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
_RELAXED = _Mode.CU_STREAM_CAPTURE_MODE_RELAXED
_Status = cuda.CUstreamCaptureStatus


@dataclass
class _Capture:
    #: The thread that began it.
    thread: int
    mode: Any
    #: Whether its stream is a blocking one.
    blocking: bool
    #: Whether no forbidden call has ended it.
    intact: bool = True


class StreamFunctions(DeviceFunctions):
    """Streams and graphs by number; one that is unknown is refused.

    Number 0 is the legacy default stream, which always exists and waits for all blocking streams.
    """

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._blocking: dict[int, bool] = {}  # whether each stream is a blocking one
        self._captures: dict[int, _Capture] = {}
        self._graphs: set[int] = set()

    @answers(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        self.current()
        number = next(self.numbers)
        self._blocking[number] = not int(Flags) & _NON_BLOCKING
        return cuda.CUstream(number)

    @answers(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        self._check_joins(self._check_stream(hStream), Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self.check_unsafe()

    @answers(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        number = self._check_stream(hStream)
        check(number, Result.CUDA_ERROR_INVALID_HANDLE)
        with self.lock:
            del self._blocking[number]
            self._captures.pop(number, None)

    @answers(0)
    def cuCtxSynchronize(self) -> None:
        self.current()
        self._refuse(self._intact(), Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    @answers(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before = self._mode
        self._thread.mode = _Mode(mode)
        return before

    @answers(0)
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        number = self._check_stream(hStream)
        with self.lock:
            check(number, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            check(number not in self._captures, Result.CUDA_ERROR_ILLEGAL_STATE)
            self._captures[number] = _Capture(threading.get_ident(), _Mode(mode), self._blocking[number])

    @answers(1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        with self.lock:
            capture = self._captures.get(int(hStream))
            if capture is None:
                raise Refusal(Result.CUDA_ERROR_ILLEGAL_STATE)
            ours = capture.mode == _RELAXED or capture.thread == threading.get_ident()
            check(ours, Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
            del self._captures[int(hStream)]
        check(capture.intact, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        self._graphs.add(number := next(self.numbers))
        return cuda.CUgraph(number)

    @answers(1)
    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        number = self._known(hStream)
        waits = not number and any(capture.blocking for capture in self._intact())
        check(not waits, Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        capture = self._captures.get(number)
        if capture is None:
            return _Status.CU_STREAM_CAPTURE_STATUS_NONE
        kind = "ACTIVE" if capture.intact else "INVALIDATED"
        return getattr(_Status, f"CU_STREAM_CAPTURE_STATUS_{kind}")

    @answers(0)
    def cuGraphDestroy(self, hGraph: Any) -> None:
        check(int(hGraph) in self._graphs)
        self._graphs.discard(int(hGraph))

    def check_unsafe(self) -> None:
        """Refuse a call that is unsafe during a capture, unless this thread's mode allows it."""
        mode, thread = self._mode, threading.get_ident()
        if mode == _RELAXED:
            return
        own = [each for each in self._intact() if each.thread == thread and each.mode != _RELAXED]
        others = [each for each in self._intact() if each.mode == _GLOBAL and mode == _GLOBAL]
        self._refuse([*own, *others], Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def records(self, stream: Any) -> bool:
        """Whether work in a stream is recorded instead of done; refused if a forbidden call has ended the capture."""
        capture = self._captures.get(self._check_stream(stream))
        check(capture is None or capture.intact, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return capture is not None

    def _check_joins(self, stream: int, reason: Any) -> None:
        """Refuse to have a captured stream wait for work outside of its capture."""
        if capture := self._captures.get(stream):
            self._refuse([capture], reason)

    def _check_stream(self, stream: Any) -> int:
        """Return the number of a stream; refuse the default one if it would have to wait for captured work."""
        number = self._known(stream)
        if not number:
            blocking = [capture for capture in self._intact() if capture.blocking]
            self._refuse(blocking, Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return number

    def _known(self, stream: Any) -> int:
        number = int(stream)
        check(not number or number in self._blocking, Result.CUDA_ERROR_INVALID_HANDLE)
        return number

    @property
    def _mode(self) -> Any:
        return getattr(self._thread, "mode", _GLOBAL)

    def _intact(self) -> list[_Capture]:
        with self.lock:
            return [capture for capture in self._captures.values() if capture.intact]

    def _refuse(self, forbidding: list[_Capture], reason: Any) -> None:
        """Refuse a call, and end the captures that forbid it, if there are any."""
        for capture in forbidding:
            capture.intact = False
        check(not forbidding, reason)


@dataclass(eq=False)
class _Event:
    device: int
    shareable: bool = False
    #: Whether another process made it.
    opened: bool = False
    #: The pipe's ends: both of an exported event, the reading one of an opened event.
    fds: tuple[int, ...] = ()
    #: The handle that other processes open it with; empty until it is exported.
    handle: bytes = field(default=b"", repr=False)

    def exists(self) -> bool:
        if not self.opened:
            return True
        poll = select.poll()
        poll.register(self.fds[0], 0)  # a hang-up is always reported
        return not poll.poll(0)


class EventFunctions(StreamFunctions):
    """Events by number; one that is unknown, or was destroyed or lost with its maker, is refused."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._events: dict[int, _Event] = {}

    @answers(1)
    def cuEventCreate(self, Flags: int) -> Any:
        device = self.current()
        shareable = bool(Flags & _INTERPROCESS)
        check(not shareable or Flags & _DISABLE_TIMING)
        return self._enter(_Event(device, shareable))

    @answers(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        shareable = self._check_event(hEvent)
        refused = self.records(hStream) and shareable  # the capture goes on
        check(not refused, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    @answers(0)
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        number = self._check_stream(hStream)
        kind = "UNSUPPORTED" if self._check_event(hEvent) else "ISOLATION"
        self._check_joins(number, getattr(Result, f"CUDA_ERROR_STREAM_CAPTURE_{kind}"))

    @answers(0)
    def cuEventQuery(self, hEvent: Any) -> None:
        self.check_unsafe()
        self._check_event(hEvent)

    cuEventSynchronize = cuEventQuery

    @answers(0)
    def cuEventDestroy(self, hEvent: Any) -> None:
        with self.lock:
            check(int(hEvent) in self._events, Result.CUDA_ERROR_INVALID_HANDLE)
            self._end(int(hEvent))

    @answers(1)
    def cuIpcGetEventHandle(self, event: Any) -> Any:
        with self.lock:
            known = self._events.get(int(event))
            if known is None or not known.shareable:
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            if not known.fds:
                with shared_memory.fork_lock() as ours:
                    known.fds = os.pipe()
                    ours.update(known.fds)
            if not known.handle:
                known.handle = self.shared.share(SharedFd(known.fds[0], known.device))
        return handle_of(cuda.CUipcEventHandle(), known.handle, "a handle")

    @answers(1)
    def cuIpcOpenEventHandle(self, handle: Any) -> Any:
        device = self.current()
        raw = handle_bytes(handle)
        with self.lock:
            ours = any(event.handle == raw for event in self._events.values())
            check(not ours, Result.CUDA_ERROR_INVALID_CONTEXT)
        try:
            shared = shared_memory.fetch(raw)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE) from None
        try:
            check(stat.S_ISFIFO(os.fstat(shared.fd).st_mode), Result.CUDA_ERROR_INVALID_HANDLE)  # else it is of memory
            check(self.reaches(device, shared.device), Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        except Refusal:
            shared_memory.close(shared.fd)
            raise
        return self._enter(_Event(device, opened=True, fds=(shared.fd,)))

    def destroy(self, device: int) -> None:
        """End the events of a context too."""
        super().destroy(device)
        for number in [number for number, event in self._events.items() if event.device == device]:
            self._end(number)

    def _check_event(self, event: Any) -> bool:
        """Refuse an event that is gone; return whether processes can share it."""
        with self.lock:
            known = self._events.get(int(event))
            if known is None or not known.exists():
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            return known.shareable or known.opened

    def _enter(self, event: _Event) -> Any:
        number = next(self.numbers)
        with self.lock:
            self._events[number] = event
        return cuda.CUevent(number)

    def _end(self, number: int) -> None:
        event = self._events.pop(number)
        self.shared.withdraw(event.handle)
        shared_memory.close(*event.fds)
