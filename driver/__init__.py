"""The CUDA driver calls that both sides make, and the same calls answered out of host memory.

:func:`load` gives a :class:`Driver`; its :class:`Context` objects do everything that cubroker does with
a device. They speak to ``cuda.bindings.driver`` or to :mod:`cubroker.driver.host`, which answers the
same functions; nothing above can tell which, except by asking ``host``.
"""

from cubroker.driver.calls import DriverError
from cubroker.driver.context import Context, Device, Working
from cubroker.driver.guard import MulticastOff
from cubroker.driver.load import Driver, load
from cubroker.driver.multicast import Granularity, Multicast
from cubroker.driver.peers import Link, Peers
from cubroker.driver.stream import Event, Pinned, Stream
from cubroker.driver.vmm import Physical, Reservation
from cubroker.driver.window import Window

__all__ = [
    "Context",
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
    "Working",
    "load",
]
