"""Multicast objects of host devices: what is refused, what waits, what is counted, what deaths and forks leave."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.driver import Driver, DriverError, load, system_calls
from cubroker.driver.host import shared_memory
from cubroker.driver.host.bindings import HostModule
from cubroker.driver.host.multicast import (
    MAX_BINDINGS,
    MAX_DEVICES,
    NAME,
    OPTIONS,
    RECOMMENDED,
    Binding,
    Options,
    Table,
)
from cubroker.driver.host.shared_memory import BLOCK, close
from cubroker.driver.host.virtual_memory import for_reading
from tests import faults, forkserver
from tests.brokers import eventually
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.host.calls import (
    DESCRIPTOR,
    Kind,
    access,
    held,
    imported_again,
    properties,
    release,
    value,
)
from tests.unit.driver.multicast_setup import TEXT, MulticastSetup
from tests.unit.driver.other_process import PRELOAD, ROOT, OtherProcess

Result = cuda.CUresult
MINIMUM = cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM


@pytest.fixture
def module() -> HostModule:
    """A driver of its own, as a fresh process has it: four devices in groups of two, and no context."""
    module = HostModule(4, 16 * BLOCK, 2)
    assert module.cuInit(0) == (Result.CUDA_SUCCESS,)
    return module


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a descriptor, a mapping or a thread behind."""
    for measured in (True, False):
        forkserver.prepare(PRELOAD, measured=measured)  # it stays, with its socket
    before, threads = held(), set(threading.enumerate())
    yield
    shared_memory.join_stopped()
    assert held() <= before
    assert set(threading.enumerate()) <= threads


def team_of(nbytes: int = BLOCK, devices: int = 2, kind: Any = DESCRIPTOR, flags: int = 0) -> Any:
    found = cuda.CUmulticastObjectProp()
    found.numDevices, found.size, found.handleTypes, found.flags = devices, nbytes, int(kind), flags
    return found


def made(module: HostModule, nbytes: int = BLOCK, kind: Any = DESCRIPTOR) -> Any:
    """An object with devices 0 and 1."""
    team = value(module.cuMulticastCreate(team_of(nbytes, kind=kind)))
    for device in (0, 1):
        value(module.cuMulticastAddDevice(team, device))
    return team


def create(module: HostModule, device: int = 0, nbytes: int = BLOCK, kind: Any = DESCRIPTOR) -> Any:
    return value(module.cuMemCreate(nbytes, properties(device, kind), 0))


# -- refusals ------------------------------------------------------------------------------------------


def test_properties_that_make_no_sense_are_refused(module: HostModule) -> None:
    for asked in (
        team_of(0),
        team_of(BLOCK + 1),
        team_of(devices=0),
        team_of(devices=MAX_DEVICES + 1),
        team_of(flags=1),
        team_of(kind=Kind.CU_MEM_HANDLE_TYPE_WIN32),
    ):
        assert module.cuMulticastCreate(asked) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    fabric = team_of(kind=Kind.CU_MEM_HANDLE_TYPE_FABRIC)
    assert module.cuMulticastCreate(fabric) == (Result.CUDA_ERROR_NOT_PERMITTED, None)
    assert module.cuMulticastGetGranularity(team_of(devices=0), MINIMUM)[0] == Result.CUDA_ERROR_INVALID_VALUE
    assert value(module.cuMulticastGetGranularity(team_of(), MINIMUM)) == BLOCK
    for option in (-1, 2, 7):
        assert module.cuMulticastGetGranularity(team_of(), option) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    assert RECOMMENDED > BLOCK


def test_a_device_that_reaches_no_other_has_no_multicast() -> None:
    alone = HostModule(2, 4 * BLOCK, 1)
    value(alone.cuInit(0))
    assert alone.cuMulticastCreate(team_of()) == (Result.CUDA_ERROR_NOT_SUPPORTED, None)
    driver = load("host:3@64MiB/2")
    assert [driver.multicast_obstacle(index) is None for index in (0, 1, 2)] == [True, True, False]
    with pytest.raises(
        DriverError, match=r"INVALID_DEVICE \(101\): these devices cannot share an object: not all reach"
    ):
        driver.multicast((2,), BLOCK)
    driver.close()


