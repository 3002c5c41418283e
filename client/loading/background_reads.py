"""Reads that go on in other threads: of files by the C library's, of anything else by Python's.

POSIX AIO (``aio(7)``) reads the parts of a chunk at once, in up to 20 threads that never need Python's interpreter. The
thread that asks for 16 MiB makes two calls in place of eight reads, and the rest of its time belongs to the devices.

glibc reads parts with one descriptor one after the other, so a chunk's parts have several descriptors of their file.
Its threads do not survive a fork, and it does not notice: a forked child whose parent has read so would wait for ever.
There, and with other C libraries, whose requests look different, Python's threads read files as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EINPROGRESS
from typing import Any, Protocol

from cubroker.client.loading.read_plan import Chunk, Readable

log = logging.getLogger(__name__)

AIO_PART = 1 << 20
"""The most bytes that a thread of the C library reads at a time. Beside an H200 with 32 cores chunks of 16 such parts
came at 54 GB/s, as fast as a pinned copy, those of 8 at 45 to 50, and 16 parts of half the size at 25."""

USUAL_PARTS = 16
"""Parts of a chunk that has no gaps."""

THREAD_PART = 4 << 20
"""The most bytes that a Python thread reads at a time: with 1 MiB all wait for the interpreter, at a quarter of the
rate."""

_LIO_READ, _LIO_NOWAIT, _SIGEV_NONE = 0, 1, 1
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class Read(Protocol):
    """A read that goes on."""

    def wait(self) -> None:
        """Return when the chunk is there; raise the error of the file if it cannot be read."""

    def finish(self) -> None:
        """Return when nothing is written to the image any more, whatever became of it."""


class Reads(Protocol):
    """One thread's reads, each of which it waits for."""

    def start(self, file: Readable, chunk: Chunk, pointer: int) -> Read:
        """Begin to read a chunk into its image in host memory at ``pointer``."""

    def close(self) -> None:
        """Give back what they share; all are finished."""


Submit = Callable[..., "Future[Any]"]
"""Has a Python thread call a function, with some arguments."""


def reads_of(files: Sequence[Readable], submit: Submit) -> Callable[[], Reads]:
    """Return what makes the reads of a thread, which reads some of these files."""
    if posix_aio.usable and all(file.descriptor is not None for file in files):
        return AioReads
    return lambda: ThreadReads(submit)


def make_room() -> None:
    """Have room in the kernel's table for the descriptors of a thread's reads of one file.

    To go past 64 descriptors, and past each doubling, takes 25 to 50 ms where a process has several threads: the kernel
    waits until none of them uses the table as it was.
    """
    if posix_aio.usable:
        first = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, first + USUAL_PARTS))
        except OSError as error:  # there may be no more: fewer parts are read at once
            log.info("no room for the descriptors of a load: %s", error)
        finally:
            os.close(first)


class ThreadReads:
    """Reads by Python's threads."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def start(self, file: Readable, chunk: Chunk, pointer: int) -> ThreadRead:
        """See :class:`Reads`. What is less than a part is read by the caller: to have a thread begin takes longer."""
        read = ThreadRead()
        for offset, pieces in chunk.parts(THREAD_PART):
            buffers = [at_address(pointer + place, count) for place, count in pieces]
            if chunk.nbytes < THREAD_PART:
                file.read_into(buffers, offset)
            else:
                read.parts.append(self._submit(file.read_into, buffers, offset))
        return read

    def close(self) -> None:
        """See :class:`Reads`."""


class ThreadRead:
    """A read by Python's threads."""

    def __init__(self) -> None:
        self.parts: list[Future[Any]] = []

    def wait(self) -> None:
        """See :class:`Read`."""
        self.finish()
        for part in self.parts:
            part.result()

    def finish(self) -> None:
        """See :class:`Read`."""
        futures.wait(self.parts)


class _Request(ctypes.Structure):
    """``struct aiocb`` of glibc where pointers have 64 bits; names without the prefix ``aio_``."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("lio_opcode", ctypes.c_int),
        ("reqprio", ctypes.c_int),
        ("buf", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("sigev_rest", ctypes.c_char * 48),
        ("next_prio", ctypes.c_void_p),
        ("abs_prio", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("error_code", ctypes.c_int),
        ("return_value", ctypes.c_ssize_t),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


class PosixAio:
    """The C library's calls, and whether they can be used."""

    def __init__(self) -> None:
        #: Whether this process has read so, or the one that it was forked from.
        self.used = False
        self.usable = "CS_GNU_LIBC_VERSION" in os.confstr_names and _POINTER == 8
        if self.usable:
            library = ctypes.CDLL("librt.so.1")  # whose calls are glibc's own since 2.34
            self.submit = library.lio_listio
            self.submit.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            self.suspend = library.aio_suspend
            self.suspend.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            self.error = ctypes.PyDLL("librt.so.1").aio_error  # which takes less time than to give the interpreter away
            self.error.argtypes = (ctypes.c_void_p,)
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.usable = self.usable and not self.used


