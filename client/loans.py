"""A lease from being asked for to being given back, whatever interrupts its holder in between.

The steps, and the thread that each runs on: ``ask`` (the caller's), ``_answered`` (the connection's),
``_open`` (the janitor's), then the caller has a :class:`Mapped`; when nobody uses that any more, ``_end`` (the
janitor's) and ``_closed`` (the connection's). A lease is owned by no frame of the caller at any time,
so a time limit or a KeyboardInterrupt cannot lose one: what nobody waits for is given back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cubroker.client import devices
from cubroker.client.futures import Future
from cubroker.client.janitor import Guard
from cubroker.client.mapping import Mapped, Place
from cubroker.client.requests import Pending
from cubroker.driver import Context, DriverError
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.messages import Attach, Attached, Cancel, Close, Create, Created, Reply, Seal, Sealed

if TYPE_CHECKING:
    from cubroker.client.session import Session

log = logging.getLogger(__name__)

Granted = tuple[Attached | Created, Mapped]
"""What a request for a lease brings: the broker's answer, and the memory."""


class Loan:
    """One request for a lease, and the lease.

    Attributes:
        owner: the process that it belongs to.
        lease: its number, once granted.
    """

    def __init__(self, session: Session) -> None:
        self.owner = session.owner
        self.lease = 0
        self._session = session
        self._ended: Future[Reply] = Future()
        self._granted: Future[Granted] | None = Future()
        self._request: Pending | None = Pending(self._answered)  # until it is answered
        self._abandoned = False
        self._guard: Guard | None = None
        self._ending = False
        self._opened: list[tuple[Context, int]] = []
        self._last: type[Close] | type[Seal] = Close

    def ask(self, body: Attach | Create) -> Future[Granted]:
        """Send the request; the future brings the memory, mapped."""
        future, request = self._granted, self._request
        assert future is not None
        assert request is not None
        self._session.requests.post(body, request)
        return future

    @property
    def asked(self) -> bool:
        """Whether the request is under way, or was."""
        request = self._request
        return request is None or request.number > 0

    def abandon(self, reason: CubrokerError) -> None:
        """Nobody waits any more, because of ``reason``: tell the broker, and give back what comes nevertheless.

        Does nothing if the memory was handed over.
        """
        self._abandoned = True
        if future := self._granted:
            future.abandon()
            future.fail(reason)
        if (request := self._request) and request.number:
            self._session.requests.submit(Cancel(request.number))

    @property
    def ending(self) -> bool:
        """Whether the memory is being given back."""
        return self._ending or (self._guard is not None and self._guard() is None)

    def end(self) -> None:
        """Have the memory unmapped and the lease closed, as happens when nobody uses the memory any more."""
        assert self._guard is not None
        self._ending = True
        self._session.janitor.put(self._guard)

    def seal_at_end(self) -> None:
        """Let the end of the memory publish the draft, instead of discarding it."""
        self._last = Seal

    def confirm(self) -> Reply:
        """Wait until the broker has the lease back, and return what it answered; for loans that are ending."""
        if self._session.stopped:
            raise Unavailable("the interpreter exits, and the lease ends with this process")
        self._session.check_may_wait()
        if not self._ended.wait(self._session.timeout):
            raise TimedOut(f"the broker has not confirmed the end of lease {self.lease} in {self._session.timeout:g} s")
        return self._ended.result()

    # -- on the connection's thread ----------------------------------------------------------------

    def _answered(self, reply: Reply | CubrokerError) -> None:
        self._request = None
        match reply:
            case Attached() | Created():
                self.lease = reply.lease
                self._session.janitor.put(lambda: self._open(reply))
            case CubrokerError():
                self._fail(reply)
                self._session.forget(self)
            case _:
                self._fail(Unavailable(f"the broker answered a request for a lease with {type(reply).__name__}"))
                self._session.forget(self)

    def _closed(self, reply: Reply | CubrokerError) -> None:
        if self._last is Seal and not isinstance(reply, Sealed | Unavailable):
            self._last = Close  # the draft was not published, so it is discarded
            self._session.requests.send(Close(self.lease), lambda _: self._session.forget(self))
        else:
            self._session.forget(self)
        if isinstance(reply, CubrokerError):
            self._ended.fail(reply)
        else:
            self._ended.set(reply)

    # -- on the janitor's thread -------------------------------------------------------------------

    def _open(self, reply: Attached | Created) -> None:
        if self._abandoned:
            return self._end()
        try:
            mapped = self._map(reply)
        except (CubrokerError, DriverError, ValueError) as error:
            self._fail(devices.failure(error, f"opening {_label(reply)}"))
            return self._end()
        self._guard = self._session.janitor.guard(mapped, self._end)
        # From here on the memory ends with the last reference to it, so none may stay in this object.
        future, self._granted = self._granted, None
        assert future is not None
        future.set((reply, mapped))
        return None

    def _map(self, reply: Attached | Created) -> Mapped:
        replicas = reply.replicas if isinstance(reply, Created) else (reply,)
        places = tuple(self._place(replica.device, replica.handles) for replica in replicas)
        return Mapped(_label(reply), places, readonly=isinstance(reply, Attached), finish=self.end)

    def _place(self, device: str, handles: tuple[bytes, ...]) -> Place:
        context = devices.context(self._session.driver, device)
        pointers = []
        for handle in handles:
            pointers.append(context.open(handle))
            self._opened.append((context, pointers[-1]))
        return Place(context, tuple(pointers))

    def _end(self) -> None:
        """Unmap everything, last first, then give the lease back. What cannot be unmapped stays on loan."""
        try:
            while self._opened:
                context, pointer = self._opened[-1]
                context.close(pointer)
                del self._opened[-1]
        except DriverError as error:
            failure = devices.failure(error, f"unmapping the memory of lease {self.lease}")
            log.error("%s; it is given back when this process ends", failure)
            self._ended.fail(failure)
            return self._session.forget(self)
        self._session.requests.send(self._last(self.lease), self._closed)
        return None

    def _fail(self, error: CubrokerError) -> None:
        if future := self._granted:
            future.fail(error)


def _label(reply: Attached | Created) -> str:
    kind = "pool" if isinstance(reply, Attached) else "draft of pool"
    return f"{kind} {reply.name!r} version {reply.version}"
