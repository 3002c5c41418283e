"""The CUDA driver calls of both sides, and the same calls answered by host memory (:mod:`cubroker.driver.host`).

:func:`load` returns a :class:`Driver`; its :class:`Context` objects do everything that cubroker does with a device.
Server, client and command line may import this package; it imports nothing of theirs.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cubroker.driver.checked_calls import DriverError, MulticastOff
    from cubroker.driver.context import CurrentContext, Device, Event, Pinned, Stream
    from cubroker.driver.driver import Context, Driver, load, prepare
    from cubroker.driver.multicast import Multicast, Window
    from cubroker.driver.peer_access import Link, Peers
    from cubroker.driver.vmm import Physical, Reservation

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
    "start_cuda",
]

_MODULES = {
    **dict.fromkeys(("DriverError", "MulticastOff"), "checked_calls"),
    **dict.fromkeys(("CurrentContext", "Device", "Event", "Pinned", "Stream"), "context"),
    **dict.fromkeys(("Context", "Driver", "load", "prepare"), "driver"),
    **dict.fromkeys(("Multicast", "Window"), "multicast"),
    **dict.fromkeys(("Link", "Peers"), "peer_access"),
    **dict.fromkeys(("Physical", "Reservation"), "vmm"),
}
"""The module of each name, imported at its first use: a process may call :func:`start_cuda` before."""

DESCRIPTORS = 200
"""Descriptors that a load may add; CUDA has 40 of them, and the reads of each device 32."""


def __getattr__(name: str) -> object:
    """Import a name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def start_cuda() -> None:
    """Begin to initialize CUDA, if it is installed, and to make the context of the GPU, if there is exactly one.

    That takes more than 0.1 s beside an H200, in a thread: the caller imports other modules meanwhile, which takes as
    long, and :func:`load` and its :class:`Driver` have less to wait for. Call it before the process has other threads.
    The context stays until the process ends. Of several GPUs it is not known yet which one is needed.
    """
    with suppress(ImportError, RuntimeError):  # the latter: no libcuda, or no room for another thread
        from cuda.bindings import driver as cuda  # in this thread, since imports wait for each other

        from cubroker.driver.system_calls import make_room

        make_room(DESCRIPTORS)  # before there is another thread
        from threading import Thread

        Thread(target=_initialize, args=(cuda,), name="cubroker-cuda").start()


def _initialize(cuda: Any) -> None:
    with suppress(RuntimeError):  # cuda-bindings could not load libcuda
        if not cuda.cuInit(0)[0] and cuda.cuDeviceGetCount()[1] == 1:
            cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])
