"""Following what version of a pool is current."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import RLock

from cubroker.client.futures import Future
from cubroker.client.living import Living
from cubroker.client.processes import Owner, Scoped, Unsendable
from cubroker.client.requests import Requests
from cubroker.protocol import messages
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import PoolChanged, Reply


class Watch(Unsendable, Iterator[int | None], Scoped):
    """The current version of a pool, now and after every change; None while there is none, of the owners asked for.

    Changes that come faster than they are read are seen as one. Iterating blocks until there is a
    change, until :meth:`close` is called (from any thread; the iteration stops), or until the broker
    is gone or the :class:`Broker` closed (``Unavailable``).
    """

    def __init__(self, name: str, watches: Watches, owner: Owner, find: Callable[[], int] | None = None) -> None:
        self.name = name
        self._owner = owner
        self._watches = watches
        self._lock = watches.lock  # a signal handler may close it in the middle
        self._news: Future[None] = Future()  # the next; no Condition, whose lock an interrupt may leave shut
        self._find = find  # asks for the version that counts, where not everybody's does
        self._latest: int | None = None  # as the broker says it: 0 is no version; None until it said anything
        self._heard: int | None = None  # the last of these that was looked at
        self._seen: int | None = None
        self._closed = False
        self._error: CubrokerError | None = None

    def __next__(self) -> int | None:
        self._owner.check()
        while True:
            news = self._news  # taken before the look, so that none is missed
            with self._lock:
                self._check()
                version, heard = self._latest, self._heard
            if version is None or version == heard:
                news.wait()
                continue
            found = self._find() if version and self._find else version  # which has news of its own, if it differs
            with self._lock:
                self._check()
                self._heard = version
                if found != self._seen:
                    self._seen = found
                    return found or None

    def _check(self) -> None:
        if self._closed:
            raise StopIteration
        if self._error:
            raise self._error.anew()

    def close(self) -> None:
        """Stop watching; whoever iterates gets the end."""
        self._owner.check()
        self._closed = True
        self._wake()
        self._watches.remove(self)

    def tell(self, version: int) -> None:
        """The pool's current version is now this one, or 0 if it has none."""
        self._latest = version
        self._wake()

    def fail(self, error: CubrokerError) -> None:
        """There will be no more news."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._news.set(None)
            self._news = Future()


class Watches:
    """Every :class:`Watch` of a session, by pool.

    Args:
        requests: the session's.
        lock: held while watches change, or what they have seen; whoever has it must not wait for the session.
    """

    def __init__(self, requests: Requests, lock: RLock) -> None:
        self._requests = requests
        self.lock = lock  # again and again: a finalizer may close a watch while another one is made
        self._watches: dict[str, Living[Watch]] = {}

    def add(self, watch: Watch) -> Future[Reply]:
        """Have the broker report the pool's state to ``watch``; the future says whether it will."""
        with self.lock:  # held over the request, so that it cannot be overtaken by the one of a `remove`
            self._watches.setdefault(watch.name, Living()).add(watch)
            return self._requests.submit(messages.Watch(watch.name, on=True))

    def remove(self, watch: Watch) -> None:
        """Report to ``watch`` no more; without any left for its pool, the broker stops too."""
        with self.lock:
            others = self._watches.get(watch.name)
            if others is None:
                return
            others.discard(watch)
            if not any(others):
                del self._watches[watch.name]
                self._requests.submit(messages.Watch(watch.name, on=False))

    def changed(self, change: PoolChanged) -> None:
        """Pass on what the broker reports."""
        for watch in self._of(change.name):
            watch.tell(change.version)

    def fail(self, error: CubrokerError) -> None:
        """End all of them."""
        with self.lock:
            names = list(self._watches)
        for name in names:
            for watch in self._of(name):
                watch.fail(error)

    def _of(self, name: str) -> list[Watch]:
        with self.lock:
            return list(self._watches.get(name, ()))
