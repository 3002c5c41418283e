"""The ledger: the only thing that decides who may use which memory, and when it is freed.

It is sans-I/O: events in, effects out (:mod:`cubroker.server.ledger.events`), no clock, no sockets, no
device. Time reaches it as timers that run out, devices as outcomes of what it asked for.

A *session* asks; each request is answered exactly once, at once or after waiting, unless the session
is lost first. Three lives are followed, as tables in :mod:`cubroker.server.ledger.states`: that of a version, that of
a piece of memory, and that of a team of such pieces. What ends, ends on one path, whatever the cause:

    request   waiting.leave    answered, refused, out of time, cancelled, its session lost
    lease     leases.release   closed, sealed, its session gone
    event     signals.end      dropped, its lease closed, its session gone
    version   leases.end       given up by its writer, or out of service and without leases
    team      teams.dissolved  the shell reports that nothing is bound to its memory
    memory    room.take_off    its device reports that it has the bytes again
    session   sessions.end     its process is gone, or it is lost and holds nothing

A lost session (its connection ended, its process may live) keeps its leases, asks for nothing new
and is told nothing; it may still close, seal and drop. It ends with its last lease, or with its process.

A ledger that has a store outlives the broker: :meth:`Ledger.changes` says what to record of every batch of events, and
:meth:`Ledger.restore` builds a ledger out of that. It is then told what is missing, who is gone (``Gone``, ``Lost``)
and which memory (``Vanished``), and goes on with ``Resumed``.

Whatever ends stirs the pool or the device that it took part in, and after every event
:func:`cubroker.server.ledger.drafts.settle` serves those who wait there, until nobody can be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, assert_never

from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.protocol.messages import (
    LAST_WORDS,
    Attach,
    AwaitEvent,
    Cancel,
    Close,
    Create,
    Describe,
    Done,
    Drain,
    DropEvent,
    Failed,
    Find,
    ListClients,
    ListDevices,
    ListDigests,
    ListPools,
    Look,
    OpenEvent,
    Recorded,
    Reply,
    Retire,
    Seal,
    SendDescriptors,
    ShareEvent,
    Tell,
    View,
    Watch,
)
from cubroker.server.ledger import (
    admitting,
    attaching,
    drafts,
    draining,
    invariants,
    inventory,
    leases,
    mapped,
    publishing,
    reconfiguring,
    reports,
    sessions,
    signals,
    stories,
    teams,
    vanishing,
    waiting,
    wording,
)
from cubroker.server.ledger.auditing import Audit, audit
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Budget, Limits, Session
from cubroker.server.ledger.events import (
    Allocated,
    Asked,
    Assembled,
    Dissolved,
    Effect,
    Elapsed,
    Ending,
    Event,
    Freed,
    Gone,
    Joined,
    Lost,
    Measured,
    Measuring,
    NotAllocated,
    Reconfigured,
    Respond,
    Resumed,
    Vanished,
)
from cubroker.server.ledger.inventory import Held, Lent
from cubroker.server.ledger.policy import Policy
from cubroker.server.ledger.record import Recorder, whole
from cubroker.server.ledger.reports import Holder
from cubroker.server.ledger.restoring import restore
from cubroker.server.ledger.states import Impossible

__all__ = ["Budget", "Held", "Holder", "Impossible", "Ledger", "Lent", "Limits"]


class Ledger:
    """The record of sessions, pools, versions and leases.

    Args:
        devices: the devices whose memory the broker lends, with their budgets.
        uid: the user that the broker runs as, who may change every pool.
        limits: what one session may have at once.
        policy: what users may do and have; by default there are no quotas, and everybody may attach to everything.
        store: how many descriptors of sessions and of durable memory the store has room for; None: there is no store,
            nothing is recorded, and nothing can be durable.
    """

    def __init__(
        self,
        devices: Sequence[Budget],
        uid: int,
        limits: Limits | None = None,
        policy: Policy | None = None,
        store: int | None = None,
    ) -> None:
        self._books = Books(devices, uid, limits or Limits(), policy or Policy(), store)
        self._recorder = None if store is None else Recorder(self._books)

    @classmethod
    def restore(
        cls,
        devices: Sequence[Budget],
        uid: int,
        limits: Limits,
        policy: Policy,
        items: Iterable[tuple[bytes, bytes]],
        store: int,
    ) -> Self:
        """Return the ledger whose record is among ``items``, a new one if there is none of a ledger.

        What is held stays, however little the rules allow now. The ledger waits for ``Resumed``. What contradicts the
        rest of the record is given up, and is among its :attr:`findings`.

        Raises:
            Damaged: the record cannot be understood, or contradicts itself in a way that cannot be told apart.
        """
        ledger = cls(devices, uid, limits, policy, store)
        counted = restore(ledger._books, items)
        ledger._recorder = Recorder(ledger._books, counted)
        return ledger

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return what is to be recorded anew since the last call (None: no more); nothing without a store."""
        return [] if self._recorder is None else self._recorder.changes()

    def record(self) -> dict[bytes, bytes]:
        """Return all that there is to record; costs time in proportion to all that the ledger knows."""
        return whole(self._books)

    @property
    def findings(self) -> Sequence[str]:
        """What of its record contradicted the rest, and was given up, one sentence each."""
        return self._books.findings

    @property
    def last_session(self) -> int:
        """The highest number that a session had."""
        return self._books.last_session

    def sessions(self) -> tuple[Joined, ...]:
        """Return all sessions, as they joined; some may have been detached since."""
        return inventory.sessions(self._books)

    def memory(self) -> tuple[Held, ...]:
        """Return all memory that versions have."""
        return inventory.memory(self._books)

    def lent(self, session: int, lease: int) -> Lent | None:
        """Return the answer that grants a lease, as it would be given now; None if the session holds no such lease."""
        return inventory.lent(self._books, session, lease)

    def admit(self, uid: int, *, verified: bool = False) -> CubrokerError | None:
        """Return why a user may open no session now, None if it may; to be asked before it has ``Joined``."""
        return admitting.refusal(self._books, uid, verified=verified)

    def handle(self, event: Event, now: float = 0.0) -> list[Effect]:
        """Take one event, which came ``now``, in seconds since 1970; return what is to be done about it, in order.

        Raises:
            Impossible: the event cannot follow from what was told before; nothing has changed. Effects
                of an event that another exception ended half-way are those of :meth:`recover`, or of the next event.
        """
        self._books.clock.set(now)
        match event:
            case Asked():
                self._asked(event)
            case Allocated():
                drafts.allocated(self._books, event)
            case NotAllocated():
                drafts.not_allocated(self._books, event)
            case Freed():
                drafts.freed(self._books, event)
            case Assembled():
                drafts.assembled(self._books, event)
            case Dissolved():
                teams.dissolved(self._books, event)
            case Elapsed():
                self._elapsed(event)
            case Joined():
                sessions.joined(self._books, event)
            case Lost():
                sessions.lost(self._books, event)
            case Gone():
                sessions.gone(self._books, event)
            case Reconfigured():
                reconfiguring.reconfigure(self._books, event)
            case Ending(with_store):
                draining.end(self._books, with_store=with_store)
            case Measuring():
                mapped.begin(self._books)
            case Measured():
                mapped.measured(self._books, event)
            case Vanished():
                vanishing.vanished(self._books, event)
            case Resumed():
                vanishing.resumed(self._books)
            case _:
                assert_never(event)
        return self.recover()

    def recover(self) -> list[Effect]:
        """Serve those who wait and return what is to be done; to be called if an exception ended :meth:`handle`."""
        drafts.settle(self._books)
        return self.give_up()

    def give_up(self) -> list[Effect]:
        """Return what is to be done, and serve nobody; to be called if an exception ended :meth:`recover`, too.

        Whoever it was about waits, and is looked at again when something stirs them: not at every event of others.
        """
        books = self._books
        books.stirred_pools.clear()
        books.stirred_users.clear()
        books.stirred_accounts.clear()
        effects, books.effects = books.effects, []
        return effects

    def audit(self) -> Audit:
        """Return what does not agree; costs time in proportion to all that the ledger knows."""
        return audit(self._books)

    def check(self) -> None:
        """Assert everything that always holds of the ledger; costs time in proportion to all that it knows."""
        invariants.check(self._books)

    def story(self, subject: str | int) -> tuple[str, ...]:
        """Return the last events of a pool, by name, or of a session, by id, in words; none if it is unknown."""
        story = stories.find(self._books, subject)
        return () if story is None else tuple(story)

    def holder(self, session: int) -> Holder | None:
        """Return who has a session; None if there is no such session."""
        found = self._books.sessions.get(session)
        return None if found is None else reports.holder(found)

    def leased(self, session: int, lease: int) -> str:
        """Return the name of the pool that a session's lease is on; none if it has no such lease."""
        found = self._books.sessions.get(session)
        held = None if found is None else found.leases.get(lease)
        return "" if held is None else held.version.pool.name

    @property
    def stored(self) -> int:
        """How many descriptors of sessions and of durable memory the store has, or is to have."""
        return self._books.stored

    @property
    def draining(self) -> str:
        """Why nobody gets a lease; nothing if that is not so."""
        return draining.reason(self._books)

    @property
    def held(self) -> str:
        """Which versions that would go with the broker are held, and by whom, in words; nothing if none are."""
        return draining.in_words(self._books)

    def takes_along(self, *, with_store: bool) -> bool:
        """Say whether anything is held that would go with the broker, and ``with_store`` that does."""
        return draining.takes_along(self._books, with_store=with_store)

    def last_words(self, session: int) -> str:
        """Return what a session should know of what it holds as the broker ends; nothing if it holds nothing."""
        found = self._books.sessions.get(session)
        return "" if found is None else draining.last_words(found)

    def summary(self) -> str:
        """Return in one line how much there is of everything."""
        return reports.summary(self._books)

    def view(self, *, everything: bool) -> View:
        """Return all that is known: ``everything``, or what somebody may see who is a stranger to every pool."""
        return reports.view(self._books, reports.onlooker(self._books, everything=everything))

    def beyond_leases(self) -> Mapping[int, int]:
        """Return the bytes of memory that processes refer to beyond leases, by user of whom anything is known."""
        return mapped.totals(self._books)

    def excesses(self) -> Mapping[int, str]:
        """Return, by user, in words, who has more beyond leases than its quota allows."""
        return mapped.excesses(self._books)

    def _asked(self, event: Asked) -> None:
        session = self._books.sessions.get(event.session)
        if session is None:
            return
        try:
            answer = self._answer(session, event)
        except CubrokerError as error:
            answer = Failed(error.code, error.message)
            session.story.append(f"{type(event.body).__name__} was refused ({error.code}): {error.message}")
        if answer is not None:
            self._books.effects.append(Respond(session.id, event.request, answer))
        if not session.connected and not session.leases:
            sessions.end(self._books, session)

    def _answer(self, session: Session, event: Asked) -> Reply | None:
        """Return the answer to a request, or None if it waits or was answered already."""
        books, body = self._books, event.body
        if not session.connected and type(body) not in LAST_WORDS:
            raise Unavailable(f"the connection of session {session.id} has ended; open a new session")
        match body:
            case Attach():
                return attaching.attach(books, session, event.request, body)
            case Close():
                signals.give_back(books, leases.held(session, body.lease), wording.GIVEN_BACK)
                return Done()
            case SendDescriptors():
                return leases.send_descriptors(books, leases.held(session, body.lease))
            case Create():
                assert event.layout is not None
                return drafts.create(books, session, event.request, body, event.layout)
            case Seal():
                return publishing.seal(books, session, body)
            case Cancel():
                return self._cancel(session, body)
            case Retire():
                return publishing.retire(books, session, body)
            case Watch():
                return publishing.watch(books, session, body)
            case Find():
                return publishing.find_current(books, session, body)
            case Drain():
                return draining.drain(books, session, body)
            case Describe():
                return reports.describe(books, session, body)
            case ShareEvent() | OpenEvent() | Recorded() | AwaitEvent() | DropEvent():
                return signals.asked(books, session, event.request, body)
            case ListDigests():
                return reports.list_digests(books, session, body)
            case ListPools():
                return reports.list_pools(books, session)
            case ListClients():
                return reports.list_clients(books, session)
            case ListDevices():
                return reports.list_devices(books)
            case Look():
                return reports.view(books, session)
            case Tell():
                return stories.tell(books, session, body)
            case _:
                assert_never(body)

    def _cancel(self, session: Session, body: Cancel) -> Done:
        waiter = session.unfinished.get(body.request)
        if waiter is not None:
            waiting.refuse(self._books, waiter, TimedOut(f"request {body.request} was cancelled by its caller"))
        return Done()

    def _elapsed(self, event: Elapsed) -> None:
        waiter = self._books.timers.pop(event.timer, None)
        if waiter is not None:
            waiter.timer = 0
            waiting.refuse(self._books, waiter, TimedOut(wording.waited(self._books, waiter)))
