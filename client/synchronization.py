"""How processes wait for each other: locks of names, and events on pools whose readers may write.

- A lock is for work that only one process at a time may do: see :meth:`cubroker.client.broker.Broker.lock`.
- An event is recorded by one process when bytes are ready; others wait on their streams: see :meth:`Pool.event`.

A :class:`LockHandle` is one lock in this process, and an :class:`EventHandle` one event, from its request to its end,
through any interrupt of its caller. As with leases, no frame of the caller owns a lock or an event at any time: it is
given back with the last reference to its :class:`LockRef` or :class:`EventRef`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Protocol, TypeVar

from cubroker.client import devices
from cubroker.client.cleanup_thread import Retry
from cubroker.client.devices import DeviceId
from cubroker.client.fork_guard import Closeable, NotPicklable, WeakRefs
from cubroker.client.memory.mapping import DeviceMapping
from cubroker.client.session import ClientSession, Resource
from cubroker.client.transport.requests import Future, Pending, Steps, blocking, expect, failure, seconds, whole
from cubroker.driver import Context, Device, DriverError, Event, Stream
from cubroker.protocol import fields
from cubroker.protocol.errors import CubrokerError, Invalid, TimedOut, Unavailable
from cubroker.protocol.layout import MAX_EXTENT
from cubroker.protocol.messages import (
    AwaitEvent,
    DropEvent,
    EventOpened,
    EventShared,
    Generation,
    Lock,
    Locked,
    OpenEvent,
    Recorded,
    Reply,
    ShareEvent,
    Unlock,
)

R = TypeVar("R", bound=Reply)
T = TypeVar("T")

SOON, LATE = 20e-6, 1e-3
"""Seconds between two queries of an event that a thread waits for: at first, and at most."""


# -- locks ---------------------------------------------------------------------------------------------


class LockRef:
    """What stands for a lock in this process; the lock is given back with the last reference to this object."""

    __slots__ = ("__weakref__",)


class LockHandle(Resource[LockRef]):
    """The lock of a name: requested, held, or being given back."""

    request = "Lock"

    def __init__(self, session: ClientSession, name: str, wait: float) -> None:
        super().__init__(session, f"the lock of {name!r}")
        self._body = Lock(name, wait)
        self._pending = Pending(self._answered)
        self._posted = False
        self._number = 0

    # -- on the cleanup thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """See :meth:`Resource.begin`."""
        if self.abandoned:
            if self._posted:
                self._session.requests.cancel(self._pending)
            else:
                self._forget()
        elif not self._posted:
            self._posted = True
            self._session.requests.post(self._body, self._pending)

    def _release(self) -> None:
        self._session.requests.send(Unlock(self._number), lambda _: self._forget())

    # -- on the connection's thread ----------------------------------------------------------------

    def _answered(self, reply: Reply | CubrokerError) -> None:
        if isinstance(reply, Locked):
            self._number = reply.lock
            self._guarded(LockRef, self._release)
        else:
            self.fail(failure(reply, Locked))
            self._forget()

    def _forget(self) -> None:
        self._session.forget(self)
        self._ended.set(None)


class NameLock(NotPicklable, Closeable):
    """The lock of a pool's name, which this process holds until :meth:`close`, or the end of ``with``.

    Attributes:
        name: the name.
    """

    def __init__(self, handle: LockHandle, ref: LockRef, session: ClientSession, name: str) -> None:
        self._ref: LockRef | None = ref
        #: The Broker, which this reference keeps open while the lock is held; see :class:`Pool`.
        self.opener: object = None
        self.name = name
        self._handle = handle
        self._session = session
        self._owner = session.owner

    def __repr__(self) -> str:
        return f"<NameLock of {self.name!r}, {'given back' if self.closed else self.lost or 'held'}>"

    @property
    def closed(self) -> bool:
        """Whether the lock was given back, here or with the Broker."""
        return self._ref is None

    @property
    def lost(self) -> str:
        """Why the session is over, and with it the lock; empty while the broker knows of it. See ``Broker.lost``."""
        return self._session.lost

    @blocking
    def close(self) -> Steps[None]:
        """Give the lock back; the next process in line then gets it.

        Raises:
            TimedOut: the lock is being given back, but the broker has not confirmed that in time.
        """
        if self.let_go():
            yield from self._handle.confirm()

    def let_go(self) -> bool:
        """Begin to give the lock back, without waiting; returns whether that is under way."""
        self._owner.check()
        self._ref = self.opener = None
        return self._handle.ending

    def confirming(self) -> Steps[None]:
        """Wait until the broker has confirmed that a lock that was let go is given back."""
        return self._handle.confirm()


def obtain_lock(session: ClientSession, name: str, wait: float) -> Steps[NameLock]:
    """Take the lock of a name; see :meth:`cubroker.client.broker.Broker.lock`."""
    handle = LockHandle(session, name, wait)
    return NameLock(handle, (yield from handle.obtain(wait)), session, name)


# -- events --------------------------------------------------------------------------------------------
#
# The steps of an :class:`EventHandle`, and the thread of each: ``obtain`` (the caller's), ``begin`` (the cleanup
# thread), ``_shared`` (the connection's, for an event that this process makes), ``_hand_over`` (the cleanup thread);
# then the caller has an :class:`EventRef`. After the last reference to that, the cleanup thread calls ``_end`` and,
# once the broker has told all waiting processes, ``_destroy``.


class EventRef:
    """The driver's event, which is closed with the last reference to this object."""

    __slots__ = ("__weakref__", "event", "number")

    def __init__(self, event: Event, number: int) -> None:
        self.event = event
        self.number = number  # the broker's number of the event


