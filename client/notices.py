"""The broker's notices: about versions that are current or lost, about draining, and about multicast groups."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from threading import RLock
from typing import Protocol

import msgspec

from cubroker.client.cleanup_thread import CleanupThread
from cubroker.client.fork_guard import Closeable, NotPicklable, OwnerProcess, WeakRefs
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.requests import Future, Requests, Settle, Steps, run, time_limit
from cubroker.protocol import messages
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.messages import Draining, Found, Notice, PoolChanged, PoolLost, Rebound

log = logging.getLogger(__name__)


class News:
    """Wakes threads that wait for a change.

    It has no lock: an interrupt may leave a Condition's lock taken, and a signal handler may wait for the thread that
    reports a change.
    """

    def __init__(self) -> None:
        self._waiting: deque[Future[None]] = deque()
        self._error: CubrokerError | None = None

    def until(self, found: Callable[[], bool], timeout: float) -> Steps[bool]:
        """Call ``found`` now and after every change until it is true, for up to ``timeout`` seconds; return whether."""
        deadline = time.monotonic() + timeout
        while True:
            change: Future[None] = Future()
            self._waiting.append(change)  # before `found`, so that no change is missed
            try:
                if found():
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or not (yield change, None if left == inf else left):
                    return found()
            finally:
                with suppress(ValueError):  # `stir` has removed it
                    self._waiting.remove(change)

    def stir(self) -> None:
        """Wake the threads and the tasks that wait."""
        with suppress(IndexError):
            while True:
                self._waiting.popleft().set(None)

    def fail(self, error: CubrokerError) -> None:
        """Note that there will be no more changes; the first reason counts."""
        self._error = self._error or error
        self.stir()

    @property
    def failed(self) -> bool:
        """Whether there will be no more changes."""
        return self._error is not None

    def check(self) -> None:
        """Raise the reason why there will be no more changes, if there is one."""
        if self._error:
            raise self._error.anew()


class WatchClosed(Exception):
    """A :class:`Watch` was closed: steps, being generators, may not raise ``StopIteration``."""


class Watch(NotPicklable, Iterator[int | None], Closeable):
    """The current version of a pool, now and after every change; None while it has none, or none of the given owners.

    Not to be confused with :class:`cubroker.protocol.messages.Watch`.

    Changes that come faster than they are read are seen as one. Iterating blocks until there is a
    change, until :meth:`close` is called (from any thread; the iteration stops), until the broker
    is gone or the :class:`Broker` closed (``Unavailable``), or for the ``timeout`` in seconds, if
    there is one (``TimedOut``; the iteration may go on).
    """

    def __init__(
        self,
        name: str,
        watches: Watches,
        owner: OwnerProcess,
        find: Callable[[], Steps[Found]] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        #: The Broker, kept alive: its session, and with it this watch, ends with it.
        self.opener: object = None
        self._owner = owner
        self._watches = watches
        self._news = News()
        self._looking = RLock()  # several threads may iterate; the session's own threads never take it
        #: Asks for the version that counts, if only those of some owners do.
        self._find = find
        #: The version in the broker's last notice: 0 for none; None before the first notice.
        self._latest: int | None = None
        #: The last of these versions that :meth:`change` has dealt with.
        self._heard: int | None = None
        #: The version that was returned last.
        self._seen: int | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watch of {self.name!r}{', closed' * self._closed}>"

    def __next__(self) -> int | None:
        return self.next()

    def next(self, timeout: float | None = None) -> int | None:
        """Wait until the current version is another than the one returned before, and return it.

        Args:
            timeout: seconds to wait; by default those of the watch. 0: return what is known already.

        Raises:
            StopIteration: the watch is closed.
            TimedOut: nothing changed in that time.
            Unavailable: the broker is gone, or the Broker closed.
        """
        try:
            return run(self.change(timeout))
        except WatchClosed:
            raise StopIteration from None

    def change(self, timeout: float | None = None) -> Steps[int | None]:
        """Do as :meth:`next`, but raise ``WatchClosed`` at the end."""
        self._owner.check()
        limit = time_limit(self.timeout if timeout is None else timeout)
        deadline = time.monotonic() + limit
        while True:
            if not (yield from self._news.until(self._changed, deadline - time.monotonic())):
                raise TimedOut(f"pool {self.name!r} did not change within {limit:g} s")
            found = version = self._latest
            if version and self._find:
                found = (yield from self._find()).version  # a newer version than `version` brings another notice
            with self._looking:
                self._check()
                self._heard = version
                if found != self._seen:
                    self._seen = found
                    return found or None

    def _changed(self) -> bool:
        self._check()
        return self._latest not in (None, self._heard)

    def _check(self) -> None:
        if self._closed:
            raise WatchClosed
        self._news.check()

    def close(self) -> None:
        """Stop watching; iterations end."""
        self._owner.check()
        self._closed = True
        self.opener = None
        self._news.stir()
        self._watches.remove(self)

    def tell(self, version: int) -> None:
        """See :meth:`Watcher.tell`."""
        self._latest = version
        self._news.stir()

    def fail(self, error: CubrokerError) -> None:
        """See :meth:`Watcher.fail`."""
        self._news.fail(error)


class Watcher(Protocol):
    """Receives news of a pool on the connection's thread: a :class:`Watch`, for example."""

    name: str

    def tell(self, version: int) -> None:
        """Note that the pool's current version is now this one, or 0 if it has none."""

    def fail(self, error: CubrokerError) -> None:
        """Note that there will be no more news."""


