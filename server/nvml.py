"""What NVIDIA's management library tells of processes on a GPU; four of its functions, called through ctypes.

libnvidia-ml comes with the driver, and its structs have kept their shape (nvml.h, ``nvmlProcessInfo_t``), so no package
is needed. It makes no context and takes no GPU memory.
"""

from __future__ import annotations

import ctypes

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_ROOM = 64
"""Processes for which there is room at first."""

_MORE = 16
"""Processes that may come while the room is being made larger."""

_NOT_AVAILABLE = (1 << 64) - 1


class NvmlError(Exception):
    """A function failed: its name, and the number that it returned."""


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The library.

    Raises:
        OSError: it is not there, as where there is no driver.
        NvmlError: it does not work here.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._devices: dict[str, ctypes.c_void_p] = {}

    def processes(self, uuid: str) -> dict[int, int]:
        """Return the bytes of a device's memory that count for each process that has a context on it.

        Raises:
            NvmlError: it does not tell, or does not know the device.
        """
        device = self._device(uuid)
        room = _ROOM
        while True:
            count, rows = ctypes.c_uint(room), (_ProcessInfo * room)()
            status = self._status("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), rows)
            if status == _SUCCESS:
                return {row.pid: row.used for row in rows[: count.value] if row.used != _NOT_AVAILABLE}
            if status != _INSUFFICIENT_SIZE:
                raise NvmlError("nvmlDeviceGetComputeRunningProcesses_v3", status)
            room = count.value + _MORE

    def _device(self, uuid: str) -> ctypes.c_void_p:
        if uuid not in self._devices:
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
            self._devices[uuid] = device
        return self._devices[uuid]

    def _call(self, name: str, *args: object) -> None:
        if status := self._status(name, *args):
            raise NvmlError(name, status)

    def _status(self, name: str, *args: object) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(name, "this driver does not have it") from None
        return int(function(*args))
