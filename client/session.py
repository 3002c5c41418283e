"""One process's session with a broker: its connection, its threads, its leases, and their common end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import socket
from threading import RLock, current_thread
from typing import Any, TypeVar

from cubroker.client import devices, headroom, processes
from cubroker.client.connection import Connection, Waker
from cubroker.client.descriptors import Inbox
from cubroker.client.futures import Future
from cubroker.client.hello import greet
from cubroker.client.janitor import Guard, Janitor, OwnThread, Task
from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.client.rebinding import Rebinding
from cubroker.client.recall import Recall
from cubroker.client.requests import INSTEAD, INTRUDER, Requests, expect
from cubroker.client.signals import Grip, Signal
from cubroker.client.watch import Watch, Watches
from cubroker.driver import Driver
from cubroker.protocol.authentication import Bearer, authentication
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.messages import Attach, Attached, Create, Created, Done, Find, Found, PoolLost, Reply, Request
from cubroker.protocol.system_errors import explain

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply)
T = TypeVar("T")

EXIT = 1.0
"""Seconds that the interpreter's exit waits for each thread."""


class Losses:
    """Versions whose memory went with an earlier broker, while somebody here has leases of them."""

    def __init__(self) -> None:
        self._why: dict[tuple[str, int], str] = {}

    def note(self, loss: PoolLost) -> None:
        """Take note of one. Runs on the connection's thread."""
        self._why[loss.name, loss.version] = loss.why
        log.warning(
            "pool %r version %d is lost: %s; give it back, and attach to the next", loss.name, loss.version, loss.why
        )

    def why(self, name: str, version: int) -> str:
        """Return how a version was lost; nothing if it was not."""
        return self._why.get((name, version), "")


