"""Shows operators what the broker does for its sessions: an audit log, counts, and snapshots of the ledger.

Each line of the audit log says who did what, with its outcome and the reason. Publications, ends and rejections are at
``info``; everything else, which is most, at ``debug``. Users cause these lines, so the number of lines at ``info`` is
limited for each user.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from msgspec import Struct

from cubroker.protocol import messages
from cubroker.protocol.errors import Denied
from cubroker.server.ledger import Ledger, events
from cubroker.server.ledger.records import Session
from cubroker.server.transport.unix_sockets import RateLimiter, RejectionLog

log = logging.getLogger(__name__)

BURST, REFILL = 200, 1.0
"""Lines at ``info`` that one user can cause in a burst, and seconds after which a user can cause one more."""

PLAIN = frozenset((messages.Failed, messages.Created, messages.Sealed, messages.Retirement))
"""Replies that are worth a line at ``info``."""

FAILURE = "the broker failed at counting and logging an event"

Naming = (
    messages.Attach
    | messages.Create
    | messages.Describe
    | messages.Retire
    | messages.Find
    | messages.ListDigests
    | messages.Lock
    | messages.Watch
)  #: The requests that name their pool.
OF_DRAFTS = frozenset((messages.Seal, messages.SealDigested, messages.SealInPlace, messages.SetLayout))
"""The requests that name a draft, by its lease."""


@dataclass(frozen=True, slots=True)
class BrokerGauges:
    """Facts about a broker that a view of its ledger does not have."""

    #: Brokers before this one whose sessions and pools it took over.
    restarts: int = 0
    #: Descriptors that the store has of this broker; None without a store.
    stored: int | None = None
    #: Descriptors that the store can have of this broker; None without a store.
    storable: int | None = None
    #: Bytes that processes refer to beyond their leases, by user, as far as that is known.
    beyond_leases: Mapping[int, int] = field(default_factory=dict)
    #: Seconds for which each device, by UUID, has been at its oldest unfinished free; absent if it has none.
    freeing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A broker at one moment, as metrics and the page show it."""

    view: messages.View
    #: Increases with every event.
    revision: int
    gauges: BrokerGauges = BrokerGauges()


class EventCounter:
    """Counts what happens. This base class counts nothing, for when metrics are off."""

    def request_answered(self, request: str, seconds: float, code: str = "") -> None:
        """Count an answered request of a kind; ``code`` says why it was rejected, if it was."""

    def turned_away(self, code: str) -> None:
        """Count a session that was rejected."""

    def gateway_changed(self) -> None:
        """Count a gateway that is not the first."""


class PendingRequest(Struct, frozen=True):
    """A request without a reply yet."""

    event: events.RequestReceived
    #: The pool of the draft whose lease the request names; empty if it names none.
    leased: str
    #: The time of its arrival, by the monotonic clock.
    since: float

    @property
    def kind(self) -> str:
        """The name of the request's type."""
        return type(self.event.body).__name__

    @property
    def pool(self) -> str:
        """The name of the pool that the request is about; empty if the request names none."""
        body = self.event.body
        if isinstance(body, Naming):
            return body.name
        return body.pool or "" if isinstance(body, messages.Tell) else self.leased


def _count(leases: int) -> str:
    return f"{leases} lease{'' if leases == 1 else 's'}"


def _describe(request: PendingRequest, reply: messages.Reply) -> tuple[int, str, dict[str, object]]:
    """Return the level, the text and the fields of a reply's line."""
    kind, pool = request.kind, request.pool
    match reply:
        case messages.Failed(code, message):
            asked = f"{kind} of {pool}" if pool else kind
            return logging.INFO, f"{asked} was refused ({code}): {message}", {"code": code, "why": message}
        case messages.Created(version=version):
            return logging.INFO, f"writes {pool}@{version}", {"version": version}
        case messages.Sealed(version):
            return logging.INFO, f"published {pool}@{version}", {"version": version}
        case messages.Retirement(version, leases):
            text = f"retired {pool}@{version}, with {_count(leases)} left on it"
            return logging.INFO, text, {"version": version}
        case messages.Attached(version=version):
            return logging.DEBUG, f"attached to {pool}@{version}, lease {reply.lease}", {"version": version}
        case _:
            return logging.DEBUG, f"{kind} was done", {}


