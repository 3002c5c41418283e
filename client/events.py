"""Events on pools whose readers may write: one process says when bytes are ready, others wait on their streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from cubroker.client import devices
from cubroker.client.living import Living
from cubroker.client.mapping import Place
from cubroker.client.processes import Scoped, Unsendable
from cubroker.client.requests import expect
from cubroker.client.signals import Grip, Made, Opened, Signal
from cubroker.client.waits import Waits
from cubroker.driver import Device, DriverError, Event, Stream
from cubroker.protocol import names
from cubroker.protocol.bounds import MAX_WAIT
from cubroker.protocol.errors import CubrokerError, Invalid, TimedOut, Unavailable
from cubroker.protocol.layout import MAX_EXTENT
from cubroker.protocol.messages import AwaitEvent, EventOpened, Generation, OpenEvent, Recorded

if TYPE_CHECKING:
    from cubroker.client.pool import Pool
    from cubroker.client.session import Session

T = TypeVar("T")

SOON, LATE = 20e-6, 1e-3
"""Seconds between two looks at an event that a thread waits for: the first, and at most."""


class SharedEvent(Unsendable, Scoped):
    """A place in a stream of the process that made it, for which streams of others wait. See :meth:`Pool.event`.

    Its maker records it, again and again; each time counts, and is a *generation*: 1, 2, 3 …. Every method may be
    called from any thread.

    Attributes:
        name: its name on the pool's version.
        pool: the pool here; it stays open for as long as this object lives, unless it is closed.
        device: whose work it marks.
        mine: whether this process made it, and so records it.
    """

    def __init__(self, grip: Grip, signal: Signal, pool: Pool, session: Session, name: str, device: Device) -> None:
        self._grip: Grip | None = grip  # first: what dies with this object begins with it
        self.name = name
        self.pool = pool
        self.device = device
        self.mine = isinstance(signal, Made)
        self._number = grip.number
        self._signal = signal
        self._session = session
        self._owner = session.owner
        self._waits = Waits(session)
        self._seen = 0
        self._recording = RLock()  # so that generations are told in the order in which they were recorded

    def __repr__(self) -> str:
        state = "closed" if self.closed else "mine" if self.mine else "opened"
        return f"<SharedEvent {self.name!r} of {self.pool.name!r} version {self.pool.version}, {state}>"

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the pool."""
        return self._grip is None

    def record(self, stream: Stream | int = 0) -> int:
        """Mark all work that was started in a stream so far as the next generation; returns its number.

        Whoever waits for it goes on when that work is done.

        Args:
            stream: of the context of ``device``; or a CUDA stream's handle, as ``torch.cuda.Stream.cuda_stream`` is
                one. By default the default stream, which is right after synchronous copies.

        Raises:
            Invalid: another process made it, or it is closed.
            DeviceFailure: the driver refused.
            Unavailable, TimedOut: the broker is gone or silent, so that nobody may have heard of it.
        """
        self._owner.check()
        if not self.mine:
            raise Invalid(f"{self._label} is recorded by the process that made it; make another one to answer it")
        self._session.check_may_wait()
        with self._recording:
            self._use(lambda event: event.record(_handle(stream)), "recording")
            future = self._session.requests.submit(Recorded(self._number))
        return expect(self._session.wait(future, "Recorded", 0.0), Generation).generation

    def wait(self, stream: Stream | int | None = None, *, after: int | None = None, timeout: float = 60.0) -> int:
        """Wait for a generation to be recorded, then have a stream wait for the work before it; returns its number.

        It is the newest one: where several were recorded meanwhile, all but the last were missed.

        Args:
            stream: of any device that reaches ``device``, or a CUDA stream's handle; later work in it waits. None: this
                thread waits until the work is done.
            after: the generation wanted is a later one than this; by default than what this object waited for last.
            timeout: seconds to wait for the record; without a ``stream``, for the work too.

        Raises:
            TimedOut: it was not recorded, or the work not done, in that time; its maker may be stopped.
            Unavailable: its maker closed it, gave its lease back, or has ended, and what was recorded; or this object
                was closed, or the broker is gone.
            Invalid: it is closed, or a number makes no sense.
            DeviceFailure: the driver refused.
        """
        self._owner.check()
        since = self._seen if after is None else after
        if not 0 <= since <= MAX_EXTENT or not 0 <= timeout <= MAX_WAIT:
            raise Invalid(f"a wait of {timeout} seconds for what comes after generation {since}; neither can be")
        if self.closed:
            raise self._closed()
        deadline = time.monotonic() + timeout
        body = AwaitEvent(self.pool.lease, self._number, since, float(timeout))
        generation = self._waits.ask(body, Generation).generation
        if stream is None:
            self._finish(generation, deadline)
        else:
            self._use(lambda event: event.hold(_handle(stream)), "waiting for")
        self._seen = max(self._seen, generation)
        return generation

    def close(self) -> None:
        """Give it back; an event of this process's own ends for everybody, and whoever waits for it is told.

        Streams that wait go on waiting for what was recorded. Consumers had better be done with the last generation
        before its maker closes it: the driver promises nothing about what they do with it afterwards.

        Raises:
            TimedOut: it is closed here, but the broker has not yet confirmed that.
        """
        if self.let_go():
            self._signal.confirm()

    def let_go(self) -> bool:
        """Begin to close it, without waiting; returns whether its end is under way."""
        self._owner.check()
        closed = self.closed
        self._grip = None
        reason = Unavailable(f"{self._label} was closed in this process while it waited")
        self._waits.give_up(reason, for_good=True)
        return not closed and self._signal.ending

    @property
    def _label(self) -> str:
        return f"event {self.name!r} of pool {self.pool.name!r} version {self.pool.version}"

    def _closed(self) -> Invalid:
        return Invalid(f"{self._label} is closed in this process; make or open it again")

    def _finish(self, generation: int, deadline: float) -> None:
        """Wait until the work is done: by looking, since the driver's own wait ends for no signal and no time limit."""
        pause = SOON
        while not self._use(Event.done, "waiting for"):
            if time.monotonic() > deadline:
                raise TimedOut(f"{self._label} was recorded, generation {generation}, but the work before is not done")
            time.sleep(pause)
            pause = min(2 * pause, LATE)

    def _use(self, call: Callable[[Event], T], doing: str) -> T:
        grip = self._grip
        if grip is None or self._signal.ending:  # which the collector makes it before it calls finalizers
            raise self._closed()
        try:
            return call(grip.event)
        except DriverError as error:
            raise devices.failure(error, f"{doing} {self._label}") from error
        finally:
            del grip  # a traceback may keep this frame for long


