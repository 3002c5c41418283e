"""``python -m cubroker.cli.doctor.trials PARENT TASK SPEC [DEVICE]``: one trial, in a process that may be killed.

The process prints the outcome as JSON. In a trial of sharing it owns the memory, and starts the workers that open it,
since only another process can. It shares 2 MiB, and frees them. There is no trial of multicast, ever.
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
from contextlib import closing, suppress
from typing import TypeVar

import msgspec

from cubroker.cli.doctor.facts import DeviceFacts, DriverFacts, Survey, Trial
from cubroker.driver import Context, Device, Driver, DriverError, load
from cubroker.driver.buffers import round_up
from cubroker.protocol.encoding import encode, encode_json
from cubroker.protocol.errors import signal_name
from cubroker.protocol.messages import IPC, VMM
from cubroker.server.hardening import PR_SET_PDEATHSIG, prctl, python_command

R = TypeVar("R")

SIZE = 2 << 20
"""Bytes that are shared."""

DRIVER_LIBRARY = "libcuda.so.1"


class Shared(msgspec.Struct):
    """What a worker reads from its standard input: a handle is a secret, and arguments are visible to others."""

    seed: bytes
    size: int = SIZE
    handle: bytes = b""
    descriptor: int = -1


def main(parent: str, task: str, spec: str, index: str = "0") -> None:
    """Run one task until it ends, or until its parent, the process that started it, ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the parent ended before `prctl` was called
    result = survey(spec) if task == "survey" else attempt(task, spec, int(index))
    sys.stdout.write(encode_json(result).decode() + "\n")


# -- asking the driver -----------------------------------------------------------------------------


def survey(spec: str) -> Survey:
    """Ask the driver about itself and its devices; nothing is allocated, and no context made."""
    try:
        with closing(load(spec)) as driver:
            devices = tuple(_describe(driver, device) for device in driver.devices)
            return Survey(DriverFacts(spec, Trial("works"), driver.version), devices)
    except (DriverError, RuntimeError) as error:
        library = True
        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            library = False
        return Survey(DriverFacts(spec, refusal(error), library=library))


def _describe(driver: Driver, device: Device) -> DeviceFacts:
    peers, links = {}, Trial("works")
    try:
        for other in driver.devices:
            if other is not device:
                peers[other.index] = driver.peers.can_access(device.index, other.index)
    except DriverError as error:
        links = refusal(error)
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


# -- owners ----------------------------------------------------------------------------------------


def _ipc(driver: Driver, index: int) -> Trial:
    """Share an allocation by its handle."""
    context, seed = driver.context(index), secrets.token_bytes()
    pointer = context.allocate(SIZE)
    context.write(pointer, _pattern(seed, SIZE))
    trial = ask_worker("ipc-reader", driver, index, Shared(seed, handle=context.export(pointer)))
    context.free(pointer)
    return trial


def _vmm(driver: Driver, index: int) -> Trial:
    """Share memory by descriptor as a broker does, without a context."""
    physical = driver.create(index, round_up(SIZE, driver.granularity(index)))
    descriptor = physical.export()
    trial = _lent(driver, index, Shared(secrets.token_bytes(), physical.nbytes, descriptor=descriptor))
    os.close(descriptor)
    physical.release()
    return trial


def _fabric(driver: Driver, index: int) -> Trial:
    """Share memory by fabric handle, if the driver gives one."""
    physical = driver.create(index, round_up(SIZE, driver.granularity(index)), fabric=True)
    handle = physical.export_fabric()
    trial = Trial("refused")
    if handle is not None:
        trial = _lent(driver, index, Shared(secrets.token_bytes(), physical.nbytes, handle))
    physical.release()
    return trial


def _events(driver: Driver, index: int) -> Trial:
    """Share an event that was recorded."""
    context = driver.context(index)
    with context.event(shared=True) as event, context.stream() as stream:
        stream.record(event)
        return ask_worker("event-waiter", driver, index, Shared(b"", handle=event.export()))


def _lent(driver: Driver, index: int, order: Shared) -> Trial:
    """Have a writer fill memory without an address, and then a reader read it."""
    trial = ask_worker("vmm-writer", driver, index, order)
    return ask_worker("vmm-reader", driver, index, order) if trial.outcome == "works" else trial


# -- workers ---------------------------------------------------------------------------------------


def _ipc_reader(context: Context, order: Shared) -> Trial:
    pointer = context.open(order.handle)
    same = context.read(pointer, order.size) == _pattern(order.seed, order.size)
    context.close(pointer)
    return Trial("works" if same else "differs")


def _vmm_writer(context: Context, order: Shared) -> Trial:
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=False)
        context.write(memory.pointer, _pattern(order.seed, order.size))
    return Trial("works")


def _vmm_reader(context: Context, order: Shared) -> Trial:
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=True)
        if context.read(memory.pointer, order.size) != _pattern(order.seed, order.size):
            return Trial("differs")
        try:
            context.write(memory.pointer, b"written")
        except DriverError:
            return Trial("works")
    return Trial("writable")


def _event_waiter(context: Context, order: Shared) -> Trial:
    with context.open_event(order.handle) as event, context.stream() as stream:
        stream.wait(event)
        stream.synchronize()
        event.wait()
    return Trial("works")


OWNERS: dict[str, Callable[[Driver, int], Trial]] = {IPC: _ipc, VMM: _vmm, "fabric": _fabric, "events": _events}
WORKERS: dict[str, Callable[[Context, Shared], Trial]] = {
    "ipc-reader": _ipc_reader,
    "vmm-writer": _vmm_writer,
    "vmm-reader": _vmm_reader,
    "event-waiter": _event_waiter,
}


def attempt(task: str, spec: str, index: int) -> Trial:
    """Run an owner's or a worker's part in this process."""
    side = "owner" if task in OWNERS else "worker"
    try:
        with closing(load(spec)) as driver:
            if task in OWNERS:
                return OWNERS[task](driver, index)
            order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Shared)
            return WORKERS[task](driver.context(index), order)
    except (DriverError, RuntimeError) as error:
        return refusal(error, side)


def refusal(error: DriverError | RuntimeError, side: str = "") -> Trial:
    """Return a refusal as an outcome; the bindings raise a RuntimeError if the driver has no such function."""
    if isinstance(error, DriverError):
        return Trial("refused", side, error.call, error.name, error.detail)
    return Trial("refused", side, detail=str(error))


def ask_worker(task: str, driver: Driver, index: int, order: Shared) -> Trial:
    """Have another process do a worker's part; it ends with this process."""
    done = subprocess.run(  # noqa: S603
        trial_command(task, driver.spec, str(index)),
        input=encode(order),
        capture_output=True,
        pass_fds=[] if order.descriptor < 0 else [order.descriptor],
        check=False,
    )
    return read_answer(done.returncode, done.stdout, done.stderr, Trial)


def _pattern(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)


def trial_command(*arguments: str) -> list[str]:
    """Return the command line of a trial, which ends with this process if not before."""
    return python_command("cubroker.cli.doctor.trials", str(os.getpid()), *arguments)


def read_answer(status: int, out: bytes, errors: bytes, kind: type[R]) -> R | Trial:
    """Return what a process printed last, or a trial that ``died``; libraries may print lines before."""
    lines = out.splitlines()
    if status == 0 and lines:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(lines[-1], type=kind)
    if status < 0:
        return Trial("died", detail=signal_name(-status))
    said = errors.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    return Trial("died", detail=f"status {status}: {last}")


if __name__ == "__main__":
    main(*sys.argv[1:])
