"""The threads of a load or a comparison: how an interrupt of the caller ends them, and how they read chunks.

An interrupt of the caller stops the work without ever being raised inside it. Python delivers signals to the main
thread alone, where they can break even Python's own ``Thread.start``, ``Condition`` and executors. So the caller starts
all work with one call into C, and then only waits.

Chunks are read in the background: the C library's threads read files, Python's threads read anything else.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EINPROGRESS
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, ParamSpec, Self, TypeAlias, TypeVar, cast

from cubroker.client.fork_guard import OwnerProcess
from cubroker.client.loading.read_plan import Chunk, Readable
from cubroker.client.transport.connection import thread_limits
from cubroker.client.transport.requests import Future
from cubroker.protocol.errors import Unavailable

try:
    from concurrent.futures import ThreadPoolExecutor
except RuntimeError as error:  # it cannot be imported for the first time while the interpreter exits
    raise Unavailable(f"no threads to work in: {error}; {thread_limits()}") from error

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1
"""Seconds between reports of progress."""

AIO_PART = 1 << 20
"""The most bytes that a thread of the C library reads at a time. On a machine with an H200 and 32 cores, chunks of 16
such parts were read at 54 GB/s, as fast as a pinned copy, chunks of 8 at 45 to 50, and 16 parts of half the size at
25."""

USUAL_PARTS = 16
"""Parts of a chunk that has no gaps."""

USUAL_REQUESTS = 64
"""Requests that glibc allocates at first, by default and here; it allocates more when it needs them."""

MANY = 4
"""Pieces per part above which one read by Python is faster than the C library with a request for each piece."""

SMALL = 256 << 10
"""A chunk with fewer bytes is read in less time than it takes to hand it over to another thread."""

SPARE = 64
"""Descriptors that reads leave to the rest of the process, for example for the memory that is being loaded."""

MAX_AIO_THREADS = 20
"""The most threads of the C library, as in glibc's default. More were slower with one H200 and with two, on 32
cores."""

MIN_AIO_THREADS = 4

OTHER_CORES = 2
"""Cores that are left to the threads that copy. On a machine with an H200 and 16 cores, a load of 8 GB took 168 to 178
ms with 14 threads of the C library, 170 to 194 with 12, and 183 to 204 with 16, 18, 20 or 24."""

THREAD_PART = 4 << 20
"""The most bytes that a Python thread reads at a time. With 1 MiB all threads wait for the interpreter, and the rate
falls to a quarter."""

_LIO_READ, _LIO_NOWAIT, _SIGEV_NONE = 0, 1, 1
_POINTER = ctypes.sizeof(ctypes.c_void_p)

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""

P = ParamSpec("P")
T = TypeVar("T")


def drain(todo: deque[T], do: Callable[[T], None]) -> None:
    """Call ``do`` with one item after the other until none is left; an error drops the items of all threads."""
    try:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                break
            do(item)
    finally:
        todo.clear()


class WorkerThreads(ThreadPoolExecutor):
    """Threads that share some work. If a thread cannot start, ``stop`` is called, so that the others end."""

    def __init__(self, count: int, name: str, stop: Callable[[], object]) -> None:
        super().__init__(count, name)
        self._name = name
        self._stop = stop

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Have a thread call ``fn``; raises ``Unavailable`` if no thread can start."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            self._stop()
            raise _no_thread(self._name, error) from error


class SupervisedThread(ABC, Generic[T]):
    """A thread whose work may use objects that an interrupt could break.

    Its caller calls :meth:`begin` within a ``with`` block, which ends with :meth:`end`.
    """

    def __init__(self, name: str) -> None:
        #: Whether the caller no longer wants the result.
        self.dropped = False
        self._owner = OwnerProcess()
        self._name = name
        self._started = False
        self._begun = False
        self._done: Future[None] = Future()
        self._over: Future[None] = Future()
        self._value: T | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @abstractmethod
    def work(self) -> T:
        """Do the work, on the thread."""

    @abstractmethod
    def stop(self) -> None:
        """Make the work end early: called in the caller's thread, at any time, also when it is done."""

    def clean(self) -> None:
        """Clean up, on the thread, after the result was handed over; raises nothing."""

    def begin(self) -> None:
        """Start the thread, unless that was done; raises ``Unavailable`` if it is certain that threads have run out."""
        if self._started:
            return
        self._started = True
        try:
            start_new_thread(self._start, ())
        except RuntimeError as error:
            raise _no_thread(self._name, error) from error

    def result(self, report: Callable[[], None] | None = None) -> T:
        """Return the value of the work, or raise its error, or ``Unavailable`` if threads have run out.

        ``report`` is called by this thread, now and then, and once more when the work is done.
        """
        while not self._done.wait(REPORT_SECONDS if report else None):
            if report:
                report()
        if self._error:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this object
        if report:
            report()
        return cast(T, self._value)

    def drop(self) -> None:
        """Stop the work and wait until it has ended; an interrupt of this wait is raised only then."""
        self._leave(self._done)

    def end(self) -> None:
        """Do the same, and wait for ``clean`` as well. In a forked child there is nothing to end."""
        self._leave(self._over)
        self._error = None  # of work whose result is not wanted any more

    def _leave(self, future: Future[None]) -> None:
        if not self._owner.here():  # a forked child does not have the thread
            return
        self.dropped = True
        self.stop()
        interrupt: BaseException | None = None
        while self._begun and not future.done():
            try:
                future.wait()
            except BaseException as error:  # noqa: BLE001  a signal handler may raise any
                interrupt = error
        try:
            if interrupt:
                raise interrupt
        finally:
            del interrupt  # its traceback has this frame

    def _start(self) -> None:
        try:
            Thread(target=self._run, name=self._name, daemon=False).start()
        except RuntimeError as error:
            self._error = _no_thread(self._name, error)
            self._done.set(None)
            self._over.set(None)

    def _run(self) -> None:
        self._begun = True
        try:
            if not self.dropped:  # `_leave` sets it and then reads `_begun`: at least one sees the other's
                self._value = self.work()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            self._error = error
        self._done.set(None)
        try:
            self.clean()
        finally:
            self._over.set(None)


