"""Events of versions: who made them, how often they were recorded, and who waits for them.

An event belongs to the lease by which it was made, and ends with it, or when its maker drops it: in :func:`end`,
whatever the cause. To wait on a device for an event is safe only once it was recorded, and while its maker is there;
so whoever waits asks here first, and hears when it was recorded, or that it never will be any more.
"""

from __future__ import annotations

from typing import assert_never

from cubroker.protocol import names
from cubroker.protocol.errors import Exists, Invalid, NotFound, OverQuota, TimedOut, Unavailable
from cubroker.protocol.messages import (
    AwaitEvent,
    Done,
    DropEvent,
    EventOpened,
    EventShared,
    Generation,
    OpenEvent,
    Recorded,
    Reply,
    ShareEvent,
)
from cubroker.server.ledger import leases, shortages, waiting, wording
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.entries import Lease, Session, Signal
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.states import State
from cubroker.server.ledger.waiters import Listener

EPITAPHS = 64
"""Ended events of a version of which it is remembered how they ended: whoever waits too late is told so."""

Body = ShareEvent | OpenEvent | Recorded | AwaitEvent | DropEvent


def asked(books: Books, session: Session, request: int, body: Body) -> Reply | None:
    """Return the answer to a request that is about events, or None if it waits; raises what stands in the way."""
    match body:
        case ShareEvent():
            return _share(books, session, body)
        case OpenEvent():
            return _open(books, session, request, body)
        case Recorded():
            return _recorded(books, _own(session, body.event))
        case AwaitEvent():
            return _await(books, session, request, body)
        case DropEvent():
            end(books, _own(session, body.event), wording.DROPPED)
            return Done()
        case _:
            assert_never(body)


def give_back(books: Books, lease: Lease, how: str) -> None:
    """End a lease, the events that were made by it, and whatever waits by it; ``how`` says what its holder did."""
    for listener in tuple(lease.listeners):
        waiting.refuse(books, listener, NotFound(wording.no_lease(lease.id)))
    for signal in tuple(lease.signals.values()):
        end(books, signal, how)
    leases.release(books, lease)


def end(books: Books, signal: Signal, how: str) -> None:
    """End an event, and tell everybody who waits for it ``how``."""
    lease = signal.lease
    del books.signals[signal.id], lease.version.signals[signal.name]
    del lease.signals[signal.id], lease.session.signals[signal.id]
    lease.session.user.events -= 1
    books.mark(Kind.EVENT, signal.id)
    epitaph = wording.event_over(signal, how)
    _remember(lease.version.epitaphs, signal.id, epitaph)
    for listener in tuple(signal.listeners):
        waiting.refuse(books, listener, Unavailable(epitaph))


def _remember(epitaphs: dict[int, str], event: int, epitaph: str) -> None:
    epitaphs[event] = epitaph
    if len(epitaphs) > EPITAPHS:
        del epitaphs[next(iter(epitaphs))]


def _share(books: Books, session: Session, body: ShareEvent) -> EventShared:
    lease = _lease(session, body.lease)
    names.check(body.name)
    version = lease.version
    if body.device not in books.accounts:
        raise NotFound(wording.no_device(body.device, books.accounts))
    if (known := version.signals.get(body.name)) is not None:
        raise Exists(wording.event_exists(known))
    _check_quota(books, session)
    signal = Signal(next(books.signal_ids), body.name, lease, body.device, body.handle)
    books.signals[signal.id] = version.signals[signal.name] = signal
    lease.signals[signal.id] = session.signals[signal.id] = signal
    session.user.events += 1
    books.mark(Kind.EVENT, signal.id)
    for opener in tuple(version.openers):
        if opener.name == signal.name:
            waiting.leave(books, opener)
            waiting.answer(books, opener, _opened(signal))
    return EventShared(signal.id)


def _check_quota(books: Books, session: Session) -> None:
    if len(session.signals) >= books.limits.events:
        raise OverQuota(f"this session has {books.limits.events} events, the most that one may; close some of them")
    if exceeds(session.user.events, 1, session.user.quota.events):
        raise OverQuota(shortages.too_many_events(session.user))


def _open(books: Books, session: Session, request: int, body: OpenEvent) -> EventOpened | None:
    lease = _lease(session, body.lease)
    names.check(body.name)
    signal = lease.version.signals.get(body.name)
    if signal is not None:
        return _opened(signal)
    if not body.wait:
        raise NotFound(wording.no_event(lease.version, body.name))
    _wait(books, Listener(session, request, lease, body, body.name))
    return None


def _recorded(books: Books, signal: Signal) -> Generation:
    signal.generation += 1
    books.mark(Kind.EVENT, signal.id)
    for listener in tuple(signal.listeners):
        if listener.after < signal.generation:
            waiting.leave(books, listener)
            waiting.answer(books, listener, Generation(signal.generation))
    return Generation(signal.generation)


def _await(books: Books, session: Session, request: int, body: AwaitEvent) -> Generation | None:
    lease = leases.held(session, body.lease)
    version = lease.version
    signal = books.signals.get(body.event)
    if signal is None or signal.lease.version is not version:
        raise Unavailable(version.epitaphs.get(body.event) or wording.unknown_event(version, body.event))
    if signal.generation > body.after:
        return Generation(signal.generation)
    listener = Listener(session, request, lease, body, signal.name, signal, body.after)
    if not body.wait:
        raise TimedOut(wording.not_recorded(listener))
    _wait(books, listener)
    return None


def _wait(books: Books, listener: Listener) -> None:
    waiting.admit(books, listener.session, listener.request)
    waiting.begin(books, listener)
    waiting.limit(books, listener)


def _opened(signal: Signal) -> EventOpened:
    return EventOpened(signal.id, signal.device, signal.handle)


def _lease(session: Session, number: int) -> Lease:
    """Return a lease of ``session`` on a version that can have events; raises ``NotFound`` or ``Invalid``."""
    lease = leases.held(session, number)
    if not lease.version.writable or lease.version.state is State.DRAFT:
        raise Invalid(wording.not_for_events(lease))
    return lease


def _own(session: Session, event: int) -> Signal:
    signal = session.signals.get(event)
    if signal is None:
        raise NotFound(wording.not_its_event(event))
    return signal