def test_devices_of_two_groups_are_not_in_one_object(module: HostModule) -> None:
    team = value(module.cuMulticastCreate(team_of()))
    value(module.cuMulticastAddDevice(team, 2))
    assert module.cuMulticastAddDevice(team, 0) == (Result.CUDA_ERROR_INVALID_DEVICE,)
    assert module.cuMulticastAddDevice(team, 2) == (Result.CUDA_ERROR_INVALID_VALUE,)
    assert module.cuMulticastAddDevice(team, 4) == (Result.CUDA_ERROR_INVALID_DEVICE,)
    value(module.cuMulticastAddDevice(team, 3))
    value(module.cuMemRelease(team))


def test_bindings_that_make_no_sense_are_refused(module: HostModule) -> None:
    team, physical = made(module, 2 * BLOCK), create(module, nbytes=2 * BLOCK)
    exported = value(module.cuMemExportToShareableHandle(physical, DESCRIPTOR, 0))
    with for_reading([exported]) as (reading,):
        readable = value(module.cuMemImportFromShareableHandle(reading, DESCRIPTOR))
    for answer in (
        module.cuMulticastBindMem(team, 0, physical, 0, 0, 0),
        module.cuMulticastBindMem(team, 0, physical, 0, BLOCK + 512, 0),
        module.cuMulticastBindMem(team, 512, physical, 0, BLOCK, 0),
        module.cuMulticastBindMem(team, 0, physical, 512, BLOCK, 0),
        module.cuMulticastBindMem(team, 0, physical, 0, BLOCK, 1),
        module.cuMulticastBindMem(team, BLOCK, physical, 0, 2 * BLOCK, 0),
        module.cuMulticastBindMem(team, 0, physical, BLOCK, 2 * BLOCK, 0),
        module.cuMulticastBindMem(team, 0, team, 0, BLOCK, 0),
        module.cuMulticastBindMem(physical, 0, physical, 0, BLOCK, 0),
        module.cuMulticastBindMem(team, 0, readable, 0, BLOCK, 0),
        module.cuMulticastBindMem(4711, 0, physical, 0, BLOCK, 0),
        module.cuMulticastUnbind(team, 0, 0, BLOCK),
    ):
        assert answer == (Result.CUDA_ERROR_INVALID_VALUE,)
    value(module.cuMulticastBindMem(team, 0, physical, BLOCK, BLOCK, 0))
    for answer in (
        module.cuMulticastBindMem(team, 0, physical, 0, 2 * BLOCK, 0),
        module.cuMulticastUnbind(team, 0, 0, 2 * BLOCK),
        module.cuMulticastUnbind(team, 1, 0, BLOCK),
    ):
        assert answer == (Result.CUDA_ERROR_INVALID_VALUE,)
    elsewhere = create(module, 2)
    assert module.cuMulticastBindMem(team, BLOCK, elsewhere, 0, BLOCK, 0) == (Result.CUDA_ERROR_INVALID_DEVICE,)
    value(module.cuMulticastUnbind(team, 0, 0, BLOCK))
    os.close(exported)
    release(module, team, physical, readable, elsewhere)


def test_memory_that_is_for_one_process_is_not_bound_and_imported_memory_is(module: HostModule) -> None:
    team, private = made(module), create(module, kind=Kind.CU_MEM_HANDLE_TYPE_NONE)
    shared = create(module, 1)
    imported = imported_again(module, shared)
    assert module.cuMulticastBindMem(team, 0, private, 0, BLOCK, 0) == (Result.CUDA_ERROR_INVALID_VALUE,)
    value(module.cuMulticastBindMem(team, 0, imported, 0, BLOCK, 0))
    release(module, team, private, shared, imported)


def test_an_object_is_exported_by_its_creator_if_it_was_made_for_that(module: HostModule) -> None:
    team, private = made(module), made(module, kind=Kind.CU_MEM_HANDLE_TYPE_NONE)
    imported = imported_again(module, team)
    for handle in (private, imported):
        assert module.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0)[0] == Result.CUDA_ERROR_INVALID_VALUE
    assert module.cuMulticastAddDevice(imported, 0) == (Result.CUDA_ERROR_INVALID_VALUE,), "it is the same object"
    release(module, team, private, imported)


