"""What every driver does. A module that imports these tests gives them a ``driver`` and its ``other_process``."""

from __future__ import annotations

import array
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.context import PinnedHuge
from tests.unit.driver.mapping_commands import in_child
from tests.unit.driver.other_process import OtherProcess

MIB = 1 << 20
BLOCK = 2 * MIB


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context(driver.devices[0].index)


@pytest.fixture
def memory(context: Context) -> Iterator[int]:
    """One cleared block of the first device."""
    pointer = context.allocate(BLOCK)
    context.clear(pointer, BLOCK)
    yield pointer
    context.free(pointer)


def refused(name: str) -> AbstractContextManager[pytest.ExceptionInfo[DriverError]]:
    return pytest.raises(DriverError, match=name)


# -- devices -------------------------------------------------------------------------------------------


def test_a_device_has_a_uuid_a_name_and_memory(driver: Driver) -> None:
    for device in driver.devices:
        assert device.uuid.startswith("HOST-" if driver.host else "GPU-")
        assert len(device.uuid.partition("-")[2]) == 36
        assert device.name.isprintable()
        assert device.name
        assert device.total >= BLOCK
    assert len({device.uuid for device in driver.devices}) == len(driver.devices)


def test_another_process_knows_the_devices_by_the_same_uuids(driver: Driver, other_process: OtherProcess) -> None:
    theirs = other_process.ask("uuids")
    assert [device.uuid for device in driver.devices if device.uuid in theirs]


def test_there_is_one_context_per_device(driver: Driver) -> None:
    index = driver.devices[0].index
    assert driver.context(index) is driver.context(index)
    assert driver.context(index).device == driver.devices[0]
    assert driver.context(index).host == driver.host


def test_a_device_that_is_not_there_is_named_in_the_error(driver: Driver) -> None:
    with pytest.raises(ValueError, match="no device 4711; the devices are"):
        driver.context(4711)


def test_the_driver_and_its_devices_say_what_they_are(driver: Driver) -> None:
    index = driver.devices[0].index
    assert 12000 <= driver.version < 20000
    assert driver.attribute(index, "COMPUTE_MODE") in (0, 1, 2, 3)
    assert driver.attribute(index, "TEA_MAKING_SUPPORTED") is None
    with pytest.raises(ValueError, match="no device 4711; the devices are"):
        driver.attribute(4711, "COMPUTE_MODE")


@pytest.mark.parametrize(
    "name",
    [
        "UNIFIED_ADDRESSING",
        "IPC_EVENT_SUPPORTED",
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    ],
)
def test_a_device_says_that_it_has_each_way_of_sharing(driver: Driver, name: str) -> None:
    assert [driver.attribute(device.index, name) for device in driver.devices] == [1] * len(driver.devices)


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"bytes that may not be written to",
        bytearray(b"bytes that may"),
        memoryview(b"...a slice...")[3:8],
        array.array("I", range(1000)),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        b"",
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "numpy", "empty"],
)
def test_what_is_written_is_read(context: Context, memory: int, data: bytes) -> None:
    expected = memoryview(data).cast("B").tobytes() if memoryview(data).nbytes else b""
    context.write(memory + 256, data)
    assert context.read(memory + 256, len(expected) + 1) == expected + b"\0"


def test_a_buffer_in_pieces_is_refused(context: Context, memory: int) -> None:
    with pytest.raises((BufferError, ValueError)):
        context.write(memory, memoryview(bytes(10))[::2])


def test_reading_fills_a_buffer_of_the_caller(context: Context, memory: int) -> None:
    context.write(memory, b"abcdef")
    target = bytearray(8)
    context.read_into(memory, memoryview(target)[1:7])
    assert target == b"\0abcdef\0"
    with pytest.raises((BufferError, ValueError)):
        context.read_into(memory, b"constant")


def test_clearing_leaves_zeros_there_and_nowhere_else(context: Context, memory: int) -> None:
    context.write(memory, b"\xff" * BLOCK)
    context.clear(memory + 3, 5000)
    assert context.read(memory, 5005) == b"\xff" * 3 + bytes(5000) + b"\xff" * 2
    context.clear(memory, BLOCK)
    assert context.read(memory, BLOCK) == bytes(BLOCK)


