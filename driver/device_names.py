"""How users name devices: one rule for the API, the command line and the configuration.

A name is an ordinal (``0``, ``"0"``), ``"cuda:0"`` or ``"host:0"``, an object such as ``torch.device("cuda", 0)``, or a
UUID or the beginning of exactly one. What an ordinal counts is up to the caller: a process counts the devices that it
sees, and a broker those that it serves.

``cuda:0`` names an emulated device, too, if the devices are emulated, so that programs for GPUs run there unchanged.
``host:0`` never names a GPU. The beginning of a UUID includes its kind, ``GPU-``, ``MIG-`` or ``HOST-``, in letters of
any case; a whole UUID may omit the kind, as torch does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import index
from typing import Protocol, TypeVar

# `re` compiles patterns on their first use, and caches them: a process that names no device compiles none.
_ORDINAL = r"(?a:(?:(?P<kind>cuda|host):)?(?P<ordinal>\d{1,9}))"
_BARE = r"(?ai:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})"
_UUID = r"(?ai:(?:GPU|MIG|HOST)-[0-9a-fA-F-]*)"

CURRENT = ("cuda", "host")  #: Names of the caller's current device, as in frameworks.


class FrameworkDevice(Protocol):
    """A framework's own object for a device: ``torch.device`` is one."""

    @property
    def type(self) -> str:
        """``cuda``, or another kind of device."""

    @property
    def index(self) -> int | None:
        """Its ordinal; None for the current one."""

    def __hash__(self) -> int: ...


class Known(Protocol):
    """A device that a name can mean."""

    @property
    def index(self) -> int:
        """Its ordinal."""

    @property
    def uuid(self) -> str:
        """Its UUID, which begins with ``GPU-``, ``MIG-`` or ``HOST-``."""

    @property
    def name(self) -> str:
        """The product's name."""

    def __hash__(self) -> int: ...


DeviceId = int | str | FrameworkDevice | Known  #: What names a device.


D = TypeVar("D", bound=Known)


class UnknownDevice(LookupError):
    """A name that is not that of exactly one device; the text lists the devices."""


def find(name: DeviceId, devices: Sequence[D], where: str, *, current: int | None = None) -> D:
    """Return the device that a name means.

    Args:
        name: what the user wrote.
        devices: the devices that it can mean.
        where: who has them, as a subject and a verb with which an error begins: ``this process sees``.
        current: the ordinal of the current device, which ``cuda`` without an ordinal means; None if there is none, so
            that such a name means the only device.

    Raises:
        UnknownDevice: no device has that name, or several have.
    """
    text = written(name)
    found = _matching(text, devices, current)
    if len(found) == 1:
        return found[0]
    there = ", ".join(map(describe, devices)) or "none"
    if found:
        raise UnknownDevice(
            f"device {text!r} could be any of {', '.join(map(describe, found))}; write more of the UUID"
        )
    if text in CURRENT and len(devices) > 1:
        raise UnknownDevice(f"device {text!r} does not say which one; write {text}:N; {where} {there}")
    raise UnknownDevice(f"{where} no device {name if isinstance(name, int) else text!r}; it has {there}")


def written(name: DeviceId) -> str:
    """Return a name as text: ``cuda:0`` for ``torch.device("cuda", 0)``."""
    if isinstance(name, str):
        return name.strip()
    uuid = getattr(name, "uuid", None)
    if isinstance(uuid, str):
        return uuid
    kind = getattr(name, "type", None)
    if isinstance(kind, str):
        ordinal = getattr(name, "index", None)
        return kind if ordinal is None else f"{kind}:{ordinal}"
    try:
        return repr(name) if isinstance(name, bool) else str(index(name))  # type: ignore[arg-type]  # numpy's, too
    except TypeError:
        return repr(name)


def describe(device: Known) -> str:
    """Return index, name and UUID: ``0 (NVIDIA H200, GPU-…)``."""
    return f"{device.index} ({device.name}, {device.uuid})"


def label(device: Known) -> str:
    """Return index and name, for messages: ``device 0 (NVIDIA H200)``."""
    return f"device {device.index} ({device.name})"


def is_name(text: str) -> bool:
    """Whether a text has the form of a device's name; ``cuda`` alone has not."""
    return any(re.fullmatch(form, text) for form in (_ORDINAL, _UUID, _BARE))


def _matching(text: str, devices: Sequence[D], current: int | None) -> list[D]:
    if text in CURRENT and (current is not None or len(devices) == 1):
        text = str(devices[0].index if current is None else current)
    elif text == "host" or text.startswith("host:"):
        devices = [device for device in devices if device.uuid.startswith("HOST-")]
    if not is_name(text):
        return []
    if match := re.fullmatch(_ORDINAL, text):
        return [device for device in devices if device.index == int(match["ordinal"])]
    beginning = text.lower()
    if re.fullmatch(_BARE, text):  # as frameworks write it, without its kind
        return [device for device in devices if device.uuid.lower().endswith(f"-{beginning}")]
    exact = [device for device in devices if device.uuid.lower() == beginning]
    return exact or [device for device in devices if device.uuid.lower().startswith(beginning)]
