"""The host driver's functions, called as the bindings' own are."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import DriverError, load
from cubroker.driver.checked_calls import Calls
from cubroker.driver.host import shared_memory
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK, AddressMap, Region
from tests.brokers import PATIENCE
from tests.unit.server.processes import files

Result = cuda.CUresult
Attribute = cuda.CUdevice_attribute


@pytest.fixture
def module() -> HostModule:
    """A driver of its own, as a fresh process has it."""
    module = HostModule(2, 16 * BLOCK)
    assert module.cuInit(0) == (Result.CUDA_SUCCESS,)
    return module


@pytest.fixture
def current(module: HostModule) -> Iterator[HostModule]:
    """The same, with the first device's context current."""
    _, context = module.cuDevicePrimaryCtxRetain(0)
    assert module.cuCtxSetCurrent(context) == (Result.CUDA_SUCCESS,)
    yield module
    while module.cuDevicePrimaryCtxRelease(0)[0] == Result.CUDA_SUCCESS:
        pass


def test_nothing_works_before_it_is_initialised() -> None:
    module = HostModule(1, BLOCK)
    assert module.cuDeviceGetCount() == (Result.CUDA_ERROR_NOT_INITIALIZED, None)
    assert module.cuMemGetInfo() == (Result.CUDA_ERROR_NOT_INITIALIZED, None, None)
    assert module.cuCtxSynchronize() == (Result.CUDA_ERROR_NOT_INITIALIZED,)
    assert module.cuDriverGetVersion() == (Result.CUDA_SUCCESS, 13000)
    assert module.cuInit(1) == (Result.CUDA_ERROR_INVALID_VALUE,)
    assert module.cuInit(0) == module.cuInit(0) == (Result.CUDA_SUCCESS,)
    assert module.cuDeviceGetCount() == (Result.CUDA_SUCCESS, 1)


def test_without_a_context_there_is_no_memory(module: HostModule) -> None:
    handle = cuda.CUipcMemHandle()
    for status, *_ in (
        module.cuMemAlloc(1),
        module.cuMemFree(1),
        module.cuMemGetInfo(),
        module.cuMemsetD8(1, 0, 1),
        module.cuMemcpyDtoD(1, 1, 1),
        module.cuMemHostAlloc(1, 0),
        module.cuMemFreeHost(1),
        module.cuStreamCreate(0),
        module.cuEventCreate(0),
        module.cuIpcGetMemHandle(1),
        module.cuIpcOpenMemHandle(handle, 1),
        module.cuIpcCloseMemHandle(1),
        module.cuCtxGetDevice(),
        module.cuCtxSynchronize(),
        module.cuCtxPopCurrent(),
    ):
        assert status == Result.CUDA_ERROR_INVALID_CONTEXT


def test_contexts_are_pushed_and_popped(module: HostModule) -> None:
    contexts = [module.cuDevicePrimaryCtxRetain(device)[1] for device in (0, 1)]
    assert int(module.cuCtxGetCurrent()[1]) == 0
    for context in contexts:
        module.cuCtxPushCurrent(context)
    assert int(module.cuCtxGetDevice()[1]) == 1
    module.cuCtxSetCurrent(contexts[0])
    assert int(module.cuCtxGetCurrent()[1]) == int(contexts[0])
    module.cuCtxSetCurrent(cuda.CUcontext(0))
    assert int(module.cuCtxPopCurrent()[1]) == int(contexts[0])
    assert module.cuCtxPopCurrent() == (Result.CUDA_ERROR_INVALID_CONTEXT, None)


def test_a_context_lives_while_it_is_retained(current: HostModule) -> None:
    current.cuDevicePrimaryCtxRetain(0)
    pointer = current.cuMemAlloc(BLOCK)[1]
    current.cuDevicePrimaryCtxRelease(0)
    assert current.cuMemGetInfo() == (Result.CUDA_SUCCESS, 15 * BLOCK, 16 * BLOCK)
    current.cuDevicePrimaryCtxRelease(0)
    assert current.cuMemFree(pointer) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    assert current.cuDevicePrimaryCtxRelease(0) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    assert current.cuCtxPushCurrent(cuda.CUcontext(1)) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    current.cuDevicePrimaryCtxRetain(0)
    assert current.cuMemGetInfo() == (Result.CUDA_SUCCESS, 16 * BLOCK, 16 * BLOCK)


def test_devices_are_numbered_from_zero(module: HostModule) -> None:
    assert int(module.cuDeviceGet(1)[1]) == 1
    for ordinal in (-1, 2):
        assert module.cuDeviceGet(ordinal) == (Result.CUDA_ERROR_INVALID_DEVICE, None)
    assert module.cuDeviceGetName(10, 1) == (Result.CUDA_SUCCESS, b"cubroker \0")
    assert module.cuDeviceGetAttribute(Attribute.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 0)[1] == 1
    assert module.cuDeviceGetAttribute(Attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0)[1] == 0


def test_copies_stay_within_device_memory(current: HostModule) -> None:
    first, second = (int(current.cuMemAlloc(BLOCK)[1]) for _ in range(2))
    assert current.cuMemsetD8(first, 7, BLOCK) == (Result.CUDA_SUCCESS,)
    assert current.cuMemcpyDtoD(second, first, BLOCK) == (Result.CUDA_SUCCESS,)
    low = min(first, second)
    for status in (
        current.cuMemsetD8(low - 1, 0, BLOCK),
        current.cuMemcpyDtoD(first + 1, second, BLOCK),
        current.cuMemcpyDtoD(first, second + 1, BLOCK),
        current.cuMemcpyHtoD(first + BLOCK - 1, first, 2),
        current.cuMemcpyHtoDAsync(8, first, 2, cuda.CUstream(0)),
        current.cuMemcpyDtoH(first, 8, 2),
        current.cuMemsetD8(first, 0, -1),
        current.cuMemcpyDtoH(second, first, -1),
    ):
        assert status == (Result.CUDA_ERROR_INVALID_VALUE,)


