"""Following a pool: its current version now and after every change, from one session with a broker to the next.

A :class:`Follow` only waits. Its :class:`Follower` has a thread of its own, which watches the pool in one session,
opens another session when that one is lost, and records which version is current. So callers wait in the same way for a
version and for a broker: for a time of their choice, until another thread closes the Follow, or in an event loop. The
thread does not refer to the Follow, and ends with it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock, Thread
from typing import NamedTuple, Self
from weakref import ref

from cubroker.client.fork_guard import Closeable, NotPicklable, OwnerProcess
from cubroker.client.notices import News
from cubroker.client.session import ClientSession, shortage
from cubroker.client.transport.connection import Shortage, start_lock, try_memory
from cubroker.client.transport.handshake import LAST_PAUSE
from cubroker.client.transport.requests import run, run_in_loop, time_limit
from cubroker.protocol.errors import CubrokerError, NotFound, Retired, TimedOut, Unavailable
from cubroker.protocol.messages import FINDS, Find, Found, Reply

Pause = Callable[[float], None]
"""Sleeps for so many seconds, or raises an error that ends the wait."""


class Told(NamedTuple):
    """What a follower knows of the pool."""

    #: The number of the follower's session that reported it, from 1 on: two sessions may be with two brokers.
    session: int
    #: The current version; 0 if there is none, or no session.
    version: int


class Follow(NotPicklable, Iterator[int], AsyncIterator[int], Closeable):
    """The current version of a pool, now and after every change, also that of a later broker.

    Iterate with ``for`` or ``async for``. Changes that come faster than they are read are seen as one, and a version
    that is not current any more is not returned: only the last one is. While the pool has no version, or no broker
    serves, the iteration waits. It ends when :meth:`close` is called, from any thread, at the end of ``with`` or
    ``async with``, or when the :class:`Broker` is closed. A Follow that is dropped is closed.

    A broker that is started again with its store keeps its versions, and no version is returned twice. After another
    session was opened (:meth:`Broker.reconnect`), the current version is returned again, even if its number is the
    same: the next broker counts from 1 again.

    Attributes:
        name: the pool.
        timeout: seconds that each wait may take before it raises ``TimedOut``, after which the iteration may continue;
            None: without limit.
    """

    def __init__(
        self,
        name: str,
        live: Callable[[Pause], ClientSession],
        owners: tuple[int, ...] = (),
        timeout: float | None = None,
        wanted: Callable[[int], bool] = bool,
        use: Callable[[int], object] | None = None,
    ) -> None:
        """Begin to follow, without waiting.

        Args:
            name: the pool.
            live: returns a session that lives; it may pause until there is one.
            owners: the users whose pool counts; empty for all users.
            timeout: see above.
            wanted: whether to return a version that is current.
            use: called with a version before it is returned; it may raise that the version was retired in between.

        Raises:
            Unavailable: this process is short of threads or memory.
        """
        time_limit(timeout)
        self.name = name
        self.timeout = timeout
        self._owner = OwnerProcess()
        self._wanted = wanted
        self._use = use
        self._closed = False
        self._looking = RLock()  # several threads may iterate; the follower never takes it
        self._using = RLock()
        #: What was returned last.
        self._seen = Told(0, 0)
        self._follower = Follower(name, live, owners)
        self._follower.start(self)

    def __repr__(self) -> str:
        return f"<Follow of {self.name!r}{', closed' * self._closed}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        return self.next()

    def next(self, timeout: float | None = None) -> int:
        """Wait until the current version is another than the one returned before, and return it.

        Args:
            timeout: seconds to wait; by default :attr:`timeout`. 0: return what is known already.

        Raises:
            StopIteration: the Follow is closed.
            TimedOut: there was no such version in that time.
            Denied: the pool's mode keeps this user from reading it; or a later broker does not admit this user.
            Unsupported: owners count, and a later broker is too old to check them.
            OverQuota: this session, or this user, watches as many pools as it may.
            Unavailable: this process cannot open a session, or the pool whose newer versions are followed is lost.
            CubrokerError: as :meth:`Pool.switch`, if the pool is switched; the next call tries again.
        """
        self._owner.check()
        limit = time_limit(self.timeout if timeout is None else timeout)
        deadline = time.monotonic() + limit
        while not self._closed:
            with self._taken() as version:
                if version and self._used(version):
                    return version
            if not run(self._follower.news.until(self._stirred, deadline - time.monotonic())):
                raise self._late(limit)
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Do as :meth:`next`, in an event loop; a task that is cancelled leaves nothing behind.

        A pool is switched in a thread. A task that is cancelled during the switch ends after it, and the next call
        returns the version.
        """
        self._owner.check()
        limit = time_limit(self.timeout)
        deadline = time.monotonic() + limit
        while not self._closed:
            with self._taken() as version:
                if version and (self._use is None or await _to_its_end(partial(self._used, version))):
                    return version
            if not await run_in_loop(self._follower.news.until(self._stirred, deadline - time.monotonic())):
                raise self._late(limit)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.__exit__(*raised)

    def close(self) -> None:
        """End the iteration in all threads and tasks, without waiting for the follower's thread."""
        self._owner.check()
        self._closed = True
        self._follower.end()

    @contextmanager
    def _taken(self) -> Iterator[int]:
        """Yield what :meth:`_take` returns; if the block fails, the version can be taken again."""
        try:
            yield self._take()
        except BaseException:
            self._seen = Told(0, 0)
            raise

    def _used(self, version: int) -> bool:
        """Use a version that was taken; return whether it still existed, and this is not closed.

        Threads use versions one after the other, and skip a version if another thread has taken a later one.
        """
        if not self._use:
            return True
        try:
            with self._using:
                if self._seen.version != version:
                    return False
                self._use(version)
        except (NotFound, Retired):
            return False
        except CubrokerError:
            if self._closed:
                return False
            raise
        return True

    def _take(self) -> int:
        """Return the current version if it was not returned yet and is wanted, else 0; raise the thread's error."""
        with self._looking:
            self._follower.news.check()
            told = self._follower.told
            if not told.version or told == self._seen or not self._wanted(told.version):
                return 0
            self._seen = told
            return told.version

    def _stirred(self) -> bool:
        """Whether there is something to return or to raise."""
        told = self._follower.told
        fresh = told.version and told != self._seen and self._wanted(told.version)
        return self._closed or self._follower.news.failed or bool(fresh)

    def _late(self, limit: float) -> TimedOut:
        why = self._follower.missing
        return TimedOut(f"no new version of {self.name!r} came within {limit:g} s{why and f': {why}'}")