def _no_thread(name: str, error: RuntimeError) -> Unavailable:
    return Unavailable(f"{name} has no threads to work in: {error}; {thread_limits()}")


# -- reads ---------------------------------------------------------------------------------------------
#
# POSIX AIO (``aio(7)``) reads the parts of a chunk in parallel, in up to 20 threads that never need Python's
# interpreter. The thread that asks for 16 MiB makes two calls in place of eight reads, and spends the rest of its time
# on the devices, if the readers leave it a core.
#
# glibc serialises requests that share a descriptor, so each part of a chunk has a descriptor of its own: a duplicate,
# which stays valid when the file is closed. A chunk of many small pieces would need a request for each piece, so
# Python's threads read it, with one call for each part. Python's threads also read files if the C library is not glibc,
# whose structs are declared here, and in a forked child whose parent has used AIO: glibc does not notice that its
# threads do not exist in the child, which would wait for ever.


ChunkRead: TypeAlias = "ThreadRead | AioRead"
"""A read in progress."""

Reads: TypeAlias = "Readers | AioReads"
"""What a thread has chunks read by; it waits for each read."""


def reads_of(files: Sequence[Readable], readers: Readers) -> Callable[[], Reads]:
    """Return a factory of ``Reads``, one for each thread that reads some of these files."""
    if reads_in_c(files):
        return lambda: AioReads(readers)
    return lambda: readers


def reads_in_c(files: Sequence[Readable]) -> bool:
    """Whether the C library reads these files, except chunks of many pieces."""
    return posix_aio.usable and all(file.descriptor is not None for file in files)


def has_many_pieces(chunk: Chunk) -> bool:
    """Whether Python's threads read a chunk of a file faster than the C library, which needs a request per piece."""
    return len(chunk.pieces) > MANY * USUAL_PARTS


