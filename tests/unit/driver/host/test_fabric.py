"""Fabric handles of host devices: who is refused and how, and what is left of them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK
from cubroker.driver.host.virtual_memory import CHANNEL
from cubroker.driver.vmm import import_refused
from tests import faults
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.host.calls import DESCRIPTOR, OURS, held, properties, value
from tests.unit.driver.other_process import OtherProcess

Kind = cuda.CUmemAllocationHandleType
Result = cuda.CUresult
FABRIC = Kind.CU_MEM_HANDLE_TYPE_FABRIC
THREAD = "cubroker-host-memory"


@pytest.fixture(autouse=True)
def channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNEL, "7")


def refusal(context: Context, handle: bytes) -> str:
    """The status with which a handle is refused."""
    with context.reserve(BLOCK) as reservation, pytest.raises(DriverError) as caught:
        reservation.map(handle, readonly=True)
    assert import_refused(caught.value)
    return caught.value.name


@pytest.mark.parametrize("theirs", ["", "8", "none"])
def test_a_process_on_no_channel_or_another_is_refused_and_told_what_it_lacks(
    driver: Driver, context: Context, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    with OtherProcess(SPEC) as owner:
        handle = owner.ask("lend_fabric", BLOCK)
        monkeypatch.setenv(CHANNEL, theirs)
        assert refusal(context, handle) == "CUDA_ERROR_NOT_PERMITTED"
        with context.reserve(BLOCK) as reservation:
            with pytest.raises(DriverError, match="not on the IMEX channel of the memory's owner"):
                reservation.map(handle, readonly=True)
            monkeypatch.setenv(CHANNEL, "7")
            reservation.map(handle, readonly=True)


def test_a_handle_ends_with_its_memory_or_its_owner(driver: Driver, context: Context) -> None:
    physical = driver.create(0, BLOCK, fabric=True)
    handle = physical.export_fabric()
    assert handle
    assert physical.export_fabric() == handle
    physical.release()
    assert refusal(context, handle) == "CUDA_ERROR_INVALID_VALUE"
    with OtherProcess(SPEC) as owner:
        handle = owner.ask("lend_fabric", BLOCK)
        owner.kill()
    assert refusal(context, handle) == "CUDA_ERROR_INVALID_VALUE"


def test_a_handle_of_anything_else_is_refused(context: Context) -> None:
    pointer = context.allocate(BLOCK)
    with context.event(shared=True) as event:
        for handle in (context.export(pointer), event.export()):
            with_channel = handle[:32] + (7).to_bytes(4, "little") + handle[36:]
            assert refusal(context, with_channel) == "CUDA_ERROR_INVALID_VALUE"
    context.free(pointer)


def test_memory_is_exported_only_as_it_was_created() -> None:
    module = HostModule(1, 8 * BLOCK)
    value(module.cuInit(0))
    handle = value(module.cuMemCreate(BLOCK, properties(kind=FABRIC), 0))
    assert module.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    exported = value(module.cuMemExportToShareableHandle(handle, FABRIC, 0))
    assert any(ctypes.string_at(exported.getPtr(), 64))
    value(module.cuMemRelease(handle))


@pytest.mark.parametrize("name", ["CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_refused_trial_means_that_there_is_a_descriptor_alone(name: str, call: str) -> None:
    plan = faults.Plan()
    faulty = Driver(faults.FaultyModule(HostModule(1, BLOCK), plan), "host:1", host=True)
    plan.arm([call], 1, int(getattr(Result, name)))
    physical = faulty.create(0, BLOCK, fabric=True)
    assert physical.export_fabric() is None
    physical.release()
    plan.arm([call], 1, int(Result.CUDA_ERROR_OUT_OF_MEMORY))
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        faulty.create(0, BLOCK, fabric=True).export_fabric()


def test_nothing_is_left_of_handles_and_their_memory(driver: Driver, context: Context) -> None:
    before, threads, free = held(), set(threading.enumerate()), context.memory()
    several = [driver.create(0, BLOCK, fabric=True) for _ in range(3)]
    handles = [physical.export_fabric() for physical in several]
    assert len({*handles}) == 3
    assert [thread.name for thread in set(threading.enumerate()) - threads] == [THREAD]
    for physical in several:
        physical.release()
    assert set(threading.enumerate()) <= threads
    assert held() <= before
    assert context.memory() == free


def test_a_forked_child_does_not_answer_for_its_parent() -> None:
    with OtherProcess(SPEC) as owner, OtherProcess(SPEC) as other:
        handle = owner.ask("lend_fabric", BLOCK)
        _, *files = owner.ask("fork")
        assert not [file for file in files if OURS in file]
        child = owner.ask("fork_and_stay")
        owner.kill()
        with pytest.raises(DriverError, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_INVALID_VALUE"):
            other.ask("attach_fabric", handle, BLOCK, True)
        os.kill(child, signal.SIGKILL)
