"""The CUDA driver calls of both sides, and the same calls answered by host memory (:mod:`cubroker.driver.host`).

:func:`load` gives a :class:`Driver`; its :class:`Context` objects do everything that cubroker does with a device.
Server, client and command line may import this package; it imports nothing of theirs.
"""

from cubroker.driver.checked_calls import DriverError
from cubroker.driver.context import CurrentContext, Device, Event, Pinned, Stream
from cubroker.driver.driver import Context, Driver, load
from cubroker.driver.multicast import Granularity, Multicast, Window
from cubroker.driver.multicast_guard import MulticastOff
from cubroker.driver.peer_access import Link, Peers
from cubroker.driver.vmm import Physical, Reservation

__all__ = [
    "Context",
    "CurrentContext",
    "Device",
    "Driver",
    "DriverError",
    "Event",
    "Granularity",
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
]