def test_memory_is_counted_and_comes_back(context: Context) -> None:
    context.free(context.allocate(BLOCK))  # whatever the driver sets up once is set up
    before, total = context.memory()
    pointer = context.allocate(64 * MIB)
    assert before - context.memory()[0] >= 64 * MIB
    context.free(pointer)
    assert context.memory() == (before, total)
    assert total <= context.device.total


def test_pointers_are_aligned_for_tensors(context: Context) -> None:
    pointers = [context.allocate(size) for size in (1, 700, MIB + 1, BLOCK)]
    assert [pointer % 256 for pointer in pointers] == [0] * len(pointers)
    for pointer in pointers:
        context.free(pointer)


def test_more_than_the_device_has_is_out_of_memory(context: Context) -> None:
    with pytest.raises(DriverError) as caught:
        context.allocate(2 * context.device.total)
    assert caught.value.out_of_memory
    assert caught.value.call == "cuMemAlloc"
    assert caught.value.status == 2
    assert str(2 * context.device.total) in str(caught.value)


def test_nothing_cannot_be_allocated(context: Context) -> None:
    with refused("cuMemAlloc failed with CUDA_ERROR_INVALID_VALUE") as caught:
        context.allocate(0)
    assert not caught.value.out_of_memory


def test_memory_is_freed_once(context: Context) -> None:
    pointer = context.allocate(BLOCK)
    context.free(pointer)
    with refused("cuMemFree failed with CUDA_ERROR_INVALID_VALUE"):
        context.free(pointer)


