"""The shell around the ledger: brings it events, and carries out its effects.

Everything here runs on the event loop and returns at once. What blocks is elsewhere: device memory
on one thread per device, and large layouts on a thread that checks them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Denied, InternalFailure, Unavailable
from cubroker.protocol.messages import Failed, Farewell, GatewayChanged, Notice, Refused, Welcome
from cubroker.server import events
from cubroker.server.answers import Frame
from cubroker.server.assembly import Assembly
from cubroker.server.denials import Denials
from cubroker.server.devices import DeviceMemory
from cubroker.server.events import Asked, Effect, Event
from cubroker.server.ledger import Ledger
from cubroker.server.parcels import Parcel
from cubroker.server.peers import Peer
from cubroker.server.requests import Requests
from cubroker.server.sessions import Session
from cubroker.server.sight.observer import Sight

log = logging.getLogger(__name__)


class Broker:
    """Sessions, timers and device memory, as the ledger wants them.

    Args:
        ledger: decides everything.
        memory: the devices' memory, by UUID; what comes of its work returns through :meth:`handle`.
        assembly: binds the memory of several devices together.
        driver: what clients build their driver from.
        send: takes batches of answers for the gateway.
        sight: watches the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: Mapping[str, DeviceMemory],
        assembly: Assembly,
        driver: str,
        send: Callable[[Sequence[Frame]], None],
        sight: Sight | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._sight = sight or Sight(ledger)
        self._memory = memory
        self._assembly = assembly
        self._descriptors: dict[int, tuple[int, ...]] = {}  # by ticket or team
        self._driver = driver
        self._requests = Requests(self._apply, send)
        self.receive = self._requests.receive
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._denials = Denials()

    def admit(self, connection: socket.socket, peer: Peer, version: int) -> None:
        """Open a session on a connection that has greeted, if its user may have one more."""
        number = next(self._numbers)
        session = Session(number, connection, peer, self._ended, self._denials)
        if (refusal := self._ledger.admit(peer.uid)) is not None:
            self._denials.log(peer, refusal.message)
            return self._turn_away(session, refusal)
        try:
            session.watch()
        except OSError as error:  # no memory, or this user may watch no more files (fs.epoll.max_user_watches)
            return self._unwatched(session, error)
        self._sessions[number] = session
        self._requests.enter(session)
        self.handle(events.Joined(number, peer.pid, peer.uid, peer.gid, peer.groups))
        session.send(wire.pack(Welcome(version, number, session.secret, self._driver)))
        return None

    def _unwatched(self, session: Session, error: OSError) -> None:
        """Refuse a session whose end nobody would hear of, so that its leases would never fall."""
        message = f"the broker cannot watch process {session.peer.pid}: {error}; try again later"
        self._denials.log(session.peer, message)
        self._turn_away(session, Unavailable(message))

    def _turn_away(self, session: Session, error: CubrokerError) -> None:
        self._sight.turned_away(error)
        session.send(wire.pack(Refused(error.code, error.message)))
        session.close()

    def handle(self, event: Event) -> None:
        """Bring an event to the ledger, carry out its effects, and send what answers there are."""
        self._apply(event)
        self._requests.flush()

    def announce_gateway(self) -> None:
        """Tell every session that requests may have been lost with the gateway."""
        self._sight.gateway_changed()
        self._notify_all(GatewayChanged())

    def close(self, reason: str) -> None:
        """Say farewell to every session, and forget them all."""
        self._notify_all(Farewell(reason))
        for session in self._sessions.values():
            session.close()
        for timer in self._timers.values():
            timer.cancel()
        self._requests.close()

    def _notify_all(self, notice: Notice) -> None:
        for session in self._sessions.values():
            session.notify(notice)

    def _ended(self, event: events.Lost | events.Gone) -> None:
        self.handle(event)

    def _apply(self, event: Event) -> None:
        effects: Sequence[Effect] = ()
        self._keep(event)
        try:
            self._sight.before(event)
            effects = self._ledger.handle(event, time.time())
            self._sight.after(event, effects)
        # A mistake in the ledger over one event must not take every other client's memory with it, as
        # the end of this process would. The log has the event, and whoever asked hears of it.
        except Exception as error:
            log.exception("the broker failed at %.500r", event)
            self._respond_failed(event, error)
        for effect in effects:
            try:
                self._carry_out(effect)
            # Nor may one effect, an answer that no memory is left for, take the others with it: memory to be freed.
            except Exception as error:
                log.exception("the broker failed at %.500r", effect)
                self._respond_failed(effect, error)

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
            case events.Respond():
                session = self._sessions[effect.session]
                if isinstance(effect.body, Failed) and effect.body.code == Denied.code:
                    self._denials.log(session.peer, effect.body.message)
                self._requests.respond(session, effect.request, effect.body)
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
            case events.HandOver(session, lease, allocations, team):
                numbers = [ticket for _, ticket in allocations] + [team] * bool(team)
                self._sessions[session].hand_over(Parcel(lease, numbers, self._descriptors))
            case events.Withdraw():
                self._sessions[effect.session].withdraw(effect.lease)
            case events.SetTimer():
                self._timers[effect.timer] = self._loop.call_later(effect.seconds, self._elapse, effect.timer)
            case events.DropTimer():
                self._timers.pop(effect.timer).cancel()
            case events.Forget():
                self._forget(self._sessions.pop(effect.session))

    def _elapse(self, timer: int) -> None:
        del self._timers[timer]
        self.handle(events.Elapsed(timer))

    def _forget(self, session: Session) -> None:
        self._requests.leave(session)
        session.close()
