"""Host devices in groups that do not reach each other, and what drivers refuse that host devices never do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Driver, DriverError, load
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.devices import PEERS
from cubroker.driver.host.shared_memory import BLOCK
from tests.unit.driver.other_process import OtherProcess

Result = cuda.CUresult
Attribute = cuda.CUdevice_P2PAttribute
SPEC = "host:4@16MiB/2"


@pytest.fixture(scope="module")
def spec() -> str:
    return SPEC


@pytest.fixture
def module() -> HostModule:
    """Three devices, of which the first two reach each other; their contexts live, the first one is current."""
    module = HostModule(3, 8 * BLOCK, 2)
    module.cuInit(0)
    contexts = [module.cuDevicePrimaryCtxRetain(device)[1] for device in range(3)]
    module.cuCtxPushCurrent(contexts[0])
    return module


def mappings() -> set[str]:
    """Which pieces of host devices' memory this process has mapped, by number."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:cubroker-host" in line)
    return {number for _, _, _, _, number, *_ in lines}


# -- groups --------------------------------------------------------------------------------------------


def test_devices_reach_those_of_their_group_alone(driver: Driver) -> None:
    reached = {(link.device, link.peer) for link in driver.peers.matrix() if link.access}
    assert reached == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert not driver.peers.can_access(1, 2)
    assert [link.native_atomics for link in driver.peers.matrix()] == [link.access for link in driver.peers.matrix()]


def test_access_to_another_group_cannot_be_enabled(driver: Driver) -> None:
    text = (
        r"cuCtxEnablePeerAccess failed with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED \(217\): from device 1 to device 2: that"
    )
    with pytest.raises(DriverError, match=text):
        driver.peers.enable(driver.context(1), 2)


def test_memory_of_another_group_is_refused_before_it_is_mapped(driver: Driver, other_process: OtherProcess) -> None:
    theirs = other_process.ask("allocate", BLOCK, device=3)
    handle = other_process.ask("export", theirs, device=3)
    before = mappings()
    with pytest.raises(DriverError, match="on a device that device 1 does not reach; open it on that device") as caught:
        driver.context(1).open(handle)
    assert (caught.value.call, caught.value.status) == ("cuIpcOpenMemHandle", 217)
    assert mappings() <= before
    for device in (2, 3):
        driver.context(device).close(driver.context(device).open(handle))
    other_process.ask("free", theirs, device=3)