class EventHandle(Resource[EventRef]):
    """One event in this process, made or opened. The driver's event is in ``context``."""

    def __init__(self, session: ClientSession, context: Context, label: str) -> None:
        super().__init__(session, label)
        self._context = context
        self._begun = False
        self._number = 0
        self._event: Event | None = None
        self._closing = Retry(session.cleanup, self._destroy)

    # -- on the cleanup thread ---------------------------------------------------------------------

    def begin(self) -> None:
        """See :meth:`Resource.begin`."""
        if self._begun:
            return
        self._begun = True
        if self.abandoned:
            self._end()
            return
        try:
            self._open()
        except (DriverError, ValueError) as error:
            self._refuse(devices.failure(error, self.label))

    @abstractmethod
    def _open(self) -> None:
        """Make or open the driver's event, and have it handed over."""

    def _hand_over(self) -> None:
        assert self._event is not None
        self._guarded(partial(EventRef, self._event, self._number), self._end)

    def _refuse(self, error: CubrokerError) -> None:
        self.fail(error)
        self._session.cleanup.put(self._end)

    def _end(self) -> None:
        """Close the event; one that this process made only after the broker has told all waiting processes."""
        self._destroy()

    def _destroy(self) -> None:
        try:
            if self._event:
                self._event.close()
        except DriverError as error:
            self._closing.again(devices.failure(error, f"closing {self.label}").message)
        else:
            self._event = None
            self._session.forget(self)
        self._ended.set(None)


class OwnedEvent(EventHandle):
    """An event that this process makes, for others to open as ``name`` with a lease on the version of ``lease``."""

    request = "ShareEvent"

    def __init__(self, session: ClientSession, context: Context, label: str, lease: int, name: str) -> None:
        super().__init__(session, context, label)
        self._lease = lease
        self._name = name

    def _open(self) -> None:
        self._event = self._context.event(shared=True)
        body = ShareEvent(self._lease, self._name, self._context.device.uuid, self._event.export())
        self._session.requests.send(body, self._shared)

    def _shared(self, reply: Reply | CubrokerError) -> None:  # on the connection's thread
        if isinstance(reply, EventShared):
            self._number = reply.event
            self._session.cleanup.put(self._hand_over)
        else:
            self._refuse(failure(reply, EventShared))

    def _end(self) -> None:
        if self._number:
            cleanup = self._session.cleanup
            self._session.requests.send(DropEvent(self._number), lambda _: cleanup.put(self._destroy))
        else:
            self._destroy()


class OpenedEvent(EventHandle):
    """An event that another process made."""

    request = "OpenEvent"

    def __init__(self, session: ClientSession, context: Context, label: str, reply: EventOpened) -> None:
        super().__init__(session, context, label)
        self._number = reply.event
        self._handle = reply.handle

    def _open(self) -> None:
        self._event = self._context.open_event(self._handle)
        self._hand_over()