class Releases:
    """What devices are freeing, and since when: memory, and multicast groups, which are unbound before it."""

    def __init__(self) -> None:
        #: The devices of each group.
        self._groups: dict[int, tuple[str, ...]] = {}
        #: The devices and the start of each release, by ticket and numbers, or by group.
        self._under_way: dict[object, tuple[tuple[str, ...], float]] = {}

    def begun(self, effect: events.Free | events.BindMulticast | events.UnbindMulticast, now: float) -> None:
        """Note an effect that is executed ``now``, in seconds since an arbitrary moment."""
        match effect:
            case events.BindMulticast():
                self._groups[effect.group] = tuple(device for device, _ in effect.members)
            case events.UnbindMulticast():
                self._under_way.setdefault(effect.group, (self._groups.pop(effect.group, ()), now))
            case events.Free():
                self._under_way.setdefault((effect.ticket, effect.numbers), ((effect.device,), now))

    def done(self, event: events.Freed | events.MulticastUnbound) -> None:
        """Note that a release has finished."""
        key = event.group if isinstance(event, events.MulticastUnbound) else (event.ticket, event.numbers)
        self._under_way.pop(key, None)

    def longest(self, now: float) -> Mapping[str, float]:
        """Return for how long each device has been at its oldest unfinished release."""
        found: dict[str, float] = {}
        for devices, since in self._under_way.values():
            for device in devices:
                found[device] = max(found.get(device, 0.0), now - since)
        return found