class Count(News):
    """A watcher that counts the notices about a pool; threads can wait for the count to grow."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.heard = 0

    def tell(self, version: int) -> None:
        """See :meth:`Watcher.tell`."""
        self.heard += 1
        self.stir()

    def more(self, before: int, timeout: float) -> Steps[bool]:
        """Wait up to ``timeout`` seconds until the count is greater than ``before``; returns whether it is."""

        def found() -> bool:
            self.check()
            return self.heard > before

        return self.until(found, timeout)


class Watches:
    """Every :class:`Watcher` of a session, by pool. The connection's thread owns the table, so nothing is locked."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._watches: dict[str, WeakRefs[Watcher]] = {}

    def add(self, watch: Watcher, settle: Settle) -> None:
        """Have the broker report the pool's state to ``watch``; ``settle`` gets its answer."""
        self._requests.call(partial(self._add, watch, settle))

    def remove(self, watch: Watcher) -> None:
        """Stop reporting to ``watch``; if no other watches its pool, the broker stops, too."""
        self._requests.call(partial(self._remove, watch))

    def dropped(self, name: str) -> None:
        """Note that a watch of a pool was dropped without being removed: nothing refers to it any more."""
        self._requests.call(partial(self._end, name))

    def changed(self, change: PoolChanged) -> None:
        """Pass on what the broker reports. Runs on the connection's thread."""
        for watch in self._watches.get(change.name, ()):
            watch.tell(change.version)

    def fail(self, error: CubrokerError) -> None:
        """End all watches."""
        for watches in self._watches.copy().values():
            for watch in watches:
                watch.fail(error)

    def _add(self, watch: Watcher, settle: Settle) -> None:
        self._watches.setdefault(watch.name, WeakRefs()).add(watch)
        self._requests.send(messages.Watch(watch.name, on=True), settle)

    def _remove(self, watch: Watcher) -> None:
        if others := self._watches.get(watch.name):
            others.discard(watch)
        self._end(watch.name)

    def _end(self, name: str) -> None:
        # Once the connection is over, this runs on each thread that closes a watch.
        if not any(self._watches.get(name, ())) and self._watches.pop(name, None) is not None:
            self._requests.submit(messages.Watch(name, on=False))


class DrainState(News):
    """Whether the broker of a session is draining: by hand, or because it was told to end."""

    def __init__(self, directory: Path, held: Collection[object]) -> None:
        super().__init__()
        #: Why the broker lends nothing new; empty if it lends.
        self.why = ""
        self._directory = directory
        self._held = held

    def tell(self, notice: Draining) -> None:
        """Note what the broker says. Runs on the connection's thread."""
        if notice.why == self.why:
            return
        self.why = notice.why
        if notice.why:
            level = logging.WARNING if self._held else logging.INFO
            log.log(level, "the broker on %s is draining, give back what you hold: %s", self._directory, notice.why)
        else:
            log.info("the broker on %s lends again", self._directory)
        self.stir()

    def wait(self, timeout: float | None, *, over: bool) -> Steps[bool]:
        """Wait up to ``timeout`` seconds until the broker drains (``over``: lends again); returns whether it does."""

        def found() -> bool:
            self.check()
            return bool(self.why) != over

        return self.until(found, time_limit(timeout))


class Rebindable(Protocol):
    """What a lease has mapped to store to all replicas of its version."""

    lease: int

    def rebound(self, notice: Rebound, given: Sequence[int] | CubrokerError) -> None:
        """Map what the broker sent as a replacement after its restart. Called on the cleanup thread."""

    def unreachable(self, reason: CubrokerError) -> None:
        """Note that the connection is over: no :meth:`rebound` will follow. Called on the cleanup thread."""

    def give_up(self) -> None:
        """Give up a mapping that is under way: it is of an earlier broker. Called on the connection's thread."""


class Notices(msgspec.Struct, eq=False):
    """Passes on the broker's notices, on the connection's thread. Refers to no session."""

    watches: Watches
    drain_state: DrainState
    losses: dict[tuple[str, int], str]
    held: Collection[object]
    rebindable: WeakRefs[Rebindable]
    receiver: FdReceiver
    cleanup: CleanupThread

    def hear(self, notice: Notice) -> None:
        """Pass a notice on. A second ``Welcome`` has no effect: a restarted broker cannot know that there was one."""
        match notice:
            case PoolChanged():
                self.watches.changed(notice)
            case Draining():
                self.drain_state.tell(notice)
            case PoolLost(name, version, why):
                self.losses[name, version] = why
                log.warning("pool %r version %d is lost: %s; give it back, and attach to the next", name, version, why)
            case Rebound():
                # The cleanup thread handles it once its descriptors are there, after all earlier tasks for the lease.
                self.receiver.rebound(notice, lambda given: self.cleanup.put(lambda: self._rebind(notice, given)))
                for each in self.rebindable:
                    if each.lease == notice.lease:
                        each.give_up()

    def end(self, reason: CubrokerError, *, lost: bool) -> None:
        """Note that there will be no more notices; ``lost``: this process did not end the session."""
        if lost:
            level = logging.WARNING if self.held else logging.INFO
            text = "%s; all leases and locks of the session are lost; Broker.reconnect() opens another session"
            log.log(level, text, reason)
        self.watches.fail(reason)
        self.drain_state.fail(reason)
        for each in self.rebindable:
            each.give_up()
        self.cleanup.put(lambda: self._end_rebinding(reason))

    def _rebind(self, notice: Rebound, given: Sequence[int] | CubrokerError) -> None:
        if isinstance(given, Unavailable):  # the connection is over
            return None
        for each in self.rebindable:
            if each.lease == notice.lease:
                return each.rebound(notice, given)
        return None if isinstance(given, CubrokerError) else self.receiver.close(given)

    def _end_rebinding(self, reason: CubrokerError) -> None:
        for each in self.rebindable:
            each.unreachable(reason)
