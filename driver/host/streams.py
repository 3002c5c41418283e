"""Streams of host devices: always finished, since every call does its work before it returns."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.events import Events


class Streams(Events):
    """Numbers that stand for streams; one that is unknown is refused."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._streams: set[int] = set()

    @answers(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        self.current()
        number = next(self.numbers)
        self._streams.add(number)
        return cuda.CUstream(number)

    @answers(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        self._check(hStream)

    @answers(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        self._check(hStream)
        if not int(hStream):
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        self._streams.discard(int(hStream))

    @answers(0)
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        self._check(hStream)
        self.check_event(hEvent)

    @answers(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        self.check_event(hEvent)
        self._check(hStream)

    def _check(self, stream: Any) -> None:
        if int(stream) and int(stream) not in self._streams:  # 0: the default one, which is always there
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