class LedgerObserver:
    """Watches a ledger, for the log and for metrics. Only the broker's loop calls it, unless a method says otherwise.

    ``counter`` also counts what is no event of the ledger; its other callers report that. ``gauges`` has the facts that
    do not change; its ``stored`` counts the broker's own descriptors, without the ledger's.
    """

    def __init__(self, ledger: Ledger, counter: EventCounter | None = None, gauges: BrokerGauges | None = None) -> None:
        #: Increases with every event. Any thread may read it.
        self.revision = 0
        self._ledger = ledger
        self.counter = counter or EventCounter()
        self._gauges = gauges or BrokerGauges()
        self._limiter = RateLimiter(BURST, REFILL)
        self._rejections = RejectionLog()
        self._excesses: Mapping[int, str] = {}
        self._beyond_leases: Mapping[int, int] = {}
        self._releases = Releases()
        self._begun: PendingRequest | None = None  # the request that the ledger is handling
        self._waiting: defaultdict[int, dict[int, PendingRequest]] = defaultdict(dict)  # by session and number

    def snapshot(self, *, everything: bool) -> Snapshot:
        """Return a snapshot of the broker, with ``everything`` or with what strangers to all pools may know."""
        stored = self._gauges.stored
        gauges = replace(
            self._gauges,
            stored=None if stored is None else stored + self._ledger.stored_fds,
            beyond_leases=self._beyond_leases,
            freeing=self._releases.longest(time.monotonic()),
        )
        return Snapshot(self._ledger.view(everything=everything), self.revision, gauges)

    def before(self, event: events.LedgerEvent) -> None:
        """Note an event that the ledger is about to handle."""
        self.revision += 1
        try:
            if type(event) is events.RequestReceived:
                body = event.body
                draft: int = body.lease if type(body) in OF_DRAFTS else 0  # type: ignore[union-attr]
                leased = self._ledger.leased_pool(event.session, draft) if draft else ""
                self._begun = PendingRequest(event, leased, time.monotonic())
            else:
                self._before(event)
        # A failure here must not keep a request, or the end of a process, from the ledger.
        except Exception:
            log.exception(FAILURE)

    def after(self, event: events.LedgerEvent, effects: Collection[events.Effect]) -> None:
        """Note the effects of an event."""
        try:
            self._after(event, effects)
        except Exception:
            log.exception(FAILURE)

    def _before(self, event: events.LedgerEvent) -> None:
        if isinstance(event, events.ConnectionLost):
            if (who := self._ledger.holder(event.session)) is not None and who.leases:
                why = "the connection has ended"
                self._log(logging.INFO, who, f"{why}; {_count(len(who.leases))} until the process does", why=why)
            self._waiting.pop(event.session, None)  # its pending requests are not answered any more
        elif isinstance(event, events.ProcessExited) and (who := self._ledger.holder(event.session)) is not None:
            why = "the process has ended"
            if who.leases:
                self._log(logging.INFO, who, f"{why}, and with it {_count(len(who.leases))}", why=why)
            else:
                self._log(logging.DEBUG, who, why, why=why)

    # Most events are requests, and most effects their replies: they come first. `match` would cost more.
    def _after(self, event: events.LedgerEvent, effects: Collection[events.Effect]) -> None:
        begun, self._begun = self._begun, None
        try:
            if type(event) is events.RequestReceived:
                if type(event.body) is messages.Drain:
                    self._drains(event, event.body, effects)
            elif isinstance(event, events.SessionOpened):
                self._log(logging.DEBUG, self._ledger.holder(event.session), "joined")
            elif isinstance(event, events.ProcessScanFinished | events.Reconfigured):
                self._measured()
            elif isinstance(event, events.Freed | events.MulticastUnbound):
                self._releases.done(event)
            for effect in effects:
                if type(effect) is events.Respond:
                    if begun is None or begun.event.request != effect.request or begun.event.session != effect.session:
                        request = self._waiting.get(effect.session, {}).pop(effect.request, None)
                    else:
                        request, begun = begun, None
                    if request is not None:  # otherwise an earlier broker received it
                        self._answered(effect, request)
                elif isinstance(effect, events.Free | events.BindMulticast | events.UnbindMulticast):
                    self._releases.begun(effect, time.monotonic())
                elif isinstance(effect, events.ForgetSession):
                    self._waiting.pop(effect.session, None)
        finally:  # a failure at another request's reply must not lose this request, whose reply is still to come
            if begun:
                self._waiting[begun.event.session][begun.event.request] = begun

    def _drains(self, event: events.RequestReceived, body: messages.Drain, effects: Collection[events.Effect]) -> None:
        if events.Respond(event.session, event.request, messages.Done()) in effects:
            lends = "drains the broker, which lends nothing new" if body.on else "has the broker lend again"
            self._log(logging.INFO, self._ledger.holder(event.session), lends)

    def _measured(self) -> None:
        """Log once when a user has too much memory beyond leases, and once when that is over."""
        before, self._excesses = self._excesses, self._ledger.excesses()
        for uid in self._excesses.keys() - before.keys():
            log.warning("user %d gets no leases: %s", uid, self._excesses[uid], extra={"uid": uid})
        for uid in before.keys() - self._excesses.keys():
            why = "its processes have let go of memory beyond them, or its quota has changed"
            log.info("user %d gets leases again: %s", uid, why, extra={"uid": uid})
        self._beyond_leases = self._ledger.beyond_leases()

    def _answered(self, answer: events.Respond, request: PendingRequest) -> None:
        reply = answer.body
        code = reply.code if type(reply) is messages.Failed else ""
        self.counter.request_answered(request.kind, time.monotonic() - request.since, code)
        if type(reply) in PLAIN or log.isEnabledFor(logging.DEBUG):
            who = self._ledger.holder(answer.session)
            asked = {"request": answer.request} | ({"pool": request.pool} if request.pool else {})
            if type(reply) is messages.Failed and code == Denied.code and who is not None:
                self._rejections.log(who.pid, who.uid, reply.message, code=code, session=who.id, **asked)
                return
            level, text, fields = _describe(request, reply)
            self._log(level, who, text, **asked, **fields)

    def _log(self, level: int, who: Session | None, text: str, **fields: object) -> None:
        """Log what a session did, unless its user has had too many lines at ``info`` or the session is gone."""
        if who is None or not log.isEnabledFor(level):
            return
        suppressed = self._limiter.take(who.uid) if level >= logging.INFO else 0
        if suppressed is None:
            return
        more = f" ({suppressed} more lines about this user are not in the log)" if suppressed else ""
        known = {"session": who.id, "pid": who.pid, "uid": who.uid, **fields}
        log.log(level, "%s: %s%s", who.label, text, more, extra=known)
