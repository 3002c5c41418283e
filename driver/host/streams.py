"""Streams of host devices: always finished, since every call does its work before it returns.

A stream can be captured, which forbids calls as a GPU's driver does (:mod:`cubroker.driver.host.captures`). What is
put into a captured stream is not done, and no graph comes of it that could be launched.
"""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.events import Events

_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)


class Streams(Events):
    """Numbers that stand for streams; one that is unknown is refused."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._graphs: set[int] = set()

    @answers(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        self.current()
        number = next(self.numbers)
        self.captures.add(number, blocking=not int(Flags) & _NON_BLOCKING)
        return cuda.CUstream(number)

    @answers(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        number = self._check(hStream)
        self.captures.check_joins(number, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self.captures.check_unsafe()

    @answers(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        number = self._check(hStream)
        if not number:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        self.captures.remove(number)

    @answers(0)
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        number = self._check(hStream)
        kind = "UNSUPPORTED" if self.check_event(hEvent) else "ISOLATION"
        self.captures.check_joins(number, getattr(Result, f"CUDA_ERROR_STREAM_CAPTURE_{kind}"))

    @answers(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        shareable = self.check_event(hEvent)
        if self.captures.records(int(hStream)) and shareable:
            raise Refusal(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)  # the capture goes on

    @answers(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        return self.captures.exchange(mode)

    @answers(0)
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        self.captures.begin(self._check(hStream), mode)

    @answers(1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        self.captures.end(int(hStream))
        self._graphs.add(number := next(self.numbers))
        return cuda.CUgraph(number)

    @answers(1)
    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        return self.captures.status(int(hStream))

    @answers(0)
    def cuGraphDestroy(self, hGraph: Any) -> None:
        if int(hGraph) not in self._graphs:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        self._graphs.discard(int(hGraph))

    def _check(self, stream: Any) -> int:
        """Return the number of a stream that work may be put into."""
        self.captures.check(int(stream))
        return int(stream)
