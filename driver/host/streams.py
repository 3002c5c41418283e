"""Streams and events of host devices: always finished, since every call does its work before it returns."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import itertools
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.state import State


class Streams(State):
    """Numbers that stand for streams and events; one that is unknown is refused."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size)
        self._numbers = itertools.count(1)
        self._streams: set[int] = set()
        self._events: set[int] = set()

    @answers(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        return cuda.CUstream(self._new(self._streams))

    @answers(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        self._check(self._streams, hStream)

    @answers(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        self._check(self._streams, hStream)
        self._streams.discard(int(hStream))

    @answers(1)
    def cuEventCreate(self, Flags: int) -> Any:
        return cuda.CUevent(self._new(self._events))

    @answers(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        self._check(self._events, hEvent)
        self._check(self._streams, hStream)

    @answers(0)
    def cuEventQuery(self, hEvent: Any) -> None:
        self._check(self._events, hEvent)

    @answers(0)
    def cuEventSynchronize(self, hEvent: Any) -> None:
        self._check(self._events, hEvent)

    @answers(0)
    def cuEventDestroy(self, hEvent: Any) -> None:
        self._check(self._events, hEvent)
        self._events.discard(int(hEvent))

    def _new(self, kind: set[int]) -> int:
        self.current()
        number = next(self._numbers)
        kind.add(number)
        return number

    @staticmethod
    def _check(kind: set[int], item: Any) -> None:
        if int(item) not in kind:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