def test_slots_run_out(module: HostModule) -> None:
    module.options = Options(slots=2)
    teams = [made(module), made(module)]
    assert module.cuMulticastCreate(team_of()) == (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
    value(module.cuMemRelease(teams.pop()))
    teams.append(made(module))
    release(module, *teams)


@pytest.mark.slow
def test_a_table_that_is_full_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.create(BLOCK * (MAX_BINDINGS + 1), 2)
    for number in range(MAX_BINDINGS):
        assert table.bind(Binding(0, number * BLOCK, BLOCK, bytes(64)))
    with pytest.raises(MemoryError):
        table.bind(Binding(0, MAX_BINDINGS * BLOCK, BLOCK, bytes(64)))
    assert table.unbind(0, 7 * BLOCK, BLOCK) == Binding(0, 7 * BLOCK, BLOCK, bytes(64))
    assert table.bind(Binding(0, MAX_BINDINGS * BLOCK, BLOCK, bytes(64)))
    table.close()


@pytest.mark.parametrize("status", [800, 801, 802, 401])
@pytest.mark.parametrize("call", ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"])
def test_failures_are_imitated_on_demand(monkeypatch: pytest.MonkeyPatch, call: str, status: int) -> None:
    monkeypatch.setenv(OPTIONS, f"slots=9, {call}={status}")
    module = HostModule(2, 4 * BLOCK)
    assert module.options == Options(9, {call: status})
    driver = Driver(module, "host:2", host=True)
    physical = driver.create(0, BLOCK)
    with pytest.raises(DriverError) as caught, driver.multicast((0, 1), BLOCK) as team:
        team.bind(physical)
    physical.release()
    assert (caught.value.call, caught.value.status) == (call, status)


@pytest.mark.parametrize("text", ["slots", "slots=many", "cuMulticastCreate=12345"])
def test_an_option_that_makes_no_sense_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"{OPTIONS}={text}: .*; write slots=2,cuMulticastCreate=801"):
        Options.parse(text)
    assert Options.parse("") == Options()


# -- waiting -------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody starts to wait for devices."""
    started, wait = threading.Event(), system_calls.futex_wait

    def watched(address: int, number: int) -> None:
        started.set()
        wait(address, number)

    monkeypatch.setattr(system_calls, "futex_wait", watched)
    return started


WAITERS = ("bind", "map")


@pytest.mark.parametrize("what", WAITERS)
def test_it_waits_until_another_process_has_added_the_last_device(
    module: HostModule, waiting: threading.Event, what: str
) -> None:
    team, physical = value(module.cuMulticastCreate(team_of())), create(module)
    value(module.cuMulticastAddDevice(team, 0))
    start = int(value(module.cuMemAddressReserve(BLOCK, 0, 0, 0)))
    calls: dict[str, Callable[[], Any]] = {
        "bind": lambda: module.cuMulticastBindMem(team, 0, physical, 0, BLOCK, 0),
        "map": lambda: module.cuMemMap(start, BLOCK, 0, team, 0),
    }
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(calls[what]()))
    thread.start()
    assert waiting.wait(60)
    fd = value(module.cuMemExportToShareableHandle(team, DESCRIPTOR, 0))  # nobody else has to wait
    assert thread.is_alive()
    assert not answers
    with OtherProcess("host:4@32MiB/2") as other:
        other.add_device(fd, 1)
        thread.join(60)
        assert answers == [(Result.CUDA_SUCCESS,)]
    os.close(fd)
    if what == "map":
        value(module.cuMemUnmap(start, BLOCK))
    value(module.cuMemAddressFree(start, BLOCK))
    release(module, team, physical)


def test_an_object_that_is_released_while_a_bind_waits_is_refused(module: HostModule, waiting: threading.Event) -> None:
    team, physical = value(module.cuMulticastCreate(team_of())), create(module)
    second = imported_again(module, team)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(module.cuMulticastBindMem(team, 0, physical, 0, BLOCK, 0)))
    thread.start()
    assert waiting.wait(60)
    value(module.cuMemRelease(team))
    for device in (0, 1):
        value(module.cuMulticastAddDevice(second, device))
    thread.join(60)
    assert answers == [(Result.CUDA_ERROR_INVALID_VALUE,)]
    release(module, second, physical)


