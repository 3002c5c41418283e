"""A lease, from its request to its return, through any interrupt of its caller in between.

A :class:`LeaseHandle` is a value with a state; ``TRANSITIONS`` has every change of it. A :class:`LeaseRequest` obtains
a lease: the first one of a handle, and another one each time that its memory wakes, or is replaced by the memory of
another version at the same addresses. Its steps, and the thread of each:

* the caller's: ``ask`` posts the request and waits;
* the connection's: ``_answered`` receives the answer, and waits for descriptors if there are any;
* the cleanup thread's: ``_open`` maps the memory and hands it to the caller. If the driver refuses fabric handles, the
  request continues with descriptors.

No frame of a caller owns a lease at any time, so a time limit or a KeyboardInterrupt cannot lose one: a lease for
which no caller waits is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from cubroker.client import devices
from cubroker.client.cleanup_thread import Guard, Retry
from cubroker.client.memory.mapping import AddressSpace, LeasedMemory, Source
from cubroker.client.session import Asked, ClientSession, Holding
from cubroker.client.transport import fd_receiver
from cubroker.client.transport.requests import Future, Pending, Steps, failure
from cubroker.driver import CurrentContext, DriverError
from cubroker.driver.vmm import HalfReplaced, import_refused, unmap
from cubroker.protocol.errors import CubrokerError, DeviceFailure, Invalid, OutOfMemory, Unavailable, Unsupported
from cubroker.protocol.layout import Layout, TensorIndex
from cubroker.protocol.messages import (
    Attach,
    Attached,
    Close,
    Create,
    Created,
    Digests,
    Done,
    Reply,
    Seal,
    SealDigested,
    Sealed,
    SendDescriptors,
)

if TYPE_CHECKING:
    from cubroker.client.memory.multicast import MulticastMapping

log = logging.getLogger(__name__)

Granted = tuple[Attached | Created, LeasedMemory]
"""The result of a request for a lease: the broker's answer, and the memory."""


class LeaseState(Enum):
    """Where a lease stands in this process."""

    ASKED = "its memory is not mapped yet"
    HELD = "its memory is mapped"
    ASLEEP = "its memory was unmapped and the lease given back; the addresses stay"
    ENDING = "nothing uses its memory any more: it is unmapped, and the lease given back"
    ENDED = "the broker has it back, or never granted it"


class LeaseEvent(Enum):
    """What changes the state of a lease.

    The connection's thread reports REFUSED and CLOSED, the cleanup thread all other events. The broker no longer has a
    lease that ends asleep, so the cleanup thread reports the CLOSED of that one, too.
    """

    MAPPED = "its memory was mapped"
    REFUSED = "the broker granted no lease, or was not asked"
    UNWANTED = "its memory could not be mapped, or its caller has stopped waiting"
    SLEPT = "its memory was unmapped for a sleep"
    WOKEN = "its memory was mapped again, under another lease"
    SWITCHED = "the memory of another version was mapped in its place, under another lease"
    DROPPED = "nothing refers to its memory any more, or its draft ended"
    CLOSED = "the broker has answered, or held no lease any more"


TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    LeaseState.ASKED: {
        LeaseEvent.MAPPED: LeaseState.HELD,
        LeaseEvent.REFUSED: LeaseState.ENDED,
        LeaseEvent.UNWANTED: LeaseState.ENDING,
    },
    LeaseState.HELD: {
        LeaseEvent.SLEPT: LeaseState.ASLEEP,
        LeaseEvent.WOKEN: LeaseState.HELD,  # from a sleep that could not unmap everything
        LeaseEvent.SWITCHED: LeaseState.HELD,
        LeaseEvent.DROPPED: LeaseState.ENDING,
    },
    LeaseState.ASLEEP: {LeaseEvent.WOKEN: LeaseState.HELD, LeaseEvent.DROPPED: LeaseState.ENDING},
    LeaseState.ENDING: {LeaseEvent.CLOSED: LeaseState.ENDED},
    LeaseState.ENDED: {},
}
"""Every event that can occur in a state, and the state after it; any other event is a mistake of this module."""


