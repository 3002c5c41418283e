"""What every driver does with memory that is shared by descriptor; to be imported beside ``conformance``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cubroker.driver import Context, Driver, DriverError, vmm
from cubroker.driver.checked_calls import Calls
from tests.faults import FaultyModule, Plan
from tests.unit.driver.mapping_commands import obtain, soil
from tests.unit.driver.other_process import OtherProcess

GRANULE = 2 << 20
PIECE = 64 << 20
"""Bytes: enough that a driver takes it from the device at once, and gives it back at once."""

FAULTS = ("cuCtxPushCurrent", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess")
"""The calls of a map that may fail; each is made once."""


def failing(call: str, status: str = "") -> AbstractContextManager[pytest.ExceptionInfo[DriverError]]:
    return pytest.raises(DriverError, match=f"{call} failed with {status}")


@contextmanager
def lent(driver: Driver, nbytes: int = GRANULE, device: int = 0) -> Iterator[int]:
    """A descriptor of new memory on a device."""
    physical = driver.create(driver.devices[device].index, nbytes)
    try:
        descriptor = physical.export()
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        physical.release()


@contextmanager
def mapped(context: Context, descriptor: int, nbytes: int = GRANULE, *, readonly: bool = False) -> Iterator[int]:
    """A pointer to the memory of a descriptor."""
    with context.reserve(nbytes) as reservation:
        reservation.map(descriptor, readonly=readonly)
        yield reservation.pointer


@contextmanager
def imported(context: Context, descriptor: int) -> Iterator[Any]:
    """The driver's own handle of the memory of a descriptor, and its kind."""
    kind = context.calls.module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = context.calls.cuMemImportFromShareableHandle(descriptor, kind)
    try:
        yield handle, kind
    finally:
        context.calls.cuMemRelease(handle)


def settled(driver: Driver, context: Context) -> tuple[int, int]:
    """The free and the total memory, once the driver has set up whatever it sets up once."""
    with lent(driver, PIECE) as descriptor, mapped(context, descriptor, PIECE):
        pass
    return context.memory()


# -- creating ------------------------------------------------------------------------------------------


def test_sizes_are_multiples_of_the_granularity(driver: Driver, context: Context) -> None:
    index = context.device.index
    assert driver.granularity(index) == GRANULE
    for nbytes in (0, 1, GRANULE - 1, GRANULE + 1):
        with failing("cuMemCreate", "CUDA_ERROR_INVALID_VALUE"):
            driver.create(index, nbytes)
        with failing("cuMemAddressReserve", "CUDA_ERROR_INVALID_VALUE"):
            context.reserve(nbytes)
    with context.reserve(3 * GRANULE) as reservation:
        assert reservation.pointer % GRANULE == 0
        assert not reservation.mapped


def test_a_device_that_is_not_there_has_no_memory_to_create(driver: Driver) -> None:
    for call in (driver.granularity, lambda index: driver.create(index, GRANULE)):
        with pytest.raises(ValueError, match="no device 4711; the devices are"):
            call(4711)


def test_created_memory_is_counted_and_comes_back(driver: Driver, context: Context) -> None:
    before = settled(driver, context)
    with lent(driver, PIECE):
        assert before[0] - context.memory()[0] >= PIECE
    assert context.memory() == before


