"""The streams of host devices and their captures: what a capture forbids, and what a forbidden call does to it.

A GPU's driver records the work of a captured stream instead of doing it, and forbids calls that a replay could not
repeat. Host devices record nothing and replay nothing; they imitate the forbidding, as one H200 showed it (driver
580.159, CUDA 13.0), so that a call which would end somebody's capture on a GPU ends it here too.

| call, while a capture goes on | who may make it |
| --- | --- |
| cuCtxSynchronize | no thread, in any mode |
| allocating and freeing; waiting for or asking a stream or an event | a thread that its mode and the capture's let |
| anything in the legacy default stream | every thread, unless the captured stream is a blocking one |
| all others | every thread |

A forbidden call is refused, and ends the captures that forbid it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.answers import Refusal, Result

Mode = cuda.CUstreamCaptureMode
Status = cuda.CUstreamCaptureStatus

GLOBAL = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = Mode.CU_STREAM_CAPTURE_MODE_RELAXED


@dataclass
class _Capture:
    """``thread``: the one that began it, by its number; ``blocking``: whether its stream is."""

    thread: int
    mode: Any
    blocking: bool
    intact: bool = True


class Captures:
    """The streams of this process, by their numbers, the captures of them that go on, and each thread's mode.

    Number 0 is the legacy default stream, which is always there, and which waits for all blocking streams.
    """

    def __init__(self) -> None:
        self._blocking: dict[int, bool] = {}
        self._captures: dict[int, _Capture] = {}
        self._lock = threading.Lock()
        self._threads = threading.local()

    def add(self, stream: int, *, blocking: bool) -> None:
        """Enter a new stream."""
        self._blocking[stream] = blocking

    def remove(self, stream: int) -> None:
        """A stream is destroyed, and its capture with it."""
        with self._lock:
            del self._blocking[stream]
            self._captures.pop(stream, None)

    def exchange(self, mode: Any) -> Any:
        """Set this thread's mode, and return the one before; a thread begins with GLOBAL."""
        before = self._mode
        self._threads.mode = Mode(mode)
        return before

    def begin(self, stream: int, mode: Any) -> None:
        """Begin to capture a stream that is not captured."""
        with self._lock:
            if not stream:  # the default stream cannot be captured
                raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            if stream in self._captures:
                raise Refusal(Result.CUDA_ERROR_ILLEGAL_STATE)
            self._captures[stream] = _Capture(threading.get_ident(), Mode(mode), self._blocking[stream])

    def end(self, stream: int) -> None:
        """End the capture of a stream; refused if a forbidden call has ended it before."""
        with self._lock:
            capture = self._captures.get(stream)
            if capture is None:
                raise Refusal(Result.CUDA_ERROR_ILLEGAL_STATE)
            if capture.mode != RELAXED and capture.thread != threading.get_ident():
                raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
            del self._captures[stream]
        if not capture.intact:
            raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)

    def status(self, stream: int) -> Any:
        """Return whether a stream is being captured; of the default stream that cannot always be said."""
        self._check_known(stream)
        if not stream and any(capture.blocking for capture in self._intact()):
            raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        capture = self._captures.get(stream)
        if capture is None:
            return Status.CU_STREAM_CAPTURE_STATUS_NONE
        kind = "ACTIVE" if capture.intact else "INVALIDATED"
        return getattr(Status, f"CU_STREAM_CAPTURE_STATUS_{kind}")

    def check_unsafe(self) -> None:
        """Refuse a call that is unsafe during a capture, unless this thread's mode lets it."""
        mode, thread = self._mode, threading.get_ident()
        if mode == RELAXED:
            return
        own = [each for each in self._intact() if each.thread == thread and each.mode != RELAXED]
        others = [each for each in self._intact() if each.mode == GLOBAL and mode == GLOBAL]
        self._refuse([*own, *others], Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def check_all(self) -> None:
        """Refuse a call that no capture survives."""
        self._refuse(self._intact(), Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def check(self, stream: int) -> None:
        """Refuse an unknown stream, and the default one if it would have to wait for captured work."""
        self._check_known(stream)
        if not stream:
            blocking = [capture for capture in self._intact() if capture.blocking]
            self._refuse(blocking, Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def check_joins(self, stream: int, reason: Any) -> None:
        """Refuse to have a captured stream wait for work outside of its capture."""
        capture = self._captures.get(stream)
        if capture:
            self._refuse([capture], reason)

    def records(self, stream: int) -> bool:
        """Whether work in a stream is recorded instead of done; refused if the capture has ended in vain."""
        self.check(stream)
        capture = self._captures.get(stream)
        if capture and not capture.intact:
            raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return capture is not None

    def _check_known(self, stream: int) -> None:
        if stream and stream not in self._blocking:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)

    @property
    def _mode(self) -> Any:
        return getattr(self._threads, "mode", GLOBAL)

    def _intact(self) -> list[_Capture]:
        with self._lock:
            return [capture for capture in self._captures.values() if capture.intact]

    def _refuse(self, captures: Iterable[_Capture], reason: Any) -> None:
        """Refuse a call, and end the captures that forbid it, if there are any."""
        forbidding = list(captures)
        for capture in forbidding:
            capture.intact = False
        if forbidding:
            raise Refusal(reason)
