"""A lease from being asked for to being given back, whatever interrupts its holder in between.

The steps, and the thread that each runs on: ``ask`` (the caller's), ``_answered`` (the connection's),
``_open`` (the janitor's; where fabric handles are refused, once more after ``_exchange``), then the caller has a
:class:`Mapped`; when nobody uses that any more, ``_end`` (the janitor's) and ``_closed`` (the connection's). A lease
is owned by no frame of the caller at any time, so a time limit or a KeyboardInterrupt cannot lose one: what nobody
waits for is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cubroker.client import descriptors, devices
from cubroker.client.addresses import Addresses, Source
from cubroker.client.futures import Future
from cubroker.client.janitor import Guard, Retry
from cubroker.client.mapping import Mapped
from cubroker.client.reach import Offer, Reach
from cubroker.client.replica import decode
from cubroker.client.requests import Pending
from cubroker.driver import DriverError, Working
from cubroker.driver.vmm import import_refused
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Close,
    Create,
    Created,
    Digests,
    Done,
    Rebound,
    Reply,
    Seal,
    SealDigested,
    Sealed,
    SendDescriptors,
    Team,
)

if TYPE_CHECKING:
    from cubroker.client.session import Session

log = logging.getLogger(__name__)

Granted = tuple[Attached | Created, Mapped]
"""What a request for a lease brings: the broker's answer, and the memory."""


