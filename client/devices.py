"""This process's devices: one driver per kind of broker, devices by ordinal or UUID, driver errors in plain words."""

from __future__ import annotations

import os

from cubroker.driver import Context, Device, Driver, DriverError, load
from cubroker.driver.once import keep_first
from cubroker.protocol.bounds import MAX_DEVICES
from cubroker.protocol.errors import CubrokerError, DeviceFailure, NotFound, OutOfMemory, Unavailable

_drivers: dict[str, Driver] = {}
_inherited = False


def _forked() -> None:
    global _inherited
    _inherited = _inherited or bool(_drivers)
    _drivers.clear()


os.register_at_fork(after_in_child=_forked)


def driver(spec: str) -> Driver:
    """Return this process's driver for ``spec``, loaded once: contexts belong to a process, not to a Broker.

    Raises:
        Unavailable: there is no such driver here, or this process was forked from one that uses it.
    """
    try:
        return keep_first(_drivers, spec, lambda: load(spec), Driver.close)
    except (DriverError, ValueError) as error:
        hint = "; it was forked from one that uses them: start it by spawn or forkserver" if _inherited else ""
        raise Unavailable(f"this process cannot open the broker's devices ({spec}): {error}{hint}") from error


def in_call(spec: str) -> bool:
    """Whether this thread is within a driver call that a session's own threads may wait for; nothing is loaded."""
    known = _drivers.get(spec)
    return known is not None and known.in_call()


def find(driver: Driver, device: int | str) -> Device:
    """Return the device with that ordinal in this process, or with that UUID.

    Raises:
        NotFound: this process sees no such device.
    """
    for known in driver.devices:
        if device == (known.uuid if isinstance(device, str) else known.index):
            return known
    there = ", ".join(f"{known.index} ({known.uuid})" for known in driver.devices) or "none"
    hint = "" if driver.host else "; CUDA_VISIBLE_DEVICES decides which GPUs a process sees, and in what order"
    raise NotFound(f"this process sees no device {device!r}; it sees {there}{hint}")


def context(driver: Driver, device: int | str) -> Context:
    """Return this process's context on a device; made on first use.

    Raises:
        NotFound: this process sees no such device.
        OutOfMemory: the device has no room for a context.
        DeviceFailure: the driver refused.
    """
    found = find(driver, device)
    try:
        return driver.context(found.index)
    except DriverError as error:
        raise failure(error, f"a context on {found.name} ({found.uuid})") from error


def reachable(driver: Driver, device: int | str) -> tuple[str, ...]:
    """Return the UUIDs of the other devices whose memory a device reaches directly, over the fastest links first.

    Raises:
        NotFound: this process sees no such device.
        DeviceFailure: the driver refused to tell.
    """
    found = find(driver, device)
    try:
        links = [(driver.peers.link(found.index, other.index), other) for other in driver.devices if other != found]
    except DriverError as error:
        raise failure(error, f"the peers of {found.name} ({found.uuid})") from error
    near = [(link.performance_rank, other.index, other.uuid) for link, other in links if link.access]
    return tuple(uuid for *_, uuid in sorted(near)[:MAX_DEVICES])


def failure(error: DriverError | CubrokerError | ValueError, asked: str) -> CubrokerError:
    """Turn a driver's error into one of ours; ``asked`` says what was being done. One of ours stays as it is."""
    if isinstance(error, CubrokerError):
        return error
    kind = OutOfMemory if isinstance(error, DriverError) and error.out_of_memory else DeviceFailure
    return kind(f"{asked}: {error}")