def test_any_thread_may_use_a_context_and_keeps_its_own(context: Context, memory: int) -> None:
    seen: list[object] = []

    def work() -> None:
        context.write(memory, b"thread")
        seen.append(context.read(memory, 6))
        seen.append(int(context.calls.cuCtxGetCurrent()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [b"thread", 0]


def test_a_block_makes_its_context_current_for_many_calls_and_then_the_one_that_was(
    context: Context, memory: int
) -> None:
    before = int(context.calls.cuCtxGetCurrent())
    with context.current():
        inside = int(context.calls.cuCtxGetCurrent())
        context.write(memory, b"in a block")
        assert context.read(memory, 10) == b"in a block"
        assert int(context.calls.cuCtxGetCurrent()) == inside != 0
    assert int(context.calls.cuCtxGetCurrent()) == before


# -- sharing -------------------------------------------------------------------------------------------


def test_two_processes_share_the_bytes(context: Context, memory: int, other_process: OtherProcess) -> None:
    context.write(memory, b"from the owner")
    pointer = other_process.ask("open", context.export(memory))
    assert other_process.ask("read", pointer, 14) == b"from the owner"
    other_process.ask("write", pointer + BLOCK - 8, b"and back")
    assert context.read(memory + BLOCK - 8, 8) == b"and back"
    context.clear(memory, BLOCK)
    assert other_process.ask("read", pointer + BLOCK - 8, 8) == bytes(8)
    other_process.ask("close", pointer)


def test_an_interior_pointer_has_the_handle_of_its_allocation(context: Context, memory: int) -> None:
    handle = context.export(memory)
    assert len(handle) == 64
    assert context.export(memory + 4096) == handle


def test_each_open_needs_its_own_close(context: Context, memory: int, other_process: OtherProcess) -> None:
    handle = context.export(memory)
    pointer = other_process.ask("open", handle)
    assert other_process.ask("open", handle) == pointer
    other_process.ask("close", pointer)
    assert other_process.ask("read", pointer, 4) == bytes(4)
    other_process.ask("close", pointer)
    with refused("cuIpcCloseMemHandle failed with CUDA_ERROR_INVALID_VALUE"):
        other_process.ask("close", pointer)


def test_threads_that_open_together_get_the_same_pointer(
    context: Context, memory: int, other_process: OtherProcess
) -> None:
    pointers = other_process.ask("open_at_once", context.export(memory), 8)
    assert len(pointers) == 8
    assert len(set(pointers)) == 1
    for pointer in pointers:
        other_process.ask("close", pointer)
    with refused("CUDA_ERROR_INVALID_VALUE"):
        other_process.ask("close", pointers[0])


def test_a_closed_handle_opens_again(context: Context, memory: int, other_process: OtherProcess) -> None:
    handle = context.export(memory)
    for text in (b"once", b"more"):
        context.write(memory, text)
        pointer = other_process.ask("open", handle)
        assert other_process.ask("read", pointer, 4) == text
        other_process.ask("close", pointer)


def test_the_owner_cannot_open_its_own_handle(context: Context, memory: int) -> None:
    with refused("cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_CONTEXT .*: this process exported it"):
        context.open(context.export(memory))


def test_a_made_up_handle_is_refused(context: Context, other_process: OtherProcess) -> None:
    with refused("cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE"):
        other_process.ask("open", bytes(range(64)))
    with pytest.raises(ValueError, match="a handle of 5 bytes; it has 64"):
        context.open(b"short")


def test_a_handle_ends_with_its_memory(context: Context, other_process: OtherProcess) -> None:
    pointer = context.allocate(BLOCK)
    handle = context.export(pointer)
    context.free(pointer)
    with refused("CUDA_ERROR_INVALID_VALUE"):
        other_process.ask("open", handle)


def test_what_is_open_outlives_the_owner(driver: Driver, context: Context) -> None:
    with OtherProcess(driver.spec) as owner:
        theirs = owner.ask("allocate", BLOCK)
        owner.ask("write", theirs, b"still here")
        handle = owner.ask("export", theirs)
        pointer = context.open(handle)
        owner.kill()
    assert context.read(pointer, 10) == b"still here"
    context.close(pointer)


def test_an_importer_that_is_killed_leaves_the_memory_as_it_was(driver: Driver, context: Context, memory: int) -> None:
    with OtherProcess(driver.spec) as importer:
        pointer = importer.ask("open", context.export(memory))
        importer.ask("write", pointer, b"last words")
        importer.kill()
    assert context.read(memory, 10) == b"last words"


# -- streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [False, True])
def test_a_stream_copies_from_pinned_memory_in_order(context: Context, memory: int, huge: bool) -> None:
    pin = context.pin_huge if huge else context.pin
    with pin(BLOCK) as pinned, context.stream() as stream, context.event() as event:
        assert event.done(), "an event that marks nothing has nothing to wait for"
        event.wait()
        pinned.view[:] = b"\x01" * BLOCK
        pinned.view[-3:] = b"end"
        stream.copy_in(memory, pinned.pointer, BLOCK)
        stream.copy_in(memory, pinned.pointer + BLOCK - 3, 3)
        stream.record(event)
        event.wait()
        assert event.done()
        assert context.read(memory, 4) == b"end\x01"
        assert context.read(memory + BLOCK - 4, 4) == b"\x01end"
        stream.copy_in(memory + 3, pinned.pointer, 1)
        stream.record(event)
        stream.synchronize()
        assert event.done()
        context.synchronize()
    assert context.read(memory, 5) == b"end\x01\x01"


def test_huge_pages_are_pinned_for_this_process_alone_and_until_they_are_closed(context: Context) -> None:
    nbytes = 8 * BLOCK + 4096
    with context.pin_huge(nbytes) as pinned:
        assert isinstance(pinned, PinnedHuge)
        assert pinned._pages
        assert pinned.pointer % BLOCK == 0
        assert all(map(mapped, (pinned.pointer, pinned.pointer + nbytes - 1)))
        assert in_child(lambda: str(mapped(pinned.pointer))) == "False"
        pinned.view[-4:] = b"last"
        with refused("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"), context.current():
            context.calls.cuMemHostRegister(pinned.pointer, 4096, 0)
    with refused("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"), context.current():
        context.calls.cuMemHostUnregister(pinned.pointer)


def mapped(address: int) -> bool:
    """Whether this process has something at an address that it may write."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, *_ = line.split()
        start, end = (int(each, 16) for each in bounds.split("-"))
        if start <= address < end:
            return access.startswith("rw")
    return False
