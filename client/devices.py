"""This process's devices by ordinal or UUID, where a pool is placed on them, and driver errors in plain words."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import translate
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeVar

from cubroker.driver import Context, Device, Driver, DriverError, device_names, load
from cubroker.driver.buffers import keep_first
from cubroker.driver.device_names import CURRENT, UnknownDevice, label, written
from cubroker.protocol.errors import CubrokerError, DeviceFailure, Invalid, NotFound, OutOfMemory, Unavailable
from cubroker.protocol.fields import MAX_DEVICES
from cubroker.protocol.layout import Layout, Tensors, triples

DeviceId: TypeAlias = device_names.DeviceId
"""A device: an ordinal of this process, ``cuda:0``, a framework's object, or a UUID or the beginning of one."""

Plan = Mapping[str, DeviceId]
"""The device of each tensor, by names of tensors and shell patterns of names; see :func:`resolve_plan`."""

D = TypeVar("D")

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
    """Whether this thread is inside a driver call that a session's own threads may wait for; loads no driver."""
    known = _drivers.get(spec)
    return known is not None and known.in_call()


def find(driver: Driver, device: DeviceId) -> Device:
    """Return the device of that name; raises ``NotFound``. Ordinals are those of this process.

    ``cuda`` without an ordinal is the device that is current on this thread, or the first one if none is, as in torch.
    """
    if isinstance(device, str):  # in most cases a UUID, as the broker names devices
        for known in driver.devices:
            if known.uuid == device:
                return known
    current = None
    if written(device) in CURRENT:
        context = driver.current_context()
        current = driver.devices[0].index if context is None and driver.devices else context and context.device
    try:
        return device_names.find(device, driver.devices, "this process sees", current=current)
    except UnknownDevice as error:
        hint = "" if driver.host else "; CUDA_VISIBLE_DEVICES decides which GPUs a process sees, and in what order"
        raise NotFound(f"{error}{hint}") from None


def lasting(driver: Driver, device: DeviceId) -> DeviceId:
    """Return a name of a device that means the same later and on other threads; raises as :func:`find`.

    For ``cuda`` that is the ordinal of the current device, else the name itself: later brokers may have other devices,
    so that names have to be looked up again.
    """
    return find(driver, device).index if written(device) in CURRENT else device


def context(driver: Driver, device: DeviceId) -> Context:
    """Return this process's context on a device, made on first use; raises ``NotFound`` or as :func:`failure` says."""
    found = find(driver, device)
    try:
        return driver.context(found.index)
    except DriverError as error:
        raise failure(error, f"a context on {label(found)}") from error


def reachable(driver: Driver, device: DeviceId) -> tuple[str, ...]:
    """Return the UUIDs of the other devices whose memory a device reaches directly, over the fastest links first."""
    found = find(driver, device)
    with doing(f"the peers of {label(found)}"):
        links = [(driver.peers.link(found.index, other.index), other) for other in driver.devices if other != found]
    near = [(link.performance_rank, other.index, other.uuid) for link, other in links if link.access]
    return tuple(uuid for *_, uuid in sorted(near)[:MAX_DEVICES])


def synchronize(context: Context, asked: str) -> None:
    """Wait for all work that was submitted to a context; raises as :func:`failure` turns the driver's error."""
    with doing(asked):
        context.synchronize()


@contextmanager
def doing(asked: str) -> Iterator[None]:
    """Raise a driver's error within a ``with`` block as :func:`failure` turns it."""
    try:
        yield
    except DriverError as error:
        raise failure(error, asked) from error


def failure(error: DriverError | CubrokerError | ValueError, asked: str) -> CubrokerError:
    """Turn a driver's error into a ``CubrokerError``, or keep one; ``asked`` says what was being done."""
    if isinstance(error, CubrokerError):
        return error
    kind = OutOfMemory if isinstance(error, DriverError) and error.out_of_memory else DeviceFailure
    return kind(f"{asked}: {error}")


# -- placement -----------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """The UUIDs of devices, and for each allocation of a sharded layout the index of its device among them."""

    devices: tuple[str, ...]
    plan: tuple[int, ...] | None


