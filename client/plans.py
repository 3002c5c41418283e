"""Where tensors shall lie: what a caller says of devices and plans, in the broker's terms."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fnmatch import translate
from typing import NamedTuple, TypeVar

from cubroker.client import devices as local
from cubroker.driver import Driver
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout

DeviceId = int | str
"""A device: its ordinal in this process, or its UUID."""

Plan = Mapping[str, DeviceId]
"""For tensors by name, the device on which each of them lies."""

Group = TypeVar("Group", bound=Hashable)


class Placed(NamedTuple):
    """The UUIDs of devices, and for each allocation of a sharded layout the index of its device among them."""

    devices: tuple[str, ...]
    plan: tuple[int, ...] | None


def place(driver: Driver, layout: Layout, devices: Sequence[DeviceId] | None, plan: Plan | None) -> Placed:
    """Say where the allocations of a layout lie; this process has a context on each of the devices then.

    Args:
        driver: this process's.
        layout: whose tensors the plan names, every one of them.
        devices: by default those of the plan, in its order, or the first one.
        plan: by default each allocation is on all devices.

    Raises:
        Invalid: there are no devices, or the plan does not fit the layout or the devices.
        NotFound: this process sees no such device.
        OutOfMemory, DeviceFailure: a context could not be made.
    """
    if devices is None:
        devices = (0,) if plan is None else tuple(dict.fromkeys(_uuids(driver, plan).values()))
    if not devices or isinstance(devices, str):  # the letters of a UUID are no devices
        raise Invalid(f"no list of devices to create on: {devices!r}; name one at least")
    uuids = tuple(local.context(driver, device).device.uuid for device in devices)
    if plan is None:
        return Placed(uuids, None)
    known = _uuids(driver, plan)
    if strangers := {device for device, uuid in known.items() if uuid not in uuids}:
        raise Invalid(f"the plan places tensors on {strangers}, which `devices` does not name")
    return Placed(uuids, tuple(map(uuids.index, layout.spread({name: known[plan[name]] for name in plan}))))


def spell_out(plan: Mapping[str, Group], names: Iterable[str]) -> dict[str, Group]:
    """Return the entry of each tensor in a plan that has names and patterns, as shells have them for files.

    A tensor's own name goes before patterns; of these the first one that matches it counts.

    Raises:
        Invalid: a tensor is matched by none, or an entry matches no tensor.
    """
    listed = dict.fromkeys(names)
    patterns = {entry: re.compile(translate(entry)).match for entry in plan if entry not in listed}
    found: dict[str, Group] = {}
    used: set[str] = set()
    for name in listed:
        entries = [entry for entry, match in patterns.items() if match(name)]
        used.update(entries)
        if name in plan:
            entries = [name]
        if not entries:
            raise Invalid(f"the plan has no device for tensor {name!r}; add its name, or '*' as the last pattern")
        found[name] = plan[entries[0]]
    if idle := [entry for entry in patterns if entry not in used]:
        raise Invalid(f"the plan's {idle[0]!r} is no tensor's name and matches none; leave it out, or correct it")
    return found


def _uuids(driver: Driver, plan: Plan) -> dict[DeviceId, str]:
    return {device: local.find(driver, device).uuid for device in dict.fromkeys(plan.values())}
