"""The broker as a line: events come in at one end; memory, descriptors, notices and replies leave at the other.

    decode    turn an event of the queue into events of the ledger: a batch into requests, a greeting into a session
    decide    pass each of them to the ledger, which returns effects
    prepare   encode the replies, which the journal keeps, and note what else the journal must record
    commit    write all of that to the journal, before any reply is sent and before any effect is executed
    execute   carry out the effects on devices, sessions and timers
    send      send the replies, and welcome new sessions

:meth:`Broker.step` runs these stages in order. Each stage takes values and returns values. No stage calls back into an
earlier one: the outcome of an effect is a new event in the queue (:mod:`cubroker.server.event_queue`). Everything here
runs on the event loop and never blocks. Blocking work runs on a thread per device, and long work in short steps, in
which users take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cubroker.protocol.errors import CubrokerError, InternalFailure, OverQuota, explain
from cubroker.protocol.messages import Close, Draining, Failed, Farewell, GatewayChanged, Seal, SealDigested
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
from cubroker.server.store.store import StoreReplied
from cubroker.server.transport.admission import Sessions, answer_ping
from cubroker.server.transport.requests import IncomingRequests, own_failure
from cubroker.server.transport.session import FdTransfer, LoggedSession, SessionConnection, SessionLog

if TYPE_CHECKING:
    from cubroker.driver import Driver
    from cubroker.server.store.store import Store
    from cubroker.server.transport.gateway_process import GatewayProcess

log = logging.getLogger(__name__)

ENDS_LEASE = frozenset((Close, Seal, SealDigested))  #: Requests that may end a lease.
RETRY = 0.5  #: Seconds after which the broker tries again to write changes for which the journal had no room.
AUDIT_SHARE = 20  #: Audits of all tables take at most 1/AUDIT_SHARE of the loop's time, however often the ledger fails.
MOST_FINDINGS = 20  #: Findings of an audit that are logged.


class Broker:
    """The line, through which each event of a queue goes, one at a time.

    Not to be confused with :class:`cubroker.client.Broker`, a client's session with this one.

    ``memory`` has the allocator of each device, by UUID. Without a store, ``store`` and ``session_log`` are None.
    """

    def __init__(
        self,
        queue: EventQueue,
        ledger: Ledger,
        memory: Mapping[str, DeviceAllocator],
        multicast: MulticastBinder,
        driver: Driver,
        gateway: GatewayProcess,
        observer: LedgerObserver,
        checks: MappedChecks,
        store: Store | None = None,
        session_log: SessionLog | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._ledger = ledger
        self._memory = memory
        self._multicast = multicast
        self._driver = driver
        self._gateway = gateway
        self._observer = observer
        self._checks = checks
        self._store = store
        self._log = session_log
        self._unwritten: list[tuple[bytes, bytes | None]] = []  # what the journal had no room for
        self._retry: asyncio.TimerHandle | None = None
        self._requests = IncomingRequests(queue, self._loop, session_log)
        self.sessions = Sessions(queue, ledger, self._requests, driver, store, session_log)
        self._sessions = self.sessions.by_number
        self._descriptors: dict[int, dict[int, int]] = {}  # by ticket or multicast group, then by number in it
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._effects: list[Effect] = []  # decided, not yet written down
        self._recovery = Recovery(ledger)
        self._drained = asyncio.Event()
        self._closed = False
        queue.attach(self.step)

    # -- the line ----------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        """Take one event through the line. After :meth:`close`, ignore it: it is left to the next broker."""
        if self._closed:
            return None
        if type(event) is FdsDelivered:  # recorded by the next commit; after a crash before that, they are sent again
            return self._log.delivered(event.lease) if self._log else None
        now = time.time()
        try:
            for told in self._decode(event):
                effects: Sequence[Effect]
                if type(told) is Respond:  # a reply that needs no decision
                    effects = (told,)
                else:
                    self._observer.before(told)
                    try:
                        effects = self._ledger.handle(told, now)
                    # A mistake in the ledger at one event must not end this process, which would end the memory of all
                    # clients. The log gets the event, and the client that sent the request gets an error.
                    except Exception as error:
                        log.exception("the broker failed at %.500r", told)
                        effects = self._recover(told, error)
                    self._observer.after(told, effects)
                self._prepare(told, effects)
                if self._requests.full:  # send before decoding the next request: the gateway may be behind afterwards
                    self._commit_and_send()
        finally:
            self._commit_and_send()
        return None

    def _commit_and_send(self) -> None:
        """Write all decisions to the journal; then execute their effects, and send the replies.

        If the journal has no room, a later step tries again. Until then no effect is executed and no reply is sent.
        """
        if not self._commit():
            return
        effects, self._effects = self._effects, []
        for effect in effects:
            try:
                self._execute(effect)
            # One effect that fails, say a notice for want of memory, must not stop the others: they may free memory.
            except Exception:
                log.exception("the broker failed at %.500r", effect)
        if self.sessions.unwelcomed:
            self.sessions.welcome_stored()
        for batch in self._requests.replies():
            if self._gateway.send(batch):  # the gateway is behind with replies: start no more expensive work
                self._requests.turns.pause()

    def _commit(self) -> bool:
        """Write all changes to the journal, if there is one; return False if it has no room for them now."""
        if self._store is None or self._log is None:
            return True
        try:
            self._unwritten += self._ledger.changes()
            self._unwritten += self._log.changes()
            if self._unwritten:
                self._store.journal.commit(self._unwritten)
        except (OSError, MemoryError) as error:
            if self._retry is None:
                log.error("cannot write to the journal, so requests wait: %s", explain(error))
                self._retry = self._loop.call_later(RETRY, self._queue.put, JournalRetryDue())
            return False
        self._unwritten = []
        return True

    # -- decode ------------------------------------------------------------------------------------

    def _decode(self, event: Event) -> Iterable[LedgerEvent | Respond]:
        """Return the ledger events that an event leads to, and replies that need no decision."""
        told: LedgerEvent | None = None
        match event:
            case BatchReceived(requests):
                if self._requests.turns.paused and not self._gateway.send(()):  # the gateway is not behind any more
                    self._requests.turns.resume()
                return self._requests.decode(requests)
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
                self._checks.begin(self._processes())
            case MappedCheckDone():
                self._checks.finish(event, self._processes())
            case JournalRetryDue():
                self._retry = None  # every step tries to commit at its end
            case FdsDelivered():
                pass  # handled by the step itself
            case _ if self._take_note(event):
                told = event
        return () if told is None else (told,)

    def _processes(self) -> Iterable[SessionProcess]:
        return (SessionProcess(each.peer.pid, each.peer.uid, each.pidfd) for each in self._sessions.values())

    def _take_note(self, event: LedgerEvent) -> bool:
        """Note what an event means for the broker itself; return whether the ledger may have the event now.

        It may not if no memory is left to note descriptors: leases would get none. The event is then queued again.
        """
        match event:
            case events.ConnectionLost(number) | events.ProcessExited(number):
                try:
                    self._requests.hang_up(self._sessions[number])
                    if isinstance(event, events.ProcessExited):
                        self._checks.soon()
                except MemoryError:  # the ledger must have the event all the same: it is reported only once
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
            case events.Freed(number, ()) | events.MulticastUnbound(number):
                # The descriptors are still here if Free was executed before Allocated arrived.
                self._descriptors.pop(number, None)
        return True

    # -- decide ------------------------------------------------------------------------------------

    def _recover(self, told: LedgerEvent, error: Exception) -> Sequence[Effect]:
        """Return the effects of an event at which the ledger failed."""
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
        """Encode replies, and note what the journal must record of the other effects."""
        if type(told) is RequestReceived and type(told.body) in ENDS_LEASE:
            self._checks.soon()
        for effect in effects:
            try:
                if type(effect) is Respond:
                    session, body = self._sessions[effect.session], effect.body
                    if type(body) is Failed and body.code == OverQuota.code:
                        # It may be the quota of memory beyond leases, and a client that unmaps asks again.
                        self._checks.soon()
                    self._requests.respond(session, effect.request, body)
                    continue
                self._note_change(effect)
            # As in _commit_and_send: one effect that fails must not stop the others.
            except Exception as error:
                log.exception("the broker failed at %.500r", effect)
                if isinstance(effect, Respond) and (waits := self._awaiting(effect.session, effect.request)):
                    self._requests.respond(waits, effect.request, own_failure(error))

    def _note_change(self, effect: Effect) -> None:
        match effect:
            case events.SendFds(session, lease, rebound=False) if self._log:  # a next broker rebinds multicast groups
                self._log.undelivered(session, lease)
            case events.CancelFds(_, lease) if self._log:
                self._log.delivered(lease)
            case events.ForgetSession(session):
                self.sessions.end(session)
        self._effects.append(effect)

    def _awaiting(self, number: int, request: int) -> SessionConnection | None:
        """Return the session of a request that is not answered yet; None if the request is answered."""
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
                if timer := self._timers.pop(effect.timer, None):  # it may have expired before the commit
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
        """Tell the ledger what happened while no broker ran, and send sessions again what they may have missed."""
        self._queue.put(Restored(tuple(news)))
        for number, session in self._sessions.items():
            self._checks.joined(session.peer.uid)
            session.notify(Draining(self._ledger.drain_reason))  # the earlier broker may have sent another one
            for lease in logged[number].undelivered_fds:
                if (sent := self._ledger.sent_fds(number, lease)) is not None:
                    self._execute(sent)

    def status(self) -> str:
        """Return the ledger's totals, in one line."""
        return self._ledger.summary()

    def holds(self, *, with_store: bool) -> bool:
        """Whether a client leases memory that ends with this broker or, if ``with_store``, with the store."""
        return self._ledger.shutdown_loses(with_store=with_store)

    def drain(self, *, with_store: bool) -> None:
        """Grant no more leases on memory that ends with this broker or, if ``with_store``, with the store."""
        self._queue.put(events.ShutdownStarted(with_store))
        log.info("draining; what is held: %s", self._ledger.holders_text)

    async def drained(self) -> None:
        """Wait until no lease is left on the memory that :meth:`drain` is about."""
        await self._drained.wait()

    def close(self, reason: str) -> None:
        """Send every session a farewell and end it; with a store, leave the sessions to the next broker instead.

        Memory that a client leases is not freed: it may be mapped.
        """
        if held := self._ledger.holders_text:
            log.warning("still held, so not freed: %s; memory of ipc pools ends with this process", held)
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
        self._checks.stop()
        self._closed = True


