"""The devices of a driver, named by a specification such as ``host:2``, and the memory that a process has on each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from cubroker.driver import device_names, system_calls, vmm
from cubroker.driver.buffers import handle_bytes, handle_of, keep_first
from cubroker.driver.checked_calls import Calls, DriverError, explained, tolerated, unmapped
from cubroker.driver.context import CurrentContext, Device, PrimaryContext, Stream, current_context

if TYPE_CHECKING:  # what a reader of a pool does not need is imported where it is used
    from cubroker.driver.kernels import Segment
    from cubroker.driver.multicast import Multicast, Window
    from cubroker.driver.peer_access import Peers

MAX_HOST_DEVICES = 64

_HOST = r"(?a:host:(?P<count>\d{1,4})(@(?P<size>\d{1,18})(?P<unit>|KiB|MiB|GiB|TiB))?(/(?P<island>\d{1,4}))?)"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Driver:
    """The devices of one driver, and their contexts; made by :func:`load`."""

    def __init__(self, module: Any, spec: str, *, host: bool, chosen: tuple[str, ...] | None = None) -> None:
        #: The argument with which another process loads a driver that opens this one's handles.
        self.spec = spec
        #: Whether the devices are emulated in host memory.
        self.host = host
        self._calls = Calls(module)
        self._contexts: dict[int, Context] = {}
        #: Lends readers descriptors of the same memory, for a ``with`` block. On GPUs these are the given descriptors;
        #: see :func:`cubroker.driver.host.virtual_memory.for_reading` for host devices.
        self.for_reading: Callable[[Sequence[int]], AbstractContextManager[Sequence[int]]] = nullcontext
        if host:
            from cubroker.driver.host.virtual_memory import for_reading

            self.for_reading = for_reading
        self._start()
        every = [_Listed(index, self._describe) for index in range(self._calls.cuDeviceGetCount())]
        found = every if chosen is None else self._chosen(chosen, every)
        #: All devices, or those that were asked for, in that order. No context is made to list them.
        self.devices: tuple[Device, ...] = tuple(each.device for each in found)
        self._peers: dict[None, Peers] = {}

    @property
    def peers(self) -> Peers:
        """The links between the devices."""
        if peers := self._peers.get(None):
            return peers
        from cubroker.driver.peer_access import Peers

        return keep_first(self._peers, None, lambda: Peers(self._calls, self.devices, self.context), Peers.close)

    def context(self, index: int) -> Context:
        """Return the context of the device with that ordinal; made on first use, shared afterwards."""
        device = self._device(index)
        return keep_first(self._contexts, index, lambda: Context(self._calls, device, host=self.host), Context.release)

    def in_call(self) -> bool:
        """Whether a signal handler or finalizer runs inside a call of this thread that holds the driver's lock.

        That happens on host devices alone, whose driver is Python code.
        """
        return self.host and bool(self._calls.module.lock._is_owned())  # as threading.Condition does

    def current_context(self) -> CurrentContext | None:
        """Return the context that is current on this thread, if any, for :meth:`Context.check_thread`."""
        return current_context(self._calls)

    def granularity(self, index: int) -> int:
        """Return the unit of :meth:`create` and :meth:`Context.reserve` on that device, in bytes."""
        return vmm.granularity(self._calls, self._device(index).index)

    def create(self, index: int, nbytes: int, *, fabric: bool = False) -> vmm.Physical:
        """Create memory on a device, which the caller releases. No context is made or needed.

        Args:
            index: the device's ordinal.
            nbytes: its size, a multiple of the :meth:`granularity`.
            fabric: whether to share it by fabric handle too, if that works (:meth:`Physical.export_fabric`).
        """
        return vmm.Physical(self._calls, self._device(index).index, nbytes, fabric=fabric)

    def vmm_obstacle(self, index: int) -> str | None:
        """Return why that device's memory cannot be shared by descriptor here, or None; no context is made."""
        return vmm.obstacle(self._calls, self._device(index).index)

    def adopt(self, index: int, nbytes: int, descriptor: int) -> vmm.Physical:
        """Import memory that another process created on the device with that ordinal, by its descriptor.

        The descriptor is not needed afterwards. The memory cannot be exported again; the caller releases it.
        """
        return vmm.Physical(self._calls, self._device(index).index, nbytes, descriptor=descriptor)

    def file_id(self, descriptor: int) -> system_calls.FileId | None:
        """Return the file that holds a descriptor's memory on host devices; None on GPUs."""
        return system_calls.file_id(descriptor) if self.host else None

    @property
    def version(self) -> int:
        """The CUDA version of the driver: 13000 for 13.0."""
        return int(self._calls.cuDriverGetVersion())

    def attribute(self, index: int, name: str) -> int | None:
        """Return an attribute of a device, such as ``"COMPUTE_MODE"``; no context is made.

        Names are those of ``CUdevice_attribute``. The result is None if the bindings, or the driver, do not know it.
        """
        attribute = getattr(self._calls.module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return None
        with tolerated("CUDA_ERROR_INVALID_VALUE"):
            return int(self._calls.cuDeviceGetAttribute(attribute, self._calls.cuDeviceGet(self._device(index).index)))
        return None

    def multicast(self, indices: Sequence[int], nbytes: int) -> Multicast:
        """Make a multicast object of these devices for ``nbytes`` bytes each, rounded up; the caller releases it.

        No context is made or needed.

        Raises:
            DriverError: the driver refuses; see :func:`multicast.unavailable`.
        """
        from cubroker.driver.multicast import Multicast

        return Multicast(self._calls, [self._device(index).index for index in indices], nbytes)

    def multicast_obstacle(self, index: int) -> str | None:
        """Return why that device cannot take part in multicast here, or None; no multicast call is made."""
        from cubroker.driver.multicast import obstacle

        return obstacle(self._calls, self._device(index).index)

    def close(self) -> None:
        """Release all contexts. Their memory is freed, unless other code of the process retains them."""
        if peers := self._peers.pop(None, None):
            peers.close()
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

    def _chosen(self, names: Sequence[str], every: Sequence[_Listed]) -> list[_Listed]:
        invalid = self._calls.module.CUresult.CUDA_ERROR_INVALID_DEVICE
        try:
            found = [device_names.find(name, every, "this process sees") for name in names]
        except device_names.UnknownDevice as error:
            raise DriverError("cuDeviceGet", int(invalid), invalid.name, str(error)) from None
        if len(set(found)) < len(found):
            raise ValueError(f"cuda:{','.join(names)!r} names a device twice")
        return found

    def _describe(self, index: int) -> Device:
        calls = self._calls
        cudevice = calls.cuDeviceGet(index)
        uuid = UUID(bytes=bytes(calls.cuDeviceGetUuid(cudevice).bytes))
        name = bytes(calls.cuDeviceGetName(256, cudevice)).partition(b"\0")[0].decode()
        prefix = "HOST" if self.host else "GPU"
        return Device(index, f"{prefix}-{uuid}", name, int(calls.cuDeviceTotalMem(cudevice)))


class _Listed:
    """A device that is described on first use: one that fails concerns only callers that name it, or a UUID."""

    def __init__(self, index: int, describe: Callable[[int], Device]) -> None:
        self.index = index
        self._describe = describe

    @cached_property
    def device(self) -> Device:
        """The description of the device; raises ``DriverError``."""
        return self._describe(self.index)

    @property
    def uuid(self) -> str:
        """See :class:`Device`."""
        return self.device.uuid

    @property
    def name(self) -> str:
        """See :class:`Device`."""
        return self.device.name


class Context(PrimaryContext):
    """A device's primary context, and memory in it; see :class:`PrimaryContext` for what applies to every method."""

    # -- memory that this process owns -------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes and return the pointer.

        Allocations whose size is not a multiple of 2 MiB may share a block, and a process that opens one of them sees
        all of the block. The size of memory to be exported should be such a multiple.
        """
        with self.current():
            return int(self.calls.cuMemAlloc(nbytes))

    def free(self, pointer: int) -> None:
        """Free what ``allocate`` returned, once all work submitted in the context is done."""
        with self.current():
            self.calls.cuMemFree(pointer)  # which waits for the work

    def file_id(self, pointer: int) -> system_calls.FileId | None:
        """Return the file that holds memory of :meth:`allocate` on a host device; None on a GPU."""
        found: system_calls.FileId | None = self.calls.module.file_id(pointer) if self.host else None
        return found

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device. On host devices only this process's own count as used."""
        with self.current():
            free, total = self.calls.cuMemGetInfo()
        return int(free), int(total)

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the digest (:data:`cubroker.driver.kernels.ALGORITHM`) of each range of memory that this device reads.

        The device computes them, at about the rate at which it reads. Work in other streams is not waited for.

        Args:
            ranges: a pointer, which is a multiple of 16, and a number of bytes each.

        Raises:
            ValueError: a pointer is not such a multiple.
        """
        from cubroker.driver.kernels import Digester

        return self.kept(Digester).digests(ranges)

    def differing(self, segments: Sequence[Segment]) -> list[bool]:
        """Return for each segment whether the memory at its two addresses, which this device reads, differs.

        The device compares them, at about the rate at which it reads. Work in other streams is not waited for. Sizes
        and alignments may be any; 16 bytes are compared at a time if both addresses are multiples of 16. A wrong
        address makes the context unusable.

        Raises:
            DriverError: no kernel can be loaded.
        """
        from cubroker.driver.kernels import BatchedCompare

        return self.kept(BatchedCompare).differing(segments)

    def copy_batch(self, stream: Stream, segments: Sequence[Segment], base: int = 0) -> None:
        """Start copies of memory that this device reads and writes, in a stream of this context.

        The segments may be of any number, size and alignment; 16 bytes are copied at a time if both addresses are
        multiples of 16. They must not overlap. A kernel, which the first call loads, makes the copies; a wrong address
        makes the context unusable. The driver copies a single segment, and all segments if no kernel can be loaded.

        Args:
            stream: where the copies are submitted.
            segments: the copies.
            base: is added to the target addresses.
        """
        with self.current():
            if len(segments) > 1:
                from cubroker.driver.kernels import BatchedCopy

                try:
                    batched = self.kept(BatchedCopy)
                except DriverError:
                    pass  # no compiler, or no memory, for the kernel
                else:
                    batched.start(stream, segments, base)
                    return
            for target, source, nbytes in segments:
                if nbytes:
                    stream.copy(base + target, source, nbytes)

    # -- memory shared between processes -----------------------------------------------------------

    def export(self, pointer: int) -> bytes:
        """Return the handle, 64 bytes, with which other processes open the allocation that ``pointer`` lies in.

        It names the whole allocation. Every process that knows the bytes can read and write the memory.
        """
        with self.current():
            return handle_bytes(self.calls.cuIpcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return the pointer to its first byte.

        Opening it again returns the same pointer; each open needs its own :meth:`close`. The memory may be on another
        device that this one reaches: the driver enables peer access.

        Raises:
            DriverError: CUDA_ERROR_INVALID_CONTEXT: this process exported it, or has the exporter's process id in
                another pid namespace; or :meth:`check_thread`. CUDA_ERROR_INVALID_VALUE: the handle is made up, or its
                memory was freed. CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: this device does not reach the memory's.
                CUDA_ERROR_TOO_MANY_PEERS: it can have no more peers. CUDA_ERROR_MAP_FAILED: all other causes.
        """
        self.check_thread(current_context(self.calls))
        module = self.calls.module
        shared = handle_of(module.CUipcMemHandle(), handle, "a handle")
        flags = module.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with explained(self._refusals), self.current():
            return int(self.calls.cuIpcOpenMemHandle(shared, int(flags)))

    def check_thread(self, thread: CurrentContext | None) -> None:
        """Refuse a thread that works in another context of this device than the primary one.

        CUDA lets a process open shared memory in one context per device, here the primary one, and memory opened there
        is out of reach in another context. :meth:`open` therefore refuses such a thread before it touches anything.
        Call this where memory will be opened on behalf of another thread (:meth:`Driver.current_context`).

        Raises:
            DriverError: CUDA_ERROR_INVALID_CONTEXT.
        """
        if thread is None or thread.device != self.device.index or thread.context == int(self.handle):
            return
        code = self.calls.module.CUresult.CUDA_ERROR_INVALID_CONTEXT
        text = (
            f"this thread works in another context of device {self.device.index} than its primary one, and a "
            "process opens shared memory in one context per device: use the primary one, as the CUDA runtime does"
        )
        raise DriverError("cuIpcOpenMemHandle", int(code), code.name, text)

    def close(self, pointer: int) -> None:
        """Undo one :meth:`open`, once all work submitted in the context is done."""
        with self.current():
            self.calls.cuIpcCloseMemHandle(pointer)  # which waits for the work

    def reserve(self, nbytes: int) -> vmm.Reservation:
        """Reserve addresses for memory of :meth:`Driver.create` to be mapped at; the caller closes the range."""
        return vmm.Reservation(self, nbytes)

    def window(self, nbytes: int) -> Window:
        """Reserve addresses for a multicast object of ``nbytes`` bytes to be mapped at; the caller closes it.

        Raises:
            MulticastOff: a setting forbids multicast on real hardware.
        """
        from cubroker.driver.multicast import Window

        return Window(self, nbytes)

    def _refusals(self) -> dict[str, str]:
        return unmapped(self.device.index, host=self.host) | {
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": f"the memory is on a device that device {self.device.index} does not "
            "reach; open it on that device, or on one that does",
            "CUDA_ERROR_INVALID_CONTEXT": "this process exported it; or the exporter, in another pid namespace, has "
            "the pid of this process, and CUDA takes the two for one: run one of them in the host's pid namespace, "
            "or share it as vmm",
            "CUDA_ERROR_INVALID_HANDLE": "this process has it open in another context of the device; "
            "shared memory can be opened in one context per device and process",
            "CUDA_ERROR_INVALID_VALUE": "the memory is gone, or it is emulated and its owner in another network "
            "namespace, as in a container; there it has to be shared as vmm",
        }


def load(spec: str) -> Driver:
    """Load the driver that ``spec`` names.

    Args:
        spec: ``cuda`` (every GPU), ``cuda:0,1``, ``0,1`` or ``GPU-8d2f,GPU-11c0`` (these, as
            :mod:`~cubroker.driver.device_names` has it), ``host:2`` (two emulated devices that
            share half of the machine's memory), ``host:2@64MiB`` (with 64 MiB each) or ``host:4@64MiB/2``
            (in groups of two that reach each other's memory; without ``/2`` all four do).

    Raises:
        ValueError: ``spec`` is none of these.
        DriverError: there is no CUDA driver, or no such GPU.
    """
    chosen = parse_spec(spec)
    if not isinstance(chosen, _HostDevices):
        from cuda.bindings import driver as cuda

        return Driver(cuda, "cuda", host=False, chosen=chosen)
    count, size, island = chosen
    full = f"host:{count}@{size}" + (f"/{island}" if island < count else "")
    from cubroker.driver.host.bindings import host_module

    return Driver(host_module(count, size, island), full, host=True)


def prepare(spec: str) -> None:
    """Import what :func:`load` needs for ``spec``, and touch no device; raises ``ValueError`` as that does."""
    host = isinstance(parse_spec(spec), _HostDevices)
    import_module("cubroker.driver.host.bindings" if host else "cuda.bindings.driver")


class _HostDevices(NamedTuple):
    devices: int
    size: int
    island: int


def parse_spec(spec: str) -> _HostDevices | tuple[str, ...] | None:
    """Return the host devices, or the names of GPUs, None for all of them; raises ``ValueError`` for other texts."""
    if spec == "cuda":
        return None
    match = re.fullmatch(_HOST, spec)
    if match is None:
        names = tuple(spec.removeprefix("cuda:").split(","))
        if spec.startswith("host") or not all(map(device_names.is_name, names)):
            forms = "cuda, cuda:0,1, cuda:GPU-8d2f41c6, host:2, host:2@64MiB or host:4@64MiB/2"
            raise ValueError(f"no driver {spec!r}; write {forms}")
        if len({name.removeprefix("cuda:") for name in names}) < len(names):
            raise ValueError(f"{spec!r} names a device twice")
        return names
    count = int(match["count"])
    if not 0 < count <= MAX_HOST_DEVICES:
        raise ValueError(f"{spec!r} asks for {count} devices; it can be 1 to {MAX_HOST_DEVICES}")
    from cubroker.driver.host.shared_memory import BLOCK

    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = int(match["size"]) * _UNITS[match["unit"]] if match["size"] else installed // 2 // count
    if not BLOCK <= size < 1 << 47:
        bounds = f"{BLOCK} at least, and less than {1 << 47}"
        raise ValueError(f"{spec!r} gives a device {size} bytes; it needs {bounds}, as in host:{count}@64MiB")
    island = int(match["island"] or count)
    if not 0 < island <= count:
        raise ValueError(f"{spec!r} makes groups of {island} devices; they can be of 1 to {count}")
    return _HostDevices(count, size - size % BLOCK, island)
