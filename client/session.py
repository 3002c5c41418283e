"""One process's session with a broker: what its threads share, how it begins, receives notices, and ends.

A session has two threads of its own. The *connection's* thread (:mod:`.transport.connection`) owns the sockets: it
numbers and sends requests, settles them, and receives descriptors. The *cleanup* thread (:mod:`.cleanup_thread`) maps
and unmaps memory. All other threads are *callers*: they post requests, leave tasks for the cleanup thread, and wait on
futures. An interrupt or a time limit can only hit a caller, so no caller's frame owns a lease or an event: a
:class:`Holding` object does, and gives back what arrives after its caller has left.
"""

from __future__ import annotations

import atexit
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import RLock, current_thread
from time import monotonic
from typing import ClassVar, Generic, TypeVar

from cubroker.client import devices
from cubroker.client.cleanup_thread import CleanupThread, Guard
from cubroker.client.fork_guard import Closeable, NotPicklable, OwnerProcess, SessionThread, WeakRefs, fork_lock
from cubroker.client.notices import Count, DrainState, Notices, Rebindable, Watch, Watcher, Watches
from cubroker.client.transport.connection import (
    Connection,
    Shortage,
    Waker,
    memory_limits,
    start_lock,
    thread_limits,
    try_memory,
)
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.handshake import greet, until_served
from cubroker.client.transport.requests import Future, Requests, Steps, expect, run, seconds
from cubroker.driver import Driver
from cubroker.protocol.errors import CubrokerError, Retired, TimedOut, Unavailable, Unsupported, explain
from cubroker.protocol.messages import (
    ENDS,
    Describe,
    Description,
    Done,
    Find,
    Found,
    ListPools,
    Pools,
    Reply,
    Request,
)
from cubroker.protocol.paths import absolute, find_directory
from cubroker.protocol.wire import authentication

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply)
T = TypeVar("T")

FAILED = "the thread that maps and unmaps memory has failed"

EXIT = 1.0
"""Seconds that the interpreter's exit waits for each thread."""

SESSIONS: WeakRefs[ClientSession] = WeakRefs()
"""The sessions of this process."""


class Holding:
    """A lease, an event or a lock of a session: requested, held, or being given back."""

    def abandon(self, reason: CubrokerError) -> None:
        """Give it back when it arrives: its caller no longer waits, for ``reason``. No effect once it has arrived."""


class Asked(Holding, Generic[T]):
    """What a caller has requested, until it is handed over."""

    def __init__(self) -> None:
        #: Delivers the value; None afterwards: the value ends with the last reference to it, so none may stay here.
        self.future: Future[T] | None = Future()
        #: Whether no caller waits for it.
        self.abandoned = False

    def abandon(self, reason: CubrokerError) -> None:
        """See :meth:`Holding.abandon`."""
        self.abandoned = True
        if future := self.future:
            future.abandon()
            future.fail(reason)

    def hand_over(self, box: list[T]) -> None:
        """Deliver the value in the box to the caller, and empty the box."""
        future, self.future = self.future, None
        assert future is not None
        future.take(box)

    def fail(self, error: CubrokerError) -> None:
        """Deliver an error to the caller."""
        if future := self.future:
            future.fail(error)


class Resource(Asked[T], ABC):
    """An event or a lock of a session, obtained on the cleanup thread; it ends with the last reference to its value."""

    #: The name of the request that obtains it.
    request: ClassVar[str]

    def __init__(self, session: ClientSession, label: str) -> None:
        super().__init__()
        #: Its name in messages.
        self.label = label
        self._session = session
        self._guard: Guard[T] | None = None
        self._ended: Future[None] = Future()

    def obtain(self, wait: float = 0.0) -> Steps[T]:
        """Request it, and wait. If the caller stops waiting, by time or by interrupt, it is given back."""
        return self._session.obtain(self, self._put, self.request, wait)

    def abandon(self, reason: CubrokerError) -> None:
        """See :meth:`Holding.abandon`. A request that was not begun ends without being sent."""
        super().abandon(reason)
        self._put()

    @property
    def ending(self) -> bool:
        """Whether it was handed over, and nothing refers to it any more."""
        return self._guard is not None and self._guard() is None

    def confirm(self) -> Steps[None]:
        """Wait until the broker has confirmed the end of an event or lock that is ending."""
        with suppress(Unavailable):  # a broker that is gone confirms nothing
            yield from self._session.confirm(self._ended, self.label)

    @abstractmethod
    def begin(self) -> None:
        """Obtain it, unless that was begun before; or end it, if it was abandoned. On the cleanup thread."""

    def _put(self) -> None:
        self._session.cleanup.put(self.begin)

    def _guarded(self, make: Callable[[], T], end: Callable[[], None]) -> None:
        """Make the value and hand it over; ``end`` is called on the cleanup thread after the last reference to it."""
        box = [make()]
        self._guard = self._session.cleanup.guard(box[0], end)
        self.hand_over(box)


