"""One lease's way to all replicas of a multicast version: found, put to sleep, woken, and found anew after a restart.

All of it is called on the janitor's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from cubroker.client import devices
from cubroker.client.addresses import Addresses, Source
from cubroker.client.broadcast import Copies, Outlet, Refused, Unbound, Windows
from cubroker.client.errands import Errand
from cubroker.client.mapping import Lent, Mapped, Place
from cubroker.driver import Driver, DriverError, Window
from cubroker.driver.multicast import unavailable
from cubroker.protocol.errors import CubrokerError, NotFound, Unavailable
from cubroker.protocol.messages import Replica, Team

log = logging.getLogger(__name__)

MOMENT = 1.0
"""Seconds within which a call returns that is not held up any more."""


class Offer(NamedTuple):
    """What the broker gave a lease to store to all replicas by.

    Attributes:
        team: how that is done; None: it is no multicast version.
        others: the replicas on other devices, for copies.
        sources: what opens the ``others``, in order, then what opens the multicast objects.
        stale: whether it is of a broker that is gone, and such objects may be with it.
    """

    team: Team | None
    others: tuple[Replica, ...]
    sources: Sequence[Source]
    stale: Callable[[], bool]


class Reach:
    """What a lease has mapped to store to all replicas.

    Args:
        driver: this process's.
        places: the replicas that the lease has mapped anyway, the first on the device that stores.
        sizes: bytes of every allocation of the layout.
    """

    def __init__(self, driver: Driver, places: Sequence[Place], sizes: Sequence[int]) -> None:
        self._addresses = Addresses(readonly=False, thread=None)  # nothing of it is opened by a legacy handle
        self._driver = driver
        self._places = tuple(places)
        self._sizes = tuple(sizes)
        self._team: Team | None = None
        self._unbound: Unbound | None = None
        self._leaving = False  # while stores under way still use the outlet before it
        self._errand: Errand | None = None
        self._late: list[tuple[Window, Errand]] = []  # those that were given up
        self._failure: CubrokerError | None = None
        self._closed = False

    @property
    def asleep(self) -> bool:
        """Whether memory is missing anywhere, and not because it is still to come."""
        return self._addresses.asleep and (self._unbound is None or self._unbound.over.done())

    def find(self, offer: Offer) -> Outlet | None:
        """Map what it takes; nothing is mapped if it fails, unless unmapping does as well.

        Returns:
            None if it is no multicast version, or the lease has no replica on its own device.

        Raises:
            CubrokerError, DriverError: the driver refused.
        """
        self._team, home = offer.team, self._places[0]
        if offer.team is None or home.context.device != home.memory:
            return None
        return self._connect(offer, offer.team)

    def sleep(self) -> None:
        """Unmap it, and keep the addresses; raises ``DriverError`` if some is still mapped."""
        self._addresses.sleep()
        self._settle()

    def wake(self, label: str, outlet: Outlet | None, offer: Offer) -> Outlet | None:
        """Map it where it was, and return the outlet from now on.

        Raises:
            CubrokerError, DriverError: as :meth:`Addresses.wake`, or there is another way now.
        """
        if outlet is None or isinstance(outlet, Refused):
            return outlet
        before = outlet.before if isinstance(outlet, Unbound) else outlet
        if before is None:
            return self.find(offer)
        if offer.team is not None and _unknown(offer.team, offer):
            return self._unbind(before)
        _check_same(label, before, offer.team)
        self._team = offer.team
        if isinstance(before, Copies):
            self._addresses.wake(offer.sources)
            return before
        try:
            return self._bind(before, offer)
        except DriverError:
            self._addresses.sleep()
            raise

    def replace(self, mapped: Mapped, offer: Offer | CubrokerError) -> Lent | None:
        """Have another outlet for what is mapped, or the same on other objects.

        Returns:
            What holds a tensor, and may be using the outlet that there is: nothing was done then.
        """
        outlet = mapped.outlet
        if outlet is None or self._closed:  # the lease is being given back, and the addresses are others' by now
            return None
        before = outlet.before if isinstance(outlet, Unbound) else outlet
        used = self._leaving or outlet is before
        if isinstance(offer, Offer) and offer.stale():
            if used:
                self._reopen(mapped, before)
            return None
        if used and self._lets_go(before, offer) and (lent := self._shut(mapped, before)):
            return lent
        self._leaving = False
        unbound, self._unbound = self._unbound, None
        mapped.outlet = self._replaced(before, offer, asleep=mapped.asleep)
        if unbound:
            unbound.over.set(None)
        return None

    def give_up(self) -> None:
        """What is being mapped is of an earlier broker. Runs on any thread."""
        if errand := self._errand:
            errand.give_up()

    def fail(self, reason: CubrokerError) -> None:
        """Nothing comes any more for those who wait for an outlet."""
        self._failure = reason
        if self._unbound:
            self._unbound.over.fail(reason)

    def close(self) -> None:
        """Unmap everything, last first; raises ``DriverError`` if something is still mapped."""
        self._closed = True
        self._settle()
        self._addresses.close()

    def _unbind(self, before: Windows | Copies | None = None) -> Unbound:
        self._unbound = Unbound(before)
        if self._failure:
            self._unbound.over.fail(self._failure)
        return self._unbound

    def _settle(self) -> None:
        """Have those who wait for an outlet look again."""
        if self._unbound:
            self._unbound.over.set(None)

    def _shut(self, mapped: Mapped, outlet: Outlet | None) -> Lent | None:
        """Let nobody begin to use an outlet, unless a tensor is held: its holder would wait for itself.

        Whoever stores notes it, and then looks for the outlet; this is the other way round.
        """
        assert isinstance(outlet, Windows | Copies)
        if not self._leaving:
            mapped.outlet, self._leaving = self._unbind(outlet), True
        lent = mapped.holder()
        if lent and not lent.storing:
            self._reopen(mapped, outlet)
        return lent

    def _reopen(self, mapped: Mapped, outlet: Outlet | None) -> None:
        mapped.outlet, self._leaving = outlet, False
        self._settle()

    def _lets_go(self, outlet: Outlet | None, offer: Offer | CubrokerError) -> bool:
        """Whether something is to be unmapped that an outlet uses. Copies go to the same replicas as before."""
        return isinstance(outlet, Windows) or (isinstance(outlet, Copies) and not self._stays(offer))

    def _stays(self, offer: Offer | CubrokerError) -> bool:
        """Whether copies are still to be made: also by a draft whose process, and not the broker, has no multicast."""
        if isinstance(offer, CubrokerError) or offer.team is None:
            return False
        return not offer.team.sizes or bool(self._team and self._team.sizes)

    def _replaced(self, before: Outlet | None, offer: Offer | CubrokerError, *, asleep: bool) -> Outlet | None:
        # Only words are kept of errors: their tracebacks keep what is mapped.
        if isinstance(offer, CubrokerError):
            return self._do_without(offer.message)
        try:
            return self._found_again(before, offer, asleep=asleep)
        except (CubrokerError, DriverError, ValueError) as error:
            why = devices.failure(error, "mapping what its replicas were bound together by after a restart").message
        return self._do_without(why)

    def _do_without(self, why: str) -> Refused:
        log.error("no way to store to all replicas: %s", why)
        try:
            self._addresses.close()
        except DriverError as error:
            log.error("%s", str(error))  # it is tried again when the lease ends
        return Refused(f"{why}; close it, and attach again")

    def _found_again(self, before: Outlet | None, offer: Offer, *, asleep: bool) -> Outlet | None:
        team = offer.team
        assert team is not None
        if isinstance(before, Windows) and before.sizes == team.sizes:
            outlet: Outlet = self._bind(before, offer, asleep=asleep)
        elif isinstance(before, Copies) and self._stays(offer):
            if self.asleep and not asleep:
                self._addresses.wake(offer.sources)
            outlet = before
        else:
            self._addresses.close()
            return self.find(offer)
        self._team = team
        return outlet

    def _connect(self, offer: Offer, team: Team) -> Outlet:
        if _unknown(team, offer):
            return self._unbind()
        why = ""
        if team.sizes:
            try:
                return self._windows(team.sizes, offer)
            except DriverError as error:
                if not unavailable(error):
                    raise
                why = str(error)
        if why and not offer.others and len(self._places) == 1:  # the other replicas are not at hand
            return Refused(why)
        try:
            return self._copies(offer)
        except NotFound as error:
            return Refused(error.message)

    def _windows(self, sizes: Sequence[int], offer: Offer) -> Windows | Unbound:
        context = self._places[0].context
        with self._addresses.all_or_none():
            return self._bind(Windows(context, [self._addresses.window(context, size) for size in sizes]), offer)

    def _bind(self, windows: Windows, offer: Offer, *, asleep: bool = False) -> Windows | Unbound:
        """Map objects into windows, in the place of what is there; what sleeps stays so while the pool is ``asleep``.

        Where the maker of an object is gone, the driver may wait for its devices for ever. So this is given up, and
        the windows are there for the next offer, when that comes.
        """
        for window, source in zip(windows.windows, offer.sources[-len(windows.windows) :], strict=True):
            if window.mapped:
                window.unmap()
            elif asleep:
                continue
            if not self._map(window, source, offer):
                return self._unbind(windows)
        return windows

    def _map(self, window: Window, source: Source, offer: Offer) -> bool:
        """Map an object; False if that was given up."""
        self._errand = errand = Errand(partial(window.map, source))
        try:
            if offer.stale():
                return False
            if not errand.run():
                self._late.append((window, errand))
                return False
        except DriverError:
            if not self._vacate(window):
                raise
            return self._map(window, source, offer)
        finally:
            self._errand = None
        return True

    def _vacate(self, window: Window) -> bool:
        """Unmap an object of an earlier broker, if one was mapped after all by a call that was given up."""
        self._late = [(each, errand) for each, errand in self._late if each is not window or not errand.returns(MOMENT)]
        if window.mapped:
            window.unmap()
            return True
        return False

    def _copies(self, offer: Offer) -> Copies:
        """Map the other replicas for the home device; a draft has them, if not for that device, and then does so."""
        home, *rest = self._places
        if offer.others:
            left = iter(offer.sources)
            pairs = [(replica, tuple(islice(left, len(replica.handles)))) for replica in offer.others]
            with self._addresses.all_or_none():
                rest = [self._addresses.reach(self._driver, home, *pair, self._sizes) for pair in pairs]
        return Copies(home, rest)


def _unknown(team: Team, offer: Offer) -> bool:
    """Whether nobody knows yet how all replicas are stored to: the broker will say."""
    return not team.how or offer.stale()


def _check_same(label: str, outlet: Windows | Copies, team: Team | None) -> None:
    """Raise ``Unavailable`` unless the ``team`` of a new lease has what a holder's outlet was made of."""
    if team is None or outlet.sizes != team.sizes:
        now = f"{team.how}: {team.why}" if team else "not at all"
        raise Unavailable(
            f"{label} is not stored to as when it fell asleep (now: {now}), so what used the addresses cannot go on; it"
            f" stays asleep: close it, and attach again"
        )
