"""Multicast objects: one address for the memory of several devices, in which a store goes to all of them at once.

A broker makes the object, binds a replica on each device to it, and hands a descriptor of it out; a worker puts a
:class:`cubroker.driver.window.Window` on it. On real hardware all of it is subject to :mod:`cubroker.driver.guard`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cubroker.driver import guard, vmm
from cubroker.driver.calls import Calls, DriverError, explained
from cubroker.driver.sizes import round_up

if TYPE_CHECKING:
    from cubroker.driver.context import Context


class Granularity(NamedTuple):
    """Bytes: what is bound, and where, is a multiple of ``minimum``; the object's own size best of ``recommended``."""

    minimum: int
    recommended: int


class _Binding(NamedTuple):
    device: int
    offset: int
    nbytes: int


class Multicast:
    """A multicast object with all of its devices, for as long as anybody may import it; see :meth:`Driver.multicast`.

    Every method raises :class:`DriverError` where the driver refuses; where :func:`unavailable` says so of the error,
    copies between the devices are to take the place of one-to-all stores.

    Attributes:
        devices: the ordinals of its devices.
        nbytes: its size.
    """

    def __init__(self, calls: Calls, devices: Sequence[int], nbytes: int) -> None:
        self.devices = tuple(devices)
        self._calls = calls
        self._bindings: list[_Binding] = []
        self._memories: list[vmm.Physical] = []
        with explained(REFUSALS), ExitStack() as undo:
            self.nbytes = rounded(calls, self.devices, nbytes)
            self._handle = calls.cuMulticastCreate(_properties(calls.module, len(self.devices), self.nbytes))
            undo.callback(calls.cuMemRelease, self._handle)
            for device in self.devices:  # binding before the last of them was added would wait for it
                calls.cuMulticastAddDevice(self._handle, calls.cuDeviceGet(device))
            undo.pop_all()

    def bind(self, physical: vmm.Physical, *, offset: int = 0, keep: bool = False) -> None:
        """Bind all of some memory, of one of the devices, at an offset; :meth:`release` then releases it too.

        Each device has memory of its own at the same offset. If it is refused, the memory stays the caller's; so it
        does with ``keep``, and the caller releases it after :meth:`release`.
        """
        with explained(REFUSALS):
            self._calls.cuMulticastBindMem(self._handle, offset, physical.handle, 0, physical.nbytes, 0)
        self._bindings.append(_Binding(physical.device, offset, physical.nbytes))
        if not keep:
            self._memories.append(physical)

    def bind_address(self, context: Context, pointer: int, nbytes: int, *, offset: int = 0) -> None:
        """Bind memory of the context's device by the address at which it is mapped here.

        It stays mapped there, and its :class:`Physical` unreleased, until after :meth:`unbind` or :meth:`release`.
        """
        with explained(REFUSALS), context.current():
            self._calls.cuMulticastBindAddr(self._handle, offset, pointer, nbytes, 0)
        self._bindings.append(_Binding(context.device.index, offset, nbytes))

    def unbind(self, device: int, *, offset: int = 0) -> None:
        """Undo what was bound of a device at an offset, once nobody stores there any more.

        Memory that :meth:`bind` was given stays until :meth:`release`.
        """
        for binding in self._bindings:
            if (binding.device, binding.offset) == (device, offset):
                self._bindings.remove(binding)
                self._unbind(binding)
                return
        raise ValueError(f"nothing of device {device} is bound at offset {offset}")

    def export(self) -> int:
        """Return a descriptor of it, which another process imports and which the caller closes; exec closes it too.

        Who imports it after :meth:`release` may get another object without devices and memory, and never know.
        """
        guard.check(self._calls.module, "cuMemExportToShareableHandle")
        return vmm.export(self._calls, self._handle)

    def release(self) -> None:
        """Unbind everything, release the object, then its memory; once, after every importer has closed its window.

        No step is left out because another one fails; the error is raised at the end.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def obstacle(calls: Calls, device: int) -> str | None:
    """Return why a device can have no part in multicast here, or None; no multicast call is made to find out.

    Where there is none, making an object may still be refused: the fabric manager is asked only then.
    """
    try:
        guard.check(calls.module, "cuMulticastCreate")
    except guard.MulticastOff as error:
        return error.detail
    attribute = calls.module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    if calls.cuDeviceGetAttribute(attribute, calls.cuDeviceGet(device)):
        return None
    return (
        f"device {device} has no multicast: it needs NVSwitch and a second device (no MIG), and a driver that knows it"
    )


def granularity(calls: Calls, devices: int, nbytes: int) -> Granularity:
    """Return the granularity of an object of so many bytes for so many devices."""
    properties, flags = _properties(calls.module, devices, nbytes), calls.module.CUmulticastGranularity_flags
    kinds = (flags.CU_MULTICAST_GRANULARITY_MINIMUM, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED)
    with explained(REFUSALS):
        return Granularity(*(int(calls.cuMulticastGetGranularity(properties, kind)) for kind in kinds))


def rounded(calls: Calls, devices: Sequence[int], nbytes: int) -> int:
    """Return the size of the object for ``nbytes`` bytes: a multiple of its granularities and those of the memory."""
    units = {*granularity(calls, len(devices), nbytes), *(vmm.granularity(calls, device) for device in devices)}
    return round_up(nbytes, math.lcm(*units))


def unavailable(error: DriverError) -> bool:
    """Whether an error means that multicast cannot be had here and now, so that copies are to take its place."""
    return isinstance(error, guard.MulticastOff) or (error.call.startswith(guard.PREFIX) and error.name in REFUSALS)


REFUSALS = {
    "CUDA_ERROR_NOT_SUPPORTED": "these devices, or their driver, have no multicast",
    "CUDA_ERROR_NOT_PERMITTED": "this process may not use multicast; does its container lack the fabric's device file?",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager is not ready yet; it may be in a while",
    "CUDA_ERROR_ILLEGAL_STATE": "the fabric manager is broken; whoever runs this machine should look at it",
    "CUDA_ERROR_INVALID_DEVICE": "these devices cannot share an object: not all reach each other through one NVSwitch",
    "CUDA_ERROR_OUT_OF_MEMORY": "the devices have no multicast slots left; other programs' objects take them too",
}
"""What refusals of multicast calls mean, by their names."""


def _properties(module: Any, devices: int, nbytes: int) -> Any:
    properties = module.CUmulticastObjectProp()
    properties.numDevices = devices
    properties.size = nbytes
    properties.handleTypes = int(module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return properties
