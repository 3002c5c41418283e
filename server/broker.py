"""The broker as a line: events come in at one end; memory, descriptors, notices and replies leave at the other.

    decode    an event of the queue becomes what the ledger is told: a batch becomes requests, a greeting a session
    decide    the ledger takes it and returns effects
    prepare   replies are encoded, since the journal has them, and what else is to be written down is noted
    commit    the journal gets all of that, before anyone hears of it and before anything is done about it
    execute   devices, sessions and timers do what the effects say
    send      the replies leave, and new sessions are welcomed

:meth:`Broker.step` shows these stages in order. Each takes values and returns values, and none calls back into an
earlier one: what it learns later is put into the queue (:mod:`cubroker.server.event_queue`). Everything here runs on
the event loop and returns at once. Blocking work runs on a thread per device, and long work in steps, in which users
take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cubroker.protocol.errors import CubrokerError, Denied, InternalFailure, OverQuota, explain
from cubroker.protocol.messages import Close, Draining, Failed, Farewell, GatewayChanged, Seal
from cubroker.server.devices.allocator import DeviceAllocator, MulticastBinder
from cubroker.server.devices.mapped_memory import MappedChecks, SessionProcess
from cubroker.server.event_queue import (
    BatchReceived,
    ClientGreeted,
    Event,
    EventQueue,
    FdsDelivered,
    GatewayStarted,
    JournalRetryDue,
    MappedCheckDone,
    MappedCheckDue,
    Restored,
    TurnDue,
)
from cubroker.server.ledger import Ledger, events
from cubroker.server.ledger.events import Effect, LedgerEvent, RequestReceived, Respond
from cubroker.server.ledger.snapshot import Audit
from cubroker.server.monitoring.observer import LedgerObserver
from cubroker.server.store.fdstore import StoreReplied
from cubroker.server.transport.admission import Sessions, answer_ping
from cubroker.server.transport.requests import IncomingRequests, own_failure
from cubroker.server.transport.session import FdTransfer, SessionConnection
from cubroker.server.transport.session_journal import LoggedSession, SessionLog

if TYPE_CHECKING:
    from cubroker.driver import Driver
    from cubroker.server.store.fdstore import Store
    from cubroker.server.transport.gateway_process import GatewayProcess

log = logging.getLogger(__name__)

ENDS_LEASE = (Close, Seal)  #: Requests that may end a lease.
RETRY = 0.5  #: Seconds after which changes that the journal had no room for are written again.

AUDIT_SHARE = 20
"""An audit of all tables takes at most 1/AUDIT_SHARE of the loop's time, however many mistakes there are."""

MOST_FINDINGS = 20  #: Findings of an audit that are logged.


