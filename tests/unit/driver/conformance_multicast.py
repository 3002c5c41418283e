"""What every driver does with multicast objects, shown on host devices alone.

Making such objects can take a host with NVSwitch out of service while its fabric manager is unwell, so no test of
this project ever makes one on real hardware: ``tests/gpu`` does not import this module, and its tests refuse to run
there all the same.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from cubroker.driver import Context, Driver
from cubroker.driver.multicast import granularity
from tests.unit.driver.conformance_vmm import GRANULE, failing
from tests.unit.driver.multicast_setup import TEXT, MulticastSetup, replicate
from tests.unit.driver.other_process import OtherProcess


@pytest.fixture(autouse=True)
def host_devices_alone(driver: Driver) -> None:
    assert driver.host


# -- making them ---------------------------------------------------------------------------------------


def test_multicast_is_to_be_had_with_two_devices(driver: Driver) -> None:
    assert [driver.multicast_obstacle(device.index) for device in driver.devices] == [None, None]


def test_the_size_is_a_multiple_of_every_granularity(driver: Driver) -> None:
    minimum, recommended = granularity(driver.context(0).calls, 2, GRANULE)
    assert minimum % driver.granularity(0) == 0
    assert recommended % minimum == 0
    for asked, given in ((1, 1), (recommended, 1), (recommended + 1, 2), (3 * recommended, 3)):
        with driver.multicast((0, 1), asked) as team:
            assert team.nbytes == given * recommended
            assert team.devices == (0, 1)


def test_a_device_is_in_an_object_once(driver: Driver) -> None:
    with failing("cuMulticastAddDevice", "CUDA_ERROR_INVALID_VALUE"):
        driver.multicast((0, 0), GRANULE)
    with failing("cuMulticastGetGranularity", "CUDA_ERROR_INVALID_VALUE"):
        driver.multicast((), GRANULE)
    with pytest.raises(ValueError, match="no device 4711"):
        driver.multicast((0, 4711), GRANULE)


def test_a_descriptor_of_an_object_does_not_outlive_exec(multicast: MulticastSetup) -> None:
    assert not os.get_inheritable(multicast.descriptor)


# -- storing -------------------------------------------------------------------------------------------


def test_a_store_goes_to_every_device(multicast: MulticastSetup) -> None:
    for offset in (0, 4096, GRANULE - 16):
        multicast.window.broadcast(multicast.source, multicast.window.pointer + offset, 16)
        assert multicast.stored(offset) == [TEXT, TEXT]
    assert multicast.stored(16, 4096 - 16) == [bytes(4096 - 16)] * 2


def test_many_bytes_arrive_in_order(multicast: MulticastSetup) -> None:
    data = os.urandom(GRANULE)
    multicast.contexts[0].write(multicast.source, data)
    multicast.window.broadcast(multicast.source, multicast.window.pointer, GRANULE)
    assert multicast.stored(0, GRANULE) == [data, data]
    multicast.window.broadcast(multicast.source, multicast.window.pointer, 0)


def test_a_copy_between_devices_goes_to_all_as_well(multicast: MulticastSetup) -> None:
    with multicast.contexts[0].stream() as stream:
        stream.copy(multicast.window.pointer + 5, multicast.source, 7)
        stream.synchronize()
    assert multicast.stored(5, 8) == [TEXT[:7] + b"\0"] * 2


def test_what_is_no_multiple_of_a_piece_or_lies_elsewhere_is_refused(multicast: MulticastSetup) -> None:
    start = multicast.window.pointer
    for source, target, nbytes in ((1, 0, 16), (0, 1, 16), (0, 0, 15)):
        with pytest.raises(ValueError, match="all must be multiples of 16"):
            multicast.window.broadcast(multicast.source + source, start + target, nbytes)
    for target, nbytes in (
        (start - 16, 16),
        (start + multicast.window.nbytes, 16),
        (start, -16),
        (multicast.places[1], 16),
    ):
        with pytest.raises(ValueError, match="do not lie in this window"):
            multicast.window.broadcast(multicast.source, target, nbytes)
    with pytest.raises(ValueError, match="nothing can be read through it"):
        multicast.window.map(multicast.descriptor, readonly=True)
    assert multicast.stored() == [bytes(16)] * 2


def test_another_process_stores_to_all(multicast: MulticastSetup, other_process: OtherProcess) -> None:
    source = other_process.ask("allocate", GRANULE, device=1)
    other_process.ask("write", source, TEXT[::-1], device=1)
    window = other_process.open_window(multicast.descriptor, multicast.team.nbytes, device=1)
    other_process.ask("broadcast", window, source, 4096, 16)
    assert multicast.stored(4096) == [TEXT[::-1]] * 2
    other_process.ask("close_window", window)
    other_process.ask("free", source, device=1)


def test_what_is_bound_later_is_stored_to_as_well(
    driver: Driver, multicast: MulticastSetup, other_process: OtherProcess
) -> None:
    source = other_process.ask("allocate", GRANULE)
    other_process.ask("write", source, TEXT)
    theirs = other_process.open_window(multicast.descriptor, multicast.team.nbytes)
    with ExitStack() as undo:
        undo.callback(other_process.ask, "free", source)
        undo.callback(other_process.ask, "close_window", theirs)
        first = replicate(driver, multicast.team, multicast.contexts[0], undo, GRANULE)
        with failing("cuLaunchKernel"):
            multicast.window.broadcast(multicast.source, multicast.window.pointer + GRANULE, 16)
        second = replicate(driver, multicast.team, multicast.contexts[1], undo, GRANULE)
        other_process.ask("broadcast", theirs, source, GRANULE - 16, 16)
        multicast.contexts[0].write(multicast.source, TEXT * 2)
        multicast.window.broadcast(multicast.source, multicast.window.pointer + GRANULE - 16, 32)
        assert multicast.stored(GRANULE - 16) == [TEXT, TEXT]
        assert [multicast.contexts[0].read(first, 17), multicast.contexts[1].read(second, 17)] == [TEXT + b"\0"] * 2


# -- binding -------------------------------------------------------------------------------------------


def test_what_cannot_be_bound_stays_the_callers(driver: Driver, multicast: MulticastSetup) -> None:
    physical = driver.create(0, GRANULE)
    for offset in (0, 1, multicast.team.nbytes):
        with failing("cuMulticastBindMem", "CUDA_ERROR_INVALID_VALUE"):
            multicast.team.bind(physical, offset=offset)
    physical.release()


# -- lifetimes -----------------------------------------------------------------------------------------


def test_a_release_gives_all_memory_back(driver: Driver, multicast: MulticastSetup) -> None:
    before = [context.memory() for context in multicast.contexts]
    with driver.multicast((0, 1), GRANULE) as team, ExitStack() as undo:
        for context in multicast.contexts:
            replicate(driver, team, context, undo)
        assert [context.memory()[0] for context in multicast.contexts] == [free - GRANULE for free, _ in before]
    assert [context.memory() for context in multicast.contexts] == before


def test_an_importer_that_is_killed_harms_nobody(driver: Driver, multicast: MulticastSetup) -> None:
    with OtherProcess(driver.spec) as importer:
        importer.open_window(multicast.descriptor, multicast.team.nbytes)
        importer.kill()
    multicast.window.broadcast(multicast.source, multicast.window.pointer, 16)
    assert multicast.stored() == [TEXT, TEXT]


@pytest.mark.parametrize("end", ["kill", "release"])
def test_a_window_outlives_the_objects_maker(driver: Driver, context: Context, end: str) -> None:
    with OtherProcess(driver.spec) as maker, ExitStack() as undo:
        descriptor, *memories = maker.make_team([0, 1], GRANULE)
        for each in (descriptor, *memories):
            undo.callback(os.close, each)
        _, nbytes = granularity(context.calls, 2, GRANULE)
        window = undo.enter_context(context.window(nbytes))
        window.map(descriptor)
        source, other = (undo.enter_context(driver.context(index).reserve(GRANULE)) for index in (0, 1))
        for reservation, memory in zip((source, other), memories, strict=True):
            reservation.map(memory, readonly=False)
        context.write(source.pointer + 32, TEXT)
        if end == "kill":
            maker.kill()
            window.broadcast(source.pointer + 32, window.pointer, 16)
            assert [context.read(source.pointer, 16), driver.context(1).read(other.pointer, 16)] == [TEXT, TEXT]
        else:  # it unbinds first
            maker.ask("release_team")
            with failing("cuLaunchKernel"):
                window.broadcast(source.pointer + 32, window.pointer, 16)