def test_a_finalizer_may_copy_in_the_middle_of_a_call(module: HostModule) -> None:
    copied: list[tuple[Any, ...]] = []

    def call() -> None:
        _, context = module.cuDevicePrimaryCtxRetain(0)
        module.cuCtxSetCurrent(context)
        _, pointer = module.cuMemAlloc(4)
        with module.lock:
            copied.append(module.cuMemsetD8(pointer, 1, 4))
            copied.append(module.cuMemcpyDtoD(pointer, pointer, 4))
        module.cuMemFree(pointer)
        module.cuDevicePrimaryCtxRelease(0)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert copied == [(Result.CUDA_SUCCESS,)] * 2


def test_memory_side_by_side_is_not_one_piece() -> None:
    addresses = AddressMap()
    for pointer in (BLOCK, 2 * BLOCK):
        addresses.add(Region(0, pointer, BLOCK))
    assert addresses.allows(0, BLOCK + 1, BLOCK - 1, writing=True)
    assert not addresses.allows(0, BLOCK + 1, BLOCK, writing=False)


def test_a_pointer_is_undone_by_its_own_function_alone(current: HostModule) -> None:
    pointer = int(current.cuMemAlloc(BLOCK)[1])
    pinned = current.cuMemHostAlloc(BLOCK, 0)[1]
    for status, *_ in (
        current.cuMemFree(pinned),
        current.cuMemFree(pointer + 512),
        current.cuMemFreeHost(pointer),
        current.cuIpcCloseMemHandle(pointer),
        current.cuIpcGetMemHandle(pinned),
        current.cuMemHostAlloc(0, 0),
        current.cuIpcOpenMemHandle(cuda.CUipcMemHandle(), 0),
    ):
        assert status == Result.CUDA_ERROR_INVALID_VALUE
    assert current.cuMemFreeHost(pinned) == current.cuMemFree(pointer) == (Result.CUDA_SUCCESS,)


def test_streams_and_events_are_known_until_destroyed(current: HostModule) -> None:
    stream, event = current.cuStreamCreate(1)[1], current.cuEventCreate(3)[1]
    assert current.cuEventRecord(event, stream) == current.cuEventQuery(event) == (Result.CUDA_SUCCESS,)
    current.cuStreamDestroy(stream)
    assert current.cuEventRecord(event, stream) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert current.cuStreamSynchronize(stream) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    default = cuda.CUstream(0)  # it is always there, and nobody's to destroy
    assert current.cuEventRecord(event, default) == current.cuStreamSynchronize(default) == (Result.CUDA_SUCCESS,)
    assert current.cuStreamDestroy(default) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    current.cuEventDestroy(event)
    assert current.cuEventSynchronize(event) == (Result.CUDA_ERROR_INVALID_HANDLE,)


def test_structs_and_enums_are_those_of_the_bindings(module: HostModule) -> None:
    assert module.CUresult is cuda.CUresult
    assert module.CU_MEMHOSTALLOC_PORTABLE == 1
    with pytest.raises(AttributeError, match="the host driver has no cuGraphCreate"):
        module.cuGraphCreate()


@pytest.mark.parametrize(
    ("number", "name"),
    [(errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"), (errno.EMFILE, "CUDA_ERROR_OPERATING_SYSTEM")],
)
def test_the_systems_refusals_become_the_drivers(
    current: HostModule, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    before = files(os.getpid())
    monkeypatch.setattr(shared_memory, "map_shared", refuse)
    assert current.cuMemAlloc(1)[0].name == name
    assert current.cuMemGetInfo()[1] == 16 * BLOCK
    assert files(os.getpid()) <= before


def test_memory_calls_that_fail_say_so() -> None:
    before = files(os.getpid())
    with pytest.raises(OSError, match="Invalid argument"):
        shared_memory.create(-1)
    assert files(os.getpid()) <= before
    with pytest.raises(OSError, match="mmap: Cannot allocate memory"):
        shared_memory.map_private(1 << 60)
    with pytest.raises(OSError, match="munmap: Invalid argument"):
        shared_memory.unmap(1, 4096)
    with pytest.raises(OSError, match="madvise: "):
        shared_memory.fill(mmap.PAGESIZE, 0, mmap.PAGESIZE)


class NotReady:
    """A driver whose events are never done."""

    CUresult = cuda.CUresult

    def cuEventQuery(self, hEvent: Any) -> tuple[Any]:  # noqa: N803
        return (cuda.CUresult.CUDA_ERROR_NOT_READY,)


def test_an_event_that_is_not_done_says_so_and_one_that_failed_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = load("host:1@2MiB")
    with driver.context(0).stream() as stream:
        event = driver.context(0).event()
        stream.record(event)
        monkeypatch.setattr(event, "_calls", Calls(NotReady()))
        assert not event.done()
        monkeypatch.undo()
        event.close()
        with pytest.raises(DriverError, match="cuEventQuery failed with CUDA_ERROR_INVALID_HANDLE"):
            event.done()
    driver.close()


def test_pinned_memory_of_no_bytes_is_refused() -> None:
    driver = load("host:1@2MiB")
    with pytest.raises(DriverError, match="cuMemHostAlloc failed with CUDA_ERROR_INVALID_VALUE"):
        driver.context(0).pin(0)
    driver.close()
