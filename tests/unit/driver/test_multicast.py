"""The recipes of multicast: what a failure half-way leaves, in which order things end, the kernel, and the guard."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Driver, DriverError, Multicast, MulticastOff, Window
from cubroker.driver.checked_calls import Calls
from cubroker.driver.context import KERNEL_FOLDER as HERE
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.shared_memory import BLOCK
from cubroker.driver.host.virtual_memory import PhysicalMemory
from cubroker.driver.multicast import Broadcast, granularity, obstacle, unavailable
from cubroker.driver.vmm import Reservation
from tests.brokers import PATIENCE
from tests.faults import FaultyModule, Plan
from tests.unit.driver.conformance_vmm import failing
from tests.unit.driver.hardware import YES, StandIn
from tests.unit.driver.holdings import holdings
from tests.unit.driver.multicast_setup import TEXT, MulticastSetup

UNKNOWN = int(cuda.CUresult.CUDA_ERROR_UNKNOWN)
REFUSED = {
    801: "have no multicast",
    800: "may not use multicast",
    802: "not ready yet",
    401: "is broken",
    2: "no multicast slots left",
    101: "cannot share an object",
}


class Watched(FaultyModule):
    """Host devices whose calls fail as a plan says; it writes down which were made, and what was released."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(HostModule(2, 8 * BLOCK), plan)
        self.called: list[str] = []
        self.released: list[int] = []

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> Any:
            self.called.append(name)
            if name == "cuMemRelease":
                self.released.append(int(args[0]))
            return found(*args)

        return call


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def watched(plan: Plan) -> Watched:
    return Watched(plan)


@pytest.fixture
def faulty(watched: Watched) -> Driver:
    return Driver(watched, "host:2", host=True)


def used(watched: Watched) -> tuple[list[Any], list[int]]:
    """The handles that there are, and how much of each device is used."""
    return list(watched.handles.values()), [heap.used for heap in watched.heaps]


NOTHING: tuple[list[Any], list[int]] = ([], [0, 0])


def bound(driver: Driver) -> Multicast:
    """An object with memory on both devices."""
    team = driver.multicast((0, 1), BLOCK)
    for index in (0, 1):
        team.bind(driver.create(index, BLOCK))
    return team


# -- failures ------------------------------------------------------------------------------------------

MAKING = [
    ("cuMulticastGetGranularity", 1),
    ("cuMulticastGetGranularity", 2),
    ("cuMemGetAllocationGranularity", 1),
    ("cuMulticastCreate", 1),
    ("cuDeviceGet", 1),
    ("cuMulticastAddDevice", 1),
    ("cuMulticastAddDevice", 2),
]


@pytest.mark.parametrize(("call", "at"), MAKING)
def test_an_object_that_cannot_be_completed_is_gone(
    faulty: Driver, watched: Watched, plan: Plan, call: str, at: int
) -> None:
    plan.arm([call], at, UNKNOWN)
    with failing(call, "CUDA_ERROR_UNKNOWN"):
        faulty.multicast((0, 1), BLOCK)
    assert used(watched) == NOTHING


