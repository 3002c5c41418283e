"""Time of the driver calls in a pool's life, in milliseconds, by the size of the memory; no broker, no multicast.

Each figure is one call of the package ``driver``, as the broker and its clients make it: with the context made current
before it and restored after it. One process owns the memory, another one opens it.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from time import perf_counter
from typing import Any, TypeVar

from benchmarks.harness import Child, questions, run_alone
from benchmarks.options import Plan, neighbours
from benchmarks.report import Figure, median
from cubroker import driver
from cubroker.driver import Context, Driver
from cubroker.driver.buffers import round_up

SIZES = {"2 MiB": 2 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30, "16 GiB": 16 << 30, "64 GiB": 64 << 30}
"""Bytes. Sizes up to half of a GPU are measured, or up to a pool's size on host devices."""

MANY = 723
"""Allocations of the least size, as in a pool with one allocation per tensor."""

ROUNDS = 7

PIECE = 4096

Times = Mapping[str, list[float]]
"""Milliseconds, by call."""

T = TypeVar("T")


class Clock:
    """Measures calls, in milliseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def take(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of a call, and record its time."""
        began = perf_counter()
        result = call()
        self.times[what].append((perf_counter() - began) * 1e3)
        return result


def measure(plan: Plan) -> list[Figure]:
    """Measure; two devices only if two reach each other."""
    figures = _contexts(plan)
    total = driver.load(plan.devices).devices[0].total
    largest = total // 2 if plan.gpu else plan.nbytes
    sizes = {name: nbytes for name, nbytes in SIZES.items() if nbytes <= largest}
    with Child(own, plan.devices) as owner, Child(open_repeatedly, plan.devices) as opener:
        for kind in ("ipc", "vmm"):
            for name, nbytes in sizes.items():
                figures += _figures(f"{kind}, {name}", _share(owner, opener, kind, nbytes))
        figures += _figures("event", _share(owner, opener, "event", 0))
    with Child(map_many, plan.devices) as child:
        count, times = child.answer()
        figures += _figures(f"vmm, {count} allocations of the least size", times)
    return figures + _between_devices(plan)


def _share(owner: Child, opener: Child, kind: str, nbytes: int) -> Times:
    """Have one process create and export, and another open, ``ROUNDS`` times; return the times of both processes."""
    for _ in range(1 + ROUNDS):
        handle = owner.ask(kind, nbytes)
        opener.ask(kind, handle, nbytes)
        owner.ask()
    times: Times = owner.ask("times", 0) | opener.ask("times", None, 0)
    return times


def _figures(what: str, times: Times) -> list[Figure]:
    return [median(f"{what}: {call}", samples, "ms") for call, samples in times.items()]


def _start(devices: str, uuid: str | None = None) -> tuple[Driver, Context]:
    """Return the driver, and the context of one device, by default the first."""
    opened = driver.load(devices)
    indexes = {device.uuid: device.index for device in opened.devices}
    return opened, opened.context(indexes[uuid or opened.devices[0].uuid])


def _settled(clock: Clock) -> dict[str, list[float]]:
    """Return the times without each call's first, which may include setup, and reset the clock."""
    times = {what: samples[1:] for what, samples in clock.times.items()}
    clock.times.clear()
    return times


# -- the owner -------------------------------------------------------------------------------------


def own(connection: Connection, devices: str, uuid: str | None = None) -> None:
    """In the owner: create, send the handle, and release after the next message."""
    opened, context = _start(devices, uuid)
    clock = Clock()
    for kind, nbytes in questions(connection):
        if kind == "times":
            connection.send(_settled(clock))
            continue
        with _OWNED[kind](opened, context, clock, nbytes) as handle:
            connection.send(handle)
            connection.recv()  # the other process has closed the handle
        connection.send(None)


@contextmanager
def _ipc_owned(opened: Driver, context: Context, clock: Clock, nbytes: int) -> Iterator[bytes]:
    pointer = clock.take("allocate", lambda: context.allocate(nbytes))
    yield clock.take("export", lambda: context.export(pointer))
    clock.take("free", lambda: context.free(pointer))


@contextmanager
def _vmm_owned(opened: Driver, context: Context, clock: Clock, nbytes: int) -> Iterator[Any]:
    index = context.device.index
    physical = clock.take("create", lambda: opened.create(index, nbytes))
    descriptor = clock.take("export", physical.export)
    yield DupFd(descriptor)
    os.close(descriptor)
    clock.take("release, the last of the memory", physical.release)


@contextmanager
def _event_owned(opened: Driver, context: Context, clock: Clock, nbytes: int) -> Iterator[bytes]:
    with context.event(shared=True) as event:
        yield clock.take("export", event.export)


_OWNED: dict[str, Callable[[Driver, Context, Clock, int], AbstractContextManager[Any]]] = {
    "ipc": _ipc_owned,
    "vmm": _vmm_owned,
    "event": _event_owned,
}


# -- the process that opens ------------------------------------------------------------------------


def open_repeatedly(connection: Connection, devices: str) -> None:
    """In the other process: open and close the owner's handles."""
    opened, context = _start(devices)
    clock = Clock()
    for kind, handle, nbytes in questions(connection):
        if kind == "times":
            connection.send(_settled(clock))
            continue
        _OPENED[kind](opened, context, clock, handle, nbytes)
        connection.send(None)


