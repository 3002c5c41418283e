"""The shell around the ledger: brings it events, and carries out its effects.

Everything here runs on the event loop and returns at once. What blocks is elsewhere: device memory
on one thread per device. What takes long is done in steps, in which users take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Denied, InternalFailure, OverQuota, Unavailable
from cubroker.protocol.messages import (
    Attached,
    Close,
    Created,
    Draining,
    Failed,
    Farewell,
    GatewayChanged,
    Notice,
    Refused,
    Seal,
    Welcome,
)
from cubroker.protocol.system_errors import reason
from cubroker.protocol.versions import for_version
from cubroker.server.aftermath import Aftermath
from cubroker.server.arrivals import Arrivals
from cubroker.server.assembly import Assembly
from cubroker.server.batches import Part
from cubroker.server.denials import Denials
from cubroker.server.devices import DeviceMemory
from cubroker.server.ledger import Ledger, events
from cubroker.server.ledger.events import Asked, Effect, Event
from cubroker.server.mapped_checks import Client, MappedChecks
from cubroker.server.parcels import Parcel
from cubroker.server.peers import Peer
from cubroker.server.requests import Requests
from cubroker.server.scribe import Remembered, Scribe
from cubroker.server.sessions import Session
from cubroker.server.sight.observer import Sight
from cubroker.server.writing import Writing

if TYPE_CHECKING:
    from cubroker.driver import Driver
    from cubroker.server.store.store import Store

log = logging.getLogger(__name__)


class Broker:
    """Sessions, timers and device memory, as the ledger wants them.

    What is decided is written down before anybody hears of it, and before anything is done about it: events are
    brought to the ledger, and :meth:`settle` carries out what came of them.

    Args:
        ledger: decides everything.
        memory: the devices' memory, by UUID; what comes of its work returns through :meth:`handle`.
        assembly: binds the memory of several devices together.
        driver: the devices'; clients build theirs from its text.
        send: takes a batch of answers for the gateway, and returns whether that is behind.
        sight: watches the ledger.
        store: keeps what outlives this broker, if anything does.
        scribe: gathers what is to be written to the store's journal beside the ledger.
        checks: compares what processes have mapped with their leases, if anything does.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: Mapping[str, DeviceMemory],
        assembly: Assembly,
        driver: Driver,
        send: Callable[[Sequence[Part]], bool | None],
        sight: Sight | None = None,
        store: Store | None = None,
        scribe: Scribe | None = None,
        checks: MappedChecks | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._sight = sight or Sight(ledger)
        self._memory = memory
        self._assembly = assembly
        self._descriptors: dict[int, tuple[int, ...]] = {}  # by ticket or team
        self._driver = driver
        self._store = store
        self._scribe = scribe
        self._todo: list[Effect] = []
        self._arrivals = Arrivals(store, self.settle, self._take_back)
        self._writing = Writing(ledger, scribe, store, self.settle) if store and scribe else None
        self._requests = Requests(self._apply, self.settle, send, self._loop.call_soon, scribe)
        self.receive = self._requests.receive
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(ledger.last_session + 1)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._denials = Denials()
        self._aftermath = Aftermath(ledger)
        self._closed = False
        self._drained = asyncio.Event()
        self._checks = checks
        if checks:
            checks.attend(self.handle, self._clients)

    def admit(self, connection: socket.socket, peer: Peer, version: int) -> None:
        """Open a session on a connection that has greeted, if its user may have one more."""
        number = next(self._numbers)
        session = Session(number, connection, peer, self._ended, self._denials, version)
        if (refusal := self._ledger.admit(peer.uid, verified=peer.verified) or self._obstacle(session)) is not None:
            self._denials.log(peer, refusal.message)
            return self._turn_away(session, refusal)
        self._enter(session)
        if self._scribe:
            self._scribe.opened(session, welcomed=False)
        joined = events.Joined(number, peer.pid, peer.uid, peer.gid, peer.groups, peer.verified)
        if (error := self._decide(joined)) is not None:
            message = f"the broker itself failed at opening this session: {error!r}; its log says more"
            return self._take_back(session, InternalFailure(message))
        self._arrivals.expect(session)
        return self.settle()

    def take_over(self, number: int, connection: socket.socket | None, peer: Peer, remembered: Remembered) -> None:
        """Go on with a session of an earlier broker, whose ``connection`` or process may be gone."""
        answers = remembered.replies(lambda lease: self._grant(number, lease))
        own = remembered.version, remembered.secret, answers
        session = Session(number, connection, peer, self._ended, self._denials, *own, welcomed=remembered.welcomed)
        session.watch()
        self._enter(session)
        if self._scribe and remembered.mute:
            self._scribe.opened(session, welcomed=True)

    def _grant(self, session: int, lease: int) -> Attached | Created | None:
        lent = self._ledger.lent(session, lease)
        return None if lent is None else lent.answer

    def has(self, ticket: int, descriptors: tuple[int, ...]) -> None:
        """Note the descriptors of memory that an earlier broker allocated."""
        self._descriptors[ticket] = descriptors

    def go_on(self, news: Iterable[Event], remembered: Mapping[int, Remembered]) -> None:
        """Bring ``news`` of what happened while no broker ran, and say again what sessions may not have heard."""
        for event in news:
            self._apply(event)
        self.settle()
        for number, session in self._sessions.items():
            before = remembered[number]
            if not before.welcomed:
                self._welcome(session)
            session.notify(Draining(self._ledger.draining))  # it may have heard otherwise from the earlier broker
            for lease in before.owed:
                lent = self._ledger.lent(number, lease)
                if lent is not None and lent.hand_over is not None:
                    self._carry_out(lent.hand_over)

    def _obstacle(self, session: Session) -> CubrokerError | None:
        """Return why nobody would hear of the end of a session, so that its leases would never fall, or None."""
        if self._writing and self._writing.behind:  # nor has the store forgotten what ended, so it may be full
            return Unavailable("the broker's host has no memory left for the journal; try again later")
        try:
            session.watch()
            self._arrivals.store(session)
        except OSError as error:  # there is no memory, or this user may watch no more (fs.epoll.max_user_watches)
            return Unavailable(f"the broker cannot watch process {session.peer.pid}: {reason(error)}; try again later")
        except Unavailable as error:
            return error
        return None

    def _take_back(self, session: Session, error: CubrokerError) -> None:
        """End a session that has not been welcomed, and may be in the ledger only in part, and say why."""
        self._denials.log(session.peer, error.message)
        self._sight.turned_away(error)
        session.send(wire.pack(Refused(error.code, error.message)))
        known = self._ledger.holder(session.number) is not None
        if not known or self._decide(events.Gone(session.number)) is not None:
            self._note(events.Forget(session.number))
        self.settle()

    def _enter(self, session: Session) -> None:
        self._sessions[session.number] = session
        self._requests.enter(session)
        if self._checks:
            self._checks.joined(session.peer.uid)

    def _clients(self) -> Iterable[Client]:
        """Return the process of every session."""
        return (Client(each.peer.pid, each.peer.uid, each.pidfd) for each in self._sessions.values())

    def _welcome(self, session: Session) -> None:
        welcome = Welcome(session.version, session.number, session.secret, self._driver.spec, os.geteuid())
        session.welcome(wire.pack(for_version(welcome, session.version)))
        if self._scribe:
            self._scribe.opened(session, welcomed=True)
        if why := self._ledger.draining:
            session.notify(Draining(why))

    def _turn_away(self, session: Session, error: CubrokerError) -> None:
        self._sight.turned_away(error)
        session.send(wire.pack(Refused(error.code, error.message)))
        session.close()

    def handle(self, event: Event) -> None:
        """Bring an event to the ledger, and settle what comes of it."""
        self._apply(event)
        self.settle()

    def settle(self) -> None:
        """Write down what was decided, then do it, and send what answers there are.

        What cannot be written now is written later, and nothing is done about it, nor is anything said, until then.
        Nor is a session welcomed before the store has it.
        """
        if self._closed or (self._writing and not self._writing.write()):
            return
        todo, self._todo = self._todo, []
        for effect in todo:
            try:
                self._carry_out(effect)
            # One effect, a notice that no memory is left for, must not take the others with it: memory to be freed.
            except Exception:
                log.exception("the broker failed at %.500r", effect)
        for session in self._arrivals.arrived():
            self._welcome(session)
        self._requests.flush()

    @property
    def draining(self) -> str:
        """Why it lends nothing new; empty if it lends."""
        return self._ledger.draining

    def status(self) -> str:
        """Return in one line how it fares."""
        return self._ledger.summary()

    def gateway_changed(self) -> None:
        """Note that another gateway listens, and tell every session."""
        self._sight.gateway_changed()
        self.announce_gateway()

    def announce_gateway(self) -> None:
        """Tell every session that requests may have been lost with the gateway."""
        self._notify_all(GatewayChanged())

    def holds(self, *, with_store: bool) -> bool:
        """Whether anybody holds what would go with this broker, and ``with_store`` that does."""
        return self._ledger.takes_along(with_store=with_store)

    def drain(self, *, with_store: bool) -> None:
        """Lend nothing more that would go with this broker, and ``with_store`` that does."""
        self.handle(events.Ending(with_store))
        log.info("draining; what is held: %s", self._ledger.held)

    async def drained(self, seconds: float, enough: asyncio.Event) -> None:
        """Wait up to ``seconds`` until nobody holds what would go with this broker, or until it is ``enough``."""
        waits = [self._loop.create_task(each.wait()) for each in (self._drained, enough)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    def close(self, reason: str) -> None:
        """Say farewell to every session, and forget them all; or leave them to the next broker, if there is a store.

        Memory that somebody holds is left as it is, for whoever has it mapped.
        """
        if held := self._ledger.held:
            log.warning("still held, and left as it is: %s; memory of ipc pools ends with this process", held)
        for each in self._ledger.memory():
            if each.leases:
                self._memory[each.device].leave(each.ticket)
                self._assembly.leave(each.team)
        for number, session in self._sessions.items():
            if self._store is None:
                session.notify(Farewell("; ".join(filter(None, (reason, self._ledger.last_words(number))))))
                session.close()
            else:
                session.leave()
        for timer in self._timers.values():
            timer.cancel()
        if self._writing:
            self._writing.close()
        self._requests.close()
        self._aftermath.close()
        if self._checks:
            self._checks.stop()
        self._closed = True

    def _notify_all(self, notice: Notice) -> None:
        for session in self._sessions.values():
            session.notify(notice)

    def _ended(self, event: events.Lost | events.Gone) -> None:
        self._requests.hang_up(self._sessions[event.session])
        self.handle(event)

    def _apply(self, event: Event) -> None:
        if self._closed:  # nobody would hear of it; the next broker is asked again, and sweeps up what is there
            return
        self._decide(event)
        if self._requests.full:  # not before all of an event is noted: what is written together is decided together
            self.settle()

    def _decide(self, event: Event) -> Exception | None:
        """Bring an event to the ledger, and prepare what comes of it; return why the ledger could not take it."""
        effects: Sequence[Effect] = ()
        failure = None
        if not isinstance(event, Asked):
            self._keep(event)
        if self._checks and _may_end_lease(event):
            self._checks.soon()
        try:
            self._sight.before(event)
            effects = self._ledger.handle(event, time.time())
            self._sight.after(event, effects)
        # A mistake in the ledger over one event must not take every other client's memory with it, as
        # the end of this process would. The log has the event, and whoever asked hears of it.
        except Exception as error:
            log.exception("the broker failed at %.500r", event)
            failure, effects = error, self._aftermath.recover()
        for effect in effects:
            try:
                self._note(effect)
            # Nor may one effect, an answer that no memory is left for, take the others with it: memory to be freed.
            except Exception as error:
                log.exception("the broker failed at %.500r", effect)
                self._respond_failed(effect, error)
        if failure is not None:
            self._respond_failed(event, failure)
        return failure

    def _note(self, effect: Effect) -> None:
        """Prepare an effect: what is to be said and written of it, before it is carried out."""
        if isinstance(effect, events.Respond):  # as most are
            asked = self._sessions[effect.session]
            if isinstance(effect.body, Failed):
                self._refused(asked, effect.body)
            return self._requests.respond(asked, effect.request, effect.body)
        scribe = self._scribe
        match effect:
            case events.HandOver(session, lease, rebound=False) if scribe:  # what was, the next broker binds anew
                scribe.owed(session, lease)
            case events.Withdraw(_, lease) if scribe:
                scribe.sent(lease)
            case events.Forget(session):
                self._arrivals.ended(self._sessions[session])
                self._requests.leave(self._sessions[session])
                if scribe:
                    scribe.closed(self._sessions[session])
        return self._todo.append(effect)

    def _refused(self, asked: Session, refusal: Failed) -> None:
        if refusal.code == Denied.code:
            self._denials.log(asked.peer, refusal.message)
        elif refusal.code == OverQuota.code and self._checks:
            self._checks.soon()  # it may be for memory beyond leases, and who is told to unmap asks again

    def _keep(self, event: Event) -> None:
        """Note which descriptors there are. Their device closes them, after they are forgotten here."""
        match event:
            case events.Allocated(ticket, _, descriptors) if descriptors:
                self._descriptors[ticket] = descriptors
            case events.Assembled(team, descriptors=descriptors) if descriptors:
                self._descriptors[team] = descriptors
            case events.Freed(number) | events.Dissolved(number):  # and was to be before it was known to be there
                self._descriptors.pop(number, None)

    def _respond_failed(self, at: Event | Effect, error: Exception) -> None:
        if isinstance(at, Asked | events.Respond):
            session = self._sessions.get(at.session)
            if session and session.answers.is_pending(at.request):
                message = f"the broker itself failed at this request: {error!r}; its log says more"
                self._requests.respond(session, at.request, Failed(InternalFailure.code, message))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Notify():
                self._sessions[effect.session].notify(effect.notice)
            case events.Allocate():
                self._memory[effect.device].submit(effect)
            case events.Free():
                self._descriptors.pop(effect.ticket, None)
                self._memory[effect.device].submit(effect)
            case events.Assemble():
                self._assembly.submit(effect)
            case events.Dissolve():
                self._descriptors.pop(effect.team, None)
                self._assembly.submit(effect)
            case events.HandOver():
                self._hand_over(effect)
            case events.Withdraw():
                self._sessions[effect.session].withdraw(effect.lease)
            case events.SetTimer():
                self._timers[effect.timer] = self._loop.call_later(effect.seconds, self._elapse, effect.timer)
            case events.DropTimer():
                if timer := self._timers.pop(effect.timer, None):  # it may run out before this is written down
                    timer.cancel()
            case events.Drained():
                self._drained.set()
            case events.Forget():
                self._forget(self._sessions.pop(effect.session))

    def _hand_over(self, effect: events.HandOver) -> None:
        numbers = [ticket for _, ticket in effect.allocations] + [effect.team] * bool(effect.team)
        done = (lambda _: None) if effect.rebound else self._delivered
        lend = nullcontext if effect.writable else self._driver.for_reading
        parcel = Parcel(effect.lease, numbers, self._descriptors, done, rebound=effect.rebound, lend=lend)
        self._sessions[effect.session].hand_over(parcel)

    def _delivered(self, lease: int) -> None:
        if self._scribe:
            self._scribe.sent(lease)

    def _elapse(self, timer: int) -> None:
        del self._timers[timer]
        self.handle(events.Elapsed(timer))

    def _forget(self, session: Session) -> None:
        session.close()
        self._arrivals.drop(session)


def _may_end_lease(event: Event) -> bool:
    return isinstance(event.body, Close | Seal) if isinstance(event, Asked) else isinstance(event, events.Gone)