class Recovery:
    """Recovery from a mistake in the ledger: serves the other clients, and logs the damage to the ledger's tables.

    The event that failed may have left entries that contradict the rest of the tables. The next broker would drop such
    entries, or refuse all of them, long after the cause. So this broker audits the tables soon after the mistake.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def recover(self) -> Sequence[Effect]:
        """Return the effects of an event that an exception interrupted, and schedule an audit."""
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._due, self._loop.time()), self._audit)
        try:
            return self._ledger.recover()
        # As at the event itself: the other clients must still be served.
        except Exception:
            log.exception("the broker failed at recovering from that mistake")
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
        log.warning("the ledger's tables are consistent after that mistake; report it, with its traceback")
        return
    for finding in audit.disagreements[:MOST_FINDINGS]:
        log.error("the ledger's tables are not consistent after that mistake: %s", finding)
    for finding in audit.given_up[:MOST_FINDINGS]:
        log.error("the next broker would drop or lose what contradicts the rest: %s", finding)
    again = ", and publish lost versions again" if audit.given_up else ""
    advice = f"restart the broker at a convenient time, which repairs the tables{again}"
    if audit.refused:
        log.error("the next broker would refuse this broker's journal: %s", audit.refused)
        advice = "do not restart the broker before all leases have ended"
    log.error("existing leases are still served; %s; report this, with the traceback", advice)
