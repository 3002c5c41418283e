"""The primary context of a device, and work in it: streams, events, copies, pinned memory and kernels.

Two rules hold for every driver call made here and above:

- Engines capture CUDA graphs for seconds, and a forbidden call of any thread of the process ends such a capture. Calls
  are therefore made with the thread's capture mode RELAXED (:meth:`PrimaryContext.current`), and ``cuCtxSynchronize``,
  which ends a capture in every mode, is never called (:meth:`PrimaryContext.synchronize`).
- No call may use the legacy default stream while a blocking stream is being captured. Copies therefore go through a
  stream of the context's own (:meth:`PrimaryContext.copies`).

:class:`cubroker.driver.Context` adds memory to it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import msgspec

from cubroker.driver.buffers import address, handle_bytes, handle_of, keep_first
from cubroker.driver.checked_calls import Calls, DriverError, explained, tolerated, unmapped
from cubroker.driver.system_calls import HUGE_PAGE, HugePages

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

log = logging.getLogger(__name__)

POPULATING = 8
"""Threads that bring the pages of :class:`PinnedHuge` into memory: on a host with an H200 one zeroes 4 to 7 GB/s."""

KERNEL_FOLDER = Path(__file__).parent  #: Where the PTX files are.
KERNELS = {path.name: path.read_bytes() + b"\0" for path in KERNEL_FOLDER.glob("*.ptx")}
"""Their texts, by name. A file that is read later may be of another release, whose kernels take other arguments."""

R = TypeVar("R", bound="ContextResource")

_thread = threading.local()
"""``context``: the one that the innermost :meth:`PrimaryContext.current` block of this thread made current."""

_CURRENT_ALREADY = nullcontext()
"""The block of a context that is current already: copies in a loop enter it thousands of times a second."""


class Device(msgspec.Struct, frozen=True):
    """One GPU, or one emulated device."""

    #: Its ordinal in this process; other processes may count differently.
    index: int
    #: Its name everywhere on this host: ``GPU-…`` or ``HOST-…``.
    uuid: str
    #: The product's name.
    name: str
    #: Its memory in bytes.
    total: int


class CurrentContext(NamedTuple):
    """The context that is current on a thread."""

    #: The driver's handle of it.
    context: int
    #: The ordinal of its device.
    device: int


def current_context(calls: Calls) -> CurrentContext | None:
    """Return the context that is current on this thread, if any."""
    current = int(calls.cuCtxGetCurrent())
    return CurrentContext(current, int(calls.cuCtxGetDevice())) if current else None


class PrimaryContext:
    """The primary context of one device. Every method may be called from any thread.

    A pointer is a device address as a plain int. On host devices it is an address of this process.
    Every method raises :class:`DriverError` if the driver refuses.

    A copy runs after all work that was submitted to the legacy default stream before it; it does not wait for work in
    other streams.
    """

    def __init__(self, calls: Calls, device: Device, *, host: bool) -> None:
        self.calls = calls
        self.device = device
        #: Whether the device is emulated in host memory.
        self.host = host
        self._cudevice = calls.cuDeviceGet(device.index)
        #: The driver's handle of the context.
        self.handle = calls.cuDevicePrimaryCtxRetain(self._cudevice)
        self._relaxed = calls.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._kept: dict[object, Any] = {}  # by what makes them

    def current(self) -> AbstractContextManager[None]:
        """Make the context current on this thread for a block, and restore the thread's own context afterwards.

        Every method does so. A thread that calls many of them can put one block around all, which saves four driver
        calls for each; other code must not change the current context inside the block.

        In the block the thread's capture mode is RELAXED: calls that the driver takes for unsafe during a capture, such
        as allocating, freeing and waiting for a stream, leave captures alone. In the other two modes such a call ends
        the captures of this thread, and in the default mode those that any thread began as GLOBAL.
        """
        return _CURRENT_ALREADY if getattr(_thread, "context", None) is self else self._made_current()

    @contextmanager
    def _made_current(self) -> Iterator[None]:
        outer = getattr(_thread, "context", None)
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
        """Release the context. If no other code of the process retains it, everything in it is destroyed."""
        while self._kept:
            _, made = self._kept.popitem()
            with suppress(DriverError):  # a context that a failed kernel has ruined refuses everything
                made.close()
        self.calls.cuDevicePrimaryCtxRelease(self._cudevice)

    def kept(self, make: Callable[[PrimaryContext], R]) -> R:
        """Return what ``make`` makes in this context, once; it is closed with the context."""
        made: R = keep_first(self._kept, make, lambda: make(self), lambda made: made.close())
        return made

    def synchronize(self) -> None:
        """Return when all work submitted in the context is done, in all streams.

        cuCtxSynchronize would end a capture of any thread, in any mode. Unregistering a page of host memory waits for
        the same work and leaves captures alone (measured on H200s, driver 580.159; tests/gpu measures again). Freeing
        device memory does the same, but a full device has none to allocate first.
        """
        page = mmap.mmap(-1, mmap.PAGESIZE)  # freed with its last reference, which after an interrupt is the traceback
        with address(page, writable=True) as (pointer, nbytes), self.current():
            try:
                self.calls.cuMemHostRegister(pointer, nbytes, 0)
                self.calls.cuMemHostUnregister(pointer)
            except DriverError:
                raise
            except BaseException:  # an interrupt in either call: a page must not be unmapped while it is registered
                with suppress(DriverError):
                    self.calls.cuMemHostUnregister(pointer)
                raise

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

    def copy(self, pointer: int, source: int, nbytes: int, *, after: PrimaryContext) -> None:
        """Copy ``nbytes`` bytes of device memory from ``source`` to ``pointer``; done when it returns.

        It first waits for all work that was submitted in the context ``after``, which fills the source.
        """
        after.synchronize()
        copies = self.copies()
        with self.current():
            copies.copy(pointer, source, nbytes)
            copies.synchronize()

    def clear(self, pointer: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes to zero; done when it returns."""
        copies = self.copies()
        with self.current():
            copies.fill(pointer, 0, nbytes)
            copies.synchronize()

    def copies(self) -> Stream:
        """Return the context's own stream, in which its copies are made; it is closed with the context."""
        return self.kept(_CopyStream)

    # -- what the caller closes --------------------------------------------------------------------

    def stream(self) -> Stream:
        """Make a stream."""
        return Stream(self)

    def event(self, *, shared: bool = False, spin: bool = False) -> Event:
        """Make an event.

        Args:
            shared: whether other processes can open its handle (:meth:`Event.export`).
            spin: whether :meth:`Event.wait` keeps its core busy rather than sleeps: it then returns some 50 µs earlier.
        """
        flags = self.calls.module.CUevent_flags
        chosen = flags.CU_EVENT_DISABLE_TIMING
        if not spin:
            chosen |= flags.CU_EVENT_BLOCKING_SYNC
        if shared:
            chosen |= flags.CU_EVENT_INTERPROCESS
        with self.current():
            return Event(self, self.calls.cuEventCreate(int(chosen)))

    def open_event(self, handle: bytes) -> Event:
        """Open another process's event (:meth:`Event.export`).

        The driver refuses this in the process that made the event, and on a device that does not reach the event's.
        """
        raw = handle_of(self.calls.module.CUipcEventHandle(), handle, "an event's handle")
        with explained(lambda: unmapped(self.device.index, host=self.host)), self.current():
            return Event(self, self.calls.cuIpcOpenEventHandle(raw))

    def pin(self, nbytes: int) -> Pinned:
        """Allocate ``nbytes`` bytes of pinned host memory, usable from every device."""
        return Pinned(self, nbytes)

    def pin_huge(self, nbytes: int) -> Pinned:
        """Do the same in huge pages that are registered with the driver: for 64 MiB that takes a third of the time.

        Several threads zero the pages. If there is no such memory, or the driver does not register it, this allocates
        as :meth:`pin` does.
        """
        return PinnedHuge(self, nbytes)


