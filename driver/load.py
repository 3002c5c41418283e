"""From a text such as ``cuda:0,1`` or ``host:2`` to a driver with its devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from uuid import UUID

from cubroker.driver import linux, vmm
from cubroker.driver.calls import Calls, DriverError
from cubroker.driver.context import Context, Device, Working, working
from cubroker.driver.host import BLOCK, host_module, reopened
from cubroker.driver.multicast import Granularity, Multicast, granularity, obstacle
from cubroker.driver.once import keep_first
from cubroker.driver.peers import Peers

MAX_HOST_DEVICES = 64

_SPEC = re.compile(
    r"(?P<cuda>cuda)(:(?P<ordinals>\d{1,4}(,\d{1,4})*))?"
    r"|host:(?P<count>\d{1,4})(@(?P<size>\d{1,18})(?P<unit>|KiB|MiB|GiB|TiB))?(/(?P<island>\d{1,4}))?",
    re.ASCII,
)
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Driver:
    """The devices of one driver, and their contexts; made by :func:`load`.

    Attributes:
        spec: what another process passes to :func:`load` to open this one's handles.
        host: whether the devices are emulated in host memory.
        devices: all of them, or those that were asked for, in that order. Listing them makes no context.
        peers: which of them reach each other's memory, and direct access between them.
    """

    def __init__(self, module: Any, spec: str, *, host: bool, ordinals: tuple[int, ...] | None = None) -> None:
        self.spec = spec
        self.host = host
        self._calls = Calls(module)
        self._contexts: dict[int, Context] = {}
        self._start()
        chosen = range(self._calls.cuDeviceGetCount()) if ordinals is None else ordinals
        self.devices: tuple[Device, ...] = tuple(self._describe(index) for index in chosen)
        self.peers = Peers(self._calls, self.devices, self.context)

    def context(self, index: int) -> Context:
        """Return the context of the device with that ordinal; made on first use, shared afterwards."""
        device = self._device(index)
        return keep_first(self._contexts, index, lambda: Context(self._calls, device, host=self.host), Context.release)

    def in_call(self) -> bool:
        """Whether this thread is within a call that others wait for, into which a signal handler or a finalizer came.

        That is so on host devices alone, whose driver is Python code.
        """
        return self.host and bool(self._calls.module.lock._is_owned())  # as Condition asks it

    def working(self) -> Working | None:
        """Return in which context this thread works, for :meth:`Context.check_thread`; None if in none."""
        return working(self._calls)

    def granularity(self, index: int) -> int:
        """Return the bytes of which :meth:`create` and :meth:`Context.reserve` take multiples, on that device."""
        return vmm.granularity(self._calls, self._device(index).index)

    def create(self, index: int, nbytes: int, *, fabric: bool = False) -> vmm.Physical:
        """Create memory on the device with that ordinal, which the caller releases. No context is made or needed.

        ``fabric``: and have it shared by fabric handle too, where that can be had (:meth:`Physical.export_fabric`).

        Raises:
            DriverError: ``nbytes`` is no multiple of the granularity, or the device has not so much left.
        """
        return vmm.Physical(self._calls, self._device(index).index, nbytes, fabric=fabric)

    def vmm_obstacle(self, index: int) -> str | None:
        """Return why that device's memory cannot be shared by descriptor here, or None; see :func:`vmm.obstacle`."""
        return vmm.obstacle(self._calls, self._device(index).index)

    def adopt(self, index: int, nbytes: int, descriptor: int) -> vmm.Physical:
        """Return memory that somebody else created on the device with that ordinal, by a descriptor of it.

        The descriptor is not needed afterwards. What is adopted cannot be exported again; the caller releases it.

        Raises:
            DriverError: the descriptor is of something else.
        """
        return vmm.Physical(self._calls, self._device(index).index, nbytes, descriptor=descriptor)

    @contextmanager
    def for_reading(self, descriptors: Sequence[int]) -> Iterator[Sequence[int]]:
        """Have descriptors to lend of the same memory, for processes that are to read it, within a ``with`` block.

        On host devices they cannot write it; see :func:`cubroker.driver.host.ranges.reopened`. A GPU has no such: there
        they are those that were given.

        Raises:
            PermissionError: another user's process made the memory.
            OSError: the system is short of something.
        """
        with ExitStack() as undo:
            yield [_for_reading(each, undo) for each in descriptors] if self.host else descriptors

    def file_id(self, descriptor: int) -> linux.FileId | None:
        """Return which file the memory is that a descriptor stands for; None on GPUs, whose memory is none."""
        return linux.file_id(descriptor) if self.host else None

    @property
    def version(self) -> int:
        """The CUDA version that the driver serves: 13000 for 13.0."""
        return int(self._calls.cuDriverGetVersion())

    def attribute(self, index: int, name: str) -> int | None:
        """Return what the device with that ordinal says of itself, ``"COMPUTE_MODE"`` for one; no context is made.

        Names are those of ``CUdevice_attribute``. None: the bindings, or the driver, have not heard of it.
        """
        attribute = getattr(self._calls.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return None
        try:
            return int(self._calls.cuDeviceGetAttribute(attribute, self._calls.cuDeviceGet(self._device(index).index)))
        except DriverError as error:
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return None
            raise

    def multicast(self, indices: Sequence[int], nbytes: int) -> Multicast:
        """Make a multicast object of these devices for ``nbytes`` bytes each, rounded up; the caller releases it.

        No context is made or needed.

        Raises:
            DriverError: it cannot be had; see :func:`multicast.unavailable`.
        """
        return Multicast(self._calls, [self._device(index).index for index in indices], nbytes)

    def multicast_granularity(self, indices: Sequence[int], nbytes: int) -> Granularity:
        """Return the granularity of such an object."""
        devices = [self._device(index).index for index in indices]
        return granularity(self._calls, len(devices), nbytes)

    def multicast_obstacle(self, index: int) -> str | None:
        """Return why that device can have no part in multicast here, or None; see :func:`multicast.obstacle`."""
        return obstacle(self._calls, self._device(index).index)

    def close(self) -> None:
        """Let go of all contexts. What is still allocated or open in them goes, unless others hold them too."""
        self.peers.close()
        while self._contexts:
            _, context = self._contexts.popitem()
            context.release()

    def _start(self) -> None:
        try:
            self._calls.cuInit(0)
        except RuntimeError as error:  # cuda-bindings could not load libcuda
            code = self._calls.module.CUresult.CUDA_ERROR_NO_DEVICE
            text = f"there is no CUDA driver here ({error}); 'host:1' emulates a device in host memory"
            raise DriverError("cuInit", int(code), code.name, text) from None

    def _device(self, index: int) -> Device:
        for device in self.devices:
            if device.index == index:
                return device
        known = ", ".join(str(device.index) for device in self.devices)
        raise ValueError(f"no device {index}; the devices are {known}")

    def _describe(self, index: int) -> Device:
        calls = self._calls
        cudevice = calls.cuDeviceGet(index)
        uuid = UUID(bytes=bytes(calls.cuDeviceGetUuid(cudevice).bytes))
        name = bytes(calls.cuDeviceGetName(256, cudevice)).partition(b"\0")[0].decode()
        prefix = "HOST" if self.host else "GPU"
        return Device(index, f"{prefix}-{uuid}", name, int(calls.cuDeviceTotalMem(cudevice)))


def load(spec: str) -> Driver:
    """Load the driver that ``spec`` names.

    Args:
        spec: ``cuda`` (every GPU), ``cuda:0,1`` (these ordinals), ``host:2`` (two emulated devices that
            share half of the machine's memory), ``host:2@64MiB`` (so much memory each) or ``host:4@64MiB/2``
            (of which two and two reach each other's memory, and nobody else's; without ``/2`` all do).

    Raises:
        ValueError: ``spec`` is none of these.
        DriverError: there is no CUDA driver, or no such GPU.
    """
    chosen = _parse(spec)
    if isinstance(chosen, _Gpus):
        from cuda.bindings import driver as cuda

        return Driver(cuda, "cuda", host=False, ordinals=chosen.ordinals)
    count, size, island = chosen
    full = f"host:{count}@{size}" + (f"/{island}" if island < count else "")
    return Driver(host_module(count, size, island), full, host=True)


def check(spec: str) -> None:
    """Raise ``ValueError`` if ``spec`` names no driver; whether there is one here is not looked at."""
    _parse(spec)


def _for_reading(descriptor: int, undo: ExitStack) -> int:
    opened = reopened(descriptor)
    undo.callback(os.close, opened)
    return opened


class _Gpus(NamedTuple):
    ordinals: tuple[int, ...] | None


class _Emulated(NamedTuple):
    devices: int
    size: int
    island: int


def _parse(spec: str) -> _Gpus | _Emulated:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"no driver {spec!r}; write cuda, cuda:0,1, host:2, host:2@64MiB or host:4@64MiB/2")
    if match["cuda"]:
        return _Gpus(_ordinals(spec, match["ordinals"]))
    count = int(match["count"])
    if not 0 < count <= MAX_HOST_DEVICES:
        raise ValueError(f"{spec!r} asks for {count} devices; it can be 1 to {MAX_HOST_DEVICES}")
    size = int(match["size"]) * _UNITS[match["unit"]] if match["size"] else _memory() // 2 // count
    size -= size % BLOCK
    if not BLOCK <= size < 1 << 47:
        raise ValueError(f"{spec!r} gives a device {size} bytes; it needs {BLOCK} at least, and less than {1 << 47}")
    island = int(match["island"] or count)
    if not 0 < island <= count:
        raise ValueError(f"{spec!r} makes groups of {island} devices; they can be of 1 to {count}")
    return _Emulated(count, size, island)


def _ordinals(spec: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    ordinals = tuple(int(part) for part in text.split(","))
    if len(set(ordinals)) < len(ordinals):
        raise ValueError(f"{spec!r} names a device twice")
    return ordinals


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
