"""What every driver does with more than one device, and with events; for modules that import ``conformance`` too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from cubroker.driver import Context, Driver, DriverError, load
from tests.unit.driver.conformance import BLOCK, MIB, refused
from tests.unit.driver.other_process import OtherProcess

Pair = tuple[Context, Context]


@pytest.fixture
def pair(driver: Driver) -> Pair:
    """The contexts of two devices that reach each other."""
    indices = [device.index for device in driver.devices]
    for index in indices[1:]:
        if driver.peers.can_access(indices[0], index) and driver.peers.can_access(index, indices[0]):
            return driver.context(indices[0]), driver.context(index)
    pytest.skip(f"needs two devices that reach each other; there are {len(indices)}")


@contextmanager
def blocks(*contexts: Context, nbytes: int = BLOCK) -> Iterator[list[int]]:
    """Allocate and clear memory in each context."""
    with ExitStack() as stack:
        pointers = []
        for context in contexts:
            pointers.append(context.allocate(nbytes))
            stack.callback(context.free, pointers[-1])
            context.clear(pointers[-1], nbytes)
        yield pointers


# -- links ---------------------------------------------------------------------------------------------


def test_the_links_of_all_devices_are_described(driver: Driver) -> None:
    ordinals = [device.index for device in driver.devices]
    matrix = driver.peers.matrix()
    assert [(link.device, link.peer) for link in matrix] == [(a, b) for a in ordinals for b in ordinals if a != b]
    for link in matrix:
        assert link.access == driver.peers.can_access(link.device, link.peer)
        assert link.performance_rank >= 0
        assert link.access or not link.native_atomics
        assert link == driver.peers.link(link.device, link.peer)


def test_a_device_reaches_itself_and_has_no_link_to_itself(driver: Driver) -> None:
    own = driver.devices[0].index
    assert driver.peers.can_access(own, own)
    with refused(r"CUDA_ERROR_INVALID_DEVICE \(101\): from device \d to device \d: there is no such link"):
        driver.peers.link(own, own)
    with refused(r"CUDA_ERROR_INVALID_DEVICE \(101\): from device \d to device 4711"):
        driver.peers.can_access(own, 4711)


OPERATIONS = {
    *("integer_add", "integer_min", "integer_max", "integer_increment", "integer_decrement"),
    *("and", "or", "xor", "exchange", "cas"),
    *("float_add", "float_min", "float_max"),
}
"""The atomic operations of CUDA 13.0."""

FORMS = {"signed", "unsigned", "reduction", "scalar_32", "scalar_64", "scalar_128", "vector_32x4"}


def test_atomics_are_told_per_operation(driver: Driver, pair: Pair) -> None:
    near, far = (context.device for context in pair)
    atomics = driver.peers.atomics(near.index, far.index)
    if driver.version < 13000:
        assert atomics == {}
        return
    assert atomics.keys() >= OPERATIONS
    assert "max" not in atomics
    assert frozenset().union(*atomics.values()) <= FORMS
    if driver.host or {near.name, far.name} == {"NVIDIA H200"}:  # which host devices imitate
        assert driver.peers.link(near.index, far.index).native_atomics
        assert not any(atomics.values()), "driver 580.159 names no form of any operation"


# -- direct access -------------------------------------------------------------------------------------


def has_access(context: Context, peer: Context) -> bool:
    """Whether access is enabled now; it is as it was afterwards."""
    with context.current():
        try:
            context.calls.cuCtxEnablePeerAccess(peer.handle, 0)
        except DriverError as error:
            if error.status == 704:
                return True
            raise
        context.calls.cuCtxDisablePeerAccess(peer.handle)
    return False


def test_two_users_of_a_pair_never_undo_each_other(driver: Driver, pair: Pair) -> None:
    near, far = pair
    other = load(driver.spec)  # another user in the same process
    driver.peers.enable(near, far.device.index)
    driver.peers.enable(near, far.device.index)
    other.peers.enable(other.context(near.device.index), far.device.index)
    assert not has_access(far, near), "it is enabled one way"
    for _ in range(2):
        driver.peers.disable(near, far.device.index)
        assert has_access(near, far)
    with refused(r"cuCtxDisablePeerAccess failed with CUDA_ERROR_PEER_ACCESS_NOT_ENABLED \(705\): from device"):
        driver.peers.disable(near, far.device.index)
    assert has_access(near, far)
    other.close()
    assert not has_access(near, far)


def test_access_that_somebody_else_enabled_is_used_and_left(driver: Driver, pair: Pair) -> None:
    near, far = pair
    with near.current():
        near.calls.cuCtxEnablePeerAccess(far.handle, 0)
    driver.peers.enable(near, far.device.index)
    driver.peers.disable(near, far.device.index)
    assert has_access(near, far)
    with near.current():
        near.calls.cuCtxDisablePeerAccess(far.handle)
        with refused(r"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED \(705\)"):
            near.calls.cuCtxDisablePeerAccess(far.handle)


def test_a_context_is_no_peer_of_its_own(driver: Driver, context: Context) -> None:
    with refused(r"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED \(217\): from device \d to device \d: that memory is out of"):
        driver.peers.enable(context, context.device.index)
    with refused("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"):
        driver.peers.disable(context, context.device.index)
    with pytest.raises(ValueError, match="no device 4711; the devices are"):
        driver.peers.enable(context, 4711)


def test_enabling_takes_no_flags_and_needs_a_context(pair: Pair) -> None:
    near, far = pair
    with near.current(), refused(r"CUDA_ERROR_INVALID_VALUE \(1\)"):
        near.calls.cuCtxEnablePeerAccess(far.handle, 1)
    with ThreadPoolExecutor(1) as fresh:  # a thread without a context, whatever this one has
        for error in (
            fresh.submit(near.calls.cuCtxEnablePeerAccess, far.handle, 0).exception(),
            fresh.submit(near.calls.cuCtxDisablePeerAccess, far.handle).exception(),
        ):
            assert isinstance(error, DriverError)
            assert error.status == 201


# -- copies between devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["without access", "with direct access"])
def test_a_stream_copies_between_devices(driver: Driver, pair: Pair, direct: bool) -> None:
    near, far = pair
    with blocks(near, far) as (ours, theirs), near.stream() as stream:
        if direct:
            driver.peers.enable(near, far.device.index)
        near.write(ours, b"there")
        far.write(theirs + 8, b"here")
        stream.copy(theirs, ours, 5)
        stream.copy(ours + BLOCK - 4, theirs + 8, 4)
        stream.synchronize()
        assert far.read(theirs, 12) == b"there\0\0\0here"
        assert near.read(ours + BLOCK - 4, 4) == b"here"
        if direct:
            driver.peers.disable(near, far.device.index)


def test_segments_come_from_another_device_that_is_enabled(driver: Driver, pair: Pair) -> None:
    near, far = pair
    data = bytes(range(256)) * 64
    with blocks(near, far) as (ours, theirs), near.stream() as stream:
        driver.peers.enable(near, far.device.index)
        far.write(theirs, data)
        near.copy_batch(
            stream, [(ours, theirs, 100), (ours + 4096, theirs + 7, 5000), (ours + 16384, theirs + 16, 8192)]
        )
        stream.synchronize()
        found = [near.read(ours + place, nbytes) for place, nbytes in ((0, 100), (4096, 5000), (16384, 8192))]
        assert found == [data[:100], data[7:5007], data[16 : 16 + 8192]]
        driver.peers.disable(near, far.device.index)


def test_a_stream_copies_within_a_device(context: Context, memory: int) -> None:
    context.write(memory, b"twice")
    with context.stream() as stream:
        stream.copy(memory + MIB, memory, 5)
        stream.synchronize()
    assert context.read(memory + MIB, 5) == b"twice"


def test_a_chain_of_devices_passes_on_piece_by_piece(driver: Driver, pair: Pair) -> None:
    """Each device copies on what the one before it has, in the order of events alone; the host waits at the end."""
    pieces, chain = 8, [*pair, pair[0]]
    size = BLOCK // pieces
    data = bytes(piece + 1 for piece in range(pieces) for _ in range(size))
    with blocks(*chain) as pointers, ExitStack() as stack, pair[0].pin(BLOCK) as pinned:
        pinned.view[:] = data
        streams = [stack.enter_context(context.stream()) for context in chain]
        for start in range(0, BLOCK, size):
            streams[0].copy_in(pointers[0] + start, pinned.pointer + start, size)
            for last in range(len(chain) - 1):
                reached = stack.enter_context(chain[last].event())
                streams[last].record(reached)
                streams[last + 1].wait(reached)
                streams[last + 1].copy(pointers[last + 1] + start, pointers[last] + start, size)
        streams[-1].synchronize()
        assert chain[-1].read(pointers[-1], BLOCK) == data


# -- memory of other devices ---------------------------------------------------------------------------


def test_a_device_opens_another_devices_memory_both_ways(
    driver: Driver, pair: Pair, other_process: OtherProcess
) -> None:
    places = [[device.index for device in driver.devices].index(context.device.index) for context in pair]
    with blocks(*pair) as pointers:
        for context, pointer, there in zip(pair, pointers, reversed(places), strict=True):
            context.write(pointer, b"far away")
            opened = other_process.ask("open", context.export(pointer), device=there)
            assert other_process.ask("read", opened, 8, device=there) == b"far away"
            other_process.ask("write", opened, b"and back", device=there)
            assert context.read(pointer, 8) == b"and back"
            other_process.ask("close", opened, device=there)


def test_memory_opened_by_handle_does_not_need_what_was_enabled(
    driver: Driver, pair: Pair, other_process: OtherProcess
) -> None:
    near, far = pair
    there = [device.index for device in driver.devices].index(far.device.index)
    theirs = other_process.ask("allocate", BLOCK, device=there)
    other_process.ask("write", theirs, b"within reach", device=there)
    driver.peers.enable(near, far.device.index)
    opened = near.open(other_process.ask("export", theirs, device=there))
    driver.peers.disable(near, far.device.index)
    with blocks(near) as (ours,), near.stream() as stream:
        stream.copy(ours, opened, 12)
        stream.synchronize()
        assert near.read(ours, 12) == b"within reach"
    near.close(opened)
    other_process.ask("free", theirs, device=there)


def test_a_thread_in_a_second_context_of_the_device_opens_nothing(
    context: Context, memory: int, other_process: OtherProcess
) -> None:
    handle = context.export(memory)
    error, untouched = other_process.ask("in_a_second_context", handle)
    assert "CUDA_ERROR_INVALID_CONTEXT" in error
    assert "in another context of device 0 than its primary one" in error
    assert untouched
    other_process.ask("close", other_process.ask("open", handle))


def test_a_thread_that_works_on_another_device_may_open(
    driver: Driver, pair: Pair, other_process: OtherProcess
) -> None:
    near, far = pair
    theirs = other_process.ask("allocate", BLOCK)
    with far.current():
        near.check_thread(driver.current_context())
        near.close(near.open(other_process.ask("export", theirs)))
    other_process.ask("free", theirs)


# -- events of other processes -------------------------------------------------------------------------


def test_processes_share_an_event(context: Context, other_process: OtherProcess) -> None:
    theirs = other_process.ask("make_event")
    handle = other_process.ask("export_event", theirs)
    assert len(handle) == 64
    with context.open_event(handle) as event, context.stream() as stream:
        assert event.done()
        other_process.ask("record", theirs)
        event.wait()
        stream.wait(event)
        stream.record(event)
        stream.synchronize()
        assert other_process.ask("event_done", theirs)
    other_process.ask("close_event", theirs)


def test_an_event_is_recorded_and_waited_for_in_streams_by_handle(
    context: Context, other_process: OtherProcess
) -> None:
    theirs = other_process.ask("make_event")
    handle = other_process.ask("export_event", theirs)
    with context.open_event(handle) as event, context.event() as own, context.stream() as stream:
        other_process.ask("record", theirs)
        event.hold(stream.handle)
        event.hold(0)
        own.record(stream.handle)
        stream.synchronize()
        assert own.done()
        own.record()
        context.synchronize()
        assert own.done()
    other_process.ask("close_event", theirs)


def test_an_event_opens_on_another_device_too(pair: Pair, other_process: OtherProcess) -> None:
    near, far = pair
    with near.event(shared=True) as event, near.stream() as stream:
        stream.record(event)
        theirs = other_process.ask("open_event", event.export(), device=far.device.index)
        stream.synchronize()
        assert other_process.ask("event_done", theirs, device=far.device.index)
        other_process.ask("close_event", theirs, device=far.device.index)


def test_an_event_for_one_process_is_not_exported(context: Context) -> None:
    with context.event() as event, refused("cuIpcGetEventHandle failed with CUDA_ERROR_INVALID_"):
        event.export()


def test_the_maker_of_an_event_does_not_open_it(context: Context) -> None:
    with context.event(shared=True) as event, refused("cuIpcOpenEventHandle failed"):
        context.open_event(event.export())


def test_a_made_up_event_is_refused(context: Context) -> None:
    with refused("cuIpcOpenEventHandle failed"):
        context.open_event(bytes(range(64)))
    with pytest.raises(ValueError, match="an event's handle of 5 bytes; it has 64"):
        context.open_event(b"short")