class LeaseHandle(Holding):
    """One lease of this process, and its memory."""

    def __init__(self, session: ClientSession, layout: Layout | None = None) -> None:
        self.session = session
        self.state = LeaseState.ASKED
        #: The broker's number of the lease while the memory is mapped; 0 before, and while it sleeps.
        self.number = 0
        #: The version that it is on, or was on before it fell asleep; 0 before the memory is mapped.
        self.version = 0
        #: Called when a lease on another version replaces this one: what belonged to it has ended. Must not wait.
        self.switched: Callable[[CubrokerError], None] | None = None
        #: What stores to all replicas; None for other share kinds.
        self.multicast: MulticastMapping | None = None
        self._layout = layout  # the memory's, if the broker's answer does not say it
        self._space: AddressSpace | None = None
        #: A lease on another version, whose memory a switch could neither map everywhere nor unmap again; mostly 0.
        self._stuck = 0
        self._guard: Guard[LeasedMemory] | None = None
        self._dropped = False  # set by a caller; the cleanup thread will report DROPPED
        self._last: Callable[[int], Close | Seal] = Close
        self._digested: Future[None] | None = None
        self._ended: Future[Reply] = Future()
        self._unmapping = Retry(session.cleanup, self._unmap)

    # -- on callers' threads -----------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether the memory is being given back."""
        return self._dropped or (self._guard is not None and self._guard() is None)

    def end(self) -> None:
        """Have the memory unmapped and the lease closed, as happens with the last reference to the memory."""
        assert self._guard is not None
        self._dropped = True
        self.session.cleanup.put(self._guard)

    def seal(self) -> None:
        """Do as :meth:`end`, but publish the draft."""
        self._last = Seal
        self.end()

    def seal_digested(self, compute: Callable[[], Digests], refused: Callable[[], None]) -> None:
        """Do as :meth:`seal`, with digests that the cleanup thread computes. The draft must not be written any more.

        If the digests cannot be computed, ``refused`` is called, and the lease does not end (:meth:`digested`).
        """
        digested = Future[None]()
        self.session.cleanup.put(lambda: self._digest(compute, refused, digested))
        self._digested = digested  # set last: after an interrupt before this line there is nothing to wait for

    def digested(self) -> Steps[None]:
        """Wait without limit until the digests are computed; raises the error if that failed."""
        assert self._digested
        self.session.check_confirms()
        yield self._digested, None
        self._digested.result()

    def protect(self, *, readonly: bool) -> Future[None]:
        """Set whether this process may write the memory; the future is settled when that is so, or has the error."""
        done: Future[None] = Future()
        self.session.cleanup.put(lambda: self._protect(done, readonly=readonly))
        return done

    def sleep(self) -> Future[Reply]:
        """Have the memory unmapped and the lease closed; its addresses stay. The future is for :meth:`confirm`."""
        slept: Future[Reply] = Future()
        self.session.cleanup.put(lambda: self._sleep(slept))
        return slept

    def confirm(self, slept: Future[Reply] | None = None) -> Steps[Reply]:
        """Wait until the broker has the lease back, which ends or fell asleep (``slept``); return its answer."""
        if self._digested:  # first, since the time limit is for the broker alone
            with suppress(CubrokerError):
                yield from self.digested()
        return (yield from self.session.confirm(slept or self._ended, f"lease {self.number}"))

    # -- on the cleanup thread ---------------------------------------------------------------------

    def map(
        self, reply: Attached | Created, given: Sequence[Source], thread: CurrentContext | None, near: str | None
    ) -> LeasedMemory:
        """Map what a request brought: at first at any addresses, later at the same. Awake memory keeps its lease.

        Args:
            reply: the broker's answer.
            given: what opens the allocations, in order; none for legacy handles.
            thread: the context that the caller's thread works in, if any.
            near: the UUID of the device that accesses the memory of an attach; by default each replica's own.

        Raises:
            CubrokerError, DriverError, ValueError: nothing was mapped, unless unmapping failed as well.
        """
        if self.state is not LeaseState.ASKED:
            return self._wake(reply, given)
        if isinstance(reply, Attached):
            readonly, layout = not reply.writable, TensorIndex.decode(reply.layout).layout
            own = reply.replicas[:1] if reply.team else reply.replicas
        else:
            assert self._layout is not None
            readonly, layout, own, near = False, self._layout, reply.replicas, None
        self._space = AddressSpace(self.session.driver, readonly=readonly, thread=thread)
        with self._space.all_or_none():
            places = self._space.open(own, layout.allocations, given, near)
            memory = LeasedMemory(label_of(reply), places, reply.share, readonly=readonly, finish=self.end)
            if reply.team:
                from cubroker.client.memory.multicast import MulticastMapping

                version = reply.name, reply.version
                self.multicast = MulticastMapping(self.session, memory, version, layout.allocations)
                self.multicast.open(reply, given)
        self.number, self.version = reply.lease, reply.version
        self._move(LeaseEvent.MAPPED)
        self.session.held.add(self)
        self._guard = memory.guard = self.session.cleanup.guard(memory, self._drop)
        return memory

    def replace(self, reply: Attached, given: Sequence[Source], layout: Layout) -> LeasedMemory:
        """Map the memory of another version where this one's is, or was before it fell asleep.

        Args:
            reply: the broker's answer.
            given: what opens the allocations, in order.
            layout: the one that the other version must have, too.

        Raises:
            CubrokerError, DriverError: the earlier memory is mapped and leased as it was. If neither can be mapped as
                a whole, the lease is asleep.
        """
        memory = self._memory()
        if memory is None:
            raise Invalid(f"pool {reply.name!r} was closed while it was switched to version {reply.version}")
        if reply.version == self.version:
            return self._wake(reply, given)
        given = memory.matched(reply, given, layout)
        if self.multicast and self.multicast.outlet:
            raise Unsupported(
                f"{memory.label} can be broadcast to, and so cannot be switched: the memory of all its replicas would"
                f" have to be replaced together; close it, and attach to version {reply.version}"
            )
        space = self._space
        assert space
        if self._partly_mapped():
            self._unmap_all()
        asleep = self.state is LeaseState.ASLEEP
        with memory.switching():
            if asleep:
                space.wake(given)
            else:
                self._exchange(memory, reply, given)
            memory.label, self.version = label_of(reply), reply.version
            if self.multicast:
                self.multicast.switch(reply)
        before = self._renumber(LeaseEvent.WOKEN if asleep else LeaseEvent.SWITCHED, reply.lease)
        if self.switched:
            self.switched(Unavailable(f"{memory.label} replaced the event's version during the wait"))
        memory.asleep = False
        if before:
            self.session.requests.submit(Close(before))
        return memory

    def holds(self, number: int) -> bool:
        """Whether the lease of that number belongs to this handle, and is given back with it."""
        return number in (self.number, self._stuck)

    def give_back(self, number: int) -> None:
        """Give back the first lease of this handle, which no caller wants or whose memory could not be mapped."""
        self.number = number
        self._move(LeaseEvent.UNWANTED)
        self.session.held.add(self)
        self._unmap()

    def _digest(self, compute: Callable[[], Digests], refused: Callable[[], None], digested: Future[None]) -> None:
        try:
            digests = compute()
        except MemoryError:
            refused()
            return digested.fail(OutOfMemory("this process has no memory left to compute a digest"))
        except CubrokerError as error:
            refused()
            return digested.fail(error.anew())  # without a traceback
        self._last = partial(SealDigested, digests=digests)
        self.end()  # has no effect if a close was requested while the digests were computed
        return digested.set(None)

    def _memory(self) -> LeasedMemory | None:
        return self._guard() if self._guard else None

    def _protect(self, done: Future[None], *, readonly: bool) -> None:
        assert self._space
        try:
            self._space.protect(readonly=readonly)
        except DriverError as error:
            done.fail(devices.failure(error, f"setting the access of lease {self.number}"))
        else:
            done.set(None)

    def _sleep(self, slept: Future[Reply]) -> None:
        memory = self._memory()
        if memory is None or not memory.asleep:  # it has ended, or was woken again
            return slept.set(Done())
        assert self._space
        try:
            self._unmap_memory()
        except DriverError as error:
            return slept.fail(devices.failure(error, f"unmapping {memory.label}"))
        if self.state is LeaseState.ASLEEP:
            return slept.set(Done())
        self._close_stuck()
        return self.session.requests.send(Close(self._renumber(LeaseEvent.SLEPT, 0)), slept.settle)

    def _wake(self, reply: Attached | Created, given: Sequence[Source]) -> LeasedMemory:
        memory = self._memory()
        if memory is None:
            raise Invalid(f"pool {reply.name!r} version {reply.version} was closed while it was woken")
        space, multicast = self._space, self.multicast
        assert space
        if self._stuck:
            self._unmap_all()
        if self.state is LeaseState.ASLEEP or self._partly_mapped():
            if reply.version != self.version:  # the answer was lost, and came only when the request was sent again
                switched = f"pool {reply.name!r} was switched to version {self.version}"
                raise Invalid(f"{switched} while version {reply.version} was woken, and is asleep; wake it again")
            space.wake(given)
            try:
                if multicast:
                    multicast.wake(memory.label, reply, given)
            except BaseException:
                space.sleep()
                raise
            if before := self._renumber(LeaseEvent.WOKEN, reply.lease):  # the sleep had not unmapped all of it
                self.session.requests.submit(Close(before))
        memory.asleep = False
        return memory

    def _exchange(self, memory: LeasedMemory, reply: Attached, given: Sequence[Source]) -> None:
        """Map another version's memory in place of this one's; if neither can be mapped as a whole, fall asleep."""
        assert self._space
        try:
            self._space.replace(given)
        except HalfReplaced as error:
            why = f"switching to {label_of(reply)}: {error}"
        else:
            return
        memory.asleep = True
        try:
            self._unmap_all()  # the request gives the lease on the other version back
        except DriverError:
            self._stuck = reply.lease  # until the next call that unmaps or maps has unmapped all
        raise DeviceFailure(
            f"{why}; {memory.label} could not be mapped again either and is asleep; wake it, or close it"
        )

    def _partly_mapped(self) -> bool:
        """Whether a sleep or a switch could not unmap everything, or could not map everything again."""
        assert self._space
        missing = self._space.asleep or bool(self.multicast and self.multicast.asleep)
        return bool(self._stuck) or (self.state is LeaseState.HELD and missing)

    def _unmap_all(self) -> None:
        """Unmap what is left, and give back its leases; raises ``DriverError`` if some of it stays mapped."""
        self._unmap_memory()
        self._close_stuck()
        if before := self._renumber(LeaseEvent.SLEPT, 0):
            self.session.requests.submit(Close(before))

    def _unmap_memory(self) -> None:
        """Unmap what is mapped, and keep the addresses; raises ``DriverError`` if some of it stays mapped."""
        self._vacate()
        if self.multicast:
            self.multicast.sleep()

    def _vacate(self) -> None:
        """Unmap all reservations, which keep their addresses, after one wait for submitted work in each context."""
        spaces = self._space, self.multicast and self.multicast.space
        unmap([reservation for space in spaces if space for reservation in space.mapped()])

    def _close_stuck(self) -> None:
        stuck, self._stuck = self._stuck, 0
        if stuck:
            self.session.requests.submit(Close(stuck))

    def _renumber(self, event: LeaseEvent, number: int) -> int:
        """Note the number of the lease whose memory is mapped now; return the number before, to be given back."""
        before, self.number = self.number, number
        self._move(event)
        return before

    def _drop(self) -> None:
        self._move(LeaseEvent.DROPPED)
        self._unmap()

    def _unmap(self) -> None:
        """Unmap everything, last first, then give the lease back. While something stays mapped, keep the lease."""
        try:
            self._vacate()
            for each in (self.multicast, self._space):
                if each:
                    each.close()
        except DriverError as error:
            # A draft is discarded in that case, since its writer is told of a failure.
            failure = devices.failure(error, f"unmapping the memory of lease {self.number}")
            self._last = Close
            self._unmapping.again(f"{failure.message}; the lease stays")
            self._ended.fail(failure)
        else:
            self._close_stuck()
            if self.number:
                self.session.requests.send(self._last(self.number), self._closed)
            else:  # it was asleep
                self._finish()
                self._ended.set(Done())

    # -- on the connection's thread ----------------------------------------------------------------

    def refused(self) -> None:
        """Note that the broker granted no lease."""
        if self.state is LeaseState.ASKED:
            self._move(LeaseEvent.REFUSED)

    def _closed(self, reply: Reply | CubrokerError) -> None:
        if self._last is not Close and not isinstance(reply, Sealed):
            self._last = Close  # the draft was not published, so it is discarded
            self.session.requests.send(Close(self.number), lambda _: self._finish())
        else:
            self._finish()
        self._ended.settle(reply)

    def _finish(self) -> None:
        self._move(LeaseEvent.CLOSED)
        self.session.forget(self)

    def _move(self, event: LeaseEvent) -> None:
        self.state = TRANSITIONS[self.state][event]