def place(driver: Driver, layout: Layout, devices: Sequence[DeviceId] | None, plan: Mapping[str, str] | None) -> Placed:
    """Return on which devices the allocations of a layout are to be.

    Args:
        driver: this process's.
        layout: the plan has a device for every tensor of it.
        devices: by default those of the plan, in its order, or the first one.
        plan: as :func:`find_plan` returns it; by default each allocation is on all devices.

    Raises:
        NotFound: no such device.
        Invalid: the plan does not fit, or there are no devices.
    """
    uuids = tuple(find(driver, device).uuid for device in chosen(devices, plan))
    if plan is None:
        return Placed(uuids, None)
    if unknown := next((uuid for uuid in plan.values() if uuid not in uuids), None):
        where = label(find(driver, unknown))
        raise Invalid(f"the plan places tensors on {where}, which `devices` does not name; add it there")
    homes = layout.spread(resolve_plan(plan, (tensor.name for tensor in layout.tensors)))
    return Placed(uuids, tuple(map(uuids.index, homes)))


def lay_out(
    driver: Driver, layout: Layout | Tensors, devices: Sequence[DeviceId] | None, plan: Plan | None
) -> tuple[Layout, Placed]:
    """Check a layout, or pack one of tensors as :meth:`Layout.pack` takes them; return it, and where it is to be.

    Raises:
        NotFound: as :func:`place`.
        Invalid: as :func:`place` and :meth:`Layout.pack`.
    """
    places = None if plan is None else find_plan(driver, plan)
    if isinstance(layout, Layout):
        layout.check()
    else:
        tensors = tuple(triples(layout))
        groups = None if places is None else resolve_plan(places, (name for name, *_ in tensors))
        layout = Layout.pack(tensors, groups=groups)
    return layout, place(driver, layout, devices, places)


def chosen(devices: Sequence[DeviceId] | None, plan: Plan | None) -> tuple[DeviceId, ...]:
    """Return the devices of a create: by default those of its plan, in the order of that, or the first one.

    Raises:
        Invalid: ``devices`` is no list, or empty; or ``plan`` is no mapping.
    """
    if devices is None:
        return (0,) if plan is None else tuple(dict.fromkeys(_mapping(plan).values()))
    named: tuple[DeviceId, ...] = ()
    if not isinstance(devices, str | bytes):  # the letters of a UUID are no list
        with suppress(TypeError):  # nor is what cannot be iterated, such as an array without dimensions
            named = tuple(devices)
    if not named:
        raise Invalid(f"{devices!r} is no list of devices to create on; name at least one")
    return named


def _mapping(plan: Plan) -> Plan:
    entries = plan.items() if isinstance(plan, Mapping) else ((None, None),)
    if not all(isinstance(entry, str) and isinstance(device, Hashable) for entry, device in entries):
        raise Invalid(f"{plan!r} is no plan: pass a mapping of names of tensors, or of patterns, to devices")
    return plan


def find_plan(driver: Driver, plan: Plan) -> dict[str, str]:
    """Return a plan with devices by UUID; in ``plan`` a device may have several names.

    Raises:
        NotFound: no such device.
        Invalid: it is no mapping.
    """
    plan = _mapping(plan)
    uuids = {device: find(driver, device).uuid for device in dict.fromkeys(plan.values())}
    return {name: uuids[device] for name, device in plan.items()}


def resolve_plan(plan: Mapping[str, D], names: Iterable[str]) -> dict[str, D]:
    """Return the device of each tensor in a plan of names and shell patterns, in which a device has one name.

    A tensor's own name precedes patterns; if several patterns match, the first one counts.

    Raises:
        Invalid: no entry matches a tensor; or an entry matches no tensor, or comes after a pattern for another device
            that matches all its tensors and more.
    """
    listed = dict.fromkeys(names)
    patterns = {entry: re.compile(translate(entry)).match for entry in plan if entry not in listed}
    found: dict[str, D] = {}
    matches: dict[str, set[str]] = {entry: set() for entry in patterns}
    for name in listed:
        entries = [entry for entry, match in patterns.items() if match(name)]
        for entry in entries:
            matches[entry].add(name)
        if name in plan:
            entries = [name]
        if not entries:
            raise Invalid(f"the plan has no device for tensor {name!r}; add its name, or '*' as the last pattern")
        found[name] = plan[entries[0]]
    for late, (entry, matched) in enumerate(matches.items()):
        if not matched:
            raise Invalid(f"the plan's {entry!r} is no tensor's name and matches none; leave it out, or correct it")
        for earlier in islice(matches, late):
            if matched < matches[earlier] and plan[earlier] != plan[entry]:
                raise Invalid(
                    f"the plan's {entry!r} comes after {earlier!r}, which matches its tensors and more; put it first"
                )
    return found