class ClientSession:
    """A :class:`Broker`'s session. It ends when the Broker is closed and the last lease given back.

    Its arguments and errors are those of :class:`Broker`.
    """

    def __init__(self, directory: Path, timeout: float, connect_timeout: float) -> None:
        self.directory = directory.absolute()  # this process may change its working directory
        self.timeout = timeout
        self.owner = OwnerProcess()
        #: Whether this process can open fabric handles; after the first refusal it asks for descriptors instead.
        self.fabric = True
        #: Whether the Broker was closed.
        self.closed = False
        #: Whether the interpreter exits.
        self.stopped = False
        #: Leases, events and locks, from their request to their end.
        self.held: set[Holding] = set()
        #: What leases have mapped to store to all replicas.
        self.rebindable: WeakRefs[Rebindable] = WeakRefs()
        #: Versions whose memory was lost with an earlier broker, and why.
        self.losses: dict[tuple[str, int], str] = {}
        self.cleanup = CleanupThread()
        self.receiver = FdReceiver()
        self.drain_state = DrainState(self.directory, self.held)
        self._leaving = False
        self._left: Future[bool] = Future()
        try:
            self._begin(connect_timeout)
        except (OSError, RuntimeError, MemoryError, Shortage) as error:
            reason = f"no connection for requests to the broker on {self.directory}: {shortage(error)}"
            raise Unavailable(reason) from error
        SESSIONS.add(self)

    def _begin(self, timeout: float) -> None:
        """Greet the broker and start the threads, which own the connection from then on; on failure leave nothing."""
        channel, welcome = greet(self.directory, timeout)
        with ExitStack() as undo:
            undo.callback(channel.close)
            #: The session's number.
            self.id = welcome.session
            #: The protocol version that was agreed.
            self.version = welcome.version
            #: The user that the broker runs as; None for a broker that is too old to say so.
            self.uid = welcome.uid
            self._spec = welcome.driver
            waker, cleanup = Waker(), self.cleanup
            undo.callback(waker.close)
            secret = authentication(welcome.version, welcome.session, welcome.secret)
            self.requests = Requests(secret, self.owner, waker.set)
            self.watches = Watches(self.requests)
            undo.callback(cleanup.stop)
            with start_lock():
                # For both threads: Thread.start() waits for ever for a thread without memory to run in.
                try_memory(2)
                cleanup.start()
            notices = Notices(
                self.watches, self.drain_state, self.losses, self.held, self.rebindable, self.receiver, cleanup
            )
            connection = Connection(channel, self.directory, waker, self.requests, self.receiver, notices)
            self._connection = connection
            undo.callback(connection.discard)
            #: Made in advance: there may be no memory when it is needed.
            failure = Unavailable(f"{FAILED}, as its traceback says")
            cleanup.on_failure = partial(_give_up, connection, self._left, self.held, failure)

            def stop() -> None:  # refers to no session
                connection.stop()
                cleanup.stop()

            # If an interrupt comes before the caller has this object, the threads end with the object.
            cleanup.guard(self, stop)
            connection.start()
            undo.pop_all()

    @property
    def driver(self) -> Driver:
        """This process's driver for the broker's devices, loaded on first use."""
        self.owner.check()
        return devices.driver(self._spec)

    # -- on callers' threads -----------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """Why the session is over; empty while it lives, and when this process ended it."""
        return self._connection.lost

    def check_open(self) -> None:
        """Raise ``Unavailable`` if the Broker is closed, even if arrays that still live keep the connection open."""
        if self.lost and not self.closed:
            raise Unavailable(f"{self.lost}; Broker.reconnect() opens another session when a broker serves again")
        if self.closed or self._leaving:
            raise Unavailable("this Broker is closed; open another")

    def require(self, since: int, asked: str, what: str, instead: str = "") -> None:
        """Raise ``Unsupported`` if the broker is too old to do ``what``, which protocol version ``since`` has."""
        if self.version < since:
            todo = f"upgrade it, or {instead}" if instead else "upgrade it"
            raise Unsupported(f"{asked}: the broker is too old to {what}; {todo}")

    def check_may_wait(self) -> None:
        """Raise ``Unavailable`` if a finalizer or a signal handler would wait for itself.

        That is so on a session's own threads, and inside a driver call or a fork, for which these threads may wait.
        """
        if fork_lock._is_owned() or devices.in_call(self._spec):  # type: ignore[attr-defined]
            raise Unavailable(
                "called by a finalizer or a signal handler while this thread is inside a driver call or a fork, which"
                " has to finish first; call again afterwards, or from another thread"
            )
        if isinstance(current_thread(), SessionThread):
            raise Unavailable("called by a finalizer on a session's own thread, which cannot wait for the answer")

    def check_confirms(self) -> None:
        """Raise ``Unavailable`` if this thread cannot wait for the end of what it gives back."""
        if self.stopped:
            raise Unavailable("the interpreter exits, and what is held ends with this process")
        self.check_may_wait()

    def ask(self, body: Request, kind: type[R]) -> Steps[R]:
        """Send a request and wait for its answer, which is a ``kind``."""
        self.owner.check()
        self.check_open()
        reply = yield from self.wait(self.requests.submit(body), type(body).__name__, 0.0)
        return expect(reply, kind)

    def wait(self, future: Future[T], request: str, wait: float) -> Steps[T]:
        """Wait for the answer to a request, which the broker may delay for ``wait`` seconds."""
        self.check_may_wait()
        limit = self.timeout + wait
        if not (yield future, limit):
            raise TimedOut(f"the broker on {self.directory} did not answer the request {request} within {limit:g} s")
        return future.result()

    def obtain(self, asked: Asked[T], begin: Callable[[], None], request: str, wait: float) -> Steps[T]:
        """Note what is requested, call ``begin`` to obtain it, and wait; if the caller gives up, it is given back."""
        future = asked.future
        assert future is not None
        self.owner.check()
        try:
            self.held.add(asked)
            self.check_open()  # after the line above: either `end` sees `asked`, or this line sees `end`
            begin()
            value = yield from self.wait(future, request, wait)
            future.abandon()  # the thread that delivered the value may refer to the future for some time
            return value
        except BaseException:
            asked.abandon(Unavailable("no caller waits for it"))
            future.abandon()  # the value may have arrived in the meantime, and this traceback may live long
            raise

    def confirm(self, ended: Future[T], label: str) -> Steps[T]:
        """Wait until the broker has taken back what ``label`` names; return its answer, or raise its error."""
        self.check_confirms()
        if self.cleanup.failed and not ended.done():
            raise Unavailable(f"{label} is not given back before this process ends: {FAILED}")
        if not (yield ended, self.timeout):
            raise TimedOut(f"the broker has not confirmed the end of {label} in {self.timeout:g} s")
        return ended.result()

    def watch(self, name: str, owners: tuple[int, ...] = (), timeout: float | None = None) -> Steps[Watch]:
        """Watch a pool; with ``owners``, count only versions of pools that belong to one of them, or to this user."""
        self.owner.check()
        self.check_open()
        find = partial(self.ask, Find(name, owners), Found) if owners else None
        watch = Watch(name, self.watches, self.owner, find, timeout)
        self.cleanup.guard(watch, partial(self.watches.dropped, name))
        yield from self.hear(watch)
        return watch

    def hear(self, watcher: Watcher) -> Steps[None]:
        """Have the broker notify a watcher of its pool, until the watcher is removed from ``watches`` or dropped."""
        answer: Future[Reply] = Future()
        self.watches.add(watcher, answer.settle)
        try:
            expect((yield from self.wait(answer, "Watch", 0.0)), Done)
        except BaseException:
            self.watches.remove(watcher)
            raise

    def wait_ended(self, name: str, version: int, timeout: float) -> Steps[bool]:
        """Do as :meth:`.Broker.wait_ended`; version 0 stands for all that are neither current nor a draft."""
        deadline, changes = monotonic() + timeout, Count(name)
        self.require(ENDS, f"wait for the end of versions of {name!r}", "tell")
        try:
            yield from self.hear(changes)
            while True:
                heard = changes.heard
                if (yield from self._has_ended(name, version)):
                    return True
                if not (yield from changes.more(heard, deadline - monotonic())):
                    return False
        finally:
            self.watches.remove(changes)

    def _has_ended(self, name: str, version: int) -> Steps[bool]:
        pools = (yield from self.ask(ListPools(), Pools)).pools
        left = {pool.version for pool in pools if pool.name == name and pool.state not in ("draft", "current")}
        if not version or version in left:
            return not left
        try:
            yield from self.ask(Describe(name, version), Description)
        except Retired:
            return True
        return False  # it is current, or a draft

    # -- the end -----------------------------------------------------------------------------------

    def left(self) -> Steps[None]:
        """Wait until the cleanup thread has called :meth:`end`; then, if no lease is left, for the threads to end."""
        try:
            self.check_confirms()
        except Unavailable:
            return
        if not (yield self._left, self.timeout):
            raise TimedOut(f"no result within {self.timeout:g} s")
        if self._left.result():
            yield from self._join(self.timeout)

    def end(self) -> None:
        """Abandon what is requested, and end the session with its last lease. Runs on the cleanup thread."""
        for waits in (self.watches, self.drain_state):
            waits.fail(Unavailable("this Broker was closed"))
        self._leaving = True
        held = self.held.copy()
        for each in held:
            each.abandon(Unavailable("this Broker was closed while it waited"))
        if not held:
            self._stop_threads()
        self._left.set(not held)

    def forget(self, held: Holding) -> None:
        """Note that a lease, an event or a lock has ended. Runs on either thread of the session."""
        self.held.discard(held)
        if self._leaving and not self.held:
            self._stop_threads()

    def stop(self) -> None:
        """End the threads and the connection at the interpreter's exit, within a bounded time.

        Mapped memory stays mapped. Daemon threads that wait get no answer and no error: they end with the process.
        """
        if self.owner.here():
            self.stopped = True
            self._stop_threads(quietly=True)
            run(self._join(EXIT))

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child."""
        self._connection.disown()
        self.receiver.disown()

    def _stop_threads(self, *, quietly: bool = False) -> None:
        """Tell both threads to end; do not wait for them."""
        self._connection.stop(quietly=quietly)
        self.cleanup.stop()

    def _join(self, timeout: float) -> Steps[None]:
        """Wait for the threads to end, up to ``timeout`` seconds each."""
        for thread in (self._connection, self.cleanup):
            if (yield thread.ended, timeout):
                thread.join()


class Reconnecting(NotPicklable, Closeable):
    """The part of a :class:`Broker` below its requests: it has a session, and opens another when that one is lost.

    Its arguments and errors are those of :class:`Broker`.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, timeout: float, connect_timeout: float | None, wait: float
    ) -> None:
        greeting = timeout if connect_timeout is None else connect_timeout
        timeout, greeting = (seconds(limit, "timeout", zero=False) for limit in (timeout, greeting))
        self._timeouts = timeout, greeting
        #: Delivered when this object is closed.
        self._closed: Future[None] = Future()
        self._reopening = RLock()  # a signal handler or a finalizer may reopen in the middle

        def attempt() -> ClientSession:  # looks again each time: the host's broker may have started, or this user's
            place = find_directory().absolute() if directory is None else absolute(directory)
            return ClientSession(place, timeout, greeting)

        session = until_served(attempt, seconds(wait), self._closed.wait)
        if directory is None and not os.environ.get("CUBROKER_DIR"):
            log.info("no directory was named; session %d is with the broker found on %s", session.id, session.directory)
        self._owner = session.owner
        #: The session, and the guard that ends it with this object; both are replaced together.
        self._opened = session, session.cleanup.guard(self, session.end)

    @property
    def _session(self) -> ClientSession:
        return self._opened[0]

    @property
    def directory(self) -> Path:
        """Where the broker listens."""
        return self._session.directory

    @property
    def session(self) -> int:
        """The number that the broker gave this session."""
        return self._session.id

    @property
    def lost(self) -> str:
        """Why the session is over, and with it all that it held; empty while it lives, and once it is closed.

        The sessions of a broker that ends without a store end with it: :meth:`reconnect` opens another one.
        """
        return self._session.lost

    @property
    def uid(self) -> int | None:
        """The user that the broker runs as; None if it is too old to say so."""
        return self._session.uid

    @property
    def requests(self) -> Requests:
        """The session's requests, for callers that send many without waiting: ``submit(body)`` returns a future."""
        return self._session.requests

    @property
    def driver(self) -> Driver:
        """This process's driver for the broker's devices.

        Raises:
            Unavailable: there is no such driver here.
        """
        return self._session.driver

    def reconnect(self, wait: float = 0.0) -> None:
        """Open another session if this one is :attr:`lost`; one that lives is left alone.

        Pools and drafts of the lost session stay ``lost``, their memory stays mapped until they are closed, and its
        watches end. Versions of the next broker may have numbers that were used before.

        Args:
            wait: seconds to wait for a broker, if none serves yet. Closing this object ends the wait.

        Raises:
            Unavailable: no broker serves there or answers in time, or this object is closed.
            TimedOut: no broker served within ``wait`` seconds.
            CubrokerError: as opening a :class:`Broker`.
        """
        self._owner.check()
        self._live(seconds(wait), self._closed.wait)

    def _live(self, wait: float, pause: Callable[[float], object]) -> ClientSession:
        """Return a session that lives: this one, or another; see :func:`until_served`."""
        self._session.check_may_wait()
        return until_served(self._reopen, wait, pause)

    def _reopen(self) -> ClientSession:
        with self._reopening:
            session, guard = self._opened
            self._check_open()
            if session.lost:
                new = ClientSession(session.directory, *self._timeouts)
                if self._session is session:  # else a signal handler has reopened, and `new` ends with this call
                    session.cleanup.put(guard)
                    self._opened = new, new.cleanup.guard(self, new.end)
                    log.info("session %d with the broker on %s follows session %d", new.id, new.directory, session.id)
        if self._closed.done():  # by a thread that may have closed the earlier session alone
            session, guard = self._opened
            session.closed = True
            session.cleanup.put(guard)
            run(session.left())
            self._check_open()
        return self._session

    def _check_open(self) -> None:
        if self._closed.done():
            raise Unavailable("this Broker is closed; open another")


def _give_up(connection: Connection, left: Future[bool], held: set[Holding], reason: CubrokerError) -> None:
    """End a session whose cleanup thread has failed; what it has mapped stays leased until this process ends."""
    left.set(False)  # first: a caller that is told the reason may close its Broker at once
    connection.fail(reason)
    for each in held.copy():
        each.abandon(reason)


def shortage(error: Exception) -> str:
    """Return why a session could not begin, with the limits if threads or memory have run out."""
    match error:
        case RuntimeError():
            return f"{error}; {thread_limits()}"
        case MemoryError():
            return f"no memory is left; {memory_limits()}"
    return explain(error)


def disown_sessions() -> None:
    """Close the descriptors of the parent's sessions in a forked child."""
    for session in SESSIONS:
        session.disown()


def stop_sessions() -> None:
    """End all sessions at the interpreter's exit."""
    for session in SESSIONS:
        session.stop()


os.register_at_fork(after_in_child=disown_sessions)
atexit.register(stop_sessions)
