"""Multicast: one address for the memory of several devices; a store to it reaches all of them.

A broker makes a :class:`Multicast` object, binds the memory of each device to it and hands out a descriptor of it. A
worker maps the descriptor into a :class:`Window` and stores through that. The rest of the driver layer sees only
addresses and descriptors. On real hardware every step here first asks :func:`.checked_calls.check_multicast`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

from cubroker.driver import vmm
from cubroker.driver.buffers import keep_first, round_up
from cubroker.driver.checked_calls import (
    MULTICAST_PREFIX,
    Calls,
    DriverError,
    MulticastOff,
    check_multicast,
    explained,
)
from cubroker.driver.context import Kernel, PrimaryContext

REFUSALS = {
    "CUDA_ERROR_NOT_SUPPORTED": "these devices, or their driver, have no multicast",
    "CUDA_ERROR_NOT_PERMITTED": "this process may not use multicast; does its container lack the fabric's device file?",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager is not ready yet; it may be in a while",
    "CUDA_ERROR_ILLEGAL_STATE": "the fabric manager is broken; the administrator of this machine should look at it",
    "CUDA_ERROR_INVALID_DEVICE": "these devices cannot share an object: not all reach each other through one NVSwitch",
    "CUDA_ERROR_OUT_OF_MEMORY": "the devices have no multicast slots left; other programs' objects take them too",
}
"""Explanations of refused multicast calls, by name of the result."""

PIECE = 16  #: Bytes of one store of the kernel, and the unit of what is broadcast.

_THREADS = 512
_BLOCKS = 64
"""Threads and blocks of a launch at most: few of each keep all links of a device busy."""


class _Binding(NamedTuple):
    device: int
    offset: int
    nbytes: int


class Multicast:
    """A multicast object with all of its devices; see :meth:`Driver.multicast`. It must outlive the last import.

    Every method raises :class:`DriverError` if the driver refuses. If :func:`unavailable` is true of the error, copies
    between the devices should replace one-to-all stores.
    """

    def __init__(self, calls: Calls, devices: Sequence[int], nbytes: int) -> None:
        #: The ordinals of its devices.
        self.devices = tuple(devices)
        self._calls = calls
        self._bindings: list[_Binding] = []
        self._memories: list[vmm.Physical] = []
        with explained(REFUSALS), ExitStack() as undo:
            #: Its size, rounded up.
            self.nbytes = rounded(calls, self.devices, nbytes)
            self._handle = calls.cuMulticastCreate(_properties(calls.module, len(self.devices), self.nbytes))
            undo.callback(calls.cuMemRelease, self._handle)
            for device in self.devices:  # a bind before the last of them was added would wait for it
                calls.cuMulticastAddDevice(self._handle, calls.cuDeviceGet(device))
            undo.pop_all()

    def bind(self, physical: vmm.Physical, *, offset: int = 0, keep: bool = False) -> None:
        """Bind all of the memory ``physical``, of one of the devices, at an offset, which is the same for every device.

        :meth:`release` then releases the memory too, unless ``keep`` is set: then the caller does so afterwards. If the
        bind is refused, the memory stays the caller's.
        """
        with explained(REFUSALS):
            self._calls.cuMulticastBindMem(self._handle, offset, physical.handle, 0, physical.nbytes, 0)
        self._bindings.append(_Binding(physical.device, offset, physical.nbytes))
        if not keep:
            self._memories.append(physical)

    def export(self) -> int:
        """Return a descriptor that another process can import; the caller closes it, and it is closed on exec.

        An import after :meth:`release` may silently get another object, without devices and memory.
        """
        check_multicast(self._calls.module, "cuMemExportToShareableHandle")
        return vmm.export(self._calls, self._handle)

    def release(self) -> None:
        """Unbind everything, release the object, then its memory; once, after every importer has closed its window.

        All steps are taken even if one of them fails; the error is raised at the end.
        """
        with ExitStack() as steps:  # last in, first out
            for physical in self._memories:
                steps.callback(physical.release)
            steps.callback(self._calls.cuMemRelease, self._handle)
            for binding in self._bindings:
                steps.callback(self._unbind, binding)
            self._memories, self._bindings = [], []

    def _unbind(self, binding: _Binding) -> None:
        device = self._calls.cuDeviceGet(binding.device)
        self._calls.cuMulticastUnbind(self._handle, device, binding.offset, binding.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Broadcast(Kernel):
    """The kernel that stores to every device's memory, for sm_90 and later."""

    SOURCE = "multimem.ptx", b"cubroker_broadcast"


