"""Following what version of a pool is current."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Condition, Lock
from typing import Self

from cubroker.client.futures import Future
from cubroker.client.living import Living
from cubroker.client.processes import Owner
from cubroker.client.requests import Requests
from cubroker.protocol import messages
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import PoolChanged, Reply


class Watch(Iterator[int]):
    """The current version of a pool, now and after every change; 0 while there is none.

    Changes that come faster than they are read are seen as one. Iterating blocks until there is a
    change, until :meth:`close` is called (from any thread; the iteration stops), or until the broker
    is gone or the :class:`Broker` closed (``Unavailable``).
    """

    def __init__(self, name: str, watches: Watches, owner: Owner) -> None:
        self.name = name
        self._owner = owner
        self._watches = watches
        self._condition = Condition()
        self._latest: int | None = None
        self._seen: int | None = None
        self._closed = False
        self._error: CubrokerError | None = None

    def __next__(self) -> int:
        self._owner.check()
        with self._condition:
            while self._latest == self._seen and not self._closed and not self._error:
                self._condition.wait()
            if self._closed:
                raise StopIteration
            if self._error:
                raise self._error.anew()
            self._seen = self._latest
            assert self._seen is not None
            return self._seen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; whoever iterates gets the end."""
        self._owner.check()
        self._watches.remove(self)
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def tell(self, version: int) -> None:
        """The pool's current version is now this one."""
        with self._condition:
            self._latest = version
            self._condition.notify_all()

    def fail(self, error: CubrokerError) -> None:
        """There will be no more news."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()


class Watches:
    """Every :class:`Watch` of a session, by pool."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._lock = Lock()
        self._watches: dict[str, Living[Watch]] = {}

    def add(self, watch: Watch) -> Future[Reply]:
        """Have the broker report the pool's state to ``watch``; the future says whether it will."""
        with self._lock:  # held over the request, so that it cannot be overtaken by the one of a `remove`
            self._watches.setdefault(watch.name, Living()).add(watch)
            return self._requests.submit(messages.Watch(watch.name, on=True))

    def remove(self, watch: Watch) -> None:
        """Report to ``watch`` no more; without any left for its pool, the broker stops too."""
        with self._lock:
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
        with self._lock:
            names = list(self._watches)
        for name in names:
            for watch in self._of(name):
                watch.fail(error)

    def _of(self, name: str) -> list[Watch]:
        with self._lock:
            return list(self._watches.get(name, ()))
