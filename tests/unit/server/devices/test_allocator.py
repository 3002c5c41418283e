from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cubroker.driver import Context, Driver, DriverError, load
from cubroker.driver.host.virtual_memory import CHANNEL
from cubroker.protocol.messages import DESCRIPTOR
from cubroker.server.devices.allocator import DeviceAllocator, MemoryWatch
from cubroker.server.event_queue import Event
from cubroker.server.ledger.events import Allocate, Allocated, AllocationFailed, Free, Freed
from cubroker.server.ledger.memory import GRANULARITY
from tests.faults import fail_nth
from tests.unit.server.devices.outcomes import Outcomes
from tests.unit.server.processes import files

SIZE = 16 << 20


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = load(f"host:1@{SIZE}")
    yield driver
    driver.close()


class Device:
    """Device memory, and what it reported."""

    def __init__(self, driver: Driver) -> None:
        self._outcomes = Outcomes()
        (self.device,) = driver.devices
        self.memory = DeviceAllocator(driver, self.device, self._outcomes)

    def allocate(self, ticket: int, *sizes: int, share: str = "ipc") -> Event:
        self.memory.submit(Allocate(ticket, self.device.uuid, sizes, share))
        return self._outcomes.next()

    def free(self, ticket: int) -> Event:
        self.memory.submit(Free(ticket, self.device.uuid))
        return self._outcomes.next()

    def next(self) -> Event:
        return self._outcomes.next()


@contextmanager
def serving(driver: Driver) -> Iterator[Device]:
    device = Device(driver)
    try:
        yield device
    finally:
        device.memory.close()


def free_bytes(context: Context) -> int:
    return context.memory()[0]


def test_memory_is_allocated_in_whole_blocks_and_given_back(driver: Driver) -> None:
    context = driver.context(0)
    with serving(driver) as device:
        allocated = device.allocate(1, 1, GRANULARITY + 1)
        assert isinstance(allocated, Allocated)
        assert len(set(allocated.handles)) == 2
        assert all(len(handle) == 64 for handle in allocated.handles)
        assert free_bytes(context) == SIZE - 3 * GRANULARITY
        assert device.free(1) == Freed(1)
        assert free_bytes(context) == SIZE


