"""Whether multicast calls may be made on real hardware; there is no way to the driver's functions but through here.

A program that makes multicast objects can take a host with NVSwitch out of service while its fabric manager is unwell.
Sites therefore say no, in the environment of their processes, and in the words of whichever library they know. cubroker
hears all of them, and makes no such call before somebody has said yes to cubroker itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from string import whitespace
from typing import Any

from cubroker.driver import nccl
from cubroker.driver.errors import DriverError

OWN_SETTING = "CUBROKER_MULTICAST"
"""The environment variable that says yes, or no, to cubroker alone."""

PREFIX = "cuMulticast"
"""What the names of all guarded functions begin with."""

NCCLS = "NCCL_NVLS_ENABLE"
"""NCCL's own, which it also takes from its configuration files."""

_YES = frozenset({"1", "y", "yes", "on", "true"})


def _disabling_allows(value: str) -> bool:
    """Of the ways to say that something is not disabled, libraries agree about 0 alone."""
    return value == "0"


_SETTINGS: Mapping[str, Callable[[str], bool]] = {
    NCCLS: nccl.allows,
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": _disabling_allows,
    "NVSHMEM_DISABLE_NVLS": _disabling_allows,
}
"""Variables of other libraries, and which of their values are not a no. One that is not set says nothing."""


class MulticastOff(DriverError):
    """A multicast call was asked for and not made, because a setting says no.

    Attributes:
        setting: the environment variable.
    """

    def __init__(self, call: str, status: int, name: str, detail: str, setting: str = "") -> None:
        super().__init__(call, status, name, detail)
        self.setting = setting

    def __str__(self) -> str:
        return f"{self.call} was not called: {self.detail}"


def emulated(module: Any) -> bool:
    """Whether a driver-shaped module is the host driver, which says so; whatever says nothing is real hardware."""
    return getattr(module, "emulated", None) is True


def objection(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the setting that says no to multicast, and the reason in words; None if none does.

    It is one of an environment, or of the files from which NCCL would take it in that environment.
    """
    for setting, allows in _SETTINGS.items():
        value = environment.get(setting)
        if value is not None and not allows(value.strip(whitespace)):
            return setting, f"{setting}={value} says no to multicast on this machine"
    for value, file in nccl.configured(NCCLS, environment):
        if not nccl.allows(value):  # though NCCL may let the environment, or another file, win
            return NCCLS, f"{NCCLS}={value} in {file} says no to multicast on this machine"
    value = environment.get(OWN_SETTING)
    if value is None:
        return OWN_SETTING, f"multicast is off on real hardware unless {OWN_SETTING}=1 says yes"
    if value.strip().lower() not in _YES:
        return OWN_SETTING, f"{OWN_SETTING}={value} says no to multicast; only {OWN_SETTING}=1 says yes"
    return None


def check(module: Any, call: str) -> None:
    """Refuse a multicast call, or work that needs one made before, on real hardware where a setting says no.

    The settings are read each time.

    Raises:
        MulticastOff: no call was made.
    """
    if emulated(module):
        return
    found = objection(os.environ)
    if found is not None:
        code = module.CUresult.CUDA_ERROR_NOT_PERMITTED
        raise MulticastOff(call, int(code), code.name, found[1], found[0])
