"""Asynchronous copies: streams, the events that mark places in them, and the host memory they read from."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Self

from cubroker.driver.calls import DriverError

if TYPE_CHECKING:
    from cubroker.driver.context import Context


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
    """A place in a stream, which :meth:`Stream.record` puts it at; it may be put anew. See :meth:`Context.event`."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        flags = self._calls.module.CUevent_flags
        with context.current():
            self.handle = self._calls.cuEventCreate(flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC)

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
        """Return when all work before the place is finished; the thread sleeps meanwhile."""
        with self._context.current():
            self._calls.cuEventSynchronize(self.handle)

    def close(self) -> None:
        """Give the event back; work before it goes on."""
        with self._context.current():
            self._calls.cuEventDestroy(self.handle)


class Stream(_Closing):
    """Work that is done in order, beside other streams; see :meth:`Context.stream`."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        with context.current():
            self._stream = self._calls.cuStreamCreate(self._calls.module.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def copy_in(self, pointer: int, host_pointer: int, nbytes: int) -> None:
        """Start a copy of ``nbytes`` bytes at host address ``host_pointer`` to device address ``pointer``.

        The host memory must stay as it is until the copy is done. Only from :class:`Pinned` memory
        is the copy made while the caller goes on.
        """
        with self._context.current():
            self._calls.cuMemcpyHtoDAsync(pointer, host_pointer, nbytes, self._stream)

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
