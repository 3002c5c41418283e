"""The CUDA driver calls of both sides, and the same calls answered by host memory (:mod:`cubroker.driver.host`).

:func:`load` returns a :class:`Driver`; its :class:`Context` objects do everything that cubroker does with a device.
Server, client and command line may import this package; it imports nothing of theirs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from cubroker.driver.checked_calls import DriverError, MulticastOff
from cubroker.driver.context import CurrentContext, Device, Event, Pinned, Stream
from cubroker.driver.driver import Context, Driver, load, prepare
from cubroker.driver.vmm import Physical, Reservation

if TYPE_CHECKING:
    from cubroker.driver.multicast import Multicast, Window
    from cubroker.driver.peer_access import Link, Peers

__all__ = [
    "Context",
    "CurrentContext",
    "Device",
    "Driver",
    "DriverError",
    "Event",
    "Link",
    "Multicast",
    "MulticastOff",
    "Peers",
    "Physical",
    "Pinned",
    "Reservation",
    "Stream",
    "Window",
    "load",
    "prepare",
]

_LATER = {
    **dict.fromkeys(("Multicast", "Window"), "multicast"),
    **dict.fromkeys(("Link", "Peers"), "peer_access"),
}
"""The modules of the names that most processes do not need."""


def __getattr__(name: str) -> object:
    """Import a name on its first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return found
