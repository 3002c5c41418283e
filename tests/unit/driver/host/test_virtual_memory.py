"""Physical memory, ranges and mappings of host devices: what is refused, what faults, what failures and forks leave."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Context, Driver, DriverError, load
from cubroker.driver.checked_calls import Calls
from cubroker.driver.host import shared_memory
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK, close
from tests import faults, forkserver
from tests.unit.driver.conformance_vmm import imported, lent, mapped
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.host.calls import DESCRIPTOR, OURS, Kind, access, held, properties, value
from tests.unit.driver.other_process import PRELOAD, OtherProcess

Result = cuda.CUresult
SYSTEM_CALLS = ("memfd_create", "ftruncate", "fcntl", "mmap", "mprotect")


@pytest.fixture
def module() -> HostModule:
    """A driver of its own, as a fresh process has it: two devices that do not reach each other, and no context."""
    module = HostModule(2, 8 * BLOCK, 1)
    assert module.cuInit(0) == (Result.CUDA_SUCCESS,)
    return module


# -- refusals ------------------------------------------------------------------------------------------


def test_a_process_without_addresses_is_told_of_its_limit(context: Context) -> None:
    text = (
        r"cuMemAddressReserve failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): this process has no addresses left .*: raise"
        r" its limit on address space \(`ulimit -v`\)"
    )
    with pytest.raises(DriverError, match=text):
        context.reserve(1 << 48)


def test_arguments_that_make_no_sense_are_refused(module: HostModule) -> None:
    managed, nowhere = properties(), properties()
    managed.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
    nowhere.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    handle = value(module.cuMemCreate(2 * BLOCK, properties(), 0))
    start = int(value(module.cuMemAddressReserve(4 * BLOCK, 0, 0, 0)))
    for status, *_ in (
        module.cuMemGetAllocationGranularity(properties(), 7),
        module.cuMemCreate(BLOCK, managed, 0),
        module.cuMemCreate(BLOCK, nowhere, 0),
        module.cuMemCreate(BLOCK, properties(kind=Kind.CU_MEM_HANDLE_TYPE_WIN32), 0),
        module.cuMemCreate(BLOCK, properties(), 1),
        module.cuMemRelease(4711),
        module.cuMemExportToShareableHandle(handle, Kind.CU_MEM_HANDLE_TYPE_FABRIC, 0),
        module.cuMemExportToShareableHandle(handle, DESCRIPTOR, 1),
        module.cuMemImportFromShareableHandle(0, Kind.CU_MEM_HANDLE_TYPE_FABRIC),
        module.cuMemImportFromShareableHandle(0, Kind.CU_MEM_HANDLE_TYPE_WIN32),
        module.cuMemAddressReserve(BLOCK, 3, 0, 0),
        module.cuMemAddressReserve(BLOCK, 0, 0, 1),
        module.cuMemAddressFree(start, BLOCK),
        module.cuMemAddressFree(start + BLOCK, 3 * BLOCK),
        module.cuMemMap(start + 1, 2 * BLOCK, 0, handle, 0),
        module.cuMemMap(start, 0, 0, handle, 0),
        module.cuMemMap(start, 3 * BLOCK, 0, handle, 0),
        module.cuMemMap(start, 2 * BLOCK, BLOCK, handle, 0),
        module.cuMemMap(start, 2 * BLOCK, 0, handle, 1),
        module.cuMemMap(start, 2 * BLOCK, 0, 4711, 0),
        module.cuMemMap(start + 3 * BLOCK, 2 * BLOCK, 0, handle, 0),
        module.cuMemUnmap(start, 2 * BLOCK),
        module.cuMemSetAccess(start, 2 * BLOCK, [access(0)], 1),
    ):
        assert status == Result.CUDA_ERROR_INVALID_VALUE
    for offset in (0, BLOCK):
        assert module.cuMemMap(start, BLOCK, offset, handle, 0) == (Result.CUDA_ERROR_NOT_SUPPORTED,)
    assert module.cuMemCreate(BLOCK, properties(2), 0) == (Result.CUDA_ERROR_INVALID_DEVICE, None)
    assert module.cuMemCreate(7 * BLOCK, properties(), 0) == (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
    value(module.cuMemAddressFree(start, 4 * BLOCK))
    value(module.cuMemRelease(handle))


def test_what_is_mapped_is_unmapped_whole_and_before_its_range_is_freed(module: HostModule) -> None:
    handle = value(module.cuMemCreate(2 * BLOCK, properties(), 0))
    start = int(value(module.cuMemAddressReserve(4 * BLOCK, 8 * BLOCK, 0, 0)))
    assert start % (8 * BLOCK) == 0
    for place in (start, start + 2 * BLOCK):
        value(module.cuMemMap(place, 2 * BLOCK, 0, handle, 0))
    value(module.cuMemRelease(handle))
    none = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_MAX
    for status, *_ in (
        module.cuMemSetAccess(start, BLOCK, [access(0)], 1),
        module.cuMemSetAccess(start, 4 * BLOCK, [access(0, none)], 1),
        module.cuMemUnmap(start, BLOCK),
        module.cuMemUnmap(start + BLOCK, 2 * BLOCK),
        module.cuMemAddressFree(start, 4 * BLOCK),
    ):
        assert status == Result.CUDA_ERROR_INVALID_VALUE
    value(module.cuMemUnmap(start, 4 * BLOCK))
    value(module.cuMemAddressFree(start, 4 * BLOCK))


def test_what_is_not_mapped_is_not_retained(module: HostModule) -> None:
    start = value(module.cuMemAddressReserve(BLOCK, 0, 0, 0))
    for address in (int(start), 4711):
        assert module.cuMemRetainAllocationHandle(address) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    value(module.cuMemAddressFree(start, BLOCK))


@pytest.mark.parametrize("call", ["mremap", "mprotect"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_system_that_refuses_to_map_retained_memory_has_the_addresses_and_nothing_else(
    module: HostModule, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    before = held()
    handle = value(module.cuMemCreate(BLOCK, properties(), 0))
    start = value(module.cuMemAddressReserve(BLOCK, 0, 0, 0))
    value(module.cuMemMap(start, BLOCK, 0, handle, 0))
    value(module.cuMemRelease(handle))
    plan = faults.Plan()
    faults.fail_system_calls(monkeypatch, plan)
    plan.arm([call], at, errno.ENOMEM)
    status, retained = module.cuMemRetainAllocationHandle(start)
    assert (status == Result.CUDA_SUCCESS) is (at == 2)
    if at == 2:
        value(module.cuMemUnmap(start, BLOCK))
        assert module.cuMemMap(start, BLOCK, 0, retained, 0) != (Result.CUDA_SUCCESS,)
        assert module.cuMemExportToShareableHandle(retained, DESCRIPTOR, 0) == (Result.CUDA_ERROR_INVALID_VALUE, None)
        value(module.cuMemMap(start, BLOCK, 0, retained, 0))
        value(module.cuMemRelease(retained))
    value(module.cuMemUnmap(start, BLOCK))
    value(module.cuMemAddressFree(start, BLOCK))
    assert held() == before


def test_a_device_out_of_reach_gets_no_access(module: HostModule) -> None:
    handle = value(module.cuMemCreate(BLOCK, properties(1), 0))
    start = value(module.cuMemAddressReserve(BLOCK, 0, 0, 0))
    value(module.cuMemMap(start, BLOCK, 0, handle, 0))
    assert module.cuMemSetAccess(start, BLOCK, [access(1), access(0)], 2) == (Result.CUDA_ERROR_INVALID_DEVICE,)
    value(module.cuCtxPushCurrent(value(module.cuDevicePrimaryCtxRetain(1))))
    assert module.cuMemsetD8(start, 1, BLOCK) == (Result.CUDA_ERROR_INVALID_VALUE,), "nobody has access yet"
    value(module.cuMemSetAccess(start, BLOCK, [access(1), access(0)], 1))
    value(module.cuMemsetD8(start, 1, BLOCK))
    value(module.cuMemUnmap(start, BLOCK))
    value(module.cuMemAddressFree(start, BLOCK))
    value(module.cuMemRelease(handle))


def test_memory_of_a_device_out_of_reach_is_not_mapped() -> None:
    driver = load("host:2@64MiB/1")
    before = held()
    with lent(driver, device=1) as descriptor, driver.context(0).reserve(BLOCK) as reservation:
        with pytest.raises(DriverError, match=r"cuMemSetAccess .* on a device that device 0 does not reach"):
            reservation.map(descriptor, readonly=True)
        with mapped(driver.context(1), descriptor):
            pass
    assert held() <= before
    driver.close()


def test_memory_that_is_for_this_process_alone_has_no_descriptor(module: HostModule) -> None:
    handle = value(module.cuMemCreate(BLOCK, properties(kind=Kind.CU_MEM_HANDLE_TYPE_NONE), 0))
    assert module.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    value(module.cuMemRelease(handle))
    assert module.cuMemRelease(handle) == (Result.CUDA_ERROR_INVALID_VALUE,)


def test_an_impostor_cannot_make_us_map_what_would_fault(context: Context) -> None:
    before = held()
    unsealed, elsewhere = os.memfd_create(f"{OURS}0"), shared_memory.create(BLOCK, f"{OURS}2")
    for descriptor in (unsealed, elsewhere):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"), imported(context, descriptor):
            pass
        close(descriptor)
    assert held() <= before


# -- lending for reading -------------------------------------------------------------------------------


def test_what_was_lent_for_reading_is_mapped_for_nothing_else(driver: Driver, context: Context) -> None:
    """Which is another refusal than those of GPUs, where memory cannot be lent so."""
    before = held()
    with lent(driver) as descriptor, context.reserve(BLOCK) as reservation:
        with driver.for_reading([descriptor]) as (reading,):
            assert not os.get_inheritable(reading)
            with pytest.raises(DriverError, match=r"cuMemSetAccess failed with CUDA_ERROR_NOT_PERMITTED"):
                reservation.map(reading, readonly=False)
            assert not reservation.mapped
            reservation.map(reading, readonly=True)
        start = reservation.pointer
        with context.current(), pytest.raises(DriverError, match="CUDA_ERROR_NOT_PERMITTED"):
            context.calls.cuMemSetAccess(start, BLOCK, [access(0)], 1)
        assert context.read(start, 4) == bytes(4)
        reservation.unmap()
        reservation.map(descriptor, readonly=False)
        context.write(start, b"mine")
    assert held() <= before


def test_it_is_lent_for_reading_by_its_owner_alone_who_closes_it_to_others(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lent(driver) as descriptor:
        os.fchmod(descriptor, 0o777)  # as memory of earlier versions is
        before = held()
        with driver.for_reading([descriptor]) as (reading,):
            assert os.fstat(reading).st_mode & 0o777 == 0o600
        assert held() == before
        with monkeypatch.context() as short:
            short.setattr(os, "open", fail_second(os.open, OSError(errno.EMFILE, "too many")))
            with pytest.raises(OSError, match="too many"), driver.for_reading([descriptor, descriptor]):
                pass
        assert held() == before


def fail_second(call: Callable[..., int], error: OSError) -> Callable[..., int]:
    calls = iter((call, None))

    def failing(*arguments: Any) -> int:
        there = next(calls)
        if there is None:
            raise error
        return there(*arguments)

    return failing


# -- what is left --------------------------------------------------------------------------------------


def test_pages_and_addresses_go_back_to_the_system(driver: Driver, context: Context) -> None:
    before, memory_before = held(), context.memory()
    with lent(driver, 8 * BLOCK) as descriptor, mapped(context, descriptor, 8 * BLOCK) as pointer:
        context.write(pointer, b"x" * 8 * BLOCK)
        assert context.memory()[0] == memory_before[0] - 8 * BLOCK
        opened = held() - before
        assert sorted(opened.values()) == [1, 2], "a mapping; the handle's own descriptor and the one that was exported"
    assert held() <= before
    assert context.memory() == memory_before


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> faults.Plan:
    """What says which system calls beneath host memory fail."""
    plan = faults.Plan()
    faults.fail_system_calls(monkeypatch, plan)
    return plan


@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_system_calls_that_fail_leave_nothing(driver: Driver, context: Context, plan: faults.Plan, name: str) -> None:
    """Whichever of them it is, on the way from nothing to a mapping."""
    before = held()

    def use() -> None:
        with lent(driver) as descriptor, mapped(context, descriptor):
            plan.arm([], 0, 0)

    plan.arm([name], 0, 0)
    with lent(driver) as descriptor, mapped(context, descriptor):
        calls = plan.arm([], 0, 0)
    assert calls
    for at in range(1, calls + 1):
        plan.arm([name], at, errno.ENOMEM)
        with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            use()
        assert held() <= before
        assert context.memory() == (context.device.total,) * 2


def test_nothing_is_copied_where_nothing_is_mapped(driver: Driver, context: Context) -> None:
    with lent(driver) as descriptor, context.reserve(BLOCK) as reservation:
        for _ in range(2):
            with pytest.raises(DriverError, match="cuMemcpyDtoHAsync failed with CUDA_ERROR_INVALID_VALUE"):
                context.read(reservation.pointer, 1)
            reservation.map(descriptor, readonly=False)
            reservation.unmap()


def test_an_unmap_that_fails_can_be_done_again(driver: Driver, context: Context, plan: faults.Plan) -> None:
    with lent(driver) as descriptor, context.reserve(BLOCK) as reservation:
        reservation.map(descriptor, readonly=False)
        plan.arm(["mmap"], 1, errno.ENOMEM)
        with pytest.raises(DriverError, match="cuMemUnmap failed with CUDA_ERROR_OUT_OF_MEMORY"):
            reservation.unmap()
        assert reservation.mapped
        context.write(reservation.pointer, b"whole")


def test_a_mapping_whose_handle_cannot_be_released_is_taken_back(
    driver: Driver, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = faults.Plan()
    monkeypatch.setattr(context, "calls", Calls(faults.FaultyModule(context.calls.module, plan)))
    with lent(driver) as descriptor, context.reserve(BLOCK) as reservation:
        plan.arm(["cuMemRelease"], 1, 999)
        with pytest.raises(DriverError, match="cuMemRelease failed with CUDA_ERROR_UNKNOWN"):
            reservation.map(descriptor, readonly=False)
        plan.arm([], 0, 0)
        assert not reservation.mapped
        assert not any(OURS in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    ("call", "status", "obstacle"),
    [
        (
            "cuMemCreate",
            Result.CUDA_ERROR_NOT_SUPPORTED,
            "cuMemCreate failed .*cannot be shared by descriptor",
        ),
        ("cuMemExportToShareableHandle", Result.CUDA_ERROR_NOT_PERMITTED, "cuMemExportToShareableHandle failed"),
        ("cuMemGetAllocationGranularity", Result.CUDA_ERROR_NOT_SUPPORTED, "cuMemGetAllocationGranularity failed"),
        ("cuMemCreate", Result.CUDA_ERROR_OUT_OF_MEMORY, None),  # a device that is full
    ],
)
def test_a_device_whose_memory_cannot_be_shared_by_descriptor_says_why(
    call: str, status: Any, obstacle: str | None
) -> None:
    module, plan = HostModule(1, 8 * BLOCK), faults.Plan()
    driver = Driver(faults.FaultyModule(module, plan), "host:1", host=True)
    plan.arm((call,), 1, int(status))
    said = driver.vmm_obstacle(0)
    assert said is None if obstacle is None else re.search(obstacle, said or "")
    assert not module.handles
    assert driver.vmm_obstacle(0) is None


FAULTING = """
import ctypes, os, sys
from cubroker.driver import load
driver = load(sys.argv[1])
reservation = driver.context(0).reserve(2 << 20)
if sys.argv[2] == "readonly":
    reservation.map(driver.create(0, 2 << 20).export(), readonly=True)
    assert ctypes.string_at(reservation.pointer, 1) == bytes(1)