class Session:
    """What a :class:`Broker` and its pools share. It ends when the Broker is closed and the last lease given back.

    Args:
        directory: the broker's.
        timeout: seconds that the broker may take to answer, beyond what a request itself may wait.
        connect_timeout: seconds that it may take to open the session.

    Raises:
        Unavailable: nobody serves there, or this process is short of descriptors, threads or memory.
    """

    def __init__(self, directory: Path, timeout: float, connect_timeout: float) -> None:
        self.directory = directory = directory.absolute()  # of a process that may change its own
        self.timeout = timeout
        self.owner = processes.Owner()
        self._lock = RLock()  # a finalizer may come into the middle
        self._loans: set[Loan | Signal] = set()
        self._leaving = False
        self.closed = False
        self.stopped = False
        self.fabric = True  # until a fabric handle was refused; from then on descriptors take their place
        self._left: Future[bool] = Future()
        try:
            channel, welcome = greet(directory, connect_timeout)
            self.id = welcome.session
            self.version = welcome.version
            self._spec = welcome.driver
            self.uid = welcome.uid
            self._begin(channel, authentication(welcome.version, welcome.session, welcome.secret))
        except (OSError, RuntimeError, MemoryError, headroom.Shortage) as error:
            reason = f"no connection for requests to the broker on {directory}: {_shortage(error)}"
            raise Unavailable(reason) from error
        processes.register(self)

    def _begin(self, channel: socket, proof: Bearer) -> None:
        """Start the threads, which own the connection from then on; or leave nothing."""
        with ExitStack() as undo:
            undo.callback(channel.close)
            waker = Waker()
            undo.callback(waker.close)
            self.requests = Requests(proof, self.owner, waker.set)
            self.watches = Watches(self.requests, self._lock)
            self.losses = Losses()
            self.inbox = Inbox()
            self.janitor = Janitor()
            undo.callback(self.janitor.stop)
            with headroom.turn():
                # For both threads: Thread.start() waits for ever for one that has no memory to run.
                headroom.try_memory(2)
                self.janitor.start()
            self.recall = Recall(self.directory, self._loans)
            rebinding = Rebinding(self._loans, self._lock, self.inbox, self.janitor)
            self._connection = Connection(
                channel,
                self.directory,
                waker,
                self.requests,
                self.inbox,
                self.watches.changed,
                rebinding.begin,
                self.losses.note,
                self.recall.tell,
                _losing(self.watches, self.recall, rebinding),
            )
            undo.callback(self._connection.discard)
            # Should an interrupt come before anybody has this object, then its threads end with it.
            self.janitor.guard(self, _stopping(self._connection, self.janitor))
            self._connection.start()
            undo.pop_all()

    @property
    def driver(self) -> Driver:
        """This process's driver for the broker's devices, loaded on first use."""
        self.owner.check()
        return devices.driver(self._spec)

    def check_open(self) -> None:
        """Raise ``Unavailable`` if the Broker is closed: arrays that still live keep the connection, for themselves."""
        if self.closed or self._leaving:
            raise Unavailable("this Broker is closed; open another")

    def check_may_wait(self) -> None:
        """Raise ``Unavailable`` where a finalizer or a signal handler would wait for itself.

        That is on a session's own threads, and in the middle of what these wait for: a request, a driver call, a fork.
        """
        self.requests.check_free()
        locks = self._lock, processes.unforked()
        if any(lock._is_owned() for lock in locks) or devices.in_call(self._spec):  # type: ignore[attr-defined]
            raise Unavailable(
                f"called by {INTRUDER} in the middle of a call that this thread has to go on with first; {INSTEAD}"
            )
        if isinstance(current_thread(), OwnThread):
            raise Unavailable("called by a finalizer on a session's own thread, which cannot wait for the answer")

    def ask(self, body: Request, kind: type[R]) -> R:
        """Send a request and wait for its answer, which is a ``kind``."""
        self.owner.check()
        self.check_open()
        reply = self.wait(self.requests.submit(body), type(body).__name__, 0.0)
        return expect(reply, kind)

    def borrow(self, body: Attach | Create, loan: Loan) -> tuple[Loan, Attached | Created, Mapped]:
        """Ask for a lease and map its memory. If the caller gives up, by time or by interrupt, it is given back."""
        self.owner.check()
        future = None
        try:
            with self._lock:
                self.check_open()
                self._loans.add(loan)
            future = loan.ask(body)
            return loan, *self.wait(future, type(body).__name__, body.wait)
        except BaseException:
            loan.abandon(Unavailable("nobody waits for it"))
            if future:
                future.abandon()  # the memory may have come in the meantime, and this traceback may live long
            if not loan.asked:
                self.forget(loan)
            raise

    def carry(self, signal: Signal) -> Grip:
        """Have an event made or opened. If the caller gives up, by time or by interrupt, it is closed."""
        self.owner.check()
        future = signal.future
        assert future is not None
        try:
            with self._lock:
                self.check_open()
                self._loans.add(signal)
            self.janitor.put(signal.begin)
            return self.wait(future, signal.request, 0.0)
        except BaseException:
            signal.abandon(Unavailable("nobody waits for it"))
            future.abandon()
            self.janitor.put(signal.begin)  # if that did not happen above
            raise

    def watch(self, name: str, owners: tuple[int, ...] = ()) -> Watch:
        """Watch a pool; with ``owners`` it counts only while it is one of theirs, or this user's."""
        self.owner.check()
        self.check_open()
        find = (lambda: self.ask(Find(name, owners), Found).version) if owners else None
        watch = Watch(name, self.watches, self.owner, find)
        try:
            expect(self.wait(self.watches.add(watch), "Watch", 0.0), Done)
        except BaseException:
            self.watches.remove(watch)
            raise
        return watch

    def forget(self, loan: Loan | Signal) -> None:
        """A loan or an event is over."""
        with self._lock:
            self._loans.discard(loan)
            ended = self._leaving and not self._loans
        if ended:
            self._stop()

    def leave(self) -> None:
        """Give up what is being asked for, and end the session with its last lease. Runs on the janitor's thread."""
        with self._lock:
            self._leaving = True
            loans = list(self._loans)
        for waits in (self.watches, self.recall):
            waits.fail(Unavailable("this Broker was closed"))
        for loan in loans:
            loan.abandon(Unavailable("this Broker was closed while it waited"))
        if not loans:
            self._stop()
        self._left.set(not loans)

    def end(self, guard: Guard[Any]) -> None:
        """Have the janitor :meth:`leave`, as ``guard`` says, and wait for the end if no lease is left to wait for."""
        self.janitor.put(guard)
        with suppress(Unavailable):
            self.check_may_wait()
            if not self.stopped and self._left.result(self.timeout):
                self.join(self.timeout)

    def stop(self) -> None:
        """The interpreter exits: end the threads and the connection, within a bounded time.

        What is mapped stays mapped, and daemon threads that wait are left to end with the process, without a word.
        """
        if self.owner.here():
            self.stopped = True
            self._connection.stop(quietly=True)
            self.janitor.stop()
            self.join(EXIT)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, up to ``timeout`` seconds each."""
        self._connection.join(timeout)
        self.janitor.join(timeout)

    def disown(self) -> None:
        """In a forked child: close what was inherited."""
        self._connection.disown()
        self.inbox.disown()

    def _stop(self) -> None:
        self._connection.stop()
        self.janitor.stop()

    def wait(self, future: Future[T], request: str, wait: float) -> T:
        """Wait for what the broker answers to a request that it may let wait for ``wait`` seconds."""
        self.check_may_wait()
        limit = self.timeout + wait
        if not future.wait(limit):
            raise TimedOut(f"the broker on {self.directory} did not answer the request {request} within {limit:g} s")
        return future.result()


def _shortage(error: Exception) -> str:
    """Return what kept a session from beginning; with the limits, where threads or memory have run out."""
    match error:
        case RuntimeError():
            return f"{error}; {headroom.thread_limits()}"
        case MemoryError():
            return f"no memory is left; {headroom.memory_limits()}"
    return explain(error)


def _losing(*waits: Watches | Recall | Rebinding) -> Callable[[CubrokerError], None]:
    """Return what tells those who wait for news that there will be none, and does not refer to their session."""

    def lose(error: CubrokerError) -> None:
        for each in waits:
            each.fail(error)

    return lose


def _stopping(connection: Connection, janitor: Janitor) -> Task:
    """Return what stops both threads, and does not refer to their session."""

    def stop() -> None:
        connection.stop()
        janitor.stop()

    return stop