def test_an_event_of_another_group_is_refused(driver: Driver, other_process: OtherProcess) -> None:
    theirs = other_process.ask("make_event", device=3)
    handle = other_process.ask("export_event", theirs, device=3)
    with pytest.raises(DriverError, match=r"cuIpcOpenEventHandle failed with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        driver.context(0).open_event(handle)
    driver.context(2).open_event(handle).close()
    other_process.ask("close_event", theirs, device=3)


def test_a_copy_to_another_group_goes_through_the_host(driver: Driver) -> None:
    near, far = driver.context(0), driver.context(3)
    source, target = near.allocate(BLOCK), far.allocate(BLOCK)
    near.write(source, b"the long way")
    with near.stream() as stream:
        stream.copy(target, source, 12)
    assert far.read(target, 12) == b"the long way"


def test_each_direction_is_disabled_for_itself(driver: Driver) -> None:
    first, second = driver.context(0), driver.context(1)
    driver.peers.enable(first, 1)
    driver.peers.enable(second, 0)
    driver.peers.disable(second, 0)
    with second.current(), pytest.raises(DriverError, match="NOT_ENABLED"):
        second.calls.cuCtxDisablePeerAccess(first.handle)
    driver.peers.disable(first, 1)


def test_closing_the_driver_ends_the_access_that_it_enabled(driver: Driver) -> None:
    other = load(SPEC)
    driver.peers.enable(driver.context(0), 1)
    other.context(0), other.context(1)  # so that the contexts outlive the driver's
    driver.close()
    calls = other.context(0).calls
    with other.context(0).current(), pytest.raises(DriverError, match=r"NOT_ENABLED \(705\)"):
        calls.cuCtxDisablePeerAccess(other.context(1).handle)
    other.close()


# -- devices that can have few peers -------------------------------------------------------------------

THREE = "host:3@16MiB"
FULL = r"\(711\): .*device 0 has as many peers as it can have, of which other programs may hold some .*"


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver of three devices that reach each other, each of which can have one peer, in this process."""
    monkeypatch.setenv(PEERS, "1")
    driver = load(THREE)
    yield driver
    driver.close()


def test_a_device_enables_no_more_peers_than_it_can_have(three: Driver) -> None:
    context = three.context(0)
    three.peers.enable(context, 1)
    with pytest.raises(DriverError, match=f"cuCtxEnablePeerAccess failed with CUDA_ERROR_TOO_MANY_PEERS {FULL}"):
        three.peers.enable(context, 2)
    three.peers.enable(three.context(2), 1)  # a limit of each device
    three.peers.disable(context, 1)
    three.peers.enable(context, 2)


def test_memory_of_one_device_too_many_is_not_opened(three: Driver) -> None:
    with OtherProcess(THREE) as other_process:
        handles = {}
        for device in range(3):
            pointer = other_process.ask("allocate", BLOCK, device=device)
            handles[device] = other_process.ask("export", pointer, device=device)
        context = three.context(0)
        opened = context.open(handles[1])
        context.close(context.open(handles[0]))  # a device is no peer of its own
        with pytest.raises(DriverError, match=f"cuIpcOpenMemHandle failed with CUDA_ERROR_TOO_MANY_PEERS {FULL}"):
            context.open(handles[2])
        context.close(opened)
        context.close(context.open(handles[2]))
        three.peers.enable(context, 1)
        with pytest.raises(DriverError, match="TOO_MANY_PEERS"):
            context.open(handles[2])
        context.close(context.open(handles[1]))


# -- the functions themselves --------------------------------------------------------------------------


def test_links_are_asked_for_between_two_devices(module: HostModule) -> None:
    access, unknown = Attribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 77
    assert module.cuDeviceCanAccessPeer(0, 1) == (Result.CUDA_SUCCESS, 1)
    assert module.cuDeviceCanAccessPeer(0, 0) == module.cuDeviceCanAccessPeer(0, 2) == (Result.CUDA_SUCCESS, 0)
    assert module.cuDeviceCanAccessPeer(0, 3) == (Result.CUDA_ERROR_INVALID_DEVICE, None)
    assert module.cuDeviceGetP2PAttribute(access, 0, 1) == (Result.CUDA_SUCCESS, 1)
    assert module.cuDeviceGetP2PAttribute(access, 1, 2) == (Result.CUDA_SUCCESS, 0)
    assert module.cuDeviceGetP2PAttribute(access, 1, 1) == (Result.CUDA_ERROR_INVALID_DEVICE, None)
    assert module.cuDeviceGetP2PAttribute(unknown, 0, 1) == (Result.CUDA_ERROR_INVALID_VALUE, None)


def test_atomics_are_refused_all_together_for_one_that_is_unknown(module: HostModule) -> None:
    add, end = cuda.CUatomicOperation.CU_ATOMIC_OPERATION_INTEGER_ADD, cuda.CUatomicOperation.CU_ATOMIC_OPERATION_MAX
    assert module.cuDeviceGetP2PAtomicCapabilities([add], 1, 0, 1) == (Result.CUDA_SUCCESS, [0])
    assert module.cuDeviceGetP2PAtomicCapabilities([add, add], 2, 1, 2) == (Result.CUDA_SUCCESS, [0, 0])
    for operations, count in (([add, end], 2), ([], 0), ([add], 2)):
        status, _ = module.cuDeviceGetP2PAtomicCapabilities(operations, count, 0, 1)
        assert status == Result.CUDA_ERROR_INVALID_VALUE


def test_access_ends_with_either_context(module: HostModule) -> None:
    peer = cuda.CUcontext(2)
    assert module.cuCtxEnablePeerAccess(peer, 0) == (Result.CUDA_SUCCESS,)
    assert module.cuCtxEnablePeerAccess(peer, 0) == (Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
    module.cuDevicePrimaryCtxRelease(1)
    assert module.cuCtxEnablePeerAccess(peer, 0) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    assert module.cuCtxDisablePeerAccess(peer) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    module.cuDevicePrimaryCtxRetain(1)
    assert module.cuCtxDisablePeerAccess(peer) == (Result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,)


def test_a_context_of_ones_own_is_no_place_to_open_memory(module: HostModule) -> None:
    own = module.cuCtxCreate(None, 0, 1)[1]
    assert int(module.cuCtxGetCurrent()[1]) == int(own)
    assert int(module.cuCtxGetDevice()[1]) == 1
    handle = cuda.CUipcMemHandle()
    assert module.cuIpcOpenMemHandle(handle, 1) == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    assert module.cuCtxDestroy(own) == (Result.CUDA_SUCCESS,)
    assert int(module.cuCtxGetDevice()[1]) == 0
    with_another_on_top = module.cuCtxCreate(None, 0, 1)[1]
    module.cuCtxPushCurrent(cuda.CUcontext(1))
    assert module.cuCtxDestroy(with_another_on_top) == (Result.CUDA_SUCCESS,)
    assert int(module.cuCtxGetDevice()[1]) == 0
    for call in (module.cuCtxDestroy, module.cuCtxPushCurrent, module.cuCtxSetCurrent):
        assert call(own) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    assert module.cuCtxCreate(None, 0, 3) == (Result.CUDA_ERROR_INVALID_DEVICE, None)


# -- other drivers -------------------------------------------------------------------------------------


def other(**results: Any) -> Driver:
    """A driver of two devices in which these names stand for something else."""
    module = HostModule(2, 2 * BLOCK)
    for name, result in results.items():
        setattr(module, name, result)
    return Driver(module, "cuda", host=False)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("TOO_MANY_PEERS", r"\(711\): from device 0 to device 1: device 0 has as many peers as it can have, of which"),
        ("MAP_FAILED", r"\(205\): from device 0 to device 1: the driver could not map that memory; .* copy it instead"),
        ("INVALID_CONTEXT", r"\(201\): from device 0 to device 1: the context of one of them is gone"),
        ("INVALID_VALUE", r"\(1\): from device 0 to device 1: this driver does not know"),
        ("UNKNOWN", r"\(999\): asked with 0"),
    ],
)
def test_each_refusal_says_what_stood_in_the_way(status: str, text: str) -> None:
    refusal = (getattr(Result, f"CUDA_ERROR_{status}"),)
    driver = other(cuCtxEnablePeerAccess=lambda *_: refusal)
    with pytest.raises(DriverError, match=f"cuCtxEnablePeerAccess failed with CUDA_ERROR_{status} {text}"):
        driver.peers.enable(driver.context(0), 1)
    with pytest.raises(DriverError, match="NOT_ENABLED"):
        driver.peers.disable(driver.context(0), 1)
    driver.close()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("MAP_FAILED", r"\(205\): the driver could not map the memory, .* attach where the memory is"),
        ("TOO_MANY_PEERS", r"\(711\): device 0 has as many peers as it can have, .* attach where the memory is"),
    ],
)
def test_an_open_that_is_refused_says_what_is_known_of_it(status: str, text: str) -> None:
    refusal = getattr(Result, f"CUDA_ERROR_{status}")
    driver = other(
        cuIpcOpenMemHandle=lambda *_: (refusal, None),
        cuIpcOpenEventHandle=lambda *_: (refusal, None),
        cuMemSetAccess=lambda *_: (refusal,),
    )
    context, physical = driver.context(0), driver.create(0, BLOCK)
    descriptor = physical.export()
    with context.reserve(BLOCK) as memory:
        attempts: dict[str, Callable[[], object]] = {
            "cuIpcOpenMemHandle": lambda: context.open(bytes(64)),
            "cuIpcOpenEventHandle": lambda: context.open_event(bytes(64)),
            "cuMemSetAccess": lambda: memory.map(descriptor, readonly=True),
        }
        for call, attempt in attempts.items():
            with pytest.raises(DriverError, match=f"{call} failed .*{status} {text}"):
                attempt()
        assert not memory.mapped
    os.close(descriptor)
    physical.release()
    driver.close()


def test_a_context_that_refuses_everything_does_not_keep_the_driver_from_closing() -> None:
    refusal = (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
    driver = other(cuCtxDisablePeerAccess=lambda *_: refusal)
    driver.peers.enable(driver.context(0), 1)
    driver.close()


def test_older_drivers_and_bindings_know_no_atomics() -> None:
    def missing(*_: object) -> None:
        raise RuntimeError('Function "cuDeviceGetP2PAtomicCapabilities" not found')

    class Attributes:
        CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3
        CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED = 4

    driver = other(cuDeviceGetP2PAtomicCapabilities=missing)
    assert driver.peers.atomics(0, 1) == {}
    driver = other(CUatomicOperation=(), CUdevice_P2PAttribute=Attributes)
    assert driver.peers.atomics(0, 1) == {}
    assert not driver.peers.link(0, 1).only_partial_atomics


@pytest.mark.parametrize(("status", "passes"), [("INVALID_VALUE", True), ("UNKNOWN", False)])
def test_what_a_driver_does_not_know_is_left_out(status: str, passes: bool) -> None:
    refusal = (getattr(Result, f"CUDA_ERROR_{status}"), None)

    def asked(attribute: Any, *_: object) -> Any:
        return refusal if int(attribute) == 5 else (Result.CUDA_SUCCESS, 1)

    driver = other(cuDeviceGetP2PAttribute=asked, cuDeviceGetP2PAtomicCapabilities=lambda *_: refusal)
    if passes:
        assert driver.peers.atomics(0, 1) == {}
        assert driver.peers.link(0, 1).access
        assert not driver.peers.link(0, 1).only_partial_atomics
        return
    for question in (driver.peers.atomics, driver.peers.link):
        with pytest.raises(DriverError, match=status):
            question(0, 1)
