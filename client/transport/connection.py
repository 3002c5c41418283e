"""The connection to a broker: the one thread that owns the request socket and listens on the session socket.

The thread alone makes, uses and closes libzmq's objects. It numbers and sends requests, settles them with their
answers, receives descriptors, and passes the broker's notices on. Other threads only wake it.

libzmq aborts the process if it gets some of the descriptors, threads and memory that it needs, and then no more
(posix_assert in thread.cpp, 4.3.5). So the thread first allocates as many, and frees them again.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, get_native_id, main_thread

import zmq

from cubroker.client.fork_guard import SessionThread
from cubroker.client.notices import Notices
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.handshake import hang_up
from cubroker.client.transport.requests import RESEND, Future, Requests, read_notice
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Unavailable, explain
from cubroker.protocol.messages import Descriptors, Farewell, GatewayChanged, PoolLost
from cubroker.protocol.paths import REQUEST_SOCKET

BATCH = 256
"""The most answers that are read before requests are sent again."""

BATCH_BYTES = 1 << 20
"""The most bytes of these answers, not counting the last one."""

QUEUED = 32
"""Requests that libzmq queues for a gateway that does not read. Later requests wait in the outbox, and until it is
empty no request is sent a second time. A smaller number makes floods of requests slower: libzmq reports room only when
half of the queue was read. A larger one would keep more copies of a request for a gateway that is stopped."""

ZMQ_DESCRIPTORS = 8
"""Descriptors that libzmq opens for a context and its connection, and one more."""

ZMQ_THREADS = 2
"""Threads that libzmq starts with a context's first socket: one for I/O, and one that closes sockets."""

STACK = 8 << 20
"""Bytes of address space for the stack of a thread if RLIMIT_STACK sets no size."""

START_MEMORY = 4 << 20
"""Bytes that a thread and a connection allocate when they begin."""

THREAD_PATIENCE = 10.0
"""Seconds to wait for a thread to run. A thread that was started and has no memory to run in never does."""