def at_address(pointer: int, nbytes: int) -> memoryview:
    """Return host memory as writable bytes; the caller keeps the memory mapped for as long as they are used."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")


# -- reads by Python's threads -------------------------------------------------------------------------


class Readers:
    """Python threads that read parts, for all reads of a copy.

    ::

        readers = Readers()
        with readers.at_work(pool.submit, 8):
            read = readers.start(file, chunk, pointer)
    """

    def __init__(self) -> None:
        self._parts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        #: Whether threads are reading.
        self.working = False

    @contextmanager
    def at_work(self, submit: Callable[..., Any], count: int) -> Iterator[None]:
        """Have ``count`` threads read in a ``with`` block; ``submit`` has a thread call a function.

        All threads start when the block is entered: Python starts none once the program's main thread has ended.
        """
        try:
            for _ in range(count):
                submit(self._work)
            self.working = count > 0
            yield
        finally:
            self.working = False
            for _ in range(count):
                self._parts.put(None)

    def start(self, file: Readable, chunk: Chunk, pointer: int) -> ThreadRead:
        """Begin to read a chunk into its image in host memory at ``pointer``.

        The caller reads a small chunk itself: to hand it over would take longer.
        """
        read = ThreadRead()
        try:
            for offset, pieces in chunk.parts(THREAD_PART):
                buffers = [at_address(pointer + place, count) for place, count in pieces]
                if self.working and chunk.nbytes >= SMALL:
                    read.parts.append(self._read(file, buffers, offset))
                else:
                    file.read_into(buffers, offset)
        except BaseException:
            read.finish()
            raise
        return read

    def close(self) -> None:
        """Do nothing: the threads end with :meth:`at_work`."""

    def _read(self, file: Readable, buffers: list[memoryview], offset: int) -> futures.Future[None]:
        """Queue a read and return its future."""
        done: futures.Future[None] = futures.Future()

        def read() -> None:
            try:
                file.read_into(buffers, offset)
            except BaseException as error:  # noqa: BLE001  the thread that waits raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._parts.put(read)
        return done

    def _work(self) -> None:
        while (read := self._parts.get()) is not None:
            read()


class ThreadRead:
    """A read by Python's threads."""

    def __init__(self) -> None:
        self.parts: list[futures.Future[None]] = []

    def wait(self) -> None:
        """Wait until the chunk is read; raise the file's error if it cannot be read."""
        self.finish()
        for part in self.parts:
            part.result()

    def finish(self) -> None:
        """Wait until nothing is written to the image any more, also if the read failed."""
        futures.wait(self.parts)


# -- reads by the C library's threads ------------------------------------------------------------------


class AioReads:
    """Reads by the C library's threads; ``others`` reads what these cannot read, or would read more slowly.

    Chunks of one file that are read at the same time share descriptors: each part waits for the part at the same index
    of the chunk before it.
    """

    def __init__(self, others: Readers) -> None:
        self._others = others
        self._descriptors: list[_Descriptors] = []
        self._idle: list[_Requests] = []

    def start(self, file: Readable, chunk: Chunk, pointer: int) -> ChunkRead:
        """See :class:`Readers`."""
        parts = [] if has_many_pieces(chunk) else [*chunk.parts(AIO_PART)]
        descriptors = self._descriptors_of(file, len(parts)) if parts else None
        if descriptors is None:
            return self._others.start(file, chunk, pointer)
        count = sum(len(pieces) for _, pieces in parts)
        requests = self._requests(count)
        items = iter(requests.items)
        for descriptor, (offset, pieces) in zip(descriptors.numbers, parts, strict=False):
            for (place, nbytes), request in zip(pieces, items, strict=False):
                request.fildes, request.buf = descriptor, pointer + place
                request.nbytes, request.offset = nbytes, offset
                # A request that the library rejects, for want of memory or threads, stays so: `wait` reads all of it.
                request.error_code = request.return_value = 0
                offset += nbytes
        descriptors.readers += 1
        posix_aio.begin()
        posix_aio.submit(_LIO_NOWAIT, requests.addresses, count, None)
        return AioRead(file, requests, count, self._idle, descriptors)

    def close(self) -> None:
        """Close the descriptors; all reads are finished."""
        while self._descriptors:
            self._descriptors.pop().close()

    def _descriptors_of(self, file: Readable, count: int) -> _Descriptors | None:
        """Return at least ``count`` descriptors of a file; None if there cannot be so many."""
        found = next((each for each in self._descriptors if each.file is file), None)
        if found is None:
            found = next((each for each in self._descriptors if not each.readers), None)
            if found is None:
                found = _Descriptors()
                self._descriptors.append(found)
            try:
                found.reopen(file)
            except OSError:
                return None
        return found if found.extend(count) else None

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
        """See :class:`ThreadRead`. This thread reads what the library could not read, or raises the file's error."""
        self._await()
        short = [request for request in self._requests.items[: self._count] if request.return_value != request.nbytes]
        for request in short:
            got = max(request.return_value, 0)
            self._file.read_into([at_address(request.buf + got, request.nbytes - got)], request.offset + got)
        self.finish()

    def finish(self) -> None:
        """See :class:`ThreadRead`."""
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