WAIT = """
import os, signal, sys, threading
from cubroker.driver import system_calls
from cubroker.driver.host.bindings import HostModule
from tests.unit.driver.host.test_multicast import create, team_of, value
module = HostModule(2, 8 << 20)
module.cuInit(0)
team = value(module.cuMulticastCreate(team_of()))
wait = system_calls.futex_wait
def started(address, number):
    print("waiting", flush=True)
    wait(address, number)
system_calls.futex_wait = started
try:
    module.cuMulticastBindMem(team, 0, create(module), 0, 2 << 20, 0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_wait_for_devices_can_be_interrupted() -> None:
    options = {"preload": PRELOAD, "measured": False, "cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    with forkserver.Forked(["-c", WAIT], **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        eventually(lambda: asleep(process.pid), "the wait itself: a signal just before it would not end it")
        process.send_signal(signal.SIGINT)
        lines = [line for line in process.stdout if line != "waiting\n"]
    assert lines == ["interrupted\n"]


# -- what is there -------------------------------------------------------------------------------------


def test_a_late_import_gets_a_fresh_object_without_devices_or_memory(module: HostModule) -> None:
    team, physical = made(module), create(module)
    value(module.cuMulticastBindMem(team, 0, physical, 0, BLOCK, 0))
    fd = value(module.cuMemExportToShareableHandle(team, DESCRIPTOR, 0))
    early = value(module.cuMemImportFromShareableHandle(fd, DESCRIPTOR))
    value(module.cuMemRelease(team))
    late = value(module.cuMemImportFromShareableHandle(fd, DESCRIPTOR))
    os.close(fd)
    assert module.cuMulticastAddDevice(early, 0) == (Result.CUDA_ERROR_INVALID_VALUE,), "it has all its devices"
    for device in (0, 1):
        value(module.cuMulticastAddDevice(late, device))
    value(module.cuMulticastBindMem(late, 0, physical, 0, BLOCK, 0))
    value(module.cuMulticastUnbind(early, 0, 0, BLOCK))
    release(module, early, late, physical)


def test_an_object_whose_maker_was_killed_is_a_fresh_one_to_whoever_comes_late(driver: Driver) -> None:
    calls = driver.context(0).calls
    with OtherProcess(SPEC) as maker:
        descriptors = maker.make_team([0, 1], BLOCK)
        handles = [calls.cuMemImportFromShareableHandle(descriptors[0], DESCRIPTOR)]
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            calls.cuMulticastAddDevice(handles[0], 0)
        maker.kill()
    handles.append(calls.cuMemImportFromShareableHandle(descriptors[0], DESCRIPTOR))
    calls.cuMulticastAddDevice(handles[1], 0)
    for handle in handles:
        calls.cuMemRelease(handle)
    for descriptor in descriptors:
        os.close(descriptor)


def test_an_ordinary_load_is_counted_and_gets_what_nobody_has_stored(multicast: MulticastSetup) -> None:
    here, module = multicast.contexts[0], multicast.contexts[0].calls.module
    multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    before = module.violations
    assert here.read(multicast.window.pointer, 16) == b"\xdb" * 16
    with here.stream() as stream:
        stream.copy(multicast.places[0] + 64, multicast.window.pointer, 16)
        stream.synchronize()
    assert here.read(multicast.places[0] + 64, 16) == b"\xdb" * 16
    assert module.violations == before + 2


def test_an_ordinary_store_is_refused(multicast: MulticastSetup) -> None:
    for store in (lambda: multicast.contexts[0].write(multicast.window.pointer, TEXT), lambda: clear(multicast)):
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            store()
    assert multicast.stored() == [bytes(16)] * 2


def clear(multicast: MulticastSetup) -> None:
    multicast.contexts[0].clear(multicast.window.pointer, 16)


def test_a_device_without_access_stores_nothing(multicast: MulticastSetup) -> None:
    with multicast.contexts[1].stream() as stream, pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.copy(multicast.window.pointer, multicast.places[1], 16)


TOUCHING = """
import ctypes, sys
from cubroker.driver import load
driver = load(sys.argv[1])
team = driver.multicast((0, 1), 2 << 20)
for index in (0, 1):
    team.bind(driver.create(index, 2 << 20))