def test_memory_is_cleared_before_there_is_a_handle(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []

    def clear(pointer: int, nbytes: int) -> None:
        Context.clear(context, pointer, nbytes)
        cleared.append(pointer)

    def export(pointer: int) -> bytes:
        assert pointer in cleared
        assert context.read(pointer, GRANULARITY) == bytes(GRANULARITY)
        return Context.export(context, pointer)

    context = driver.context(0)
    monkeypatch.setattr(context, "clear", clear)
    monkeypatch.setattr(context, "export", export)
    with serving(driver) as device:
        assert isinstance(device.allocate(1, 100, 100), Allocated)


def test_a_request_that_does_not_fit_leaves_nothing_allocated(driver: Driver) -> None:
    context = driver.context(0)
    with serving(driver) as device:
        refused = device.allocate(1, GRANULARITY, SIZE)
        assert isinstance(refused, AllocationFailed)
        assert refused.code == "out_of_memory"
        device_0 = f"the broker's device 0 (cubroker host device 0, {driver.devices[0].uuid[:13]})"
        assert refused.message.startswith(f"{device_0} cannot provide {GRANULARITY + SIZE} bytes: ")
        assert free_bytes(context) == SIZE
        assert device.free(1) == Freed(1)


def test_an_unknown_share_kind_is_never_taken_for_another(driver: Driver) -> None:
    with serving(driver) as device:
        refused = device.allocate(1, GRANULARITY, share="smoke")
        assert isinstance(refused, AllocationFailed)
        assert refused.code == "internal"
        assert "unknown share kind 'smoke'" in refused.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DriverError("cuMemAlloc", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"), "device"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("a mistake"), "internal"),
    ],
)
def test_whatever_fails_is_reported_undone_and_not_fatal(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def fail(pointer: int) -> bytes:
        raise error

    context = driver.context(0)
    with serving(driver) as device:
        with monkeypatch.context() as broken:
            broken.setattr(context, "export", fail)
            refused = device.allocate(1, 100)
        assert isinstance(refused, AllocationFailed)
        assert refused.code == code
        assert free_bytes(context) == SIZE
        assert isinstance(device.allocate(2, 100), Allocated)


def test_a_free_asked_for_while_its_allocation_is_queued_comes_after_it(driver: Driver) -> None:
    with serving(driver) as device:
        for ticket in range(10):
            device.memory.submit(Allocate(ticket, device.device.uuid, (GRANULARITY,), "ipc"))
            device.memory.submit(Free(ticket, device.device.uuid))
        for ticket in range(10):
            assert isinstance(device.next(), Allocated)
            assert device.next() == Freed(ticket)


@pytest.mark.parametrize("numbers", [(), (0, 1), (1,)])
def test_a_free_of_what_went_with_an_earlier_broker_is_reported_and_not_fatal(
    driver: Driver, numbers: tuple[int, ...]
) -> None:
    with serving(driver) as device:
        device.memory.submit(Free(7, device.device.uuid, numbers))
        assert device.next() == Freed(7, numbers)
        assert isinstance(device.allocate(8, GRANULARITY), Allocated)
        device.free(8)


@pytest.mark.parametrize(
    "error", [DriverError("cuMemFree", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"), MemoryError(), RuntimeError("a mistake")]
)
def test_memory_that_the_driver_keeps_is_told_and_the_rest_is_free(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    context = driver.context(0)
    with serving(driver) as device:
        assert isinstance(device.allocate(1, 100, GRANULARITY + 1, 100), Allocated)
        with monkeypatch.context() as broken:
            fail_nth(broken, context, "free", 2, error)
            assert device.free(1) == Freed(1, unfreed=2 * GRANULARITY)
        assert SIZE - free_bytes(context) == 2 * GRANULARITY
        assert isinstance(device.allocate(2, 100), Allocated)


@pytest.mark.parametrize("name", ["freed", "freeing"])
def test_memory_is_freed_though_nobody_can_be_told_of_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    context = driver.context(0)
    with serving(driver) as device:
        device.allocate(1, 100)
        fail_nth(monkeypatch, MemoryWatch, name, 1, MemoryError())
        assert device.free(1) == Freed(1)
        assert free_bytes(context) == SIZE


def test_an_outcome_that_cannot_be_told_holds_up_no_later_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(driver) as device:
        fail_nth(monkeypatch, Outcomes, "put_threadsafe", 1, MemoryError())
        device.memory.submit(Allocate(1, device.device.uuid, (100,), "ipc"))
        assert device.free(1) == Freed(1)


@pytest.fixture
def no_context(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a context fails."""

    def fail(index: int) -> Context:
        raise AssertionError(f"a context of device {index}")

    monkeypatch.setattr(driver, "context", fail)


@pytest.mark.usefixtures("no_context")
def test_memory_that_descriptors_open_needs_no_context_and_is_all_zero(driver: Driver) -> None:
    before = files(os.getpid())
    with serving(driver) as device:
        allocated = device.allocate(1, 1, GRANULARITY + 1, share="vmm")
        assert isinstance(allocated, Allocated)
        assert allocated.handles == (DESCRIPTOR, DESCRIPTOR)
        sizes = []
        for descriptor in allocated.descriptors:
            with mmap.mmap(descriptor, 0) as seen:
                sizes.append(len(seen))
                assert seen[:] == bytes(len(seen))
        assert sizes == [GRANULARITY, 2 * GRANULARITY]
        assert device.free(1) == Freed(1)
        assert files(os.getpid()) <= before
        assert isinstance(device.allocate(2, SIZE, share="vmm"), Allocated)  # all of it is there again
    assert files(os.getpid()) <= before


@pytest.mark.usefixtures("no_context")
def test_memory_without_addresses_that_does_not_fit_leaves_nothing_allocated(driver: Driver) -> None:
    before = files(os.getpid())
    with serving(driver) as device:
        refused = device.allocate(1, GRANULARITY, SIZE, share="vmm")
        assert isinstance(refused, AllocationFailed)
        assert refused.code == "out_of_memory"
        assert files(os.getpid()) <= before
        assert isinstance(device.allocate(2, SIZE, share="vmm"), Allocated)


def test_memory_has_a_fabric_handle_beside_its_descriptor_if_it_is_vmm_and_there_is_a_channel(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(driver) as device:
        for number, (channel, share, handles) in enumerate([("0", "vmm", 2), ("0", "multicast", 1), ("", "vmm", 1)], 1):
            monkeypatch.setenv(CHANNEL, channel)
            allocated = device.allocate(number, 1, 1, share=share)
            assert isinstance(allocated, Allocated)
            assert len(allocated.descriptors) == 2
            assert len(set(allocated.handles)) == handles
            assert (DESCRIPTOR in allocated.handles) == (handles == 1)


def test_a_device_makes_its_context_for_the_first_memory_that_has_an_address(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    context = driver.context

    def make(index: int) -> Context:
        made.append(index)
        return context(index)

    monkeypatch.setattr(driver, "context", make)
    with serving(driver) as device:
        device.allocate(1, 1, share="vmm")
        assert made == []
        assert isinstance(device.allocate(2, 1), Allocated)
        assert made == [0]


def test_memory_that_the_driver_keeps_of_an_allocation_that_failed_is_told(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pointer: int) -> bytes:
        raise DriverError("cuIpcGetMemHandle", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def free(pointer: int) -> None:
        freed.append(pointer)
        if len(freed) != 2:
            raise DriverError("cuMemFree", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        Context.free(context, pointer)

    freed: list[int] = []
    context = driver.context(0)
    with serving(driver) as device:
        with monkeypatch.context() as broken:
            broken.setattr(context, "export", fail)
            broken.setattr(context, "free", free)
            refused = device.allocate(1, 100, GRANULARITY, GRANULARITY + 1)
        assert isinstance(refused, AllocationFailed)
        assert refused.unfreed == SIZE - free_bytes(context) == 3 * GRANULARITY
        assert device.free(1) == Freed(1)
        again = device.allocate(2, SIZE)
        assert isinstance(again, AllocationFailed)
        assert again.unfreed == 0


def test_closing_frees_what_is_left(driver: Driver) -> None:
    context = driver.context(0)
    with serving(driver) as device:
        device.allocate(1, 100)
        device.allocate(2, 100)
    assert free_bytes(context) == SIZE


def test_memory_that_somebody_uses_is_left_when_the_rest_is_freed(driver: Driver) -> None:
    context = driver.context(0)
    before = free_bytes(context)
    with serving(driver) as device:
        for ticket in (1, 2):
            device.allocate(ticket, GRANULARITY)
            device.allocate(ticket + 2, GRANULARITY, share="vmm")
        assert not device.memory.leaves
        device.memory.leave(1)
        device.memory.leave(3)
        assert device.memory.leaves
    assert free_bytes(context) == before - 2 * GRANULARITY
    for ticket in (1, 3):
        device.memory._free(ticket)  # which the end of the process does elsewhere