class LeaseRequest(Asked[Granted]):
    """One request for a lease until its memory is mapped or the lease is being given back.

    Args:
        lease: the lease: new, asleep, or to be switched to another version.
        kept: the layout of a lease to be switched, whose memory is replaced by that of the other version. If that is
            impossible, :meth:`ask` raises, and the version before stays mapped. Once :meth:`ask` has raised, its caller
            has to wait for :meth:`settle`.
    """

    def __init__(self, lease: LeaseHandle, kept: Layout | None = None) -> None:
        super().__init__()
        self.lease = lease
        self._kept = kept
        self._session = lease.session
        self._pending = Pending(self._answered)
        self._near: str | None = None
        self._thread: CurrentContext | None = None
        self._opening: Future[None] | None = None

    # -- on the caller's thread --------------------------------------------------------------------

    def ask(self, body: Attach | Create) -> Steps[Granted]:
        """Post the request and wait for the memory, which is given back if the caller gives up."""
        where = body if isinstance(body, Attach) else body.attach
        self._near = where.device if where else None
        return self._session.obtain(self, lambda: self._post(body), type(body).__name__, body.wait)

    def abandon(self, reason: CubrokerError) -> None:
        """See :meth:`Holding.abandon`. The broker is told; a request that was not sent yet fails."""
        super().abandon(reason)
        self._session.requests.cancel(self._pending)

    def settle(self) -> Steps[None]:
        """Wait, after the request was abandoned, for a mapping that the cleanup thread has begun nevertheless.

        That may wait for submitted work, and has no limit: a caller that continued earlier would use memory that is
        about to be unmapped.
        """
        if opening := self._opening:
            yield opening, None

    def _post(self, body: Attach | Create) -> None:
        try:
            self._thread = self._session.driver.current_context()
        except DriverError as error:
            raise devices.failure(error, "asking in which context this thread works") from error
        self._session.requests.post(body, self._pending)

    # -- on the connection's thread ----------------------------------------------------------------

    def _answered(self, reply: Reply | CubrokerError) -> None:
        if not isinstance(reply, Attached | Created):
            self.lease.refused()
            self.fail(failure(reply, Attached))
            return self._session.forget(self)
        try:
            handles = fd_receiver.fabric(reply)
        except Unsupported as error:
            return self._given(reply, error)
        if count := fd_receiver.due(reply):
            return self._expect(reply, count)
        if handles and not self._session.fabric:
            return self._exchange(reply)
        return self._given(reply, handles)

    def _exchange(self, reply: Attached | Created) -> None:
        """Ask for descriptors in place of fabric handles that are refused here. Runs on the cleanup thread, too."""

        def exchanged(sent: Reply | CubrokerError) -> None:
            if isinstance(sent, CubrokerError):
                self._given(reply, sent)
            else:
                self._expect(reply, len(fd_receiver.fabric(reply)))

        self._session.requests.send(SendDescriptors(reply.lease), exchanged)

    def _expect(self, reply: Attached | Created, count: int) -> None:
        version = reply.name, reply.version
        self._session.receiver.expect(reply.lease, count, lambda given: self._given(reply, given), version)

    def _given(self, reply: Attached | Created, given: Sequence[Source] | CubrokerError) -> None:
        if isinstance(given, CubrokerError):
            self.fail(given)
            self._session.cleanup.put(lambda: self._give_back(reply.lease))
        else:
            self._session.cleanup.put(lambda: self._open(reply, given))

    # -- on the cleanup thread ---------------------------------------------------------------------

    def _open(self, reply: Attached | Created, given: Sequence[Source]) -> None:
        self._opening = opening = Future[None]()
        try:
            if self.abandoned:  # read last: either this line sees `abandon`, or its caller sees `_opening`
                return self._give_back(reply.lease)
            if self._kept and isinstance(reply, Attached):
                memory = self.lease.replace(reply, given, self._kept)
            else:
                memory = self.lease.map(reply, given, self._thread, self._near)
        except (CubrokerError, DriverError, ValueError) as error:
            return self._unmapped(reply, given, error)
        except MemoryError:
            full = OutOfMemory(f"this process has no memory left to open {label_of(reply)} with")
            return self._unmapped(reply, given, full)
        finally:
            self._session.receiver.close(each for each in given if isinstance(each, int))
            opening.set(None)
        if self.lease.number == reply.lease:
            self._session.forget(self)
        else:
            self._give_back(reply.lease)  # another call has woken it before
        box = [(reply, memory)]
        del memory  # the caller may give it back before this thread continues, and then waits for the end of the lease
        return self.hand_over(box)

    def _unmapped(
        self, reply: Attached | Created, given: Sequence[Source], error: CubrokerError | DriverError | ValueError
    ) -> None:
        """Try once more by descriptor if a fabric handle was refused, for any reason; else fail."""
        by_fabric = any(isinstance(each, bytes) for each in given)
        label = label_of(reply)
        if by_fabric and isinstance(error, DriverError) and import_refused(error):
            log.info("%s is mapped by descriptor, since its fabric handles are refused here: %s", label, error)
            self._session.fabric = False
            return self._exchange(reply)
        new = self.lease.state is LeaseState.ASKED
        doing = "switching to" if self._kept else "opening" if new else "waking"
        self.fail(devices.failure(error, f"{doing} {label}").anew())  # without a traceback, which may keep the memory
        return self._give_back(reply.lease)

    def _give_back(self, number: int) -> None:
        if self.lease.state is LeaseState.ASKED:
            self.lease.give_back(number)
            self._session.forget(self)
        elif self.lease.holds(number):  # its memory is mapped, and cannot be unmapped
            self._session.forget(self)
        else:
            self._session.requests.send(Close(number), lambda _: self._session.forget(self))


def acquire(
    session: ClientSession, body: Attach | Create, layout: Layout | None = None
) -> Steps[tuple[LeaseHandle, Attached | Created, LeasedMemory]]:
    """Request a lease and map its memory, whose ``layout`` is given if the answer does not have it."""
    lease = LeaseHandle(session, layout)
    return lease, *(yield from LeaseRequest(lease).ask(body))


def label_of(reply: Attached | Created) -> str:
    """Return a name for messages."""
    kind = "pool" if isinstance(reply, Attached) else "draft of pool"
    return f"{kind} {reply.name!r} version {reply.version}"