@pytest.mark.parametrize("status", REFUSED)
@pytest.mark.parametrize("call", ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"])
def test_a_refusal_is_explained_and_copies_are_to_take_its_place(
    faulty: Driver, plan: Plan, watched: Watched, call: str, status: int
) -> None:
    plan.arm([call], 1, status)
    physical = faulty.create(0, BLOCK)
    with (
        pytest.raises(DriverError, match=f"{call} failed .*{REFUSED[status]}") as caught,
        faulty.multicast((0, 1), BLOCK) as team,
    ):
        team.bind(physical)
    assert unavailable(caught.value)
    physical.release()
    assert used(watched) == NOTHING


@pytest.mark.parametrize(("call", "status"), [("cuMemCreate", 2), ("cuMulticastBindMem", 1), ("cuMemMap", 801)])
def test_other_errors_are_no_reason_to_do_without(call: str, status: int) -> None:
    assert not unavailable(DriverError(call, status, cuda.CUresult(status).name))


def test_all_devices_are_added_before_anything_is_bound_and_all_is_undone_in_order(
    faulty: Driver, watched: Watched
) -> None:
    watched.called.clear()
    team = bound(faulty)
    memory = {number for number, held in watched.handles.items() if isinstance(held, PhysicalMemory)}
    made = [name for name in watched.called if "Granularity" not in name and not name.startswith("cuDeviceGet")]
    assert made[:3] == ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastAddDevice"]
    assert made[3:] == ["cuMemCreate", "cuMulticastBindMem"] * 2
    watched.called.clear()
    team.release()
    ended = [name for name in watched.called if name != "cuDeviceGet"]
    assert ended == ["cuMulticastUnbind"] * 2 + ["cuMemRelease"] * 3
    assert set(watched.released[1:]) == memory, "the object goes before its memory"
    assert used(watched) == NOTHING


@pytest.mark.parametrize(
    ("call", "at", "left"),
    [("cuMulticastUnbind", 1, 0), ("cuMulticastUnbind", 2, 0), ("cuMemRelease", 1, 1), ("cuMemRelease", 2, 1)],
)
def test_no_step_of_a_release_is_left_out_because_another_fails(
    faulty: Driver, watched: Watched, plan: Plan, call: str, at: int, left: int
) -> None:
    team = bound(faulty)
    plan.arm([call], at, UNKNOWN)
    with failing(call, "CUDA_ERROR_UNKNOWN"):
        team.release()
    assert len(used(watched)[0]) == left
    plan.arm([], 0, 0)
    for number in tuple(watched.handles):
        watched.cuMemRelease(number)


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuStreamSynchronize"])
def test_a_broadcast_that_fails_can_be_tried_again(
    multicast: MulticastSetup, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    plan = Plan()
    context, copies = multicast.contexts[0], multicast.contexts[0].copies()
    calls = Calls(FaultyModule(context.calls.module, plan))
    held = holdings(monkeypatch, calls, ["cuModuleLoadData"])
    monkeypatch.setattr(context, "calls", calls)
    monkeypatch.setattr(copies, "_calls", calls)
    plan.arm([call], 1, UNKNOWN)
    with failing(call, "CUDA_ERROR_UNKNOWN"):
        multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    assert multicast.stored() == [TEXT, TEXT]
    assert len(held["cuModuleLoadData"]) == 1


def test_of_the_kernels_of_threads_that_store_first_at_the_same_time_one_stays(
    multicast: MulticastSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, both = multicast.contexts[0].calls, threading.Barrier(2, timeout=PATIENCE)
    held = holdings(monkeypatch, calls, ["cuModuleLoadData"])
    once = calls.cuModuleLoadData

    def load(image: bytes) -> Any:
        both.wait()
        return once(image)

    monkeypatch.setattr(calls, "cuModuleLoadData", load)
    with ThreadPoolExecutor(2) as threads:
        for done in [
            threads.submit(multicast.window.broadcast, multicast.source, multicast.window.pointer, 16) for _ in range(2)
        ]:
            done.result()
    assert multicast.stored() == [TEXT, TEXT]
    assert len(held["cuModuleLoadData"]) == 1


@pytest.mark.timeout(60)
def test_a_signal_handler_stores_while_the_thread_that_it_interrupts_loads_the_kernel(
    multicast: MulticastSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, handled = multicast.contexts[0].calls, list[int]()
    held = holdings(monkeypatch, calls, ["cuModuleLoadData"])
    once = calls.cuModuleLoadData

    def store(number: int, _: object) -> None:
        handled.append(number)
        multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)

    def load(image: bytes) -> Any:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)
        return once(image)

    monkeypatch.setattr(calls, "cuModuleLoadData", load)
    before = signal.signal(signal.SIGUSR1, store)
    try:
        multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [signal.SIGUSR1]
    assert multicast.stored() == [TEXT, TEXT]
    assert len(held["cuModuleLoadData"]) == 1


def test_a_window_gives_its_addresses_back_even_if_its_kernel_stays(
    multicast: MulticastSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, plan = multicast.contexts[1], Plan()
    module = context.calls.module
    calls = Calls(FaultyModule(module, plan))
    held = holdings(monkeypatch, calls, ["cuModuleLoadData"])
    monkeypatch.setattr(context, "calls", calls)
    window = context.window(multicast.team.nbytes)
    window.map(multicast.descriptor)
    window.broadcast(multicast.places[1], window.pointer, 16)
    plan.arm(["cuModuleUnload"], 1, UNKNOWN)
    window.close()
    assert plan.arm((), 0, 0) == 1
    assert not window.mapped
    assert module.cuMemAddressFree(window.pointer, window.nbytes) == (module.CUresult.CUDA_ERROR_INVALID_VALUE,)
    (number,) = held["cuModuleLoadData"]
    module.cuModuleUnload(number)


# -- hardware ------------------------------------------------------------------------------------------


def off(setting: str) -> Any:
    return pytest.raises(MulticastOff, match=setting)


def test_nothing_is_done_on_hardware_before_the_guard_is_asked(hardware: StandIn) -> None:
    calls = Calls(hardware)
    attempts: Sequence[Callable[[], Any]] = (
        lambda: Multicast(calls, (0, 1), BLOCK),
        lambda: granularity(calls, 2, BLOCK),
        lambda: Window(SimpleNamespace(calls=calls), BLOCK),  # type: ignore[arg-type]
    )
    for attempt in attempts:
        with off("CUBROKER_MULTICAST") as caught:
            attempt()
        assert unavailable(caught.value)
    assert obstacle(calls, 0) == "multicast is off on real hardware unless CUBROKER_MULTICAST=1 says yes"
    assert hardware.touched == []


def test_a_no_that_comes_later_stops_all_but_what_gives_back(
    hardware: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(*next(iter(YES.items())))
    calls = Calls(hardware)
    assert obstacle(calls, 0) is None
    team = Multicast(calls, (0, 1), 7)
    physical = SimpleNamespace(device=0, nbytes=7, handle=5, release=lambda: None)
    team.bind(physical)  # type: ignore[arg-type]
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    hardware.touched.clear()
    with off("NVSHMEM_DISABLE_NVLS"):
        team.export()
    assert hardware.touched == []
    with off("NVSHMEM_DISABLE_NVLS"):
        team.release()
    assert hardware.touched == ["cuDeviceGet()", "cuMemRelease()"]


def test_a_window_on_hardware_stores_nothing_after_a_no(
    multicast: MulticastSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker that has one when its environment changes; the stand-in for hardware is the host driver itself."""
    monkeypatch.setattr(HostModule, "emulated", False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with off("TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    with off("TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        multicast.window.map(multicast.descriptor)
    with off("TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        multicast.contexts[0].window(BLOCK)
    monkeypatch.undo()
    assert multicast.stored() == [bytes(16)] * 2


# -- the kernel ----------------------------------------------------------------------------------------


def test_the_kernel_stores_floats_and_reads_nothing_through_its_target() -> None:
    """``multimem.st`` takes vectors of floats alone; ordinary stores, and all loads from there, are undefined."""
    code = [line.strip() for line in (HERE / Broadcast.SOURCE[0]).read_text().splitlines() if not line.startswith("//")]
    touching = [line for line in code if line.startswith(("ld.global", "st.", "multimem", "red.", "atom."))]
    assert touching == [
        "ld.global.v4.f32 {%a, %b, %c, %d}, [%source];",
        "multimem.st.weak.global.v4.f32 [%target], {%a, %b, %c, %d};",
    ]


def test_addresses_into_which_something_is_still_mapped_late_are_nobody_elses(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told, really = threading.Event(), threading.Event(), Reservation.map

    def late(window: Window, source: int, *, readonly: bool) -> None:
        begun.set()
        assert told.wait(PATIENCE)
        really(window, source, readonly=readonly)

    with driver.multicast((0, 1), BLOCK) as team, ThreadPoolExecutor(1) as threads:
        descriptor = team.export()
        try:
            window = driver.context(0).window(team.nbytes)
            with monkeypatch.context() as patched:
                patched.setattr(Reservation, "map", late)
                mapping = threads.submit(window.map, descriptor)
                assert begun.wait(PATIENCE)
            window.close()
            with driver.context(0).window(team.nbytes) as other:
                told.set()
                mapping.result(PATIENCE)
                assert other.pointer != window.pointer
                assert not window.mapped
                other.map(descriptor)
            with driver.context(0).window(team.nbytes) as again:  # what was given back late is there again
                again.map(descriptor)
        finally:
            told.set()
            os.close(descriptor)