posix_aio = PosixAio()


class _Requests:
    """Requests for the parts of a chunk, in C's memory; used again and again, since they take long to make."""

    def __init__(self, count: int) -> None:
        self.items = [_Request(lio_opcode=_LIO_READ, sigev_notify=_SIGEV_NONE) for _ in range(count)]
        self.addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, self.items))


@dataclass(slots=True)
class _Descriptors:
    """Duplicates of a file's descriptor: one for each part of a chunk."""

    file: Readable | None = None
    #: how many reads go on with them
    readers: int = 0
    numbers: list[int] = field(default_factory=list)

    def point(self, file: Readable) -> None:
        """Have them be a file's."""
        self.file = file
        for number in self.numbers:
            os.dup2(_descriptor(file), number, inheritable=False)

    def some(self, count: int) -> list[int]:
        """Return ``count``: fewer if the process may have no more, and one at least."""
        assert self.file
        source = _descriptor(self.file)
        with suppress(OSError):
            while len(self.numbers) < count:
                self.numbers.append(os.dup(source))
        return self.numbers or [source]


class AioReads:
    """Reads by the C library's threads.

    Chunks of one file that are read at the same time share descriptors: a part waits for the same part of the chunk
    before it.
    """

    def __init__(self) -> None:
        self._descriptors: list[_Descriptors] = []
        self._idle: list[_Requests] = []

    def start(self, file: Readable, chunk: Chunk, pointer: int) -> AioRead:
        """See :class:`Reads`."""
        parts = [*chunk.parts(AIO_PART)]
        count = sum(len(pieces) for _, pieces in parts)
        descriptors = self._descriptors_of(file)
        numbers = descriptors.some(len(parts))
        requests = self._requests(count)
        items = iter(requests.items)
        for lane, (offset, pieces) in enumerate(parts):
            descriptor = numbers[lane % len(numbers)]
            for (place, nbytes), request in zip(pieces, items, strict=False):
                request.fildes, request.buf = descriptor, pointer + place
                request.nbytes, request.offset = nbytes, offset
                # What the library does not take, for want of memory or threads, has read nothing.
                request.error_code = request.return_value = 0
                offset += nbytes
        descriptors.readers += 1
        posix_aio.used = True
        posix_aio.submit(_LIO_NOWAIT, requests.addresses, count, None)
        return AioRead(file, requests, count, self._idle, descriptors)

    def close(self) -> None:
        """See :class:`Reads`."""
        while self._descriptors:
            numbers = self._descriptors.pop().numbers
            while numbers:
                os.close(numbers.pop())

    def _descriptors_of(self, file: Readable) -> _Descriptors:
        for descriptors in self._descriptors:
            if descriptors.file is file:
                return descriptors
        unused = (descriptors for descriptors in self._descriptors if not descriptors.readers)
        if (found := next(unused, None)) is None:
            found = _Descriptors()
            self._descriptors.append(found)
        found.point(file)
        return found

    def _requests(self, count: int) -> _Requests:
        if self._idle and len(self._idle[-1].items) >= count:
            return self._idle.pop()
        return _Requests(max(count, USUAL_PARTS))


class AioRead:
    """A read by the C library's threads."""

    def __init__(
        self, file: Readable, requests: _Requests, count: int, idle: list[_Requests], descriptors: _Descriptors
    ) -> None:
        self._file = file
        self._requests = requests
        self._count = count
        self._idle = idle
        self._descriptors: _Descriptors | None = descriptors

    def wait(self) -> None:
        """See :class:`Read`. What the library could not read, Python does, or says why it cannot."""
        self._await()
        short = [request for request in self._requests.items[: self._count] if request.return_value != request.nbytes]
        for request in short:
            got = max(request.return_value, 0)
            self._file.read_into([at_address(request.buf + got, request.nbytes - got)], request.offset + got)
        self.finish()

    def finish(self) -> None:
        """See :class:`Read`."""
        if self._descriptors:
            self._await()
            self._descriptors.readers -= 1
            self._descriptors = None
            self._idle.append(self._requests)

    def _await(self) -> None:
        addresses = self._requests.addresses
        for number in reversed(range(self._count)):  # the last one is done last, as a rule
            while posix_aio.error(addresses[number]) == EINPROGRESS:
                posix_aio.suspend(ctypes.addressof(addresses) + number * _POINTER, 1, None)


def _descriptor(file: Readable) -> int:
    assert file.descriptor is not None
    return file.descriptor


def at_address(pointer: int, nbytes: int) -> memoryview:
    """Return host memory as writable bytes; the caller keeps the memory mapped for as long as they are used."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")