class ContextResource:
    """A resource of a context, which :meth:`close` releases; ``with`` calls that."""

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._calls = context.calls

    def close(self) -> None:
        """Give it back to the driver; to be called once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Event(ContextResource):
    """A place in a stream; see :meth:`PrimaryContext.event` and :meth:`PrimaryContext.open_event`.

    :meth:`record` puts it there, and may move it later. All processes that have the event open record, query and wait
    for the same place. Once the process that made it has closed it or has ended, the driver promises nothing about
    calls of the other processes, which should only ``close`` it then; host devices refuse all their other calls
    (CUDA_ERROR_INVALID_HANDLE).
    """

    def __init__(self, context: PrimaryContext, handle: Any) -> None:
        super().__init__(context)
        self.handle = handle

    def export(self) -> bytes:
        """Return the handle, 64 bytes, with which other processes open this event.

        Raises:
            DriverError: the event was not made with ``shared=True``, or is another process's.
        """
        with self._context.current():
            return handle_bytes(self._calls.cuIpcGetEventHandle(self.handle))

    def record(self, stream: int = 0) -> None:
        """Put it after all work submitted so far to a stream of its context, by handle; 0 is the default stream.

        Raises:
            DriverError: the driver refused; or the stream is being captured, or is the default one while a blocking
                stream is being captured, and the capture would have ended.
        """
        with self._context.current():
            self._calls.cuEventRecord(self.handle, self._outside_captures(stream))

    def hold(self, stream: int) -> None:
        """Have later work in a stream, by handle, wait until the event is reached, as :meth:`Stream.wait` does.

        Raises:
            DriverError: as :meth:`record`.
        """
        with self._context.current():
            self._calls.cuStreamWaitEvent(self._outside_captures(stream), self.handle, 0)

    def done(self) -> bool:
        """Whether all work before the place is finished; True if the event was never recorded."""
        with tolerated("CUDA_ERROR_NOT_READY"), self._context.current():
            self._calls.cuEventQuery(self.handle)
            return True
        return False

    def wait(self) -> None:
        """Return when all work before the place is finished.

        The thread sleeps meanwhile, unless the event was made to ``spin``; for another process's event it may spin.
        """
        with self._context.current():
            self._calls.cuEventSynchronize(self.handle)

    def close(self) -> None:
        """Destroy the event; this affects neither the work before it nor streams that wait for it."""
        with self._context.current():
            self._calls.cuEventDestroy(self.handle)

    def _outside_captures(self, stream: int) -> Any:
        """Return a stream by its handle, unless using it now would end a capture; the query ends none."""
        module = self._calls.module
        handle = module.CUstream(stream)
        with explained({"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _DEFAULT_IN_CAPTURE}):
            status = self._calls.cuStreamIsCapturing(handle)
        if status != module.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            code = module.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            raise DriverError("cuStreamIsCapturing", int(code), code.name, _EVENT_IN_CAPTURE)
        return handle


_DEFAULT_IN_CAPTURE = (
    "a blocking stream of this process is being captured, and the default stream waits for all blocking streams: name"
    " another stream, or capture in a non-blocking one"
)

_EVENT_IN_CAPTURE = (
    "the stream is being captured, and an event that processes share has no place in a graph: record it, and wait for"
    " it, before or after the graph is launched"
)


class Stream(ContextResource):
    """Work that is done in order, concurrently with other streams; see :meth:`PrimaryContext.stream`.

    Args:
        context: the context of the stream.
        after_default: whether its work is ordered with that of the legacy default stream, after what was submitted
            there before and before what is submitted there later: in the driver's words a blocking stream.
    """

    def __init__(self, context: PrimaryContext, *, after_default: bool = False) -> None:
        super().__init__(context)
        flags = self._calls.module.CUstream_flags
        chosen = flags.CU_STREAM_DEFAULT if after_default else flags.CU_STREAM_NON_BLOCKING
        with context.current():
            self._stream = self._calls.cuStreamCreate(int(chosen))

    @property
    def handle(self) -> int:
        """The driver's handle, a ``CUstream``, as other libraries take it."""
        return int(self._stream)

    def copy_in(self, pointer: int, host_pointer: int, nbytes: int, copied: Event | None = None) -> None:
        """Start a copy of ``nbytes`` bytes at host address ``host_pointer`` to device address ``pointer``.

        The host memory must not change until the copy is done, after which ``copied`` is recorded. The call returns
        before that only if the memory is :class:`Pinned`.
        """
        with self._context.current():
            self._calls.cuMemcpyHtoDAsync(pointer, host_pointer, nbytes, self._stream)
            if copied:
                self._calls.cuEventRecord(copied.handle, self._stream)

    def copy_out(self, host_pointer: int, pointer: int, nbytes: int) -> None:
        """Start a copy of ``nbytes`` bytes at device address ``pointer`` to host address ``host_pointer``.

        The bytes are there when the copy is done (:meth:`synchronize`).
        """
        with self._context.current():
            self._calls.cuMemcpyDtoHAsync(host_pointer, pointer, nbytes, self._stream)

    def fill(self, pointer: int, value: int, nbytes: int) -> None:
        """Start to set ``nbytes`` bytes at device address ``pointer`` to ``value``, 0 to 255."""
        with self._context.current():
            self._calls.cuMemsetD8Async(pointer, value, nbytes, self._stream)

    def copy(self, pointer: int, source: int, nbytes: int) -> None:
        """Start a copy of ``nbytes`` bytes at device address ``source`` to device address ``pointer``.

        Addresses are unified, so either may be on another device than the stream. The copy goes directly between two
        devices if this stream's context has access to the other one (:meth:`Peers.enable`, :meth:`Context.open`
        across devices), else through host memory, which is slower.
        """
        with self._context.current():
            self._calls.cuMemcpyDtoDAsync(pointer, source, nbytes, self._stream)

    def wait(self, event: Event) -> None:
        """Hold all work submitted from now on until the work before ``event`` is done; the caller does not wait.

        The event may be of another device or process. What counts is where it was recorded last when this is called;
        an event that was never recorded holds nothing.
        """
        with self._context.current():
            self._calls.cuStreamWaitEvent(self._stream, event.handle, 0)

    def record(self, event: Event) -> None:
        """Put ``event``, of the same context, after all work submitted so far."""
        with self._context.current():
            self._calls.cuEventRecord(event.handle, self._stream)

    def synchronize(self) -> None:
        """Return when all work submitted so far is done."""
        with self._context.current():
            self._calls.cuStreamSynchronize(self._stream)

    def close(self) -> None:
        """Wait for the submitted work, then destroy the stream."""
        try:
            self.synchronize()
        finally:
            with self._context.current():
                self._calls.cuStreamDestroy(self._stream)