window = driver.context(0).window(team.nbytes)
window.map(team.export())
print("touching", flush=True)
ctypes.string_at(window.pointer, 1)
"""


def test_a_load_past_the_driver_ends_the_process_that_does_it() -> None:
    ended = forkserver.run(["-c", TOUCHING, SPEC], preload=PRELOAD, capture_output=True)
    assert (ended.stdout, ended.returncode) == (b"touching\n", -signal.SIGSEGV)


# -- kernels -------------------------------------------------------------------------------------------

PTX = b".visible .entry cubroker_broadcast(\n) { ret; }\n.visible .entry other(\n) { ret; }\0"


def test_only_what_is_known_of_a_kernel_is_done(multicast: MulticastSetup) -> None:
    calls, here = multicast.contexts[0].calls, multicast.contexts[0]

    def launch(function: Any, *numbers: int, blocks: int = 1, stream: int = 0) -> None:
        parameters = numbers, (ctypes.c_uint64,) * len(numbers)
        calls.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, parameters, 0)

    with here.current():
        for image in (b"no kernel\0", PTX[:-1]):
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_PTX"):
                calls.cuModuleLoadData(image)
        loaded = calls.cuModuleLoadData(PTX)
        with pytest.raises(DriverError, match="CUDA_ERROR_NOT_FOUND"):
            calls.cuModuleGetFunction(loaded, b"none")
        ours, other = (calls.cuModuleGetFunction(loaded, name) for name in (b"cubroker_broadcast", b"other"))
        target, source = multicast.window.pointer, multicast.source
        for name, attempt in (
            ("CUDA_ERROR_NOT_SUPPORTED", lambda: launch(other)),
            ("CUDA_ERROR_MISALIGNED_ADDRESS", lambda: launch(ours, target + 8, source, 1)),
            ("CUDA_ERROR_ILLEGAL_ADDRESS", lambda: launch(ours, multicast.places[0], source, 1)),
            ("CUDA_ERROR_ILLEGAL_ADDRESS", lambda: launch(ours, target, 4096, 1)),
            ("CUDA_ERROR_ILLEGAL_ADDRESS", lambda: launch(ours, target + multicast.window.nbytes - 16, source, 2)),
            ("CUDA_ERROR_INVALID_VALUE", lambda: launch(ours, target, source, 1, blocks=0)),
            ("CUDA_ERROR_INVALID_HANDLE", lambda: launch(ours, target, source, 1, stream=4711)),
        ):
            with pytest.raises(DriverError, match=name):
                attempt()
        calls.cuModuleUnload(loaded)
        for attempt in (
            lambda: launch(ours, target, source, 1),
            lambda: calls.cuModuleUnload(loaded),
            lambda: calls.cuModuleGetFunction(loaded, b"other"),
        ):
            with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
                attempt()
    assert multicast.stored() == [bytes(16)] * 2


# -- peers that lie, die or fork -----------------------------------------------------------------------


def test_an_impostor_gets_nothing_imported(module: HostModule) -> None:
    sizes = (
        struct.pack("@QI", *numbers) for numbers in ((BLOCK, 0), (BLOCK, 65), (0, 2), (BLOCK + 1, 2), (1 << 47, 2))
    )
    table = Table.create(BLOCK, 2)
    exported = table.export()
    nbytes = os.fstat(exported).st_size
    os.close(exported)
    table.close()
    for size in sizes:
        fake = shared_memory.create(nbytes, NAME)
        os.pwrite(fake, size, 0)
        refused(module, fake)
    refused(module, shared_memory.create(nbytes - 4096, NAME))
    unsealed = os.memfd_create(NAME)
    os.ftruncate(unsealed, nbytes)
    refused(module, unsealed)
    strange = Table.create(BLOCK, 2)
    strange.add(4)
    refused(module, strange.export())
    strange.close()


def refused(module: HostModule, fd: int) -> None:
    before = held()
    assert module.cuMemImportFromShareableHandle(fd, DESCRIPTOR) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    assert held() <= before
    close(fd)


def test_memory_that_a_binding_lies_about_is_not_stored_to(multicast: MulticastSetup) -> None:
    """Whoever has the descriptor can write anything into the table; nothing that it says makes a store go astray."""
    owner, pipe, small = shared_memory.HandleServer(), os.pipe(), shared_memory.create(BLOCK)
    unsealed, readable = os.memfd_create("unsealed"), os.open(f"/proc/self/fd/{small}", os.O_RDONLY)
    os.ftruncate(unsealed, BLOCK)
    given = [
        shared_memory.SharedFd(pipe[0], 1),
        shared_memory.SharedFd(small, 0),
        shared_memory.SharedFd(small, 1, BLOCK),
        shared_memory.SharedFd(unsealed, 1),
        shared_memory.SharedFd(readable, 1),
    ]
    handles = [owner.share(shared) for shared in given]
    table = Table.adopt(multicast.descriptor)
    multicast.team._unbind(multicast.team._bindings.pop())  # of device 1
    for handle in (*handles, bytes(64)):
        assert table.bind(Binding(1, 0, BLOCK, handle))
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
        assert table.unbind(1, 0, BLOCK)
    assert table.bind(Binding(1, multicast.team.nbytes - BLOCK, 2 * BLOCK, handles[1]))
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        multicast.window.broadcast(multicast.source, multicast.window.pointer + multicast.team.nbytes - BLOCK, 16)
    assert multicast.stored() == [bytes(16)] * 2
    table.close()
    owner.stop()
    close(*pipe, small, unsealed, readable)


def test_a_process_that_dies_while_it_changes_the_table_blocks_nobody(multicast: MulticastSetup) -> None:
    """The lock that it held is given up by the system."""
    code = f"""
