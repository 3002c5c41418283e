"""``python -m cubroker.cli.doctor.trials PARENT TASK SPEC [DEVICE]``: one trial, in a process that may be killed.

The process prints what came of it as JSON. A trial of sharing is the memory's owner, which starts the workers that
open it: only another process can. Two MiB are shared, and given back. There is no trial of multicast, ever.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing

import msgspec

from cubroker.cli.doctor.children import command, read
from cubroker.cli.doctor.facts import DeviceFacts, DriverFacts, Survey, Trial
from cubroker.driver import Device, Driver, DriverError, load
from cubroker.driver.sizes import round_up

SIZE = 2 << 20
"""Bytes that are shared."""

PR_SET_PDEATHSIG = 1
"""What prctl(2) is asked for; Python has no name for it."""

DRIVER_LIBRARY = "libcuda.so.1"


class _Shared(msgspec.Struct):
    """What a worker is told on its standard input; a handle is a secret, and arguments are none."""

    seed: bytes
    size: int = SIZE
    handle: bytes = b""
    descriptor: int = -1


def main(parent: str, task: str, spec: str, index: str = "0") -> None:
    """Run one task to its end, or to that of its parent, the process that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # it ended before it could be followed
    result = survey(spec) if task == "survey" else _told(task, spec, int(index))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


# -- asking the driver -----------------------------------------------------------------------------


def survey(spec: str) -> Survey:
    """Ask the driver what there is; nothing is allocated, and no context made."""
    try:
        with closing(load(spec)) as driver:
            devices = tuple(_describe(driver, device) for device in driver.devices)
            return Survey(DriverFacts(spec, Trial("works"), driver.version), devices)
    except (DriverError, RuntimeError) as error:
        return Survey(DriverFacts(spec, _refusal(error), library=_library()))


def _describe(driver: Driver, device: Device) -> DeviceFacts:
    peers, links = {}, Trial("works")
    try:
        for other in driver.devices:
            if other is not device:
                peers[other.index] = driver.peers.can_access(device.index, other.index)
    except DriverError as error:
        links = _refusal(error)
    multicast = driver.attribute(device.index, "MULTICAST_SUPPORTED")
    return DeviceFacts(
        device.index,
        device.uuid,
        device.name,
        emulated=driver.host,
        compute_mode=driver.attribute(device.index, "COMPUTE_MODE"),
        unified=driver.attribute(device.index, "UNIFIED_ADDRESSING"),
        ipc=driver.attribute(device.index, "IPC_EVENT_SUPPORTED"),
        virtual=driver.attribute(device.index, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        descriptors=driver.attribute(device.index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
        fabric=driver.attribute(device.index, "HANDLE_TYPE_FABRIC_SUPPORTED"),
        multicast=multicast,
        obstacle=None if multicast is None else driver.multicast_obstacle(device.index),
        peers=peers,
        links=links,
    )


def _library() -> bool:
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return False
    return True


# -- owners ----------------------------------------------------------------------------------------


def _ipc(driver: Driver, index: int) -> Trial:
    """Share an allocation by its handle."""
    context, seed = driver.context(index), secrets.token_bytes()
    pointer = context.allocate(SIZE)
    context.write(pointer, _pattern(seed, SIZE))
    trial = _worker("ipc-reader", driver, index, _Shared(seed, handle=context.export(pointer)))
    context.free(pointer)
    return trial


def _vmm(driver: Driver, index: int) -> Trial:
    """Share memory by descriptor as a broker does, without a context."""
    physical = driver.create(index, _size(driver, index))
    descriptor = physical.export()
    trial = _lent(driver, index, _Shared(secrets.token_bytes(), physical.nbytes, descriptor=descriptor))
    os.close(descriptor)
    physical.release()
    return trial


def _fabric(driver: Driver, index: int) -> Trial:
    """Share memory by fabric handle, if it gets one."""
    physical = driver.create(index, _size(driver, index), fabric=True)
    handle = physical.export_fabric()
    trial = Trial("refused")
    if handle is not None:
        trial = _lent(driver, index, _Shared(secrets.token_bytes(), physical.nbytes, handle))
    physical.release()
    return trial


def _events(driver: Driver, index: int) -> Trial:
    """Share an event that was recorded."""
    context = driver.context(index)
    with context.event(shared=True) as event, context.stream() as stream:
        stream.record(event)
        return _worker("event-waiter", driver, index, _Shared(b"", handle=event.export()))


def _size(driver: Driver, index: int) -> int:
    return round_up(SIZE, driver.granularity(index))


def _lent(driver: Driver, index: int, order: _Shared) -> Trial:
    """Have a writer fill memory without an address, and then a reader read it."""
    trial = _worker("vmm-writer", driver, index, order)
    return _worker("vmm-reader", driver, index, order) if trial.outcome == "works" else trial


# -- workers ---------------------------------------------------------------------------------------


def _ipc_reader(driver: Driver, index: int) -> Trial:
    order, context = _order(), driver.context(index)
    pointer = context.open(order.handle)
    same = context.read(pointer, order.size) == _pattern(order.seed, order.size)
    context.close(pointer)
    return Trial("works" if same else "differs")


def _vmm_writer(driver: Driver, index: int) -> Trial:
    order, context = _order(), driver.context(index)
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=False)
        context.write(memory.pointer, _pattern(order.seed, order.size))
    return Trial("works")


def _vmm_reader(driver: Driver, index: int) -> Trial:
    order, context = _order(), driver.context(index)
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=True)
        if context.read(memory.pointer, order.size) != _pattern(order.seed, order.size):
            return Trial("differs")
        try:
            context.write(memory.pointer, b"written")
        except DriverError:
            return Trial("works")
    return Trial("writable")


def _event_waiter(driver: Driver, index: int) -> Trial:
    context = driver.context(index)
    with context.open_event(_order().handle) as event, context.stream() as stream:
        stream.wait(event)
        stream.synchronize()
        event.wait()
    return Trial("works")


_OWNERS: dict[str, Callable[[Driver, int], Trial]] = {"ipc": _ipc, "vmm": _vmm, "fabric": _fabric, "events": _events}
_WORKERS: dict[str, Callable[[Driver, int], Trial]] = {
    "ipc-reader": _ipc_reader,
    "vmm-writer": _vmm_writer,
    "vmm-reader": _vmm_reader,
    "event-waiter": _event_waiter,
}


def _told(task: str, spec: str, index: int) -> Trial:
    side = "owner" if task in _OWNERS else "worker"
    try:
        with closing(load(spec)) as driver:
            return (_OWNERS | _WORKERS)[task](driver, index)
    except (DriverError, RuntimeError) as error:
        return _refusal(error, side)


def _refusal(error: DriverError | RuntimeError, side: str = "") -> Trial:
    """A RuntimeError is how the bindings say that the driver has no such function."""
    if isinstance(error, DriverError):
        return Trial("refused", side, error.call, error.name, error.detail)
    return Trial("refused", side, detail=str(error))


def _worker(task: str, driver: Driver, index: int, order: _Shared) -> Trial:
    """Have another process do its part; it ends with this one."""
    done = subprocess.run(  # noqa: S603
        command(task, driver.spec, str(index)),
        input=msgspec.msgpack.encode(order),
        capture_output=True,
        pass_fds=[] if order.descriptor < 0 else [order.descriptor],
        check=False,
    )
    return read(done.returncode, done.stdout, done.stderr, Trial)


def _order() -> _Shared:
    return msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Shared)


def _pattern(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)


if __name__ == "__main__":
    main(*sys.argv[1:])