class Window(vmm.Reservation):
    """A multicast object, mapped whole; see :meth:`Context.window`. Ordinary loads and stores must not touch it."""

    def __init__(self, context: PrimaryContext, nbytes: int) -> None:
        check_multicast(context.calls.module, "cuMemMap")
        super().__init__(context, nbytes)
        self._kernels: dict[None, Broadcast] = {}  # one, once it is loaded
        self._state = threading.Lock()
        self._maps_running = 0
        self._closed = False

    def map(self, source: int | bytes, *, readonly: bool = False) -> None:
        """Map the object of a descriptor, for one-to-all stores; the descriptor is not needed afterwards.

        The driver waits until all of the object's devices were added, perhaps forever. If the window is closed
        meanwhile, the addresses are released when this returns, and nothing is mapped.
        A window is never read-only: nothing is read from it.

        Raises:
            DriverError: as :meth:`Reservation.map`.
        """
        if readonly:
            raise ValueError("a multicast object is mapped for stores, and nothing can be read through it")
        check_multicast(self._calls.module, "cuMemImportFromShareableHandle")
        with self._state:
            self._maps_running += 1
        try:
            super().map(source, readonly=False)
        finally:
            with self._state:
                self._maps_running -= 1
                last = self._closed and not self._maps_running
            if last:
                super().close()

    def broadcast(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes to every device's memory; done everywhere when it returns.

        Args:
            source: the address of memory that this context's device can read, a multiple of 16.
            target: an address in this window, a multiple of 16.
            nbytes: a multiple of 16.

        Raises:
            ValueError: an argument is no such multiple, or the target does not lie in the window.
            DriverError: on some device there is no memory at some of the addresses.
        """
        if source % PIECE or target % PIECE or nbytes % PIECE:
            raise ValueError(f"{source:#x}, {target:#x} and {nbytes} bytes; all must be multiples of {PIECE}")
        if not self.pointer <= target <= target + nbytes <= self.pointer + self.nbytes:
            raise ValueError(f"{nbytes} bytes at {target:#x} do not lie in this window")
        if not nbytes:
            return
        check_multicast(self._calls.module, "cuLaunchKernel")
        pieces = nbytes // PIECE
        blocks = min(_BLOCKS, -(-pieces // _THREADS))
        copies = self._context.copies()
        with self._context.current():
            kernel = keep_first(self._kernels, None, lambda: Broadcast(self._context), Broadcast.close)
            kernel.launch(copies, blocks, _THREADS, target, source, pieces)
            copies.synchronize()

    def close(self) -> None:
        """Unmap the object, if it is mapped, and release the addresses; to be called once.

        While a map is still running the addresses are kept: else the driver could map the object over other memory.
        """
        if kernel := self._kernels.pop(None, None):
            with suppress(DriverError):  # it stays loaded until the context ends, and the window is closed all the same
                kernel.close()
        with self._state:
            self._closed, wait = True, self._maps_running > 0
        if not wait:
            super().close()


def obstacle(calls: Calls, device: int) -> str | None:
    """Return why a device cannot take part in multicast here, or None; no multicast call is made.

    An object may still be refused: only its creation asks the fabric manager.
    """
    try:
        check_multicast(calls.module, "cuMulticastCreate")
    except MulticastOff as error:
        return error.detail
    attribute = calls.module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    if calls.cuDeviceGetAttribute(attribute, calls.cuDeviceGet(device)):
        return None
    return (
        f"device {device} has no multicast: it needs NVSwitch and a second device (no MIG), and a driver that knows it"
    )


def granularity(calls: Calls, devices: int, nbytes: int) -> list[int]:
    """Return the unit of the sizes and offsets of an object's bindings, and the unit recommended for its size."""
    properties, flags = _properties(calls.module, devices, nbytes), calls.module.CUmulticastGranularity_flags
    kinds = (flags.CU_MULTICAST_GRANULARITY_MINIMUM, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED)
    with explained(REFUSALS):
        return [int(calls.cuMulticastGetGranularity(properties, kind)) for kind in kinds]


def rounded(calls: Calls, devices: Sequence[int], nbytes: int) -> int:
    """Return the size of the object for ``nbytes`` bytes: a multiple of its granularities and those of the memory."""
    units = {*granularity(calls, len(devices), nbytes), *(vmm.granularity(calls, device) for device in devices)}
    return round_up(nbytes, math.lcm(*units))


def unavailable(error: DriverError) -> bool:
    """Whether an error means that multicast cannot be had here and now, so that copies should replace it."""
    return isinstance(error, MulticastOff) or (error.call.startswith(MULTICAST_PREFIX) and error.name in REFUSALS)


def _properties(module: Any, devices: int, nbytes: int) -> Any:
    properties = module.CUmulticastObjectProp()
    properties.numDevices = devices
    properties.size = nbytes
    properties.handleTypes = int(module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return properties
