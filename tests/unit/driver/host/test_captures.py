"""Captures of host devices' streams: wrong calls, and what becomes of the work that is captured."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver.host.bindings import host_module
from cubroker.driver.host.shared_memory import BLOCK
from tests.unit.driver.host.calls import value

Result = cuda.CUresult
Mode = cuda.CUstreamCaptureMode
Status = cuda.CUstreamCaptureStatus
GLOBAL = Mode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = Mode.CU_STREAM_CAPTURE_MODE_RELAXED


@pytest.fixture
def module() -> Iterator[Any]:
    """A driver with a context that is current on this thread."""
    module = host_module(1, 4 * BLOCK, 1)
    value(module.cuInit(0))
    value(module.cuCtxPushCurrent(value(module.cuDevicePrimaryCtxRetain(0))))
    yield module
    value(module.cuCtxPopCurrent())
    value(module.cuDevicePrimaryCtxRelease(0))


@pytest.fixture
def stream(module: Any) -> Iterator[Any]:
    stream = value(module.cuStreamCreate(1))
    yield stream
    value(module.cuStreamDestroy(stream))


def test_what_is_captured_is_not_done(module: Any, stream: Any) -> None:
    pointer = value(module.cuMemAlloc(BLOCK))
    value(module.cuMemsetD8(pointer, 1, 16))
    value(module.cuStreamBeginCapture(stream, RELAXED))
    assert value(module.cuStreamIsCapturing(stream)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    value(module.cuMemsetD8Async(pointer, 2, 16, stream))
    graph = value(module.cuStreamEndCapture(stream))
    assert value(module.cuStreamIsCapturing(stream)) == Status.CU_STREAM_CAPTURE_STATUS_NONE
    assert ctypes.string_at(int(pointer), 16) == bytes([1]) * 16
    value(module.cuGraphDestroy(graph))
    assert module.cuGraphDestroy(graph) == (Result.CUDA_ERROR_INVALID_VALUE,)
    value(module.cuMemFree(pointer))


def test_a_stream_is_captured_once_and_the_default_one_not_at_all(module: Any, stream: Any) -> None:
    value(module.cuStreamBeginCapture(stream, GLOBAL))
    assert module.cuStreamBeginCapture(stream, GLOBAL) == (Result.CUDA_ERROR_ILLEGAL_STATE,)
    assert module.cuStreamBeginCapture(0, GLOBAL) == (Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    value(module.cuStreamEndCapture(stream))
    assert module.cuStreamEndCapture(stream) == (Result.CUDA_ERROR_ILLEGAL_STATE, None)


def test_a_capture_ends_on_the_thread_that_began_it_unless_it_is_relaxed(module: Any, stream: Any) -> None:
    ended: list[Any] = []
    for mode in (GLOBAL, RELAXED):
        value(module.cuStreamBeginCapture(stream, mode))
        thread = threading.Thread(target=lambda: ended.append(module.cuStreamEndCapture(stream)[0]))
        thread.start()
        thread.join()
        if mode == GLOBAL:
            value(module.cuStreamEndCapture(stream))
    assert ended == [Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, Result.CUDA_SUCCESS]


def test_a_captured_stream_waits_for_nothing_outside_and_nobody_for_it(module: Any, stream: Any) -> None:
    event = value(module.cuEventCreate(2))
    for call, reason in (
        (lambda: module.cuStreamWaitEvent(stream, event, 0), Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
        (lambda: module.cuStreamSynchronize(stream), Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    ):
        value(module.cuStreamBeginCapture(stream, RELAXED))
        assert call() == (reason,)
        assert value(module.cuStreamIsCapturing(stream)) == Status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        assert module.cuMemsetD8Async(0, 0, 1, stream) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,)
        assert module.cuStreamEndCapture(stream) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None)
    value(module.cuEventDestroy(event))


def test_the_end_of_a_stream_ends_its_capture(module: Any) -> None:
    stream = value(module.cuStreamCreate(0))
    value(module.cuStreamBeginCapture(stream, GLOBAL))
    value(module.cuStreamDestroy(stream))
    value(module.cuCtxSynchronize())
    for call in (module.cuStreamIsCapturing, module.cuStreamEndCapture):
        assert call(stream)[0] in (Result.CUDA_ERROR_INVALID_HANDLE, Result.CUDA_ERROR_ILLEGAL_STATE)


def test_a_page_is_registered_once(module: Any) -> None:
    value(module.cuMemHostRegister(4096, 4096, 0))
    assert module.cuMemHostRegister(4096, 4096, 0) == (Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
    value(module.cuMemHostUnregister(4096))
    assert module.cuMemHostUnregister(4096) == (Result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
    assert module.cuMemHostRegister(4096, 0, 0) == (Result.CUDA_ERROR_INVALID_VALUE,)
