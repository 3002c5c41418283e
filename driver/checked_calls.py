"""The driver's functions, checked: a permitted call is made, and returns its values or raises :class:`DriverError`.

``cuda.bindings.driver`` and the host driver answer ``(status,)`` or ``(status, value…)``. Every call of the driver
layer goes through :class:`Calls`, which returns the values alone.

:class:`Calls` is the only gate to multicast calls on real hardware, too. A program that makes multicast objects can
take a host with NVSwitch out of service while its fabric manager is unhealthy. Sites therefore forbid multicast, by the
environment variables of the libraries that they know. cubroker obeys all of these variables, and makes no multicast
call unless its own variable allows multicast too.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from string import whitespace
from typing import Any

OWN_SETTING = "CUBROKER_MULTICAST"  #: The environment variable that allows or forbids multicast to cubroker alone.
NCCL_SETTING = "NCCL_NVLS_ENABLE"  #: NCCL's variable, which NCCL also takes from its configuration files.

NCCL_SYSTEM_FILE = Path("/etc/nccl.conf")

MULTICAST_PREFIX = "cuMulticast"  #: The beginning of the names of all guarded functions.

_YES = frozenset({"1", "y", "yes", "on", "true"})


class DriverError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, status: int, name: str, detail: str = "") -> None:
        super().__init__(call, status, name, detail)
        #: The function, ``"cuMemAlloc"``.
        self.call = call
        #: Its ``CUresult`` as a number.
        self.status = status
        #: The name of that number, ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        self.name = name
        #: What was asked, or what to do about the refusal; may be empty.
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} failed with {self.name} ({self.status})" + (f": {self.detail}" if self.detail else "")

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had no room."""
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


class MulticastOff(DriverError):
    """A multicast call was asked for and not made, because a setting forbids it."""

    def __init__(self, call: str, status: int, name: str, detail: str, setting: str = "") -> None:
        super().__init__(call, status, name, detail)
        #: The environment variable that forbids it.
        self.setting = setting

    def __str__(self) -> str:
        return f"{self.call} was not called: {self.detail}"


class Calls:
    """The functions of a driver-shaped module, by their own names: ``calls.cuMemAlloc(nbytes)``.

    A function with one value returns it, with several a tuple, with none ``None``. On real hardware a multicast
    function is called only if :func:`check_multicast` allows it, each time.
    """

    def __init__(self, module: Any) -> None:
        #: The module itself, for its structs and enums.
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(MULTICAST_PREFIX):
            checked = _guarded(name, self.module)
        else:
            checked = _checked(name, getattr(self.module, name), self.module.CUresult)
        setattr(self, name, checked)  # found without __getattr__ from now on
        return checked


def _checked(name: str, function: Callable[..., tuple[Any, ...]], results: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        answer = function(*args)
        if answer[0]:  # CUDA_SUCCESS is 0
            raise DriverError(name, int(answer[0]), results(answer[0]).name, _shown(args))
        return answer[1] if len(answer) == 2 else answer[1:] or None

    return call


def _guarded(name: str, module: Any) -> Callable[..., Any]:
    """Return a function that checks first; before the check, one of real hardware is not even looked up."""

    def call(*args: Any) -> Any:
        check_multicast(module, name)
        return _checked(name, getattr(module, name), module.CUresult)(*args)

    return call


def _shown(args: tuple[Any, ...]) -> str:
    """Return the numbers that were passed. Structs stay out: a handle among them is a secret."""
    numbers = [str(arg) for arg in args if type(arg) is int]
    return f"asked with {', '.join(numbers)}" if numbers else ""


# -- explanations --------------------------------------------------------------------------------------


@contextmanager
def explained(texts: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Replace the detail of a :class:`DriverError` by the text for its name, if there is one.

    Args:
        texts: texts by name of the error, or a function that returns them, called after an error.
    """
    try:
        yield
    except MulticastOff:
        raise  # says which setting forbids the call
    except DriverError as error:
        # Mutate and re-raise: replacing the exception here would keep its frames alive until GC (3.12+).
        error.detail = (texts() if callable(texts) else texts).get(error.name, error.detail)
        error.args = (error.call, error.status, error.name, error.detail)  # pickle rebuilds the error from them
        raise


@contextmanager
def tolerated(*names: str) -> Iterator[None]:
    """Leave the block without an error if the driver refuses a call with one of these results."""
    try:
        yield
    except DriverError as error:
        if error.name not in names:
            raise


def unmapped(device: int, *, host: bool) -> dict[str, str]:
    """Return explanations, by name of the result, of why a device could not map memory that it was to open.

    NVIDIA's pages list these results and give no cause of 205. Containers, BAR1 and IOMMU are causes that users of
    other projects report (docs/sharing.md). On host devices the cause is known.
    """
    return {
        "CUDA_ERROR_MAP_FAILED": NO_ADDRESSES if host else _UNMAPPED,
        "CUDA_ERROR_TOO_MANY_PEERS": f"{too_many_peers(device)}, or attach where the memory is",
    }


def too_many_peers(device: int) -> str:
    """Return the explanation of a device's refusal to have one more peer."""
    return (
        f"device {device} has as many peers as it can have, of which other programs may hold some (by NVIDIA's pages 8 "
        "on systems without NVSwitch): close memory of other devices, disable access to them"
    )


_UNMAPPED = (
    "the driver could not map the memory, and NVIDIA names no cause; in a container, give it the owner's GPUs in the "
    "same way as the owner has them (`--gpus all`, NVIDIA_VISIBLE_DEVICES=all); for memory of another GPU, see that "
    "BAR1 is large and the IOMMU off, or attach where the memory is"
)
NO_ADDRESSES = "this process has no addresses left for the memory: raise its limit on address space (`ulimit -v`)"
"""The explanation where the driver finds no range of addresses, and of a host device that maps nothing."""


# -- whether multicast may be used ---------------------------------------------------------------------


def check_multicast(module: Any, call: str) -> None:
    """Refuse a multicast call, or work that relies on an earlier one, on real hardware if a setting forbids it.

    The settings are read each time.

    Raises:
        MulticastOff: no call was made.
    """
    if emulated(module):
        return
    found = multicast_objection(os.environ)
    if found is not None:
        code = module.CUresult.CUDA_ERROR_NOT_PERMITTED
        raise MulticastOff(call, int(code), code.name, found[1], found[0])


def emulated(module: Any) -> bool:
    """Whether a driver-shaped module declares itself the host driver; any other module is real hardware."""
    return getattr(module, "emulated", None) is True


def multicast_objection(environment: Mapping[str, str]) -> tuple[str, str] | None:
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