def test_more_than_is_free_cannot_be_created(driver: Driver, context: Context) -> None:
    with lent(driver, PIECE), pytest.raises(DriverError) as caught:
        driver.create(context.device.index, context.device.total // PIECE * PIECE)
    assert caught.value.out_of_memory
    assert caught.value.call == "cuMemCreate"
    with pytest.raises(DriverError) as caught:  # more than there ever is
        driver.create(context.device.index, 2 * context.device.total)
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"


def test_a_trial_says_that_memory_can_be_shared_by_descriptor_and_leaves_nothing(
    driver: Driver, context: Context
) -> None:
    before = settled(driver, context)
    open_files = set(Path("/proc/self/fd").iterdir())
    assert all(driver.vmm_obstacle(device.index) is None for device in driver.devices)
    assert context.memory() == before
    assert len(set(Path("/proc/self/fd").iterdir())) == len(open_files)


def test_a_descriptor_does_not_outlive_exec(driver: Driver) -> None:
    with lent(driver) as descriptor:
        assert not os.get_inheritable(descriptor)


# -- sharing -------------------------------------------------------------------------------------------


def test_bytes_are_shared_by_descriptor(driver: Driver, context: Context, other_process: OtherProcess) -> None:
    with lent(driver) as descriptor, mapped(context, descriptor) as pointer:
        context.write(pointer, b"from the owner")
        reader, writer = (other_process.attach(descriptor, GRANULE, readonly=readonly) for readonly in (True, False))
        assert other_process.ask("read", reader, 14) == b"from the owner"
        other_process.ask("write", writer + GRANULE - 8, b"and back")
        assert (
            context.read(pointer + GRANULE - 8, 8) == other_process.ask("read", reader + GRANULE - 8, 8) == b"and back"
        )
        for each in (reader, writer):
            other_process.ask("detach", each)


def test_what_is_lent_for_reading_shows_what_its_owner_writes(
    driver: Driver, context: Context, other_process: OtherProcess
) -> None:
    """On host devices it is for nothing else; a GPU's driver has no such descriptors."""
    with lent(driver) as descriptor, mapped(context, descriptor) as pointer:
        open_files = len(set(Path("/proc/self/fd").iterdir()))
        with driver.for_reading([descriptor, descriptor]) as (first, second):
            reader = other_process.attach(first, GRANULE, readonly=True)
            with context.reserve(GRANULE) as reservation:
                reservation.map(second, readonly=True)
                context.write(pointer, b"from the owner")
                assert context.read(reservation.pointer, 14) == b"from the owner"
            assert (first == descriptor) is (not driver.host)
        assert len(set(Path("/proc/self/fd").iterdir())) == open_files
        assert other_process.ask("read", reader, 14) == b"from the owner"
        other_process.ask("detach", reader)


def test_a_mapping_needs_neither_the_handle_nor_the_descriptor(driver: Driver, context: Context) -> None:
    with context.reserve(GRANULE) as reservation:
        with lent(driver) as descriptor:
            reservation.map(descriptor, readonly=False)
            context.write(reservation.pointer, b"kept")
        assert context.read(reservation.pointer, 4) == b"kept"


def test_memory_outlives_an_owner_that_is_killed(driver: Driver, context: Context, other_process: OtherProcess) -> None:
    with OtherProcess(driver.spec) as owner:
        descriptor = owner.lend(GRANULE)
        owner.ask("write", owner.attach(descriptor, GRANULE, readonly=False), b"still here")
        owner.kill()
    pointer = other_process.attach(descriptor, GRANULE, readonly=True)
    with mapped(context, descriptor, readonly=True) as ours:
        os.close(descriptor)
        assert context.read(ours, 10) == other_process.ask("read", pointer, 10) == b"still here"
    assert other_process.ask("read", pointer, 10) == b"still here"
    other_process.ask("detach", pointer)


def test_memory_of_a_killed_owner_comes_back_with_the_last_descriptor(driver: Driver, context: Context) -> None:
    before = settled(driver, context)
    with OtherProcess(driver.spec) as owner:
        descriptor = owner.lend(PIECE)
        owner.kill()
    with mapped(context, descriptor, PIECE):
        os.close(descriptor)
    assert context.memory() == before


def test_an_importer_that_is_killed_leaves_the_bytes(driver: Driver, context: Context) -> None:
    with lent(driver) as descriptor, mapped(context, descriptor) as pointer:
        with OtherProcess(driver.spec) as importer:
            importer.ask("write", importer.attach(descriptor, GRANULE, readonly=False), b"last words")
            importer.kill()
        assert context.read(pointer, 10) == b"last words"


def test_nothing_is_copied_into_what_is_mapped_read_only(
    driver: Driver, context: Context, other_process: OtherProcess
) -> None:
    with lent(driver) as descriptor, mapped(context, descriptor) as pointer:
        context.write(pointer, b"constant")
        with mapped(context, descriptor, readonly=True) as reader:
            with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
                context.write(reader, b"X")
            assert context.read(reader, 8) == b"constant"
        theirs = other_process.attach(descriptor, GRANULE, readonly=True)
        with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
            other_process.ask("write", theirs, b"X")
        other_process.ask("detach", theirs)
        context.write(pointer, b"CON")
        assert context.read(pointer, 8) == b"CONstant"


def test_access_to_what_is_mapped_can_be_taken_and_given_back(driver: Driver, context: Context) -> None:
    with lent(driver, 2 * GRANULE) as descriptor, context.reserve(2 * GRANULE) as reservation:
        reservation.map(descriptor, readonly=False)
        context.write(reservation.pointer, b"first")
        for _ in range(2):
            reservation.protect(readonly=True)
            with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
                context.write(reservation.pointer + GRANULE, b"X")
            assert context.read(reservation.pointer, 5) == b"first"
            reservation.protect(readonly=False)
            context.write(reservation.pointer + GRANULE, b"Y")
        assert context.read(reservation.pointer + GRANULE, 1) == b"Y"


def test_memory_of_another_device_can_be_mapped(driver: Driver, context: Context) -> None:
    if len(driver.devices) < 2:
        pytest.skip("there is one device")
    with lent(driver, device=1) as descriptor:
        with mapped(context, descriptor) as pointer:
            context.write(pointer, b"over there")
        other = driver.context(driver.devices[1].index)
        with mapped(other, descriptor, readonly=True) as pointer:
            assert other.read(pointer, 10) == b"over there"


# -- mapping -------------------------------------------------------------------------------------------


def test_memory_goes_and_comes_at_the_same_address(driver: Driver, context: Context) -> None:
    with lent(driver) as first, lent(driver) as second, context.reserve(GRANULE) as reservation:
        for descriptor, text in ((first, b"1st"), (second, b"2nd")):
            reservation.map(descriptor, readonly=False)
            context.write(reservation.pointer, text)
            reservation.unmap()
            assert not reservation.mapped
        reservation.map(first, readonly=True)
        assert reservation.mapped
        assert context.read(reservation.pointer, 3) == b"1st"


def test_memory_that_was_retained_can_be_mapped_again(driver: Driver, context: Context) -> None:
    calls = context.calls
    with lent(driver, 2 * GRANULE) as descriptor, context.reserve(2 * GRANULE) as reservation:
        reservation.map(descriptor, readonly=False)
        context.write(reservation.pointer, b"kept")
        handle = calls.cuMemRetainAllocationHandle(reservation.pointer + GRANULE + 7)  # any address in it will do
        reservation.unmap()
        with failing("cuMemRetainAllocationHandle"):
            calls.cuMemRetainAllocationHandle(reservation.pointer)
        reservation.fill(handle, readonly=True)
        calls.cuMemRelease(handle)
        assert context.read(reservation.pointer, 4) == b"kept"
        with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
            context.write(reservation.pointer, b"X")


def test_retained_memory_comes_back_with_its_release(driver: Driver, context: Context) -> None:
    before, calls = settled(driver, context), context.calls
    with context.reserve(PIECE) as reservation:
        with lent(driver, PIECE) as descriptor:
            reservation.map(descriptor, readonly=True)
        handle = calls.cuMemRetainAllocationHandle(reservation.pointer)
        reservation.unmap()
        calls.cuMemRelease(handle)
    assert context.memory() == before


REPLACING = (
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemUnmap",
    "cuMemMap",
    "cuMemSetAccess",
)


def test_memory_is_replaced_everywhere(driver: Driver, context: Context) -> None:
    with replaceable(driver, context) as (reservations, others):
        vmm.replace(tuple(zip(reservations, others, strict=True)), readonly=True)
        assert [context.read(each.pointer, 3) for each in reservations] == [b"2nd"] * 2
        with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
            context.write(reservations[0].pointer, b"X")


@pytest.mark.parametrize("call", REPLACING)
@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_cannot_be_replaced_everywhere_is_replaced_nowhere(
    driver: Driver, context: Context, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    plan = Plan()
    monkeypatch.setattr(context, "calls", Calls(FaultyModule(context.calls.module, plan)))
    with replaceable(driver, context) as (reservations, others):
        pairs = tuple(zip(reservations, others, strict=True))
        plan.arm([call], at, 999)
        with failing(call, "CUDA_ERROR_UNKNOWN"):
            vmm.replace(pairs, readonly=True)
        plan.arm([], 0, 0)
        assert [context.read(each.pointer, 3) for each in reservations] == [b"1st"] * 2
        vmm.replace(pairs, readonly=True)
        assert [context.read(each.pointer, 3) for each in reservations] == [b"2nd"] * 2


@contextmanager
def replaceable(driver: Driver, context: Context) -> Iterator[tuple[list[vmm.Reservation], list[int]]]:
    """Two reservations with memory that holds ``1st``, and descriptors of memory that holds ``2nd``."""
    with ExitStack() as stack:
        descriptors = [stack.enter_context(lent(driver)) for _ in range(4)]
        for number, descriptor in enumerate(descriptors):
            with mapped(context, descriptor) as pointer:
                context.write(pointer, b"1st" if number < 2 else b"2nd")
        reservations = [stack.enter_context(context.reserve(GRANULE)) for _ in range(2)]
        for reservation, descriptor in zip(reservations, descriptors, strict=False):
            reservation.map(descriptor, readonly=True)
        yield reservations, descriptors[2:]


def test_one_memory_is_mapped_at_a_time(driver: Driver, context: Context) -> None:
    with lent(driver) as first, lent(driver) as second, context.reserve(GRANULE) as reservation:
        reservation.map(first, readonly=False)
        context.write(reservation.pointer, b"1st")
        with failing("cuMemMap"):
            reservation.map(second, readonly=False)
        assert reservation.mapped
        assert context.read(reservation.pointer, 3) == b"1st"


def test_memory_is_mapped_whole(driver: Driver, context: Context) -> None:
    with lent(driver, 2 * GRANULE) as descriptor:
        with context.reserve(GRANULE) as small:
            with failing("cuMemMap", "CUDA_ERROR_NOT_SUPPORTED"):
                small.map(descriptor, readonly=False)
            assert not small.mapped
        with context.reserve(3 * GRANULE) as large, failing("cuMemMap"):
            large.map(descriptor, readonly=False)


def test_several_memories_fit_side_by_side(driver: Driver, context: Context) -> None:
    calls = context.calls
    with context.reserve(3 * GRANULE) as reservation, lent(driver) as first, lent(driver, 2 * GRANULE) as second:
        start = reservation.pointer
        places = ((first, start, GRANULE), (second, start + GRANULE, 2 * GRANULE))
        with context.current():
            for descriptor, pointer, nbytes in places:
                with imported(context, descriptor) as (handle, _):
                    calls.cuMemMap(pointer, nbytes, 0, handle, 0)
            reservation.protect(readonly=False)
            context.write(start + GRANULE - 3, b"across")
            assert context.read(start + GRANULE - 4, 8) == b"\0across\0"
            context.synchronize()
            for _, pointer, nbytes in places:
                calls.cuMemUnmap(pointer, nbytes)
        with mapped(context, second, 2 * GRANULE) as pointer:
            assert context.read(pointer, 3) == b"oss"


def test_what_was_imported_is_not_exported_again(driver: Driver, context: Context) -> None:
    with (
        lent(driver) as descriptor,
        imported(context, descriptor) as (handle, kind),
        failing("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE"),
    ):
        context.calls.cuMemExportToShareableHandle(handle, kind, 0)


def test_mapped_memory_has_no_ipc_handle(driver: Driver, context: Context) -> None:
    with (
        lent(driver) as descriptor,
        mapped(context, descriptor) as pointer,
        failing("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE"),
    ):
        context.export(pointer)


def test_a_descriptor_of_anything_else_is_refused(context: Context, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(GRANULE))
    others = [*os.pipe(), os.open(tmp_path / "file", os.O_RDWR), os.memfd_create("memory")]
    with context.reserve(GRANULE) as reservation:
        for descriptor in others:
            with failing("cuMemImportFromShareableHandle"):
                reservation.map(descriptor, readonly=False)
            os.close(descriptor)
            with failing("cuMemImportFromShareableHandle"):
                reservation.map(descriptor, readonly=False)
        assert not reservation.mapped


@pytest.mark.parametrize("call", FAULTS)
def test_a_map_that_fails_leaves_nothing(
    driver: Driver, context: Context, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before, plan = settled(driver, context), Plan()
    monkeypatch.setattr(context, "calls", Calls(FaultyModule(context.calls.module, plan)))
    with lent(driver, PIECE) as descriptor, context.reserve(PIECE) as reservation:
        plan.arm([call], 1, 999)
        with failing(call, "CUDA_ERROR_UNKNOWN"):
            reservation.map(descriptor, readonly=False)
        assert not reservation.mapped
        plan.arm([], 0, 0)
        reservation.map(descriptor, readonly=False)
        context.write(reservation.pointer, b"works")
    assert context.memory() == before


# -- reuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
@pytest.mark.parametrize("tenant", ["the same process", "another process"])
def test_memory_that_was_used_before_is_all_zero(
    driver: Driver, context: Context, other_process: OtherProcess, kind: str, tenant: str
) -> None:
    """Most of the device is written and freed, and then allocated again; a part of every sixteenth is looked at."""
    nbytes = soil(driver, context, kind) if tenant == "the same process" else other_process.ask("soil", kind)
    pointer, free = obtain(driver, context, kind, nbytes)
    step = nbytes // 16
    zeros = [context.read(pointer + place, GRANULE) == bytes(GRANULE) for place in range(0, nbytes - step + 1, step)]
    free()
    assert zeros == [True] * len(zeros)
