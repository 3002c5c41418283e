"""The only gate to multicast calls on real hardware: whether one may be made now.

A program that makes multicast objects can take a host with NVSwitch out of service while its fabric manager is
unhealthy. Sites therefore forbid multicast, by the environment variables of the libraries that they know. cubroker
obeys all of these variables, and makes no multicast call unless its own variable allows multicast too.

NCCL documents that it takes its variables from the environment, from the file that ``NCCL_CONF_FILE`` names, else from
``~/.nccl.conf``, and from ``/etc/nccl.conf``; the first that has a variable wins. NCCL before 2.23 reads the user's
file in any case. A line is ``NAME=VALUE``, or a comment that begins with ``#``. A prohibition in any of these places
counts here, whichever place would win in NCCL.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import whitespace
from typing import Any

from cubroker.driver.errors import DriverError

OWN_SETTING = "CUBROKER_MULTICAST"
"""The environment variable that allows or forbids multicast to cubroker alone."""

NCCL_SETTING = "NCCL_NVLS_ENABLE"
"""NCCL's variable, which NCCL also takes from its configuration files."""

NCCL_SYSTEM_FILE = Path("/etc/nccl.conf")

PREFIX = "cuMulticast"
"""The beginning of the names of all guarded functions."""

_YES = frozenset({"1", "y", "yes", "on", "true"})


class MulticastOff(DriverError):
    """A multicast call was asked for and not made, because a setting forbids it."""

    def __init__(self, call: str, status: int, name: str, detail: str, setting: str = "") -> None:
        super().__init__(call, status, name, detail)
        #: The environment variable that forbids it.
        self.setting = setting

    def __str__(self) -> str:
        return f"{self.call} was not called: {self.detail}"


def check(module: Any, call: str) -> None:
    """Refuse a multicast call, or work that needs one made before, on real hardware where a setting forbids it.

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


def emulated(module: Any) -> bool:
    """Whether a driver-shaped module declares itself the host driver; any other module is real hardware."""
    return getattr(module, "emulated", None) is True


def objection(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the setting that forbids multicast, and the reason in words; None if multicast is allowed.

    The settings are those of ``environment``, and of the files from which NCCL would take its own there.
    """
    for setting, is_allowed_by in _SETTINGS.items():
        value = environment.get(setting)
        if value is not None and not is_allowed_by(value.strip(whitespace)):
            return setting, f"{setting}={value} says no to multicast on this machine"
    for value, file in _in_nccl_files(NCCL_SETTING, environment):
        if not _nccl_allows(value):
            return NCCL_SETTING, f"{NCCL_SETTING}={value} in {file} says no to multicast on this machine"
    value = environment.get(OWN_SETTING)
    if value is None:
        return OWN_SETTING, f"multicast is off on real hardware unless {OWN_SETTING}=1 says yes"
    if value.strip().lower() not in _YES:
        return OWN_SETTING, f"{OWN_SETTING}={value} says no to multicast; only {OWN_SETTING}=1 says yes"
    return None


def _nccl_allows(value: str) -> bool:
    """Whether NCCL takes a value for true: an integer in any of C's notations that is not 0.

    NCCL takes any text that is not a number for 0, and so "08", which is not an octal number.
    """
    return (
        re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", value) is not None
        and re.search("[1-9a-fA-F]", value) is not None
    )


def _disabling_allows(value: str) -> bool:
    """Whether a "disable" variable allows multicast: 0 is the only value that all libraries read so."""
    return value == "0"


_SETTINGS: Mapping[str, Callable[[str], bool]] = {
    NCCL_SETTING: _nccl_allows,
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": _disabling_allows,
    "NVSHMEM_DISABLE_NVLS": _disabling_allows,
}
"""Variables of other libraries, and the rule that says which values allow multicast. Unset ones forbid nothing."""


def _in_nccl_files(variable: str, environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield each value that a variable has in NCCL's files, with the file; a file that cannot be read has none."""
    for file in _nccl_files(environment):
        with suppress(OSError):
            for line in file.read_bytes().decode(errors="backslashreplace").split("\n"):
                name, equals, value = line.partition("=")
                if equals and name.strip(whitespace) == variable:
                    yield value.strip(whitespace), file


def _nccl_files(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("NCCL_CONF_FILE"):
        yield Path(named)
    with suppress(KeyError):  # a user that the system does not know, as in a container
        yield Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    yield NCCL_SYSTEM_FILE
