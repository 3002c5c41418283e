"""What cubroker does with one device: memory, handles and copies, in its primary context."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cubroker.driver.buffers import address
from cubroker.driver.calls import Calls, DriverError, explained
from cubroker.driver.digester import Digester
from cubroker.driver.errors import unmapped
from cubroker.driver.linux import FileId
from cubroker.driver.once import keep_first
from cubroker.driver.stream import HANDLE_BYTES, Event, Pinned, Stream
from cubroker.driver.vmm import Reservation
from cubroker.driver.window import Window

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_thread = threading.local()
"""``context``: the one that the innermost :meth:`Context.current` block of this thread made current."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one emulated device.

    Attributes:
        index: its ordinal in this process; other processes may count differently.
        uuid: its name everywhere on this host: ``GPU-…`` or ``HOST-…``.
        name: what it is, for people.
        total: its memory in bytes.
    """

    index: int
    uuid: str
    name: str
    total: int


class Working(NamedTuple):
    """The context that is current on a thread: the driver's own number for it, and its device's ordinal."""

    context: int
    device: int


def working(calls: Calls) -> Working | None:
    """Return in which context this thread works; None if in none."""
    current = int(calls.cuCtxGetCurrent())
    return Working(current, int(calls.cuCtxGetDevice())) if current else None


class Context:
    """The primary context of one device. Every method may be called from any thread.

    A pointer is a device address as a plain int. On host devices it is an address of this process.
    Every method raises :class:`DriverError` where the driver refuses.

    Engines capture CUDA graphs for seconds, and a forbidden call of any thread of the process ends such a capture. No
    method makes one: see :meth:`current` and :meth:`synchronize`. Copies go through a stream of the context's own,
    since no call may use the legacy default stream while a blocking stream is being captured. A copy comes after all
    work that was submitted to the legacy default stream before; it does not wait for work in other streams.
    """

    def __init__(self, calls: Calls, device: Device, *, host: bool) -> None:
        self.calls = calls
        self.device = device
        self.host = host
        self._cudevice = calls.cuDeviceGet(device.index)
        self.handle = calls.cuDevicePrimaryCtxRetain(self._cudevice)
        self._relaxed = calls.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._copies: dict[None, Stream] = {}
        self._digester: dict[None, Digester] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread, and afterwards the one that was: others use the thread too.

        Every method does so by itself. A thread that calls many of them puts one block around all, and saves four
        driver calls each time; in the block nobody else may change what is current.

        In the block the thread's capture mode is RELAXED: calls that the driver takes for unsafe during a capture, such
        as allocating, freeing and waiting for a stream, leave captures alone. In the other two modes such a call ends
        the captures of this thread, and in the default mode those that any thread began as GLOBAL.
        """
        outer = getattr(_thread, "context", None)
        if outer is self:
            yield
            return
        self.calls.cuCtxPushCurrent(self.handle)
        try:
            mode = self.calls.cuThreadExchangeStreamCaptureMode(self._relaxed)
            _thread.context = self
            try:
                yield
            finally:
                _thread.context = outer
                self.calls.cuThreadExchangeStreamCaptureMode(mode)
        finally:
            self.calls.cuCtxPopCurrent()

    def release(self) -> None:
        """Let go of the context. If nobody else in the process holds it, everything in it is gone."""
        for each in (self._digester.pop(None, None), self._copies.pop(None, None)):
            if each:
                with suppress(DriverError):  # a context that a failed kernel has ruined refuses everything
                    each.close()
        self.calls.cuDevicePrimaryCtxRelease(self._cudevice)

    # -- memory that this process owns -------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate ``nbytes`` bytes and return the pointer.

        Sizes that are no multiple of 2 MiB may share a block with other allocations, and whoever
        opens one of them sees them all: what will be exported should be such a multiple.
        """
        with self.current():
            return int(self.calls.cuMemAlloc(nbytes))

    def free(self, pointer: int) -> None:
        """Free what ``allocate`` returned, once all work submitted in the context is done."""
        with self.current():
            self.calls.cuMemFree(pointer)  # which waits; see synchronize()

    def clear(self, pointer: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes to zero; done when it returns."""
        copies = self.copies()
        with self.current():
            copies.fill(pointer, 0, nbytes)
            copies.synchronize()

    def file_id(self, pointer: int) -> FileId | None:
        """Return which file the memory is that :meth:`allocate` returned; None on a GPU, whose memory is none."""
        found: FileId | None = self.calls.module.file_id(pointer) if self.host else None
        return found

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device. On host devices only this process's own count as used."""
        with self.current():
            free, total = self.calls.cuMemGetInfo()
        return int(free), int(total)

    # -- memory shared between processes -----------------------------------------------------------

    def export(self, pointer: int) -> bytes:
        """Return the handle, 64 bytes, with which other processes open the allocation that ``pointer`` lies in.

        It stands for the whole allocation, whichever byte of it ``pointer`` names. Whoever has it can read and write.
        """
        with self.current():
            handle = self.calls.cuIpcGetMemHandle(pointer)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return the pointer to its first byte.

        Opening again returns the same pointer; each time counts, and needs its own :meth:`close`.
        The process that exported it cannot open it (CUDA_ERROR_INVALID_CONTEXT), nor one that has the same number in
        another pid namespace; a handle that is
        made up, or whose memory was freed, is CUDA_ERROR_INVALID_VALUE. The memory may be on another
        device, if this one reaches it (else CUDA_ERROR_PEER_ACCESS_UNSUPPORTED): access is enabled by itself, unless
        this one has as many peers as it can have (CUDA_ERROR_TOO_MANY_PEERS). What cannot be mapped for another
        reason is CUDA_ERROR_MAP_FAILED.
        """
        self.check_thread(working(self.calls))
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle of {len(handle)} bytes; it has {HANDLE_BYTES}")
        module = self.calls.module
        shared = module.CUipcMemHandle()
        ctypes.memmove(shared.getPtr(), handle, HANDLE_BYTES)
        flags = module.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with explained(self._refusals()), self.current():
            return int(self.calls.cuIpcOpenMemHandle(shared, int(flags)))

    def check_thread(self, thread: Working | None) -> None:
        """Refuse a thread that works in another context of this device than the primary one.

        CUDA lets a process open shared memory in one context per device, and that is the primary one here. To such a
        thread what is opened would be out of reach, so :meth:`open` refuses it before anything is touched;
        call this where memory will be opened on behalf of another thread (:meth:`Driver.working`).

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
            self.calls.cuIpcCloseMemHandle(pointer)  # which waits by itself

    def reserve(self, nbytes: int) -> Reservation:
        """Reserve addresses for memory to be mapped at; the caller closes the range. See :meth:`Driver.create`."""
        return Reservation(self, nbytes)

    def window(self, nbytes: int) -> Window:
        """Reserve addresses for a multicast object of ``nbytes`` bytes to be mapped at; the caller closes it.

        Raises:
            MulticastOff: a setting says no to multicast on real hardware.
        """
        return Window(self, nbytes)

    def _refusals(self) -> dict[str, str]:
        return unmapped(self.device.index, host=self.host) | {
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": f"the memory is on a device that device {self.device.index} does not "
            "reach; open it on that device, or on one that does",
            "CUDA_ERROR_INVALID_CONTEXT": "this process exported it; or has the number, in its pid namespace, that the "
            "one which did has in its own, and CUDA takes them for the same: run one of the two in the host's pid "
            "namespace, or share it as vmm",
            "CUDA_ERROR_INVALID_HANDLE": "this process has it open in another context of the device; "
            "shared memory can be opened in one context per device and process",
            "CUDA_ERROR_INVALID_VALUE": "the memory is gone, or it is emulated and its owner in another network "
            "namespace, as in a container; there it has to be shared as vmm",
        }

    # -- copies ------------------------------------------------------------------------------------

    def write(self, pointer: int, data: ReadableBuffer) -> None:
        """Copy all bytes of a contiguous buffer to ``pointer``; every process sees them when it returns."""
        copies = self.copies()
        with address(data) as (source, nbytes), self.current():
            copies.copy_in(pointer, source, nbytes)
            copies.synchronize()

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes at ``pointer``."""
        data = bytearray(nbytes)
        self.read_into(pointer, data)
        return bytes(data)

    def read_into(self, pointer: int, buffer: WriteableBuffer) -> None:
        """Fill a contiguous buffer with the bytes at ``pointer``."""
        copies = self.copies()
        with address(buffer, writable=True) as (target, nbytes), self.current():
            copies.copy_out(target, pointer, nbytes)
            copies.synchronize()

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the digest (:mod:`cubroker.driver.digest`) of each range of memory that this device reads.

        The device computes them, at about the rate at which it reads. Work in other streams is not waited for.

        Args:
            ranges: a pointer and a number of bytes each; pointers are multiples of 16.

        Raises:
            ValueError: a pointer is not.
        """
        digester = keep_first(self._digester, None, lambda: Digester(self), Digester.close)
        return digester.digests(ranges)

    def synchronize(self) -> None:
        """Return when all work submitted in the context is done, in whichever stream.

        cuCtxSynchronize would end a capture of any thread, in any mode. Unregistering a page of host memory waits for
        the same work and leaves captures alone (measured on H200s, driver 580.159; tests/gpu measures again). So does
        freeing device memory, of which a full device has none to allocate first.
        """
        page = mmap.mmap(-1, mmap.PAGESIZE)  # goes with its last user, which after an interrupt is the traceback
        with address(page, writable=True) as (pointer, nbytes), self.current():
            try:
                self.calls.cuMemHostRegister(pointer, nbytes, 0)
                self.calls.cuMemHostUnregister(pointer)
            except DriverError:
                raise
            except BaseException:  # an interrupt, in whichever of the two: no page is unmapped while it is registered
                with suppress(DriverError):
                    self.calls.cuMemHostUnregister(pointer)
                raise

    def copies(self) -> Stream:
        """Return the context's own stream, in which its copies are made; it is closed with the context."""
        return keep_first(self._copies, None, lambda: Stream(self, after_default=True), Stream.close)

    def stream(self) -> Stream:
        """Make a stream, which the caller closes."""
        return Stream(self)

    def event(self, *, shared: bool = False) -> Event:
        """Make an event, which the caller closes; if ``shared``, other processes can open what it exports."""
        return Event.make(self, shared=shared)

    def open_event(self, handle: bytes) -> Event:
        """Open another process's event (:meth:`Event.export`); the caller closes it.

        Neither the process that made it can open it, nor a device that does not reach that of the event.
        """
        return Event.open(self, handle)

    def pin(self, nbytes: int) -> Pinned:
        """Allocate ``nbytes`` bytes of pinned host memory, usable from every device; the caller closes it."""
        return Pinned(self, nbytes)
