"""An event of a pool from being made or opened to being closed, whatever interrupts its holder in between.

The steps, and the thread that each runs on: ``begin`` (the janitor's), ``_shared`` (the connection's, of an event that
this process makes), ``_hand_over`` (the janitor's), then the caller has a :class:`Grip`; when nobody uses that any
more, ``_end`` and, once the broker has told all who wait, ``_destroy`` (the janitor's). As with leases, no frame of
the caller owns an event at any time.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from cubroker.client import devices
from cubroker.client.futures import Future
from cubroker.client.janitor import Guard, Retry
from cubroker.driver import Context, DriverError, Event
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.messages import DropEvent, EventOpened, EventShared, Reply, ShareEvent

if TYPE_CHECKING:
    from cubroker.client.session import Session

log = logging.getLogger(__name__)


class Grip:
    """The driver's event, which is closed when nobody refers to this object any more.

    Attributes:
        event: what streams record and wait for.
        number: the broker's for it.
    """

    __slots__ = ("__weakref__", "event", "number")

    def __init__(self, event: Event, number: int) -> None:
        self.event = event
        self.number = number


class Signal(ABC):
    """One event in this process, made or opened.

    Args:
        session: that it belongs to.
        context: in which it is.
        label: what it is, for messages.
    """

    request: ClassVar[str]
    """The name of the request that brings it."""

    def __init__(self, session: Session, context: Context, label: str) -> None:
        self.future: Future[Grip] | None = Future()
        self._session = session
        self._context = context
        self._label = label
        self._begun = False
        self._abandoned = False
        self._number = 0
        self._event: Event | None = None
        self._guard: Guard[Grip] | None = None
        self._ended: Future[None] = Future()
        self._closing = Retry(session.janitor, self._destroy)

    def abandon(self, reason: CubrokerError) -> None:
        """Nobody waits any more, because of ``reason``: undo what was done. Nothing, if it was handed over."""
        self._abandoned = True
        if future := self.future:
            future.abandon()
            future.fail(reason)

    @property
    def ending(self) -> bool:
        """Whether it was handed over, and nobody uses it any more."""
        return self._guard is not None and self._guard() is None

    def confirm(self) -> None:
        """Wait until an event that is ending is closed, and the broker knows."""
        with suppress(Unavailable):  # a broker that is gone knows of no event
            self._session.check_may_wait()
            if not self._session.stopped and not self._ended.wait(self._session.timeout):
                limit = self._session.timeout
                raise TimedOut(f"the broker has not confirmed the end of {self._label} in {limit:g} s")

    # -- on the janitor's thread -------------------------------------------------------------------

    def begin(self) -> None:
        """Make it, or open it, unless that was done, or nobody wants it any more."""
        if self._begun:
            return
        self._begun = True
        if self._abandoned:
            self._end()
            return
        try:
            self._obtain()
        except (DriverError, ValueError) as error:
            self._fail(devices.failure(error, self._label))

    @abstractmethod
    def _obtain(self) -> None:
        """Get the driver's event, and see to it that it is handed over."""

    def _hand_over(self) -> None:
        assert self._event is not None
        grip = Grip(self._event, self._number)
        self._guard = self._session.janitor.guard(grip, self._end)
        # From here on the event ends with the last reference to the grip, so none may stay in this object.
        future, self.future = self.future, None
        assert future is not None
        future.set(grip)

    def _fail(self, error: CubrokerError) -> None:
        if future := self.future:
            future.fail(error)
        self._session.janitor.put(self._end)

    def _end(self) -> None:
        """Close it; an event that this process made after its end is known to whoever waits."""
        self._destroy()

    def _destroy(self) -> None:
        try:
            if self._event:
                self._event.close()
        except DriverError as error:
            if self._closing.first:
                failure = devices.failure(error, f"closing {self._label}")
                log.error("%s; this process tries again until it succeeds", failure)
            self._closing.again()
        else:
            self._event = None
            self._session.forget(self)
        self._ended.set(None)


class Made(Signal):
    """An event that this process makes, for others to open as ``name`` with a lease on the version of ``lease``."""

    request = "ShareEvent"

    def __init__(self, session: Session, context: Context, label: str, lease: int, name: str) -> None:
        super().__init__(session, context, label)
        self._lease = lease
        self._name = name

    def _obtain(self) -> None:
        self._event = self._context.event(shared=True)
        body = ShareEvent(self._lease, self._name, self._context.device.uuid, self._event.export())
        self._session.requests.send(body, self._shared)

    def _shared(self, reply: Reply | CubrokerError) -> None:  # on the connection's thread
        if isinstance(reply, EventShared):
            self._number = reply.event
            self._session.janitor.put(self._hand_over)
        elif isinstance(reply, CubrokerError):
            self._fail(reply)
        else:
            self._fail(Unavailable(f"the broker answered the request ShareEvent with {type(reply).__name__}"))

    def _end(self) -> None:
        if self._number:
            self._session.requests.send(DropEvent(self._number), self._dropped)
        else:
            self._destroy()

    def _dropped(self, _: Reply | CubrokerError) -> None:  # on the connection's thread
        self._session.janitor.put(self._destroy)


class Opened(Signal):
    """An event that another process made."""

    request = "OpenEvent"

    def __init__(self, session: Session, context: Context, label: str, reply: EventOpened) -> None:
        super().__init__(session, context, label)
        self._number = reply.event
        self._handle = reply.handle

    def _obtain(self) -> None:
        self._event = self._context.open_event(self._handle)
        self._hand_over()
