"""How one lease stores to all replicas of a multicast version in one call. No other module of the client knows how.

The *outlet* of a lease is what it stores through. The broker decides for all holders together whether that is multicast
objects, one per allocation (:class:`Windows`), or a copy to each replica (:class:`Copies`). The objects end with the
broker: after its restart, until new ones are mapped at the same addresses, the outlet is :class:`Unbound`, and stores
wait.

:class:`MulticastMapping` has the outlet of one lease. The cleanup thread alone changes it; callers use it while they
hold a tensor; the session passes the notices of the broker to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import Event, Thread
from typing import NamedTuple
from weakref import ref

from cubroker.client import devices
from cubroker.client.memory.mapping import AddressSpace, DeviceMapping, LeasedMemory, Source, TensorUse
from cubroker.client.session import ClientSession
from cubroker.client.transport.connection import Shortage, try_memory
from cubroker.client.transport.requests import UNWANTED, Future
from cubroker.driver import Context, DriverError, Window
from cubroker.driver.multicast import PIECE, unavailable
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import Attached, Created, Rebound, ReplicaHandles, Team

log = logging.getLogger(__name__)

STAGE = 8 << 20
"""Bytes that are copied through host memory at a time."""

MOMENT = 1.0
"""Seconds within which a driver call returns once nothing blocks it any more."""

AFTER_RESTART = "what its replicas were bound together by after a restart"
"""What could not be mapped, in errors."""


# -- outlets ---------------------------------------------------------------------------------------


class Windows:
    """Stores through multicast objects, one per allocation, that are mapped into windows of addresses."""

    def __init__(self, home: Context, windows: Sequence[Window]) -> None:
        self.windows = tuple(windows)
        #: Bytes of each object; :class:`Copies` has none.
        self.sizes = tuple(window.nbytes for window in windows)
        self._home = home

    def pointer(self, allocation: int, offset: int) -> int:
        """Return the address by which a place in every replica is stored to."""
        return self.windows[allocation].pointer + offset

    def store(self, source: int, allocation: int, offset: int, nbytes: int) -> None:
        """Copy bytes at an address of the home device to a place in every replica; done when it returns.

        The kernel stores whole pieces; copies through the same addresses store the rest. After a ``DriverError`` some
        replicas may have the bytes.
        """
        window = self.windows[allocation]
        target = self.pointer(allocation, offset)
        alike = (source - target) % PIECE == 0
        head = min(-target % PIECE, nbytes) if alike else nbytes
        middle = (nbytes - head) // PIECE * PIECE
        tail = nbytes - head - middle
        self._home.synchronize()  # for the work that fills the source
        if middle:
            window.broadcast(source + head, target + head, middle)
        with self._home.stream() as stream:
            for start, length in ((0, head), (head + middle, tail)):
                if length:
                    stream.copy(target + start, source + start, length)
            stream.synchronize()


class Copies:
    """Stores by a copy to each replica: from device to device if one reaches the other, else through host memory."""

    def __init__(self, home: DeviceMapping, others: Sequence[DeviceMapping]) -> None:
        self.sizes: tuple[int, ...] = ()
        self._home = home
        #: Each in the context in which it is mapped: that of the home device, if this reaches the replica.
        self._others = tuple(others)

    def store(self, source: int, allocation: int, offset: int, nbytes: int) -> None:
        """Do as :meth:`Windows.store`: copy to the home device's replica, and from there to the others."""
        home = self._home.context
        home.synchronize()  # for the work that fills the source
        first = self._home.pointer(allocation) + offset
        with home.stream() as stream:
            if source != first:
                stream.copy(first, source, nbytes)
                stream.synchronize()
            for place in self._others:
                if place.context is home:
                    stream.copy(place.pointer(allocation) + offset, first, nbytes)
            stream.synchronize()
        for place in self._others:
            if place.context is not home:
                _stage(home, first, place.context, place.pointer(allocation) + offset, nbytes)


class StoresRefused:
    """No stores: this process cannot do what other holders can; ``why`` is the reason."""

    def __init__(self, why: str) -> None:
        self.why = why


class Unbound:
    """No stores yet: the broker was started again, and binds the replicas together again."""

    def __init__(self, before: Windows | Copies | None = None) -> None:
        #: The outlet before the restart, or one that is partly mapped; its memory may not be mapped.
        self.before = before
        #: Settled when another outlet takes the place of this one; fails if none ever will.
        self.over: Future[None] = Future()