print("touching", flush=True)
ctypes.memset(reservation.pointer, 1, 1)
"""


@pytest.mark.parametrize("state", ["readonly", "vacant"])
def test_a_write_past_the_driver_ends_the_process_that_does_it(state: str) -> None:
    ended = forkserver.run(["-c", FAULTING, SPEC, state], preload=PRELOAD, capture_output=True)
    assert ended.stdout == b"touching\n"
    assert ended.returncode == -signal.SIGSEGV


def test_a_forked_child_has_no_memory_of_its_parent_and_harms_nothing(driver: Driver, context: Context) -> None:
    with OtherProcess(SPEC) as owner:
        descriptor = owner.lend(BLOCK)
        pointer = owner.attach(descriptor, BLOCK, readonly=False)
        name, *files = owner.ask("fork")
        assert name == "CUDA_ERROR_NOT_INITIALIZED"
        assert files
        assert not [file for file in files if OURS in file]
        owner.ask("write", pointer, b"whole")
        with mapped(context, descriptor, readonly=True) as ours:
            assert context.read(ours, 5) == b"whole"
        os.close(descriptor)


def test_a_range_is_closed_once(context: Context) -> None:
    reservation = context.reserve(BLOCK)
    reservation.close()
    undone: tuple[Callable[[], None], ...] = (reservation.close, reservation.unmap)
    for undo in undone:
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            undo()