class Broker:
    """Takes the events of a queue, one at a time, through the line.

    Not to be confused with :class:`cubroker.client.Broker`, a client's session with this one.

    Args:
        queue: has the events.
        ledger: decides everything.
        memory: the devices' memory, by UUID.
        multicast: binds the memory of several devices together.
        driver: the devices'; clients build theirs from its text.
        gateway: takes batches of replies.
        observer: watches the ledger.
        store: keeps what outlives this broker, if there is one.
        session_log: gathers what is to be written to the store's journal beside the ledger.
        checks: compares what processes have mapped with their leases, if anything does.

    Attributes:
        sessions: all of them.
    """

    def __init__(
        self,
        queue: EventQueue,
        ledger: Ledger,
        memory: Mapping[str, DeviceAllocator],
        multicast: MulticastBinder,
        driver: Driver,
        gateway: GatewayProcess,
        observer: LedgerObserver | None = None,
        store: Store | None = None,
        session_log: SessionLog | None = None,
        checks: MappedChecks | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._ledger = ledger
        self._memory = memory
        self._multicast = multicast
        self._driver = driver
        self._gateway = gateway
        self._observer = observer or LedgerObserver(ledger)
        self._store = store
        self._log = session_log
        self._checks = checks
        self._unwritten: list[tuple[bytes, bytes | None]] = []  # what the journal had no room for
        self._retry: asyncio.TimerHandle | None = None
        self._requests = IncomingRequests(queue, self._loop, session_log)
        self.sessions = Sessions(queue, ledger, self._requests, driver, store, session_log)
        self._sessions = self.sessions.by_number
        self._descriptors: dict[int, dict[int, int]] = {}  # by ticket or multicast group, and by number in that
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._effects: list[Effect] = []  # decided, not yet written down
        self._recovery = Recovery(ledger)
        self._drained = asyncio.Event()
        self._closed = False
        queue.attach(self)

    # -- the line ----------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        """Take one event through the line. After :meth:`close` the next broker hears of it instead."""
        if self._closed:
            return None
        if type(event) is FdsDelivered:  # the next commit writes this down; until then it is sent again at worst
            return self._log.delivered(event.lease) if self._log else None
        try:
            for told in self._decode(event):
                effects: Sequence[Effect]
                if isinstance(told, Respond):  # a reply that needs no decision
                    effects = (told,)
                else:
                    self._observer.before(told)
                    try:
                        effects = self._ledger.handle(told, time.time())
                    # A mistake in the ledger over one event must not take every other client's memory with it, as the
                    # end of this process would. The log has the event, and the client that asked hears of it.
                    except Exception as error:
                        log.exception("the broker failed at %.500r", told)
                        effects = self._recover(told, error)
                    self._observer.after(told, effects)
                self._prepare(told, effects)
                if self._requests.full:  # these replies go before the next request: the gateway may be behind then
                    self._commit_and_send()
        finally:
            self._commit_and_send()
        return None

    def _commit_and_send(self) -> None:
        """Write down all that was decided; then do it, and send the replies.

        What the journal has no room for now is written later, and nothing is done or said about it until then.
        """
        if not self._commit():
            return
        effects, self._effects = self._effects, []
        for effect in effects:
            try:
                self._execute(effect)
            # One effect, a notice that no memory is left for, must not take the others with it: memory to be freed.
            except Exception:
                log.exception("the broker failed at %.500r", effect)
        if self.sessions.unwelcomed:
            self.sessions.welcome_stored()
        for batch in self._requests.replies():
            if self._gateway.send(batch):  # no expensive work is done while the gateway is behind with its results
                self._requests.turns.pause()

    def _commit(self) -> bool:
        """Write all changes to the journal, if there is one; False if it has no room for them now."""
        if self._store is None or self._log is None:
            return True
        try:
            self._unwritten += self._ledger.changes()
            self._unwritten += self._log.changes()
            if self._unwritten:
                self._store.journal.commit(self._unwritten)
        except (OSError, MemoryError) as error:
            if self._retry is None:
                log.error("the journal takes nothing, so requests wait: %s", explain(error))
                self._retry = self._loop.call_later(RETRY, self._queue.put, JournalRetryDue())
            return False
        self._unwritten = []
        return True

    # -- decode ------------------------------------------------------------------------------------

    def _decode(self, event: Event) -> Iterable[LedgerEvent | Respond]:
        """Return what the ledger is told about an event, and replies that it need not decide on."""
        told: LedgerEvent | None = None
        match event:
            case BatchReceived(frames):
                if self._requests.turns.paused and not self._gateway.send(()):  # it is not behind any more
                    self._requests.turns.resume()
                return self._requests.decode(frames)
            case TurnDue():
                return self._requests.turns.step()
            case ClientGreeted(ping=True):
                answer_ping(event, self._gateway.obstacle() or self._ledger.drain_reason)
            case ClientGreeted():
                opened = self.sessions.open(event, journal_full=bool(self._unwritten))
                if isinstance(opened, CubrokerError):
                    self._observer.counter.turned_away(opened.code)
                else:
                    told = opened
                    if self._checks:
                        self._checks.joined(event.peer.uid)
            case GatewayStarted():
                self._observer.counter.gateway_changed()
                self.sessions.notify_all(GatewayChanged())
            case Restored(news):
                return news
            case StoreReplied():
                told = self.sessions.stored(event)
                if told and event.error:
                    self._observer.counter.turned_away(event.error.code)
            case MappedCheckDue():
                if self._checks:
                    self._checks.begin(self._processes())
            case MappedCheckDone():
                if self._checks:
                    self._checks.finish(event, self._processes())
            case JournalRetryDue():
                self._retry = None  # the end of every step tries to commit
            case FdsDelivered():
                pass  # noted by the step itself
            case _ if self._take_note(event):
                told = event
        return () if told is None else (told,)

    def _processes(self) -> Iterable[SessionProcess]:
        return (SessionProcess(each.peer.pid, each.peer.uid, each.pidfd) for each in self._sessions.values())

    def _take_note(self, event: LedgerEvent) -> bool:
        """Note what an event says to the broker itself, and not to the ledger alone; return whether that may hear it.

        Without memory for a note of descriptors the event comes again: leases would be granted and get none.
        """
        match event:
            case events.ConnectionLost(number) | events.ProcessExited(number):
                try:
                    self._requests.hang_up(self._sessions[number])
                    if self._checks and isinstance(event, events.ProcessExited):
                        self._checks.soon()
                except MemoryError:  # the ledger hears of it all the same: it is said once
                    log.exception("the broker failed at taking note of %.500r", event)
            case events.TimerExpired(timer):
                self._timers.pop(timer, None)
            case events.Allocated(number, _, descriptors) | events.MulticastBound(number, descriptors=descriptors):
                try:
                    if descriptors:
                        self._descriptors[number] = dict(enumerate(descriptors))
                except MemoryError:
                    self._loop.call_later(RETRY, self._queue.put, event)
                    return False
            case events.Freed(number, ()) | events.MulticastUnbound(number):  # perhaps before it was reported allocated
                self._descriptors.pop(number, None)
        return True

    # -- decide ------------------------------------------------------------------------------------

    def _recover(self, told: LedgerEvent, error: Exception) -> Sequence[Effect]:
        """Return the effects of an event that the ledger failed at."""
        effects = list(self._recovery.recover())
        match told:
            case events.SessionOpened(number):
                effects += self.sessions.not_opened(number, error)
                self._observer.counter.turned_away(InternalFailure.code)
            case events.ProcessExited(number):
                if (session := self._sessions.get(number)) and not session.welcomed:  # so its client holds nothing
                    effects.append(events.ForgetSession(number))
            case RequestReceived(number, request):
                if self._awaiting(number, request):
                    effects.append(Respond(number, request, own_failure(error)))
        return effects

    # -- prepare -----------------------------------------------------------------------------------

    def _prepare(self, told: LedgerEvent | Respond, effects: Iterable[Effect]) -> None:
        """Encode replies, and note what is to be written down of the other effects."""
        if self._checks and isinstance(told, RequestReceived) and isinstance(told.body, ENDS_LEASE):
            self._checks.soon()
        for effect in effects:
            try:
                if type(effect) is Respond:
                    session, body = self._sessions[effect.session], effect.body
                    if type(body) is Failed:
                        self._note_refusal(effect, body)
                    self._requests.respond(session, effect.request, body)
                    continue
                self._note_change(effect)
            # Nor may one effect, a reply that no memory is left for, take the others with it: memory to be freed.
            except Exception as error:
                log.exception("the broker failed at %.500r", effect)
                if isinstance(effect, Respond) and (waits := self._awaiting(effect.session, effect.request)):
                    self._requests.respond(waits, effect.request, own_failure(error))

    def _note_change(self, effect: Effect) -> None:
        match effect:
            case events.SendFds(session, lease, rebound=False) if self._log:  # a next broker makes new multicast groups
                self._log.undelivered(session, lease)
            case events.CancelFds(_, lease) if self._log:
                self._log.delivered(lease)
            case events.ForgetSession(session):
                self.sessions.end(session)
        self._effects.append(effect)

    def _note_refusal(self, effect: Respond, refusal: Failed) -> None:
        if refusal.code == Denied.code:
            self.sessions.rejections.log(self._sessions[effect.session].peer, refusal.message)
        elif refusal.code == OverQuota.code and self._checks:
            self._checks.soon()  # it may be for memory beyond leases; a client that is told to unmap asks again

    def _awaiting(self, number: int, request: int) -> SessionConnection | None:
        """Return the session of a request that is still to be answered, else None."""
        session = self._sessions.get(number)
        return session if session and session.replies.is_pending(request) else None

    # -- execute -----------------------------------------------------------------------------------

    def _execute(self, effect: Effect) -> None:
        match effect:
            case events.SendFds():
                sources = [(source.ticket, source.numbers) for source in effect.sources]
                sources += [(effect.group, ())] * bool(effect.group)
                readers = None if effect.writable else self._driver
                transfer = FdTransfer(effect.lease, sources, self._descriptors, rebound=effect.rebound, readers=readers)
                self._sessions[effect.session].notify(transfer)
            case events.CancelFds():
                self._sessions[effect.session].cancel_fds(effect.lease)
            case events.Notify():
                self._sessions[effect.session].notify(effect.notice)
            case events.Allocate():
                self._memory[effect.device].submit(effect)
            case events.Free():
                self._forget_fds(effect.ticket, effect.numbers)
                self._memory[effect.device].submit(effect)
            case events.BindMulticast():
                self._multicast.submit(effect)
            case events.UnbindMulticast():
                self._descriptors.pop(effect.group, None)
                self._multicast.submit(effect)
            case events.SetTimer():
                expired = events.TimerExpired(effect.timer)
                self._timers[effect.timer] = self._loop.call_later(effect.seconds, self._queue.put, expired)
            case events.CancelTimer():
                if timer := self._timers.pop(effect.timer, None):  # it may run out before this is written down
                    timer.cancel()
            case events.ForgetSession():
                self.sessions.forget(effect.session)
            case events.ShutdownReady():
                self._drained.set()

    # -- from one broker to the next ---------------------------------------------------------------

    def adopt_fds(self, ticket: int, descriptors: Mapping[int, int]) -> None:
        """Take over the descriptors of memory that an earlier broker allocated, by number of the allocation."""
        self._descriptors[ticket] = dict(descriptors)

    def _forget_fds(self, ticket: int, numbers: Sequence[int]) -> None:
        """Forget the descriptors of allocations that are freed; others of their ticket may still be sent."""
        left = self._descriptors.get(ticket, {})
        for number in numbers:
            left.pop(number, None)
        if not (numbers and left):
            self._descriptors.pop(ticket, None)

    def resume(self, news: Iterable[LedgerEvent], logged: Mapping[int, LoggedSession]) -> None:
        """Tell the ledger what happened while no broker ran, and tell sessions again what they may not have heard."""
        self._queue.put(Restored(tuple(news)))
        for number, session in self._sessions.items():
            before = logged[number]
            if self._checks:
                self._checks.joined(session.peer.uid)
            if not before.welcomed:
                self.sessions.welcome(session)
            session.notify(Draining(self._ledger.drain_reason))  # it may have heard otherwise from the earlier broker
            for lease in before.undelivered_fds:
                grant = self._ledger.lease_grant(number, lease)
                if grant is not None and grant.hand_over is not None:
                    self._execute(grant.hand_over)

    def status(self) -> str:
        """Return how it fares, in one line."""
        return self._ledger.summary()

    def holds(self, *, with_store: bool) -> bool:
        """Whether a client holds something that would go with this broker, and ``with_store`` with the store."""
        return self._ledger.shutdown_loses(with_store=with_store)

    def drain(self, *, with_store: bool) -> None:
        """Lend nothing more that would go with this broker, and ``with_store`` with the store."""
        self._queue.put(events.ShutdownStarted(with_store))
        log.info("draining; what is held: %s", self._ledger.holders_text)

    async def drained(self) -> None:
        """Return when no client holds anything any more that would go with this broker."""
        await self._drained.wait()

    def close(self, reason: str) -> None:
        """Say farewell to every session, and forget them all; or leave them to the next broker, if there is a store.

        Memory that a client holds is left as it is: it may be mapped.
        """
        if held := self._ledger.holders_text:
            log.warning("still held, and left as it is: %s; memory of ipc pools ends with this process", held)
        for each in self._ledger.held_memory():
            if each.leases:
                self._memory[each.device].leave(each.ticket)
                self._multicast.leave(each.group)
        for number, session in self._sessions.items():
            if self._store is None:
                session.notify(Farewell("; ".join(filter(None, (reason, self._ledger.last_words(number))))))
                session.close()
            else:
                session.close(stored=True)
        for timer in self._timers.values():
            timer.cancel()
        if self._retry:
            self._retry.cancel()
        self._requests.turns.close()
        self._recovery.close()
        if self._checks:
            self._checks.stop()
        self._closed = True


class Recovery:
    """Serves the other clients after a mistake in the ledger, and logs what the mistake did to the ledger's tables.

    What the event left half-done may contradict the rest of the tables. The next broker would drop such entries, or
    refuse all of them, long after the cause; so this one looks at once.

    Args:
        ledger: made the mistake.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def recover(self) -> Sequence[Effect]:
        """Return the effects of an event that an exception ended; an audit follows soon."""
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._due, self._loop.time()), self._audit)
        try:
            return self._ledger.recover()
        # As over the event itself: others are served.
        except Exception:
            log.exception("the broker failed at going on after that")
            return self._ledger.take_effects()

    def close(self) -> None:
        """Make no more audits."""
        if self._timer:
            self._timer.cancel()

    def _audit(self) -> None:
        self._timer, began = None, self._loop.time()
        try:
            _tell(self._ledger.audit())
        finally:
            self._due = self._loop.time() + AUDIT_SHARE * (self._loop.time() - began)


def _tell(audit: Audit) -> None:
    if not (audit.disagreements or audit.given_up or audit.refused):
        log.warning("the ledger's books agree after that mistake; report it, with its traceback")
        return
    for finding in audit.disagreements[:MOST_FINDINGS]:
        log.error("after that mistake the ledger's books do not agree: %s", finding)
    for finding in audit.given_up[:MOST_FINDINGS]:
        log.error("the next broker would give up what contradicts the rest: %s", finding)
    again = ", and publish anew what is lost then" if audit.given_up else ""
    advice = f"restart the broker when that suits, which puts the books in order{again}"
    if audit.refused:
        log.error("the next broker would refuse all that this one has recorded: %s", audit.refused)
        advice = "do not restart the broker before everything was given back"
    log.error("what is held goes on being served; %s; report this, with the traceback", advice)