_CopyStream = partial(Stream, after_default=True)


class Pinned(ContextResource):
    """Host memory that a GPU copies from at full speed; see :meth:`PrimaryContext.pin`."""

    def __init__(self, context: PrimaryContext, nbytes: int) -> None:
        super().__init__(context)
        with context.current():
            #: Its address.
            self.pointer: int = self._allocate(nbytes)
        self.nbytes = nbytes
        #: The same memory as writable bytes.
        self.view: memoryview = memoryview((ctypes.c_ubyte * nbytes).from_address(self.pointer)).cast("B")

    def close(self) -> None:
        """Free the memory; no copy may be reading it, and no slice of ``view`` may be used any more."""
        self.view.release()
        self._free()

    def _allocate(self, nbytes: int) -> int:
        return int(self._calls.cuMemHostAlloc(nbytes, self._calls.module.CU_MEMHOSTALLOC_PORTABLE))

    def _free(self) -> None:
        with self._context.current():
            self._calls.cuMemFreeHost(self.pointer)


class PinnedHuge(Pinned):
    """The same in huge pages; see :meth:`PrimaryContext.pin_huge`."""

    _pages: HugePages | None = None

    def _allocate(self, nbytes: int) -> int:
        try:
            pages = HugePages(nbytes)
            try:
                _populate(pages)
                self._calls.cuMemHostRegister(pages.pointer, nbytes, self._calls.module.CU_MEMHOSTREGISTER_PORTABLE)
            except BaseException:
                pages.close()
                raise
        except (OSError, DriverError) as error:
            log.info("huge pages of %d bytes cannot be pinned, and others are: %s", nbytes, error)
            return super()._allocate(nbytes)
        self._pages = pages
        return pages.pointer

    def _free(self) -> None:
        if self._pages is None:
            super()._free()
            return
        with self._context.current():
            self._calls.cuMemHostUnregister(self.pointer)
        self._pages.close()  # not if unregistering fails: the driver still has it