class _EventPool(Protocol):
    """What events use of a :class:`Pool`."""

    name: str

    @property
    def version(self) -> int: ...

    @property
    def lease(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def asleep(self) -> bool: ...

    def close(self) -> None: ...

    def event(self, name: str, *, device: DeviceId | None = None) -> SharedEvent: ...

    def open_event(self, name: str, *, wait: float = 0.0) -> SharedEvent: ...


class SharedEvent(NotPicklable, Closeable):
    """A place in a stream of the process that made it, for which streams of others wait. See :meth:`Pool.event`.

    Its maker records it again and again; each record is a *generation*: 1, 2, 3 …. Every method may be called from any
    thread.

    Attributes:
        name: its name on the pool's version.
        pool: the pool in this process; it stays open for as long as this object lives, unless it is closed.
        device: the device whose work the event marks.
        mine: whether this process made the event, and so records it.
    """

    def __init__(
        self, ref: EventRef, handle: EventHandle, pool: _EventPool, session: ClientSession, name: str, device: Device
    ) -> None:
        self._ref: EventRef | None = ref  # first: the driver's event dies with this object
        self.name = name
        self.pool = pool
        self.device = device
        self.mine = isinstance(handle, OwnedEvent)
        self._number = ref.number
        self._version = pool.version  # the pool may switch to another version
        self._handle = handle
        self._session = session
        self._owner = session.owner
        self._waits = BlockingRequests(session)
        self._seen = 0
        self._recording = RLock()  # so that the broker is told of generations in the order of their records

    def __repr__(self) -> str:
        state = "closed" if self.closed else "mine" if self.mine else "opened"
        return f"<SharedEvent {self.name!r} of {self.pool.name!r} version {self._version}, {state}>"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the pool."""
        return self._ref is None

    @blocking
    def record(self, stream: Stream | int = 0) -> Steps[int]:
        """Record the event in a stream: all work submitted there so far is the next generation; return its number.

        Waiting processes continue when that work is done.

        Args:
            stream: a stream of the context of ``device``, or a CUDA stream's handle, such as
                ``torch.cuda.Stream.cuda_stream``. By default the default stream, which is right after synchronous
                copies.

        Raises:
            Invalid: another process made the event, or it is closed.
            DeviceFailure: the driver refused.
            Unavailable, TimedOut: the broker is gone or does not answer, so that perhaps no process was told.
        """
        self._owner.check()
        if not self.mine:
            raise Invalid(f"{self._label} can be recorded only by the process that made it; make another event here")
        self._session.check_may_wait()
        handle = _stream(stream)
        with self._recording:
            self._use(lambda event: event.record(handle), "recording")
            future = self._session.requests.submit(Recorded(self._number))
        return expect((yield from self._session.wait(future, "Recorded", 0.0)), Generation).generation

    @blocking
    def wait(
        self, stream: Stream | int | None = None, *, after: int | None = None, timeout: float = 60.0
    ) -> Steps[int]:
        """Wait for a generation to be recorded, then have a stream wait for the work before it; return its number.

        It is the newest generation: if several were recorded since the last wait, all but the last are skipped.

        Args:
            stream: a stream of any device that reaches ``device``, or a CUDA stream's handle; later work in it waits.
                None: this thread waits until the work is done.
            after: a generation; wait for a later one. By default the one that this object waited for last.
            timeout: seconds to wait for the record; without a ``stream``, for the work, too.

        Raises:
            TimedOut: no generation was recorded, or its work not done, in that time; the maker may be stopped.
            Unavailable: the maker closed the event, gave its lease back, or has ended, and the record with it; or this
                object was closed during the wait, or the broker is gone.
            Invalid: the event is closed, or a number is out of range.
            DeviceFailure: the driver refused.
        """
        self._owner.check()
        since = self._seen if after is None else whole(after)
        if since is None:
            raise Invalid(f"cannot wait for a generation after {after!r:.60}: generations are 0 to {MAX_EXTENT}")
        timeout = seconds(timeout, "timeout")
        handle = None if stream is None else _stream(stream)
        if self.closed:
            raise self._closed()
        deadline = time.monotonic() + timeout
        body = AwaitEvent(self.pool.lease, self._number, since, timeout)
        generation = (yield from self._waits.ask(body, Generation)).generation
        if handle is None:
            yield from self._finish(generation, deadline)
        else:
            self._use(lambda event: event.hold(handle), "waiting for")
        self._seen = max(self._seen, generation)
        return generation

    @blocking
    def close(self) -> Steps[None]:
        """Close the event. If this process made it, it ends for all processes, and waiting processes get an error.

        Streams that wait continue to wait for the recorded work. Consumers should be done with the last generation
        before the maker closes the event: the driver does not define what uses of it do afterwards.

        Raises:
            TimedOut: the event is closed here, but the broker has not yet confirmed that.
        """
        if self.let_go():
            yield from self._handle.confirm()

    def let_go(self) -> bool:
        """Begin to close the event, without waiting; return whether its end is under way."""
        self._owner.check()
        closed = self.closed
        self._ref = None
        reason = Unavailable(f"{self._label} was closed in this process while it waited")
        self._waits.give_up(reason, for_good=True)
        return not closed and self._handle.ending

    @property
    def _label(self) -> str:
        return f"event {self.name!r} of pool {self.pool.name!r} version {self._version}"

    def _closed(self) -> Invalid:
        return Invalid(f"{self._label} is closed in this process; make or open it again")

    def _finish(self, generation: int, deadline: float) -> Steps[None]:
        """Wait until the work is done, by polling: the driver's own wait heeds neither signals nor time limits."""
        pause, never = SOON, Future[None]()
        while not self._use(Event.done, "waiting for"):
            if time.monotonic() > deadline:
                raise TimedOut(f"{self._label} was recorded as generation {generation}, but the work before it goes on")
            yield never, pause
            pause = min(2 * pause, LATE)

    def _use(self, call: Callable[[Event], T], doing: str) -> T:
        ref = self._ref
        if ref is None or self._handle.ending:  # the garbage collector clears weak references before finalizers run
            raise self._closed()
        try:
            return call(ref.event)
        except DriverError as error:
            raise devices.failure(error, f"{doing} {self._label}") from error
        finally:
            del ref  # a traceback may keep this frame for long


class BlockingRequests:
    """Requests of one object for which a thread waits, and which the broker may delay; they end with the object."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._under_way: dict[Pending, Future[Reply]] = {}
        self._over: CubrokerError | None = None

    def ask(self, body: OpenEvent | AwaitEvent, kind: type[R]) -> Steps[R]:
        """Send a request and wait for its answer, a ``kind``. If the caller gives up, tell the broker."""
        self._session.owner.check()
        self._session.check_open()
        future: Future[Reply] = Future()
        pending = Pending(future.settle)
        try:
            self._under_way[pending] = future
            if self._over:  # read last: either `give_up` sees the request, or this line sees `give_up`
                raise self._over.anew()
            self._session.requests.post(body, pending)
            return expect((yield from self._session.wait(future, type(body).__name__, body.wait)), kind)
        except BaseException:
            if not pending.settled:
                self._session.requests.cancel(pending)
            raise
        finally:
            self._under_way.pop(pending, None)

    def give_up(self, reason: CubrokerError, *, for_good: bool) -> None:
        """Have every waiting caller raise ``reason``; ``for_good``: every later caller, too."""
        if for_good:
            self._over = reason
        for future in tuple(self._under_way.values()):
            future.fail(reason)


class Events:
    """The events of one pool in this process."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._opening = BlockingRequests(session)
        self._open: WeakRefs[SharedEvent] = WeakRefs()

    def make(self, pool: _EventPool, place: DeviceMapping, name: str) -> Steps[SharedEvent]:
        """Make an event for the work of the device that uses ``place``; see :meth:`Pool.event`."""
        name = fields.check_pool_name(name, "an event")
        lease = pool.lease
        handle = OwnedEvent(self._session, place.context, f"event {name!r} of pool {pool.name!r}", lease, name)
        return (yield from self._keep(pool, lease, handle, name, place.context.device))

    def open(self, pool: _EventPool, places: tuple[DeviceMapping, ...], name: str, wait: float) -> Steps[SharedEvent]:
        """Open another process's event, in the context of its device if there is one among ``places``."""
        name = fields.check_pool_name(name, "an event")
        lease = pool.lease
        reply = yield from self._opening.ask(OpenEvent(lease, name, wait), EventOpened)
        device = devices.find(self._session.driver, reply.device)
        place = next((place for place in places if place.context.device == device), places[0])
        label = f"event {name!r} of pool {pool.name!r}, which another process has to have made"
        handle = OpenedEvent(self._session, place.context, label, reply)
        return (yield from self._keep(pool, lease, handle, name, device))

    def close(self, reason: CubrokerError) -> None:
        """Close all events, without waiting for their end; callers that wait to open one get the ``reason``."""
        self._opening.give_up(reason, for_good=False)
        for event in self._open:
            event.let_go()

    def _keep(self, pool: _EventPool, lease: int, handle: EventHandle, name: str, device: Device) -> Steps[SharedEvent]:
        event = SharedEvent((yield from handle.obtain()), handle, pool, self._session, name, device)
        self._open.add(event)
        # Another thread may have closed the pool, put it to sleep or switched it during the wait.
        if (pool.closed or pool.asleep or pool.lease != lease) and event.let_go():
            yield from handle.confirm()
        return event


def _stream(stream: Stream | int) -> int:
    """Return the handle of a stream; bindings of CUDA have objects that are one by their ``__int__``."""
    if isinstance(stream, Stream):
        return stream.handle
    handle = int(stream) if hasattr(stream, "__int__") and not isinstance(stream, float) else -1
    if not 0 <= handle < 1 << 64:
        raise Invalid(f"{stream!r} is no stream: pass a Stream, or a handle, such as torch.cuda.Stream.cuda_stream")
    return handle