Outlet = Windows | Copies | StoresRefused | Unbound


class MulticastOffer(NamedTuple):
    """What the broker gave a lease so that it can store to all replicas."""

    #: How stores are made.
    team: Team
    #: The replicas on other devices, for copies.
    others: tuple[ReplicaHandles, ...]
    #: What opens the ``others``, in order, then what opens the multicast objects.
    sources: Sequence[Source]
    #: Returns whether the broker that sent this is gone, and maybe the multicast objects with it.
    stale: Callable[[], bool]

    @property
    def unknown(self) -> bool:
        """Whether it is not known yet how stores are made: the broker will send a notice."""
        return not self.team.how or self.stale()


class AbandonableCall:
    """A driver call that may never return, on a thread of its own; other threads can end the wait for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._over: Future[BaseException | None] = Future()
        #: Set when the call has returned, also if it was given up.
        self.returned = Event()

    def run(self) -> bool:
        """Make the call, and return True once it has returned, or raise its error; False if it was given up."""
        thread = Thread(target=self._run, name="cubroker-call", daemon=True)
        try:
            try_memory(1)  # Thread.start() waits for ever for a thread without memory to run in
            thread.start()
        except (RuntimeError, Shortage):  # threads, or the memory for them, have run out
            self._run()
        try:
            error = self._over.result()
        except Unavailable:
            return False
        self._over.abandon()  # an error's traceback refers to this frame, so nothing here may refer to the error
        try:
            if error:
                raise error
        finally:
            del error
        return True

    def give_up(self) -> None:
        """Have :meth:`run` return. On any thread, at any time."""
        self._over.fail(UNWANTED)

    def _run(self) -> None:
        try:
            if not self._over.done():
                self._call()
        except BaseException as error:  # noqa: BLE001  the thread that waits raises it
            self._over.set(error)
        else:
            self._over.set(None)
        finally:
            self.returned.set()


# -- the mapping of one lease ----------------------------------------------------------------------


class MulticastMapping:
    """What a lease has mapped to store to all replicas.

    Args:
        session: the session of the lease.
        memory: the memory that the lease maps in any case; its first place is on the device that stores.
        version: name and version of the pool.
        sizes: bytes of every allocation of the layout.
    """

    def __init__(
        self, session: ClientSession, memory: LeasedMemory, version: tuple[str, int], sizes: Sequence[int]
    ) -> None:
        #: The lease's number; 0 while it sleeps.
        self.lease = 0
        #: What stores to all replicas; None if this lease cannot.
        self.outlet: Outlet | None = None
        #: The broker's latest choice: how all replicas are stored to (empty while that is not known), and why so.
        self.team = Team("", "", ())
        self._session = session
        self._memory = ref(memory)
        self._places = memory.places
        self._version = version
        self._sizes = tuple(sizes)
        #: The mappings of this object; legacy handles open none of them.
        self.space = AddressSpace(session.driver, readonly=False, thread=None)
        self._bound = self.team  # what the outlet was made for
        self._news: tuple[Rebound, Sequence[int] | CubrokerError] | None = None
        self._unbound: Unbound | None = None
        self._leaving = False  # whether stores that are under way may still use the outlet before an `Unbound` one
        self._call: AbandonableCall | None = None
        self._late: list[tuple[Window, AbandonableCall]] = []  # calls that were given up
        self._failure: CubrokerError | None = None
        self._closed = False

    # -- on callers' threads -----------------------------------------------------------------------

    @contextmanager
    def hold(self, memory: Callable[[], LeasedMemory], name: str) -> Iterator[Windows | Copies]:
        """Keep a tensor and the outlet mapped within a ``with`` block; ``memory`` returns the lease's mapped memory."""
        while True:
            outlet = self.usable(memory)
            use = memory().lend(name, held=True, storing=True)
            try:
                if self.outlet is outlet:  # what it uses stays mapped from now on
                    yield outlet
                    return
            finally:
                del use  # a traceback may keep this frame for long

    def usable(self, memory: Callable[[], LeasedMemory]) -> Windows | Copies:
        """Return the outlet, once the replicas are bound together; raises as :meth:`Pool.broadcast` does."""
        session, label = self._session, memory().label
        while isinstance(outlet := self._checked(memory()), Unbound):
            if lost := session.losses.get(self._version):
                raise Unavailable(f"{label} is lost: {lost}; close it, and attach to the next version")
            session.check_may_wait()
            if not outlet.over.wait(session.timeout):
                raise TimedOut(
                    f"the replicas of {label} were not bound together again within {session.timeout:g} s of a"
                    f" restart of the broker; try again, or see its log"
                )
            outlet.over.result()
        return outlet

    def pointer(self, memory: Callable[[], LeasedMemory], allocation: int, offset: int) -> int:
        """Return the address by which a place in every replica is stored to; raises as :meth:`usable` does."""
        outlet = self.usable(memory)
        if isinstance(outlet, Copies):
            raise Unsupported(
                f"{memory().label} is written by copies: {self.team.why}; use broadcast, which works either way"
            )
        return outlet.pointer(allocation, offset)

    def _checked(self, memory: LeasedMemory) -> Windows | Copies | Unbound:
        if memory.readonly:
            raise Invalid(f"{memory.label} was published; create it with writable=True for its readers to broadcast")
        if (outlet := self.outlet) is None:
            device = self._places[0].context.device.index
            raise Invalid(f"{memory.label} has no replica on device {device}; attach on one of its devices")
        if isinstance(outlet, StoresRefused):
            raise Unsupported(f"this process cannot store to all replicas of {memory.label}: {outlet.why}")
        return outlet

    # -- on the cleanup thread ---------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether memory is not mapped, for another reason than that the broker has not sent it yet."""
        return self.space.asleep and (self._unbound is None or self._unbound.over.done())

    def open(self, reply: Attached | Created, given: Sequence[Source]) -> None:
        """Map what the lease stores through; if that fails, nothing stays mapped, unless unmapping fails as well."""
        offer = self._offer(reply, given)
        self.lease, self.team = reply.lease, offer.team
        self._session.rebindable.add(self)  # before the driver calls, so that a notice can end them
        memory = self._memory()
        if memory is not None and not memory.readonly:
            self.outlet = self._find(offer)

    def sleep(self) -> None:
        """Unmap the memory, and keep the addresses; raises ``DriverError`` if some memory is still mapped."""
        self.space.sleep()
        self._look_again()
        self.lease = 0

    def wake(self, label: str, reply: Attached | Created, given: Sequence[Source]) -> None:
        """Map the memory where it was; raises as :meth:`AddressSpace.wake`, or ``Unavailable`` if ``how`` changed."""
        if reply.team is None:
            raise _changed(label, "not at all")
        offer = self._offer(reply, given)
        before, self.lease = self.lease, reply.lease
        try:
            self.outlet = self._woken(label, self.outlet, offer)
        except BaseException:
            self.lease = before
            raise
        self.team = offer.team

    def switch(self, reply: Attached) -> None:
        """Note that the lease is on another version now. Like the version before, it has no outlet."""
        assert reply.team
        assert self.outlet is None
        self.lease, self.team, self._version = reply.lease, reply.team, (reply.name, reply.version)

    def close(self) -> None:
        """Unmap everything, last first; raises ``DriverError`` if something is still mapped."""
        self._closed = True
        self._look_again()
        self.space.close()

    def rebound(self, notice: Rebound, given: Sequence[int] | CubrokerError) -> None:
        """Store as a notice says, once no tensor is held, and close its descriptors."""
        self._drop_news()
        self._news = notice, given
        self._rebind()

    def unreachable(self, reason: CubrokerError) -> None:
        """See :meth:`.notices.Rebindable.unreachable`."""
        self._failure = reason
        if self._unbound:
            self._unbound.over.fail(reason)

    def give_up(self) -> None:
        """See :meth:`.notices.Rebindable.give_up`."""
        if call := self._call:
            call.give_up()

    def _offer(self, message: Attached | Created | Rebound, given: Sequence[Source]) -> MulticastOffer:
        """Return what a message brings; it is stale once the next notice has come."""
        receiver, lease, others = self._session.receiver, message.lease, message.replicas
        notice = message if isinstance(message, Rebound) else None
        if notice is None:
            given, others = given[len(others[0].handles) :], others[1:]
        assert message.team
        return MulticastOffer(message.team, others, given, lambda: receiver.later(lease, notice))

    def _rebind(self) -> None:
        memory = self._memory()
        if self._news is None:
            return
        notice, given = self._news
        if memory is not None and self.lease == notice.lease:
            offer = given if isinstance(given, CubrokerError) else self._offer(notice, given)
            if holder := self._replace(memory, offer):
                self._session.cleanup.guard(holder, self._rebind)
                return
            self.team = notice.team
        self._drop_news()

    def _drop_news(self) -> None:
        if self._news and not isinstance(self._news[1], CubrokerError):
            self._session.receiver.close(self._news[1])
        self._news = None

    def _find(self, offer: MulticastOffer) -> Outlet | None:
        """Map what an outlet needs and return the outlet; None if the lease has no replica on its own device."""
        self._bound, home = offer.team, self._places[0]
        return self._connect(offer) if home.context.device == home.memory else None

    def _connect(self, offer: MulticastOffer) -> Outlet:
        if offer.unknown:
            return self._unbind()
        why = ""
        if offer.team.sizes:
            try:
                return self._windows(offer)
            except DriverError as error:
                if not unavailable(error):
                    raise
                why = str(error)
        if why and not offer.others and len(self._places) == 1:  # nothing here opens the other replicas
            return StoresRefused(why)
        try:
            return self._copies(offer)
        except NotFound as error:
            return StoresRefused(error.message)

    def _woken(self, label: str, outlet: Outlet | None, offer: MulticastOffer) -> Outlet | None:
        if outlet is None or isinstance(outlet, StoresRefused):
            return outlet
        before = outlet.before if isinstance(outlet, Unbound) else outlet
        if before is None:
            return self._find(offer)
        if offer.unknown:
            return self._unbind(before)
        if before.sizes != offer.team.sizes:
            raise _changed(label, f"{offer.team.how}: {offer.team.why}")
        self._bound = offer.team
        if isinstance(before, Copies):
            self.space.wake(offer.sources)
            return before
        try:
            return self._bind(before, offer)
        except BaseException:
            self.space.sleep()
            raise

    def _replace(self, memory: LeasedMemory, offer: MulticastOffer | CubrokerError) -> TensorUse | None:
        """Set another outlet, or the same on other objects; if it is in use, return a use that holds a tensor."""
        outlet = self.outlet
        if outlet is None or self._closed:  # once the lease is given back, the addresses may have another use
            return None
        before = outlet.before if isinstance(outlet, Unbound) else outlet
        used = self._leaving or outlet is before
        if isinstance(offer, MulticastOffer) and offer.stale():
            if used:
                self._reopen(before)
            return None
        # Copies go to the same replicas as before.
        unmaps = isinstance(before, Windows) or (isinstance(before, Copies) and not self._stays(offer))
        if used and unmaps and (holder := self._shut(memory, before)):
            return holder
        self._leaving = False
        unbound, self._unbound = self._unbound, None
        self.outlet = self._replaced(before, offer, asleep=memory.asleep)
        if unbound:
            unbound.over.set(None)
        return None

    def _stays(self, offer: MulticastOffer | CubrokerError) -> bool:
        """Whether copies are still made: also by a draft if its process lacks multicast, though the broker has it."""
        if isinstance(offer, CubrokerError):
            return False
        return not offer.team.sizes or bool(self._bound.sizes)

    def _shut(self, memory: LeasedMemory, outlet: Outlet | None) -> TensorUse | None:
        """Let no use of an outlet begin, unless a tensor is held, whose holder would then wait for itself.

        A caller that stores notes its use, and then reads the outlet; this method sets the outlet, and then reads the
        uses.
        """
        assert isinstance(outlet, Windows | Copies)
        if not self._leaving:
            self.outlet, self._leaving = self._unbind(outlet), True
        holder = memory.holder()
        if holder and not holder.storing:
            self._reopen(outlet)
        return holder

    def _reopen(self, outlet: Outlet | None) -> None:
        self.outlet, self._leaving = outlet, False
        self._look_again()

    def _unbind(self, before: Windows | Copies | None = None) -> Unbound:
        self._unbound = Unbound(before)
        if self._failure:
            self._unbound.over.fail(self._failure)
        return self._unbound

    def _look_again(self) -> None:
        """Have callers that wait for an outlet look again."""
        if self._unbound:
            self._unbound.over.set(None)

    def _replaced(self, before: Outlet | None, offer: MulticastOffer | CubrokerError, *, asleep: bool) -> Outlet | None:
        # Only the texts of errors are kept: their tracebacks would keep the mapped memory.
        if isinstance(offer, CubrokerError):
            why = offer.message
        else:
            try:
                return self._found_again(before, offer, asleep=asleep)
            except (CubrokerError, DriverError, ValueError) as error:
                why = devices.failure(error, f"mapping {AFTER_RESTART}").message
            except MemoryError:
                why = f"this process has no memory left to map {AFTER_RESTART}"
        log.error("a lease can no longer store to all replicas: %s", why)
        try:
            self.space.close()
        except DriverError as error:
            log.error("%s", str(error))  # it is tried again when the lease ends
        return StoresRefused(f"{why}; close it, and attach again")

    def _found_again(self, before: Outlet | None, offer: MulticastOffer, *, asleep: bool) -> Outlet | None:
        if isinstance(before, Windows) and before.sizes == offer.team.sizes:
            outlet: Outlet = self._bind(before, offer, asleep=asleep)
        elif isinstance(before, Copies) and self._stays(offer):
            if self.asleep and not asleep:
                self.space.wake(offer.sources)
            outlet = before
        else:
            self.space.close()
            return self._find(offer)
        self._bound = offer.team
        return outlet

    def _windows(self, offer: MulticastOffer) -> Windows | Unbound:
        """Reserve addresses for the objects, and map them there."""
        context = self._places[0].context
        with self.space.all_or_none():
            windows = []
            for size in offer.team.sizes:
                windows.append(context.window(size))
                self.space.adopt(windows[-1])
            return self._bind(Windows(context, windows), offer)

    def _bind(self, windows: Windows, offer: MulticastOffer, *, asleep: bool = False) -> Windows | Unbound:
        """Map objects into windows, in place of those mapped there; ``asleep``: leave windows without one as they are.

        If the process that made an object is gone, the driver may wait for its devices for ever. So the call can be
        given up; the windows are kept for the next offer.
        """
        for window, source in zip(windows.windows, offer.sources[-len(windows.windows) :], strict=True):
            if window.mapped:
                window.unmap()
            elif asleep:
                continue
            if not self._map(window, source, offer):
                return self._unbind(windows)
        return windows

    def _map(self, window: Window, source: Source, offer: MulticastOffer) -> bool:
        """Map an object; return False if that was given up."""
        self._call = call = AbandonableCall(partial(window.map, source))
        try:
            if offer.stale():
                return False
            if not call.run():
                self._late.append((window, call))
                return False
        except DriverError:
            if not self._vacate(window):
                raise
            return self._map(window, source, offer)
        finally:
            self._call = None
        return True

    def _vacate(self, window: Window) -> bool:
        """Unmap an object of an earlier broker if a call that was given up has mapped it; return whether it had."""
        self._late = [(each, call) for each, call in self._late if each is not window or not call.returned.wait(MOMENT)]
        if window.mapped:
            window.unmap()
            return True
        return False

    def _copies(self, offer: MulticastOffer) -> Copies:
        """Map the other replicas for the home device. If the offer has none, those that the draft has mapped serve."""
        home, *rest = self._places
        if offer.others:
            left = iter(offer.sources)
            pairs = [(replica, tuple(islice(left, len(replica.handles)))) for replica in offer.others]
            with self.space.all_or_none():
                rest = [self.space.reach(home, *pair, self._sizes) for pair in pairs]
        return Copies(home, rest)


def _stage(source: Context, first: int, target: Context, second: int, nbytes: int) -> None:
    """Copy from one device to another through host memory."""
    buffer = bytearray(min(STAGE, nbytes))
    for start in range(0, nbytes, STAGE):
        piece = memoryview(buffer)[: min(STAGE, nbytes - start)]
        source.read_into(first + start, piece)
        target.write(second + start, piece)


def _changed(label: str, now: str) -> Unavailable:
    return Unavailable(
        f"stores to {label} are made in another way than when it fell asleep (now: {now}), so its addresses cannot be"
        f" used any more; it stays asleep: close it, and attach again"
    )