class _Requests:
    """Requests for the parts of a chunk, as C structs; reused, since they take long to make."""

    def __init__(self, count: int) -> None:
        self.items = [_Request(lio_opcode=_LIO_READ, sigev_notify=_SIGEV_NONE) for _ in range(count)]
        self.addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, self.items))


@dataclass(slots=True)
class _Descriptors:
    """Duplicates of a file's descriptor: one for each part of a chunk."""

    file: Readable | None = None
    #: how many reads in progress use them
    readers: int = 0
    numbers: list[int] = field(default_factory=list)

    def reopen(self, file: Readable) -> None:
        """Make all of them duplicates of this file's descriptor; raises ``OSError``."""
        self.file = None
        for number in self.numbers:
            os.dup2(_descriptor(file), number, inheritable=False)
        self.file = file

    def extend(self, count: int) -> bool:
        """Make duplicates until there are ``count``; return False if that would leave the process too few others."""
        assert self.file
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with suppress(OSError):
            while len(self.numbers) < count:
                number = os.dup(_descriptor(self.file))  # the lowest free number: all below it are in use
                if number + SPARE >= limit != resource.RLIM_INFINITY:
                    os.close(number)
                    break
                self.numbers.append(number)
        return len(self.numbers) >= count

    def close(self) -> None:
        """Close them."""
        while self.numbers:
            try:
                os.close(self.numbers.pop())
            except OSError as error:  # from a network file system; the descriptor is closed nevertheless
                log.warning("a checkpoint was read, but closing it failed: %s", error)


def _descriptor(file: Readable) -> int:
    assert file.descriptor is not None
    return file.descriptor


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


class _Limits(ctypes.Structure):
    """``struct aioinit`` of glibc; names without the prefix ``aio_``. An idle time of zero keeps the default."""

    _fields_ = (
        ("threads", ctypes.c_int),
        ("num", ctypes.c_int),
        ("unused", ctypes.c_int * 4),
        ("idle_time", ctypes.c_int),
        ("reserved", ctypes.c_int),
    )


class PosixAio:
    """The C library's calls, and whether they can be used."""

    def __init__(self) -> None:
        #: Whether this process, or one that it was forked from, has read with AIO.
        self.used = False
        self.usable = _is_glibc() and _POINTER == 8
        if self.usable:
            try:
                # Since 2.34 glibc itself has these calls. The short call keeps the interpreter lock, to save time.
                library, short = ctypes.CDLL("librt.so.1"), ctypes.PyDLL("librt.so.1")
                self.submit, self.suspend, self.error = library.lio_listio, library.aio_suspend, short.aio_error
                self._limit = library.aio_init
            except (OSError, AttributeError):
                self.usable = False
                return
            self.submit.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            self.suspend.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            self.error.argtypes = (ctypes.c_void_p,)
            self._limit.argtypes = (ctypes.POINTER(_Limits),)
            os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        """Note that this process reads with AIO; before the first read, limit the number of threads.

        The limit has no effect if something else in the process has called ``aio_init`` or has read with AIO before.
        """
        if not self.used:  # two threads may set the limit, but none reads before it is set
            cores = len(os.sched_getaffinity(0))
            threads = min(max(cores - OTHER_CORES, MIN_AIO_THREADS), MAX_AIO_THREADS)
            self._limit(_Limits(threads=threads, num=USUAL_REQUESTS))
            self.used = True

    def _forked(self) -> None:
        self.usable = self.usable and not self.used


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


posix_aio = PosixAio()
