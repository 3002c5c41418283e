"""What the rules of a configuration mean for the devices that there are, at the start and afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from cubroker.driver import Device
from cubroker.protocol.errors import Invalid
from cubroker.server import logs
from cubroker.server.config import DEFAULT_BUDGET, OTHERS, Budgets, Config
from cubroker.server.ledger.entries import Budget
from cubroker.server.ledger.events import Event, Reconfigured
from cubroker.server.quantities import parse_budget

log = logging.getLogger(__name__)


def apply(
    devices: Sequence[Device], handle: Callable[[Event], None], check_every: Callable[[float], None], config: Config
) -> None:
    """Put in force what can change while the broker runs.

    Raises:
        Invalid: a budget does not fit its device, or is of one that is not served; nothing has changed.
    """
    budgets = {budget.uuid: budget.budget for budget in grant(devices, config.budget)}
    handle(Reconfigured(config.policy, config.limits, budgets))
    check_every(config.mapped_check)
    logs.adjust(config.log.format, config.log.level)


def grant(devices: Sequence[Device], budgets: Budgets) -> list[Budget]:
    """Return the budget of every device.

    Raises:
        Invalid: a budget of a device that is not served, or more than a device has.
    """
    granted = _granted(devices, budgets)
    for each in granted:
        sizes = each.budget >> 20, each.total >> 20
        log.info("device %d: %s, %s, budget %d MiB of %d MiB", each.index, each.name, each.uuid, *sizes)
    return granted


def _granted(devices: Sequence[Device], budgets: Budgets) -> list[Budget]:
    if not isinstance(budgets, Mapping):
        return [_grant(device, budgets) for device in devices]
    known = {OTHERS, *(name for device in devices for name in _names(device))}
    for name in budgets:
        if name not in known:
            there = ", ".join(" or ".join(_names(device)) for device in devices)
            raise Invalid(f"a budget for device {name!r}, which is not served; there are {there}, and default")
    usual = budgets.get(OTHERS, DEFAULT_BUDGET)
    return [_grant(device, next((budgets[n] for n in _names(device) if n in budgets), usual)) for device in devices]


def _names(device: Device) -> tuple[str, str]:
    """What a device may be called in the configuration."""
    return device.uuid, str(device.index)


def _grant(device: Device, budget: str) -> Budget:
    return Budget(device.index, device.uuid, device.name, device.total, parse_budget(budget, device.total))