class Loan:
    """One request for a lease, and the lease.

    Args:
        session: that asks.
        layout: what the memory has to hold, if the answer may not say so.

    Attributes:
        owner: the process that it belongs to.
        lease: its number, once granted; 0 before, and while its memory is asleep.
    """

    _doing = "opening"
    """What :meth:`_map` does, in words."""

    def __init__(self, session: Session, layout: Layout | None = None) -> None:
        self.owner = session.owner
        self.lease = 0
        self._layout = layout
        self._accessor: str | None = None
        self._thread: Working | None = None
        self._session = session
        self._ended: Future[Reply] = Future()
        self._granted: Future[Granted] | None = Future()
        self._request: Pending | None = Pending(self._answered)  # until it is answered
        self._abandoned = False
        self._guard: Guard[Mapped] | None = None
        self._ending = False
        self._addresses: Addresses | None = None
        self._reach: Reach | None = None
        self._team: Team | None = None
        self._news: tuple[Rebound, Sequence[int] | CubrokerError] | None = None
        self._last: Callable[[int], Close | Seal] = Close
        self._unmapping = Retry(session.janitor, self._end)

    @property
    def how(self) -> tuple[str, str]:
        """How all replicas of a multicast version are stored to, and why so; nothing while nobody knows."""
        return (self._team.how, self._team.why) if self._team else ("", "")

    @property
    def session(self) -> Session:
        """The session that asked for it."""
        return self._session

    def ask(self, body: Attach | Create) -> Future[Granted]:
        """Send the request; the future brings the memory, mapped."""
        future, request = self._granted, self._request
        assert future is not None
        assert request is not None
        where = body if isinstance(body, Attach) else body.attach
        self._accessor = where.device if where else None
        try:
            self._thread = self._session.driver.working()
        except DriverError as error:
            raise devices.failure(error, "asking in which context this thread works") from error
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

    def sleep(self) -> Future[Reply]:
        """Have the memory unmapped and the lease closed; its addresses stay. The future is for :meth:`confirm`."""
        slept: Future[Reply] = Future()
        self._session.janitor.put(lambda: self._sleep(slept))
        return slept

    def seal(self, digests: Digests | None = None) -> None:
        """As :meth:`end`, but the draft is published, with ``digests`` of it: it may not be written any more."""
        self._last = Seal if digests is None else partial(SealDigested, digests=digests)
        self.end()

    def confirm(self, slept: Future[Reply] | None = None) -> Reply:
        """Wait until the broker has the lease back, and return what it answered; for loans that are ending.

        ``slept``: for one that falls asleep.
        """
        ended, lease = slept or self._ended, self.lease
        if self._session.stopped:
            raise Unavailable("the interpreter exits, and the lease ends with this process")
        self._session.check_may_wait()
        if not ended.wait(self._session.timeout):
            raise TimedOut(f"the broker has not confirmed the end of lease {lease} in {self._session.timeout:g} s")
        return ended.result()

    # -- on the connection's thread ----------------------------------------------------------------

    def _answered(self, reply: Reply | CubrokerError) -> None:
        self._request = None
        match reply:
            case Attached() | Created():
                self.lease = reply.lease
                handles = descriptors.fabric(reply)
                if count := descriptors.due(reply):
                    self._expect(reply, count)
                elif handles and not self._session.fabric:
                    self._exchange(reply)
                else:
                    self._given(reply, handles)
            case CubrokerError():
                self._fail(reply)
                self._session.forget(self)
            case _:
                self._fail(Unavailable(f"the broker answered a request for a lease with {type(reply).__name__}"))
                self._session.forget(self)

    def _exchange(self, reply: Attached | Created) -> None:
        """Ask for descriptors of the memory whose fabric handles this process cannot open. On either thread."""
        self._session.requests.send(SendDescriptors(reply.lease), lambda sent: self._exchanged(reply, sent))

    def _exchanged(self, reply: Attached | Created, sent: Reply | CubrokerError) -> None:
        if isinstance(sent, CubrokerError):
            self._given(reply, sent)
        else:
            count = len(descriptors.fabric(reply))
            self._expect(reply, count)

    def _expect(self, reply: Attached | Created, count: int) -> None:
        version = reply.name, reply.version
        self._session.inbox.expect(reply.lease, count, lambda given: self._given(reply, given), version)

    def _given(self, reply: Attached | Created, given: Sequence[Source] | CubrokerError) -> None:
        if isinstance(given, CubrokerError):
            self._fail(given)
            self._session.janitor.put(self._end)
        else:
            self._session.janitor.put(lambda: self._open(reply, given))

    def _closed(self, reply: Reply | CubrokerError) -> None:
        if self._last is not Close and not isinstance(reply, Sealed):
            self._last = Close  # the draft was not published, so it is discarded
            self._session.requests.send(Close(self.lease), lambda _: self._session.forget(self))
        else:
            self._session.forget(self)
        if isinstance(reply, CubrokerError):
            self._ended.fail(reply)
        else:
            self._ended.set(reply)

    # -- on the janitor's thread -------------------------------------------------------------------

    def _open(self, reply: Attached | Created, given: Sequence[Source]) -> None:
        try:
            if self._abandoned:
                return self._end()
            mapped = self._map(reply, given)
        except (CubrokerError, DriverError, ValueError) as error:
            return self._refused(reply, given, error)
        finally:
            self._session.inbox.close(each for each in given if isinstance(each, int))
        self._opened(mapped)
        # From here on the memory ends with the last reference to it, so none may stay in this object.
        future, self._granted = self._granted, None
        assert future is not None
        future.set((reply, mapped))
        return None

    def _refused(
        self, reply: Attached | Created, given: Sequence[Source], error: CubrokerError | DriverError | ValueError
    ) -> None:
        """Try once more by descriptor where a fabric handle was refused, for whatever reason; else give up."""
        by_fabric = any(isinstance(each, bytes) for each in given)
        if by_fabric and isinstance(error, DriverError) and import_refused(error):
            log.info("%s is mapped by descriptor, since its fabric handles are refused here: %s", _label(reply), error)
            self._session.fabric = False
            return self._exchange(reply)
        self._fail(devices.failure(error, f"{self._doing} {_label(reply)}"))
        return self._end()

    def _opened(self, mapped: Mapped) -> None:
        """Look after the memory from now on."""
        self._guard = mapped.guard = self._session.janitor.guard(mapped, self._end)

    def _map(self, reply: Attached | Created, given: Sequence[Source]) -> Mapped:
        """Map what the lease brought; nothing is mapped if it fails, unless unmapping does as well."""
        readonly = isinstance(reply, Attached) and not reply.writable
        layout = decode(reply.layout).layout if isinstance(reply, Attached) else self._layout
        assert layout is not None
        self._addresses = Addresses(readonly=readonly, thread=self._thread)
        driver, sizes, replicas = self._session.driver, layout.allocations, reply.replicas
        own = replicas[:1] if isinstance(reply, Attached) and reply.team else replicas
        with self._addresses.all_or_none():
            accessor = self._accessor if isinstance(reply, Attached) else None
            places = self._addresses.open(driver, own, sizes, given, accessor)
            self._reach = Reach(driver, places, sizes)
            outlet = None if readonly else self._reach.find(self._offer(reply, given))
        self._team = reply.team
        return Mapped(_label(reply), places, reply.share, readonly=readonly, finish=self.end, outlet=outlet)

    def _end(self) -> None:
        """Unmap everything, last first, then give the lease back. While something stays mapped, so does the lease."""
        try:
            for each in (self._reach, self._addresses):
                if each:
                    each.close()
        except DriverError as error:
            return self._end_later(error)
        if not self.lease:  # it was asleep
            self._ended.set(Done())
            return self._session.forget(self)
        self._session.requests.send(self._last(self.lease), self._closed)
        return None

    def _end_later(self, error: DriverError) -> None:
        """Try again to end what cannot be unmapped now. A draft is discarded then: its writer hears of a failure."""
        failure = devices.failure(error, f"unmapping the memory of lease {self.lease}")
        if self._unmapping.first:
            log.error("%s; the lease stays, and this process tries again until it succeeds", failure)
        self._last = Close
        self._ended.fail(failure)
        self._unmapping.again()

    def _sleep(self, slept: Future[Reply]) -> None:
        mapped = self._guard() if self._guard else None
        if mapped is None or not mapped.asleep:  # it has ended, or was woken again
            return slept.set(Done())
        assert self._addresses
        assert self._reach
        try:
            self._addresses.sleep()
            self._reach.sleep()
        except DriverError as error:
            return slept.fail(devices.failure(error, f"unmapping {mapped.label}"))
        lease, self.lease = self.lease, 0
        if not lease:
            return slept.set(Done())
        return self._session.requests.send(Close(lease), slept.settle)

    def resume(self, reply: Attached | Created, given: Sequence[Source]) -> Mapped | None:
        """Map memory that sleeps again, under the lease of ``reply``; memory that is awake stays under its own.

        Returns:
            The memory, or None if it has ended.

        Raises:
            CubrokerError, DriverError: as :meth:`Addresses.wake` and :meth:`Reach.wake` say.
        """
        mapped = self._guard() if self._guard else None
        if mapped is None:
            return None
        assert self._addresses
        assert self._reach
        if self._addresses.asleep or self._reach.asleep:
            self._addresses.wake(given)
            try:
                mapped.outlet = self._reach.wake(mapped.label, mapped.outlet, self._offer(reply, given))
            except BaseException:
                self._addresses.sleep()
                raise
            self._team = reply.team
            before, self.lease = self.lease, reply.lease
            if before:  # it was not asleep whole
                self._session.requests.submit(Close(before))
        mapped.wake()
        return mapped

    def rebound(self, notice: Rebound, given: Sequence[int] | CubrokerError) -> None:
        """Take what the lease stores to all replicas by from now on, and close its descriptors.

        While a tensor is held nothing is unmapped: it is done after that.
        """
        self._drop_news()
        self._news = notice, given
        self._rebind()

    def give_up(self) -> None:
        """What is being mapped to store to all replicas by is of an earlier broker. Runs on the connection's thread."""
        if self._reach:
            self._reach.give_up()

    def unreachable(self, reason: CubrokerError) -> None:
        """The connection is over: no :meth:`rebound` comes any more."""
        if self._reach:
            self._reach.fail(reason)

    def _rebind(self) -> None:
        mapped = self._guard() if self._guard else None
        if self._news is None:
            return
        notice, given = self._news
        if mapped is not None and self._reach and self.lease == notice.lease:
            offer = given if isinstance(given, CubrokerError) else self._offer(notice, given)
            if held := self._reach.replace(mapped, offer):
                self._session.janitor.guard(held, self._rebind)
                return
            self._team = notice.team
        self._drop_news()

    def _offer(self, message: Attached | Created | Rebound, given: Sequence[Source]) -> Offer:
        """Return what a message brings to store to all replicas by, until the next notice."""
        inbox, lease = self._session.inbox, message.lease
        notice = message if isinstance(message, Rebound) else None
        others = message.replicas
        if notice is None:
            given, others = given[len(others[0].handles) :], others[1:]
        return Offer(message.team, others, given, lambda: inbox.later(lease, notice))

    def _drop_news(self) -> None:
        if self._news and not isinstance(self._news[1], CubrokerError):
            self._session.inbox.close(self._news[1])
        self._news = None

    def _fail(self, error: CubrokerError) -> None:
        if future := self._granted:
            future.fail(error)


def _label(reply: Attached | Created) -> str:
    kind = "pool" if isinstance(reply, Attached) else "draft of pool"
    return f"{kind} {reply.name!r} version {reply.version}"
