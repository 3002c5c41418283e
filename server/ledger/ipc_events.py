"""IPC events of versions: who made them, how often they were recorded, and which requests wait for them.

An event belongs to the lease by which it was made. It ends with that lease, or when its maker drops it; always in
:func:`end_event`. A device may safely wait for an event only once it was recorded, and while its maker lives. So a
client first waits here: the broker answers when the event was recorded, or when it never will be.
"""

from __future__ import annotations

from cubroker.protocol import fields, messages
from cubroker.protocol.errors import Exists, Invalid, NotFound, TimedOut, Unavailable
from cubroker.server.ledger import error_text, leases
from cubroker.server.ledger.events import RequestReceived
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.records import EventWaiter, IpcEvent, Lease, Session
from cubroker.server.ledger.states import VersionState
from cubroker.server.ledger.tables import Kind, Tables

MAX_ENDED_REASONS = 64  #: Ended events of a version whose reason is remembered, for requests that arrive too late.


def close(tables: Tables, session: Session, body: messages.Close) -> messages.Done:
    """End a lease whose holder has unmapped its memory."""
    lease = leases.own_lease(session, body.lease)
    if end_lease(tables, lease, "gave back the lease that it belonged to"):
        leases.announce(tables, lease.version.pool)
    return messages.Done()


def end_lease(tables: Tables, lease: Lease, how: str) -> bool:
    """End a lease and its events, and refuse the requests that wait by it; ``how`` says what its holder did.

    Returns as :func:`~cubroker.server.ledger.leases.release`.
    """
    # Sessions may have many requests that wait, and only writable versions have events.
    for waiter in tuple(lease.session.unfinished.values()) if lease.version.writable else ():
        if isinstance(waiter, EventWaiter) and waiter.lease is lease:
            leases.refuse(tables, waiter, leases.no_lease(lease.id))
    for ipc_event in tuple(lease.ipc_events.values()):
        end_event(tables, ipc_event, how)
    return leases.release(tables, lease)


def end_event(tables: Tables, ipc_event: IpcEvent, how: str) -> None:
    """End an event, and refuse the requests that wait for it with ``how``."""
    lease = ipc_event.lease
    del tables.ipc_events[ipc_event.id], lease.version.ipc_events[ipc_event.name]
    del lease.ipc_events[ipc_event.id], lease.session.ipc_events[ipc_event.id]
    lease.session.user.events -= 1
    tables.mark_dirty(Kind.EVENT, ipc_event.id)
    at, maker, reasons = ipc_event.generation, lease.session.label, lease.version.ended_reasons
    reasons[ipc_event.id] = reason = f"{ipc_event.label} ended at generation {at}: {maker} {how}; open it anew"
    if len(reasons) > MAX_ENDED_REASONS:
        del reasons[next(iter(reasons))]
    for waiter in tuple(ipc_event.event_waiters):
        leases.refuse(tables, waiter, Unavailable(reason))


def share(tables: Tables, session: Session, body: messages.ShareEvent) -> messages.EventShared:
    """Add an event that was made by a lease, and serve the requests that wait for it."""
    lease = _lease(session, body.lease)
    fields.check_pool_name(body.name)
    version = lease.version
    if body.device not in tables.accounts:
        raise NotFound(error_text.no_device(tables, body.device))
    if (known := version.ipc_events.get(body.name)) is not None:
        maker = known.lease.session.label
        raise Exists(f"{known.label} exists: {maker} made it; open it, or use another name")
    user = session.user
    if len(session.ipc_events) >= tables.limits.events or exceeds(user.events, 1, user.quota.events):
        raise error_text.too_many(session, tables.limits, error_text.IPC_EVENTS)
    ipc_event = IpcEvent(next(tables.event_ids), body.name, lease, body.device, body.handle)
    tables.ipc_events[ipc_event.id] = version.ipc_events[ipc_event.name] = ipc_event
    lease.ipc_events[ipc_event.id] = session.ipc_events[ipc_event.id] = ipc_event
    user.events += 1
    tables.mark_dirty(Kind.EVENT, ipc_event.id)
    for opener in tuple(version.open_waiters):
        if opener.name == ipc_event.name:
            leases.stop_waiting(tables, opener)
            leases.answer(tables, opener, _opened(ipc_event))
    return messages.EventShared(ipc_event.id)


def open_event(
    tables: Tables, session: Session, body: messages.OpenEvent, event: RequestReceived
) -> messages.EventOpened | None:
    """Return an event, by its name; None if the request waits for it to be made."""
    lease = _lease(session, body.lease)
    fields.check_pool_name(body.name)
    ipc_event = lease.version.ipc_events.get(body.name)
    if ipc_event is not None:
        return _opened(ipc_event)
    if not body.wait:
        raise NotFound(error_text.no_event(lease.version, body.name))
    leases.admit(tables, session, event.request)
    leases.wait(tables, EventWaiter(session, event.request, lease.version.pool, lease, body, body.name))
    return None


def recorded(tables: Tables, session: Session, body: messages.Recorded) -> messages.Generation:
    """Count a recording of an event, and serve the requests that wait for its generation."""
    ipc_event = _own(session, body.event)
    ipc_event.generation += 1
    tables.mark_dirty(Kind.EVENT, ipc_event.id)
    for waiter in tuple(ipc_event.event_waiters):
        if waiter.after < ipc_event.generation:
            leases.stop_waiting(tables, waiter)
            leases.answer(tables, waiter, messages.Generation(ipc_event.generation))
    return messages.Generation(ipc_event.generation)


def await_event(
    tables: Tables, session: Session, body: messages.AwaitEvent, event: RequestReceived
) -> messages.Generation | None:
    """Return the generation of an event if it exceeds the one in the request; None if the request waits."""
    lease = leases.own_lease(session, body.lease)
    version = lease.version
    ipc_event = tables.ipc_events.get(body.event)
    if ipc_event is None or ipc_event.lease.version is not version:
        forgotten = f"event {body.event} of {version.label} has ended, or never existed; open it anew"
        raise Unavailable(version.ended_reasons.get(body.event, forgotten))
    if ipc_event.generation > body.after:
        return messages.Generation(ipc_event.generation)
    waiter = EventWaiter(session, event.request, version.pool, lease, body, ipc_event.name, ipc_event, body.after)
    if not body.wait:
        raise TimedOut(error_text.not_recorded(waiter))
    leases.admit(tables, session, event.request)
    leases.wait(tables, waiter)
    return None


def drop(tables: Tables, session: Session, body: messages.DropEvent) -> messages.Done:
    """End an event, as its maker requests."""
    end_event(tables, _own(session, body.event), "closed it")
    return messages.Done()


def _opened(ipc_event: IpcEvent) -> messages.EventOpened:
    return messages.EventOpened(ipc_event.id, ipc_event.device, ipc_event.handle)


def _lease(session: Session, number: int) -> Lease:
    """Return a lease of ``session`` on a version that can have events; raises ``NotFound`` or ``Invalid``."""
    lease = leases.own_lease(session, number)
    if not lease.version.writable or lease.version.state is VersionState.DRAFT:
        label = lease.version.label
        if lease.version.state is VersionState.DRAFT:
            raise Invalid(f"lease {lease.id} is on {label}, a draft; seal it and attach, then make events on it")
        raise Invalid(f"{label} is read-only, and events are made on writable pools; create it with writable=True")
    return lease


def _own(session: Session, event: int) -> IpcEvent:
    ipc_event = session.ipc_events.get(event)
    if ipc_event is None:
        raise NotFound(f"this session has no event {event}; it was closed already, or another one made it")
    return ipc_event