class Events:
    """The events of one pool in this process.

    Args:
        session: the pool's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._opening = Waits(session)
        self._open: Living[SharedEvent] = Living()

    def make(self, pool: Pool, place: Place, name: str) -> SharedEvent:
        """Make an event for the work of the device that uses ``place``; see :meth:`Pool.event`."""
        names.check(name)
        lease = pool.lease
        signal = Made(self._session, place.context, f"event {name!r} of pool {pool.name!r}", lease, name)
        return self._keep(pool, lease, signal, name, place.context.device)

    def open(self, pool: Pool, places: tuple[Place, ...], name: str, wait: float) -> SharedEvent:
        """Open another process's event, in the context of its device if there is one among ``places``."""
        names.check(name)
        lease = pool.lease
        reply = self._opening.ask(OpenEvent(lease, name, wait), EventOpened)
        device = devices.find(self._session.driver, reply.device)
        place = next((place for place in places if place.context.device == device), places[0])
        label = f"event {name!r} of pool {pool.name!r}, which another process has to have made"
        return self._keep(pool, lease, Opened(self._session, place.context, label, reply), name, device)

    def close(self, reason: CubrokerError) -> None:
        """Close all of them, without waiting for the end; whoever waits to open one is told the ``reason``."""
        self._opening.give_up(reason, for_good=False)
        for event in self._open:
            event.let_go()

    def _keep(self, pool: Pool, lease: int, signal: Signal, name: str, device: Device) -> SharedEvent:
        event = SharedEvent(self._session.carry(signal), signal, pool, self._session, name, device)
        self._open.add(event)
        if pool.closed or pool.asleep or pool.lease != lease:  # by another thread, meanwhile
            event.close()
        return event


def _handle(stream: Stream | int) -> int:
    return stream.handle if isinstance(stream, Stream) else stream