class Waker:
    """Wakes the connection's thread, when it sleeps, from any other thread; harmless once closed.

    It has no lock: a signal handler that interrupts :meth:`set` may wait for the session's own threads, which call
    :meth:`set` too.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds = [self.fd]  # until it is closed
        #: Whether the thread sleeps; the thread alone sets it.
        self._asleep = True
        self._open = True
        #: One entry for each call that may be writing to the descriptor, and so keeps it open.
        self._writing: deque[None] = deque()

    def set(self) -> None:
        """Wake the thread, unless it is awake: then it looks for work before it sleeps."""
        if self._asleep:
            try:
                self._writing.append(None)  # inside the `try`: an interrupt can only come after the call
                if self._open:  # read last: either `close` sees the entry, or this line sees `close`
                    os.eventfd_write(self.fd, 1)
            finally:
                self._writing.pop()
                if not self._open:
                    self.close()

    def rest(self) -> None:
        """Note that the thread is about to sleep: it looks for work once more, and is woken for any later work."""
        self._asleep = True

    def rise(self, *, woken: bool) -> None:
        """Note that the thread is awake, ``woken`` by :meth:`set` or by something else."""
        if woken:
            os.eventfd_read(self.fd)
        self._asleep = False

    def close(self) -> None:
        """Close the descriptor; while calls of :meth:`set` are writing to it, the last of these closes it."""
        self._open = False
        if not self._writing:
            self.disown()

    def disown(self) -> None:
        """Close the descriptor, also in a forked child, where a thread that was writing to it does not exist."""
        self._open = False
        with suppress(IndexError):
            os.close(self._fds.pop())


class Connection:
    """A session's sockets and their thread, which closes the session socket ``channel`` and the ``waker``."""

    def __init__(
        self,
        channel: socket.socket,
        directory: Path,
        waker: Waker,
        requests: Requests,
        receiver: FdReceiver,
        notices: Notices,
    ) -> None:
        self._channel = channel
        self._directory = directory
        self._endpoint = f"ipc://{directory / REQUEST_SOCKET}"
        self._waker = waker
        self._requests = requests
        self._receiver = receiver
        self._notices = notices
        #: Why the session is over; empty while it lives, and when this process ended it.
        self.lost = ""
        self._stopping = False
        self._quiet = False
        self._failure: CubrokerError | None = None
        self._poller = zmq.Poller()
        self._poller.register(waker.fd, zmq.POLLIN)
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._ready: Future[None] = Future()
        #: Delivered at the end of the thread.
        self.ended: Future[None] = Future()
        self._begun = Lock()  # taken by the thread, or by a caller that closes everything in its place
        self._thread = SessionThread(target=self._run, name="cubroker-connection", daemon=True)

    def start(self) -> None:
        """Start the thread and return when it can send; raise an error that names the resource that it lacks."""
        with start_lock():
            try_memory(1)  # Thread.start() waits for ever for a thread without memory to run in
            self._thread.start()
        self._ready.result()

    def discard(self) -> None:
        """Undo a :meth:`start` that failed, was interrupted or was never called: close everything."""
        if self._begun.acquire(blocking=False):
            self._close()
        else:
            self.stop()
            self._thread.join()  # it polls the descriptors that would be closed

    def stop(self, *, quietly: bool = False) -> None:
        """Tell the thread to close everything; do not wait for it. ``quietly``: threads that wait are left waiting."""
        self._quiet = quietly
        self._stopping = True
        self._waker.set()

    def fail(self, reason: CubrokerError) -> None:
        """Have the session be lost, for a reason in this process; do not wait for that."""
        self._failure = reason
        self._waker.set()

    def join(self) -> None:
        """Wait for the thread, which has ``ended``."""
        self._thread.join()

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child, except libzmq's: its threads do not exist there."""
        self._channel.close()
        self._waker.disown()

    def _dial(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer
        dealer.linger = 0
        dealer.immediate = True  # while there is no gateway, requests wait in the outbox, not in libzmq as well
        dealer.sndhwm = QUEUED
        dealer.rcvhwm = 0
        dealer.maxmsgsize = wire.MAX_MESSAGE
        dealer.connect(self._endpoint)
        self._poller.register(dealer, zmq.POLLIN)

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        reason: CubrokerError = Unavailable("the thread of the connection to the broker has failed")
        try:
            reason = self._converse()
        except CubrokerError as error:
            reason = Unavailable(f"the broker on {self._directory} sent {error.message}")
        except (zmq.ZMQError, OSError, Shortage) as error:
            reason = Unavailable(f"no connection for requests to the broker on {self._directory}: {explain(error)}")
        finally:
            if self._ready.done() and not self._stopping:
                self.lost = reason.message  # set before the threads that wait are woken
            self._ready.fail(reason)
            self._requests.close(reason, quietly=self._quiet)
            if not self._quiet:
                self._receiver.fail(reason)
                self._notices.end(reason, lost=bool(self.lost))
            self._close()
            self.ended.set(None)

    def _close(self) -> None:
        self._waker.close()
        hang_up(self._channel)

    def _converse(self) -> CubrokerError:
        with ExitStack() as undo:
            with start_lock():
                _check_headroom()
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._dial(self._context.socket(zmq.DEALER))
            self._ready.set(None)
            return self._serve()

    def _serve(self) -> CubrokerError:
        while not (self._stopping or self._failure):
            self._send()  # what was posted before this thread could be woken for it
            ready = dict(self._poller.poll(int(RESEND * 1000) if self._requests.waiting() else None))
            self._waker.rise(woken=self._waker.fd in ready)
            if self._channel.fileno() not in ready:
                self._receiver.drained()
            elif reason := self._listen():
                return reason
            if self._dealer in ready:
                self._receive()
            self._requests.resend_overdue()
            self._send()
            self._waker.rest()  # from here on it is woken for everything, the end included
        return self._failure or Unavailable("the connection to the broker was closed by this process")

    def _listen(self) -> CubrokerError | None:
        try:
            data, descriptors = self._receiver.receive(self._channel)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            return Unavailable(f"the broker on {self._directory} is gone: the connection to it has ended")
        match read_notice(data):
            case None:
                self._receiver.close(descriptors)
            case Descriptors() as notice:
                self._receiver.put(notice, descriptors)
            case Farewell(reason):
                return Unavailable(f"the broker on {self._directory} is gone: {reason}")
            case GatewayChanged():
                self._redial()
            case notice:
                if isinstance(notice, PoolLost):
                    self._receiver.lose(notice)
                self._notices.hear(notice)
        return None

    def _redial(self) -> None:
        """Connect to the next gateway by a new socket: one that is disconnected still accepts requests, and loses them.

        If the process has no descriptor left for a new socket, reconnect the old one; the requests that it loses are
        sent again when they are overdue.
        """
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:
            self._dealer.disconnect(self._endpoint)
            self._dealer.connect(self._endpoint)
        else:
            self._poller.unregister(self._dealer)
            self._dealer.close()
            self._dial(dealer)
        self._requests.resend_all()

    def _receive(self) -> None:
        for data in self._read():
            answer = self._requests.read(data)
            if answer and (request := self._requests.answer(answer)):
                self._receiver.settled(request, answer.body)

    def _read(self) -> list[bytes]:
        """Return the answers that have arrived, up to the limits of a batch.

        All are read before any is settled: otherwise each answer would wake a thread, which runs before the next read.
        """
        found, room = list[bytes](), BATCH_BYTES
        while room > 0 and len(found) < BATCH:
            try:
                data = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if data:  # an empty message follows a large answer, so that the gateway's count of messages allows for it
                found.append(data)
                room -= len(data)
        return found

    def _send(self) -> None:
        self._requests.take()
        outbox = self._requests.outbox
        events = zmq.POLLIN
        while outbox:
            try:
                self._dealer.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                events |= zmq.POLLOUT
                break
            outbox.popleft()
        self._poller.register(self._dealer, events)


# -- headroom for libzmq -------------------------------------------------------------------------------
#
# No limit says how much of them there is: RLIMIT_NPROC counts all threads of a user and exempts root, pids.max counts
# those of a control group, and RLIMIT_AS depends on what malloc reserves for each new thread. So the same number of
# threads is started; all live at the same time and all end before libzmq starts its own. A thread that has returned,
# and even one that was joined, counts until the kernel has released it: then its entry in /proc is gone. glibc caches
# the stacks of threads that have ended and uses them again, so address space that other threads take in between does
# no harm. Sessions of one process start their threads one after the other. The remaining risk is a thread that
# something else starts at that moment, in this process or in another one of the user.


_start_lock = RLock()


def _renew() -> None:
    """Replace the lock in a forked child, where the thread that holds it does not exist."""
    global _start_lock
    _start_lock = RLock()


os.register_at_fork(after_in_child=_renew)


class Shortage(Exception):
    """The process, or its user, is short of descriptors, threads or memory; names the limits."""


def start_lock() -> RLock:
    """Return the lock that keeps other sessions of this process from starting threads.

    The holder waits for none of these sessions. This is a bare lock: an interrupt in the middle of a context manager
    that is written in Python would leave it taken.

    Raises:
        Shortage: this thread holds the lock: a signal handler or finalizer opens a session in the middle of another.
    """
    if _start_lock._is_owned():  # type: ignore[attr-defined]
        raise Shortage(
            "a signal handler or a finalizer cannot open a Broker while its thread is opening another; open it in other"
            " code"
        )
    return _start_lock


def try_memory(stacks: int) -> None:
    """Raise ``Shortage`` unless the process can map stacks of threads, and :data:`START_MEMORY` more bytes."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stacks_bytes = stacks * (STACK if stack == resource.RLIM_INFINITY else stack)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        # The first is mapped without access, like an unused stack: it counts as address space, not as memory.
        with mmap.mmap(-1, max(stacks_bytes, 1), private, prot=0), mmap.mmap(-1, START_MEMORY, private):
            pass
    except (OSError, MemoryError):
        raise Shortage(f"{(stacks_bytes + START_MEMORY) >> 20} MiB more memory are needed; {memory_limits()}") from None


def thread_limits() -> str:
    """Say what keeps this process from starting a thread: its own exit, or one of the limits."""
    if not main_thread().is_alive():  # hooks of `atexit` run
        return "the interpreter is exiting, and starts no threads any more: do this before its exit"
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    count = "sets no limit" if limit == resource.RLIM_INFINITY else f"is {limit}, for all threads of the user"
    return (
        f"RLIMIT_NPROC (ulimit -u) {count}; pids.max of the control group may be lower: raise the one that is reached"
    )


def memory_limits() -> str:
    """Say which limits may keep this process from mapping memory."""
    kinds = (("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS), ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA))
    limits = ((name, resource.getrlimit(kind)[0]) for name, kind in kinds)
    finite = [f"{name} is {limit >> 20} MiB" for name, limit in limits if limit != resource.RLIM_INFINITY]
    return f"{' and '.join(finite)}: raise that" if finite else "the system has no more"


def _check_headroom() -> None:
    """Raise ``Shortage`` if libzmq would get less than it needs for a context and its connection."""
    _try_descriptors()
    _try_threads()


def _try_descriptors() -> None:
    """Raise ``Shortage`` unless the process can open :data:`ZMQ_DESCRIPTORS` more."""
    with ExitStack() as opened:
        try:
            for _ in range(ZMQ_DESCRIPTORS):
                opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
        except OSError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise Shortage(
                f"{ZMQ_DESCRIPTORS} more descriptors are needed: {error.strerror}; raise RLIMIT_NOFILE (ulimit -n),"
                f" which is {limit}, or close files"
            ) from None


def _try_threads() -> None:
    """Raise ``Shortage`` unless the process can have :data:`ZMQ_THREADS` more at the same time, and memory for them."""
    running: SimpleQueue[int] = SimpleQueue()
    release = Lock()

    def stay() -> None:
        running.put(get_native_id())
        with release:
            pass

    started: list[int] = []
    try:
        with release:
            for _ in range(ZMQ_THREADS):
                try_memory(1)
                Thread(target=stay, name="cubroker-headroom", daemon=True).start()
                started.append(running.get(timeout=THREAD_PATIENCE))
            try_memory(ZMQ_THREADS)  # in case threading.stack_size() is less than the stacks of libzmq's threads
    except (MemoryError, Empty):
        raise Shortage(f"{ZMQ_THREADS} more threads have no memory to run in; {memory_limits()}") from None
    except RuntimeError:
        raise Shortage(f"{ZMQ_THREADS} more threads are needed; {thread_limits()}") from None
    finally:
        _await_release(started)


def _await_release(threads: Sequence[int]) -> None:
    """Wait until the kernel has released threads that are about to end."""
    deadline = time.monotonic() + THREAD_PATIENCE
    while any(os.path.lexists(f"/proc/self/task/{thread}") for thread in threads) and time.monotonic() < deadline:
        time.sleep(0.0001)
