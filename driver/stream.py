"""Asynchronous copies: streams, the events that mark places in them, and the host memory they read from."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Self

from cubroker.driver.calls import DriverError, explained
from cubroker.driver.errors import unmapped

if TYPE_CHECKING:
    from cubroker.driver.context import Context

HANDLE_BYTES = 64
"""Bytes of a legacy IPC handle, of memory or of an event (``CU_IPC_HANDLE_SIZE``)."""


class _Closing:
    """Something of a context with exactly one undo, which ``with`` calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls = context.calls

    def close(self) -> None:
        """Give it back to the driver; to be called once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Event(_Closing):
    """A place in a stream, which :meth:`Stream.record` puts it at; it may be put anew.

    :meth:`Context.event` makes one, and :meth:`Context.open_event` opens another process's: whoever has it
    records it, asks for it or waits for it, and all mean the same place. Once the process that made it has
    closed it or has ended, the driver promises nothing about the others' calls, of which ``close`` alone is
    then in place; host devices refuse the rest (CUDA_ERROR_INVALID_HANDLE).
    """

    def __init__(self, context: Context, handle: Any) -> None:
        super().__init__(context)
        self.handle = handle

    @classmethod
    def make(cls, context: Context, *, shared: bool) -> Self:
        """Make an event; see :meth:`Context.event`."""
        flags = context.calls.module.CUevent_flags
        chosen = flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC
        if shared:
            chosen |= flags.CU_EVENT_INTERPROCESS
        with context.current():
            return cls(context, context.calls.cuEventCreate(int(chosen)))

    @classmethod
    def open(cls, context: Context, handle: bytes) -> Self:
        """Open another process's event; see :meth:`Context.open_event`."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"an event's handle of {len(handle)} bytes; it has {HANDLE_BYTES}")
        raw = context.calls.module.CUipcEventHandle()
        ctypes.memmove(raw.getPtr(), handle, HANDLE_BYTES)
        with explained(unmapped(context.device.index, host=context.host)), context.current():
            return cls(context, context.calls.cuIpcOpenEventHandle(raw))

    def export(self) -> bytes:
        """Return the handle, 64 bytes, with which other processes open this event.

        Raises:
            DriverError: the event was not made with ``shared=True``, or is another process's.
        """
        with self._context.current():
            handle = self._calls.cuIpcGetEventHandle(self.handle)
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def record(self, stream: int = 0) -> None:
        """Put it after everything that was started so far in a stream of its context, by handle; 0: the default one.

        Raises:
            DriverError: the driver refused; or the stream is being captured, or is the default one while a blocking
                stream is being captured, and the capture would have ended.
        """
        with self._context.current():
            self._calls.cuEventRecord(self.handle, self._outside_captures(stream))

    def hold(self, stream: int) -> None:
        """Have later work in a stream, by handle, wait until it is reached, as :meth:`Stream.wait` does.

        Raises:
            DriverError: as :meth:`record`.
        """
        with self._context.current():
            self._calls.cuStreamWaitEvent(self._outside_captures(stream), self.handle, 0)

    def done(self) -> bool:
        """Whether all work before the place is finished; so it is if the event was never recorded."""
        try:
            with self._context.current():
                self._calls.cuEventQuery(self.handle)
        except DriverError as error:
            if error.name == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def wait(self) -> None:
        """Return when all work before the place is finished.

        The thread sleeps meanwhile, unless the event is another process's: then it may spin.
        """
        with self._context.current():
            self._calls.cuEventSynchronize(self.handle)

    def close(self) -> None:
        """Give the event back; work before it goes on, and so does a stream that waits for it."""
        with self._context.current():
            self._calls.cuEventDestroy(self.handle)

    def _outside_captures(self, stream: int) -> Any:
        """Return a stream by its handle, unless using it now would end a capture; asking ends none."""
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


class Stream(_Closing):
    """Work that is done in order, beside other streams; see :meth:`Context.stream`.

    Args:
        context: that it is of.
        after_default: whether work in it also comes after what was submitted before to the legacy default stream, and
            before what is submitted there later: a blocking stream, in the driver's words.
    """

    def __init__(self, context: Context, *, after_default: bool = False) -> None:
        super().__init__(context)
        flags = self._calls.module.CUstream_flags
        chosen = flags.CU_STREAM_DEFAULT if after_default else flags.CU_STREAM_NON_BLOCKING
        with context.current():
            self._stream = self._calls.cuStreamCreate(int(chosen))

    @property
    def handle(self) -> int:
        """The driver's handle of it, a ``CUstream``, as other libraries take it."""
        return int(self._stream)

    def copy_in(self, pointer: int, host_pointer: int, nbytes: int) -> None:
        """Start a copy of ``nbytes`` bytes at host address ``host_pointer`` to device address ``pointer``.

        The host memory must stay as it is until the copy is done. Only from :class:`Pinned` memory
        is the copy made while the caller goes on.
        """
        with self._context.current():
            self._calls.cuMemcpyHtoDAsync(pointer, host_pointer, nbytes, self._stream)

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

        Either may be on another device than the stream: addresses are unified, and tell. The copy goes directly
        between two devices if this stream's context has access to the other one (:meth:`Peers.enable`, an
        :meth:`Context.open` across devices), else through host memory, which is slower.
        """
        with self._context.current():
            self._calls.cuMemcpyDtoDAsync(pointer, source, nbytes, self._stream)

    def wait(self, event: Event) -> None:
        """Hold everything that is started from now on until the work before ``event`` is done; the caller goes on.

        The event may be of another device or another process. What counts is where it was recorded last when
        this is called; if it never was, there is nothing to wait for.
        """
        with self._context.current():
            self._calls.cuStreamWaitEvent(self._stream, event.handle, 0)

    def record(self, event: Event) -> None:
        """Put ``event``, of the same context, after everything that was started so far."""
        with self._context.current():
            self._calls.cuEventRecord(event.handle, self._stream)

    def synchronize(self) -> None:
        """Return when everything started so far is done."""
        with self._context.current():
            self._calls.cuStreamSynchronize(self._stream)

    def close(self) -> None:
        """Finish what was started, then give the stream back."""
        self.synchronize()
        with self._context.current():
            self._calls.cuStreamDestroy(self._stream)


class Pinned(_Closing):
    """Host memory that a GPU copies from at full speed; see :meth:`Context.pin`.

    Attributes:
        pointer: its address.
        nbytes: its size.
        view: the same memory as writable bytes.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
        with context.current():
            self.pointer: int = int(self._calls.cuMemHostAlloc(nbytes, self._calls.module.CU_MEMHOSTALLOC_PORTABLE))
        self.nbytes = nbytes
        self.view: memoryview = memoryview((ctypes.c_ubyte * nbytes).from_address(self.pointer)).cast("B")

    def close(self) -> None:
        """Free the memory; no copy may be reading it, and no slice of ``view`` may be used any more."""
        self.view.release()
        with self._context.current():
            self._calls.cuMemFreeHost(self.pointer)