import fcntl, os, signal
from cubroker.driver.host.multicast import Table
table = Table.adopt({multicast.descriptor})
with table._changing():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = forkserver.run(["-c", code], preload=PRELOAD, pass_fds=[multicast.descriptor])
    assert ended.returncode == -signal.SIGKILL
    table = Table.adopt(multicast.descriptor)
    assert [binding.device for binding in table.bindings()] == [0, 1]
    table.close()


def test_an_object_ends_while_somebody_keeps_its_table_locked(module: HostModule) -> None:
    """As who is stopped in the middle does, or who means harm: it would stop all of its maker's memory."""
    team, physical = made(module), create(module)
    value(module.cuMulticastBindMem(team, 0, physical, 0, BLOCK, 0))
    descriptor = value(module.cuMemExportToShareableHandle(team, DESCRIPTOR, 0))
    table = Table.adopt(descriptor)
    with table._changing():
        value(module.cuMulticastUnbind(team, 0, 0, BLOCK))
        value(module.cuMemRelease(team))
        value(module.cuMemRelease(physical))
    assert not table.bindings()
    table.close()
    os.close(descriptor)


def test_a_forked_child_keeps_no_object_alive(driver: Driver) -> None:
    """Were the child to keep the maker's lock, who comes late would take the object for one that its maker has."""
    calls = driver.context(0).calls
    with OtherProcess(SPEC) as maker:
        descriptors = maker.make_team([0, 1], BLOCK)
        child = maker.ask("fork_and_stay")
        maker.ask("release_team")
        late = calls.cuMemImportFromShareableHandle(descriptors[0], DESCRIPTOR)
        calls.cuMulticastAddDevice(late, 0)
        calls.cuMemRelease(late)
        maker.ask("end_child", child)
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_forked_child_has_nothing_of_its_parents_objects(driver: Driver) -> None:
    """Not of those that only a window is left of either, nor what memory is fetched from."""
    with OtherProcess(SPEC) as maker:
        descriptors = maker.make_team([0, 1], BLOCK)
        with OtherProcess(SPEC) as importer:
            importer.open_window(descriptors[0], RECOMMENDED)
            for process in (maker, importer):
                name, *files = process.ask("fork")
                assert name == "CUDA_ERROR_NOT_INITIALIZED"
                assert [file for file in files if "cubroker" in file] == []
        child = maker.ask("fork_and_stay")
        maker.kill()
        try:
            rows = Table.adopt(descriptors[0])
            assert rows.bindings() == [], "it is a fresh one"
            rows.close()
        finally:
            os.kill(child, signal.SIGKILL)
    for descriptor in descriptors:
        os.close(descriptor)


# -- what is left --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["memfd_create", "ftruncate", "fcntl", "mmap", "madvise", "open"])
def test_system_calls_that_fail_leave_nothing(module: HostModule, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plan = faults.Plan()
    faults.fail_system_calls(monkeypatch, plan)
    before = held()
    plan.arm([name], 0, 0)
    value(module.cuMemRelease(value(module.cuMulticastCreate(team_of()))))
    calls = plan.arm([], 0, 0)
    assert calls
    for at in range(1, calls + 1):
        plan.arm([name], at, errno.ENOMEM)
        assert module.cuMulticastCreate(team_of()) == (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
        plan.arm([], 0, 0)
        assert held() <= before


def test_access_and_unmapping_are_as_with_memory(module: HostModule) -> None:
    before = held()
    team = made(module)
    start = int(value(module.cuMemAddressReserve(BLOCK, 0, 0, 0)))
    value(module.cuMemMap(start, BLOCK, 0, team, 0))
    value(module.cuMemRelease(team))
    assert module.cuMemSetAccess(start, BLOCK, [access(2)], 1) == (Result.CUDA_ERROR_INVALID_DEVICE,)
    value(module.cuMemSetAccess(start, BLOCK, [access(0), access(1)], 2))
    value(module.cuMemUnmap(start, BLOCK))
    value(module.cuMemAddressFree(start, BLOCK))
    assert held() <= before