async def _to_its_end(call: Callable[[], bool]) -> bool:
    """Return the result of a call in a thread; a task that is cancelled during the call ends after it."""
    import asyncio

    thread = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((thread,))
        thread.exception()  # else asyncio reports that the exception was never retrieved
        raise


class Follower:
    """The thread of a :class:`Follow`, and what it has found out.

    Everything that happens is an event in its inbox: a session's notices and replies, each with its :class:`Ear`, and
    the end. The death of the Follow puts the end there by one call into C, as for the cleanup thread
    (:mod:`.cleanup_thread`).
    """

    def __init__(self, name: str, live: Callable[[Pause], ClientSession], owners: tuple[int, ...]) -> None:
        self.told = Told(0, 0)
        #: Why no version can come now.
        self.missing = ""
        #: Reports every change of these two, and the error that ends the thread.
        self.news = News()
        self._name = name
        self._live = live
        self._owners = owners
        self._inbox: SimpleQueue[object] = SimpleQueue()
        #: Made in advance: there may be no memory when it is needed.
        self._failure = Unavailable(
            f"the thread that follows pool {name!r} has failed, as its traceback says; follow the pool again"
        )

    def start(self, follow: Follow) -> None:
        """Start the thread, which ends with ``follow``; raises ``Unavailable`` if there is no room for a thread."""
        thread = Thread(target=self._run, name="cubroker-follow", daemon=True)
        self._guard = ref(follow, self._inbox.put)
        try:
            with start_lock():
                try_memory(1)  # Thread.start() waits for ever for a thread without memory to run in
                thread.start()
        except (RuntimeError, MemoryError, Shortage) as error:
            raise Unavailable(f"no thread to follow pool {self._name!r}: {shortage(error)}") from error

    def end(self) -> None:
        """End the thread, and wake all callers that wait."""
        self._inbox.put(None)
        self.news.stir()

    def _run(self) -> None:
        try:
            while True:
                if not self._listen(self._live(self._pause)):
                    self._pause(LAST_PAUSE)  # the broker opened a session and answered nothing; it may do so each time
        except _Ended:
            pass
        except CubrokerError as error:
            self.news.fail(error)
        except BaseException:
            self.news.fail(self._failure)  # else all callers would wait for ever
            raise

    def _listen(self, session: ClientSession) -> bool:
        """Note what a session reports of the pool until it is lost; return whether it has reported anything.

        If owners count, each change causes a request, and an answer that came after a further change does not count.
        """
        if self._owners:
            session.require(FINDS, f"follow {self._name!r} of a certain owner", "check it")
        ear = Ear(self._name, self._inbox)
        number, heard, asked, asking = self.told.session + 1, 0, 0, False
        session.watches.add(ear, ear.tell)
        try:
            while True:
                match self._next(ear):
                    case int(heard):
                        asked = heard and asked
                        if not heard or not self._owners:
                            self._note(Told(number, heard))
                    case Found(version):
                        asking = False
                        if heard and heard == asked:
                            self._note(Told(number, version))
                    case CubrokerError() as error:
                        if not session.lost:
                            raise error
                        self._note(Told(self.told.session, 0), session.lost)
                        return self.told.session == number
                if self._owners and heard != asked and not asking:
                    asked, asking = heard, True
                    session.requests.send(Find(self._name, self._owners), ear.tell)
        finally:
            session.watches.remove(ear)

    def _note(self, told: Told, missing: str = "") -> None:
        self.told, self.missing = told, missing
        self.news.stir()

    def _next(self, ear: Ear) -> object:
        """Return the next event of this ear; raise ``_Ended`` at the end."""
        while True:
            match self._inbox.get():
                case (Ear() as source, event):
                    if source is ear:
                        return event
                case _:
                    raise _Ended

    def _pause(self, seconds: float) -> None:
        """Wait for so many seconds; raise ``_Ended`` if the end comes first."""
        deadline = time.monotonic() + seconds
        try:
            while isinstance(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())), tuple):
                pass  # an event of a session that was lost
        except Empty:
            return
        raise _Ended


class Ear:
    """A watcher of a pool in one session, which puts what it is told into a follower's inbox."""

    def __init__(self, name: str, inbox: SimpleQueue[object]) -> None:
        self.name = name
        self._inbox = inbox

    def tell(self, news: int | Reply | CubrokerError) -> None:
        """Put the version of a notice, the answer to a request, or an error into the inbox."""
        self._inbox.put((self, news))

    fail = tell


class _Ended(Exception):
    """The Follow is closed or dropped."""