def _populate(pages: HugePages) -> None:
    """Bring all pages into memory; several threads zero them at the rate of the memory."""
    part = -(-pages.nbytes // (POPULATING * HUGE_PAGE)) * HUGE_PAGE
    parts = [(offset, min(part, pages.nbytes - offset)) for offset in range(0, pages.nbytes, part)]
    threads: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads: registering brings the other pages into memory
        for each in parts[1:]:
            thread = threading.Thread(target=pages.populate, args=each, name="cubroker-pin")
            thread.start()
            threads.append(thread)
    pages.populate(*parts[0])
    for thread in threads:
        thread.join()


class Kernel(ContextResource):
    """One entry of a PTX file of this package, which the driver compiles for the device when it is loaded.

    It is closed before the context is released.

    Raises:
        DriverError: the driver cannot compile it for this device.
    """

    #: The file, and the name of the entry, whose arguments are integers of 64 bits, or arrays of them.
    SOURCE: ClassVar[tuple[str, bytes]]

    def __init__(self, context: PrimaryContext) -> None:
        super().__init__(context)
        file, entry = self.SOURCE
        with context.current():
            self._module = self._calls.cuModuleLoadData(KERNELS[file])
            try:
                self._function = self._calls.cuModuleGetFunction(self._module, entry)
            except BaseException:
                self._calls.cuModuleUnload(self._module)
                raise

    def launch(
        self, stream: Stream, blocks: int, threads: int, *arguments: int | ctypes.Array[ctypes.c_uint64]
    ) -> None:
        """Start it in a stream of its context, with ``blocks`` blocks of ``threads`` threads each.

        The arguments are copied before this returns.
        """
        values = [each if isinstance(each, ctypes.Array) else ctypes.c_uint64(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        at = ctypes.addressof(pointers)
        with self._context.current():
            self._calls.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream.handle, at, 0)

    def close(self) -> None:
        """Unload it; to be called once, when no launch of it is running."""
        with self._context.current():
            self._calls.cuModuleUnload(self._module)