def _ipc_opened(opened: Driver, context: Context, clock: Clock, handle: bytes, nbytes: int) -> None:
    pointer = clock.take("open", lambda: context.open(handle))
    clock.take("open, once more in the same process", lambda: context.open(handle))
    clock.take("close, of two", lambda: context.close(pointer))
    clock.take("close, the last", lambda: context.close(pointer))


def _vmm_opened(opened: Driver, context: Context, clock: Clock, handle: Any, nbytes: int) -> None:
    descriptor = handle.detach()
    imported = clock.take("import", lambda: opened.adopt(context.device.index, nbytes, descriptor))
    imported.release()
    reserved = clock.take("reserve", lambda: context.reserve(nbytes))
    clock.take("import, map, set access", lambda: reserved.map(descriptor, readonly=True))
    os.close(descriptor)
    clock.take("wait for all work, of which there is none", context.synchronize)
    clock.take("unmap", reserved.unmap)
    clock.take("free addresses", reserved.close)


def _event_opened(opened: Driver, context: Context, clock: Clock, handle: bytes, nbytes: int) -> None:
    clock.take("open", lambda: context.open_event(handle)).close()


_OPENED: dict[str, Callable[[Driver, Context, Clock, Any, int], None]] = {
    "ipc": _ipc_opened,
    "vmm": _vmm_opened,
    "event": _event_opened,
}


def map_many(connection: Connection, devices: str) -> None:
    """In one process: send the number of allocations, and the times for all of them."""
    opened, context = _start(devices)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    unit = round_up(SIZES["2 MiB"], opened.granularity(context.device.index))
    count = min(MANY, context.device.total // 2 // unit)
    clock = Clock()
    for _ in range(1 + ROUNDS):
        _map_once(opened, context, clock, [unit] * count)
    connection.send((count, _settled(clock)))


def _map_once(opened: Driver, context: Context, clock: Clock, sizes: list[int]) -> None:
    index = context.device.index
    made = clock.take("create all", lambda: [opened.create(index, nbytes) for nbytes in sizes])
    descriptors = [physical.export() for physical in made]
    ranges = clock.take("reserve all", lambda: [context.reserve(nbytes) for nbytes in sizes])
    clock.take("import, map, set access of all", lambda: _map(ranges, descriptors))
    clock.take("unmap all, free addresses", lambda: _close(ranges))
    for physical, descriptor in zip(made, descriptors, strict=True):
        os.close(descriptor)
        physical.release()


def _close(ranges: list[driver.Reservation]) -> None:
    for reserved in ranges:
        reserved.close()


def _map(ranges: list[driver.Reservation], descriptors: list[int]) -> None:
    for reserved, descriptor in zip(ranges, descriptors, strict=True):
        reserved.map(descriptor, readonly=True)


# -- contexts, and two devices ---------------------------------------------------------------------


def _contexts(plan: Plan) -> list[Figure]:
    """Measure a context: its device memory, as another process sees it, and the time to make it."""
    taken, times = [], []
    with Child(tell_free, plan.devices) as observer:
        for _ in range(plan.few):
            before = observer.ask()
            with Child(make_context, plan.devices) as child:
                times.append(child.answer())
                taken.append((before - observer.ask()) / 1e6)
    note = "by the free memory that another process sees"
    return [median("context: make", times, "ms"), median("context: device memory", taken, "MB", note)]


def tell_free(connection: Connection, devices: str) -> None:
    """In a process with a context: send the free bytes of the device."""
    _, context = _start(devices)
    for _ in questions(connection):
        connection.send(context.memory()[0])


def make_context(connection: Connection, devices: str) -> None:
    """In a fresh process: send the milliseconds that its context took, and hold it."""
    opened = driver.load(devices)
    clock = Clock()
    clock.take("make", lambda: opened.context(opened.devices[0].index))
    connection.send(clock.times["make"][0])
    for _ in questions(connection):  # none arrives; this waits for the parent
        pass


def _between_devices(plan: Plan) -> list[Figure]:
    if (pair := neighbours(plan)) is None:
        return []
    near, far = pair
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(plan.few):
        with Child(own, plan.devices, near) as owner:
            handle = owner.ask("ipc", SIZES["2 MiB"])
            with Child(reach, plan.devices, near, far, handle) as child:
                for what, samples in child.answer().items():
                    times[what] += samples
            owner.ask()
    return _figures("two devices, in a fresh process", times)


def reach(connection: Connection, devices: str, near: str, far: str, handle: bytes) -> None:
    """In a fresh process: open one device's memory on another and copy from it; then enable access, the other way."""
    opened, context = _start(devices, far)
    other = next(device.index for device in opened.devices if device.uuid == near)
    back = opened.context(other)
    clock, mine = Clock(), context.allocate(PIECE)
    with context.stream() as stream:
        clock.take("open and first copy", lambda: _copy_from(stream, mine, context.open(handle)))
    clock.take("enable access", lambda: opened.peers.enable(back, context.device.index))
    opened.peers.disable(opened.context(other), context.device.index)
    connection.send(dict(clock.times))


def _copy_from(stream: driver.Stream, target: int, source: int) -> None:
    stream.copy(target, source, PIECE)
    stream.synchronize()


if __name__ == "__main__":
    run_alone(measure)
