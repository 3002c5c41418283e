"""The ledger: it alone decides who may use which memory, and when that is freed.

One rule: events in, effects out, and nothing else. :meth:`Ledger.handle` takes one event, changes the tables, and
returns the effects that the broker executes. There is no clock, socket or device in here: expired timers and the
outcomes of device work arrive as events.

Theory of operation. A *session* sends requests; each is answered exactly once, immediately or after waiting, unless the
session ends first. Versions, their memory and multicast groups have state tables
(:mod:`cubroker.server.ledger.states`). Everything that ends has one path, for every cause:

    request    leases.stop_waiting  answered, refused, timed out, cancelled, its session ended
    lease      leases.release       closed, sealed, its session ended
    IPC event  ipc_events.end_event closed, its lease ended
    lock       publish.release_lock given back, its session ended
    version    leases.end_version   dropped by its writer, or out of service and without leases
    group      memory.unbound       nothing is bound to its memory any more
    memory     memory.remove        its device has the bytes again
    session    lifecycle.end        its process exited, or its connection ended and it has no leases and locks

A session without a connection, whose process may live, keeps its leases and locks and gets no answers; it may still
close, seal, unlock and drop. When something ends, its pool, user or device is marked for a recheck. After every event
:func:`cubroker.server.ledger.create.serve_waiters` serves the creates that wait there, until none can be served.

With a store, a ledger outlives the broker: :meth:`Ledger.changes` returns the snapshot entries of each batch of events,
and :meth:`Ledger.restore` builds a ledger from them. The restored ledger gets an event for every session and memory
that was lost (``ProcessExited``, ``ConnectionLost``, ``MemoryLost``), and resumes with ``Resumed``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

from cubroker.protocol import messages
from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.fields import LATEST
from cubroker.protocol.messages import IPC, LAST_WORDS, Attached, Created, Failed, Reply, Request, View
from cubroker.protocol.status import HIDDEN_ID
from cubroker.server.ledger import (
    create,
    error_text,
    events,
    invariants,
    ipc_events,
    leases,
    lifecycle,
    memory,
    publish,
    snapshot,
    status,
)
from cubroker.server.ledger.events import Effect, LedgerEvent, RequestReceived, Respond, SendFds
from cubroker.server.ledger.policy import Limits, Policy, Quota
from cubroker.server.ledger.records import Budget, Lease, Session, User
from cubroker.server.ledger.snapshot import Audit, ChangeRecorder
from cubroker.server.ledger.states import Impossible, MemoryState, VersionState
from cubroker.server.ledger.tables import Tables

__all__ = ["Audit", "Budget", "HeldMemory", "Impossible", "Ledger", "Limits"]

MAX_NAMED = 20  #: The most leases that a text names.


class HeldMemory(NamedTuple):
    """Memory of one ticket that versions have."""

    #: The versions.
    label: str
    ticket: int
    device: str
    #: Bytes of each allocation that a version has, by number.
    sizes: Mapping[int, int]
    share: str
    durable: bool
    #: Leases on the versions.
    leases: int
    #: Multicast group of the version; 0: none.
    group: int
    #: Whether the broker serves the device.
    served: bool
    #: Whether all of the versions are lost.
    lost: bool


class Ledger:
    """The record of sessions, pools, versions and leases.

    ``uid`` is the user that the broker runs as, who may change every pool. By default there are no quotas, and every
    user may attach to everything. ``store`` has the places that the store has for descriptors of sessions and of
    durable memory; None: there is no store, no snapshot is written, and nothing can be durable.
    """

    def __init__(
        self,
        devices: Sequence[Budget],
        uid: int,
        limits: Limits | None = None,
        policy: Policy | None = None,
        store: int | None = None,
    ) -> None:
        self._tables = Tables(devices, uid, limits or Limits(), policy or Policy(), store)
        self._recorder = None if store is None else ChangeRecorder(self._tables)

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
        """Return the ledger whose snapshot is among ``items``; a new one if there is none.

        Leases stay, even if the rules allow fewer now. Entries that contradict the rest are dropped, which
        :attr:`findings` reports. The caller must pass ``Resumed`` to the ledger.

        Raises:
            CorruptJournal: the snapshot cannot be read, or its contradictions cannot be repaired.
        """
        ledger = cls(devices, uid, limits, policy, store)
        counted = snapshot.load(ledger._tables, items)
        ledger._recorder = ChangeRecorder(ledger._tables, counted)
        return ledger

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return the snapshot entries changed since the last call (None: gone); nothing without a store."""
        return [] if self._recorder is None else self._recorder.changes()

    def snapshot(self) -> dict[bytes, bytes]:
        """Return all snapshot entries; costs time in proportion to the ledger."""
        return snapshot.full_snapshot(self._tables)

    @property
    def findings(self) -> Sequence[str]:
        """The parts of the snapshot that contradicted the rest and were dropped or lost, one sentence each."""
        return self._tables.findings

    @property
    def last_session(self) -> int:
        """The highest number that a session had."""
        return self._tables.last_session

    def sessions(self) -> tuple[Session, ...]:
        """Return all sessions, which callers only read."""
        return tuple(self._tables.sessions.values())

    def held_memory(self) -> tuple[HeldMemory, ...]:
        """Return all memory that versions have."""
        return tuple(
            HeldMemory(
                label=", ".join(version.label for version in versions),
                ticket=ticket.id,
                device=ticket.account.device.uuid,
                sizes={each.number: each.nbytes for each in ticket.allocations.values() if each.oldest},
                share=ticket.share,
                durable=ticket.durable,
                leases=sum(version.leases for version in versions),
                group=next((version.multicast_group.id for version in versions if version.multicast_group), 0),
                served=ticket.account.device.uuid in self._tables.accounts,
                lost=all(version.state is VersionState.LOST for version in versions),
            )
            for ticket in self._tables.tickets.values()
            if ticket.state is MemoryState.HELD and (versions := ticket.versions)
        )

    def granted(self, session: int, lease: int) -> Attached | Created | None:
        """Return the answer that grants a lease, as it would be now; None if the session has no such lease."""
        known = self._lease(session, lease)
        if known is None:
            return None
        return leases.created(known) if known.writes else leases.attached(known)

    def sent_fds(self, session: int, lease: int) -> SendFds | None:
        """Return the effect that sends the descriptors of a lease; None if there is no such lease, or none to send."""
        known = self._lease(session, lease)
        if known is None or known.unsent or known.version.state is VersionState.LOST:
            return None
        return leases.send_fds(known)

    def admission_error(self, uid: int, *, verified: bool = False) -> CubrokerError | None:
        """Return why a user may not open a session now; None if it may."""
        return lifecycle.admission_error(self._tables, uid, verified=verified)

    def handle(self, event: LedgerEvent, now: float = 0.0) -> list[Effect]:
        """Take one event and return its effects, in order; ``now`` is in seconds since 1970.

        Raises:
            Impossible: the event cannot follow from the earlier ones; nothing changed. After any other exception,
                :meth:`recover` or the next event returns the effects so far.
        """
        tables = self._tables
        tables.now = min(max(0.0, now), LATEST)  # a host's clock may show anything
        if not isinstance(event, RequestReceived):
            _EVENTS[type(event)](tables, event)
        elif (session := tables.sessions.get(event.session)) is not None:
            body = event.body
            try:
                if not session.connected and type(body) not in LAST_WORDS:
                    raise Unavailable(f"the connection of session {session.id} has ended; open a new session")
                if (may_wait := _MAY_WAIT.get(type(body))) is not None:
                    answer = may_wait(tables, session, body, event)
                else:
                    answer = _AT_ONCE[type(body)](tables, session, body)
            except CubrokerError as error:
                answer = Failed(error.code, error.message)
                tables.note(session, f"{type(body).__name__} was refused ({error.code}): {error.message}")
            if answer is not None:
                tables.effects.append(Respond(session.id, event.request, answer))
            if not session.connected and not session.held:
                lifecycle.end(tables, session)
        return self.recover()

    def recover(self) -> list[Effect]:
        """Serve waiting creates and return the effects; also called after an exception in :meth:`handle`."""
        tables = self._tables
        if tables.recheck_pools or tables.recheck_users or tables.recheck_accounts:
            create.serve_waiters(tables)
        effects, tables.effects = tables.effects, []
        return effects

    def take_effects(self) -> list[Effect]:
        """Return the effects and serve no create; called after an exception in :meth:`recover`.

        Creates that could have been served keep waiting until something else marks their queues for a recheck.
        """
        tables = self._tables
        tables.recheck_pools.clear()
        tables.recheck_users.clear()
        tables.recheck_accounts.clear()
        effects, tables.effects = tables.effects, []
        return effects

    def audit(self) -> Audit:
        """Return the damage that a mistake did to the tables; costs time in proportion to the ledger."""
        return snapshot.audit(self._tables)

    def check(self) -> None:
        """Assert the invariants; costs time in proportion to the ledger."""
        invariants.check(self._tables)

    def holder(self, session: int) -> Session | None:
        """Return a session, which callers only read; None if there is no such session."""
        return self._tables.sessions.get(session)

    def leased_pool(self, session: int, lease: int) -> str:
        """Return the name of the pool that a lease is on; empty if the session has no such lease."""
        found = self._lease(session, lease)
        return "" if found is None else found.version.pool.name

    def _lease(self, session: int, lease: int) -> Lease | None:
        found = self._tables.leases.get(lease)
        return found if found is not None and found.session.id == session else None

    @property
    def stored_fds(self) -> int:
        """Places of the store that sessions and durable memory take."""
        return self._tables.stored

    @property
    def drain_reason(self) -> str:
        """Why no leases are granted; empty if they are."""
        return error_text.drain_reason(self._tables)

    @property
    def holders_text(self) -> str:
        """Which versions that end with the broker are leased, and by which sessions, in words; empty if none are."""
        held = [lease for lease in self._tables.leases.values() if self._tables.ends_with_broker(lease.version)]
        pairs = Counter(f"{lease.version.label} by {lease.session.label}" for lease in held)
        named = [pair if times == 1 else f"{pair} {times} times" for pair, times in islice(pairs.items(), MAX_NAMED)]
        if (more := len(pairs) - MAX_NAMED) > 0:
            named.append(f"and {more} more")
        return ", ".join(named)

    def shutdown_loses(self, *, with_store: bool) -> bool:
        """Whether a lease is on memory that ends with the broker or, if ``with_store``, on any that is not lost."""
        tables = self._tables
        versions = (lease.version for lease in tables.leases.values())
        return any(
            tables.ends_with_broker(version) or (with_store and version.state is not VersionState.LOST)
            for version in versions
        )

    def last_words(self, session: int) -> str:
        """Return what a session must know of its leases as the broker ends; empty if it has none."""
        found = self._tables.sessions.get(session)
        versions = {} if found is None else dict.fromkeys(lease.version for lease in found.leases.values())
        if not versions:
            return ""
        held = ", ".join(version.label for version in islice(versions, MAX_NAMED))
        doomed = ", ".join([version.label for version in versions if version.share == IPC][:MAX_NAMED])
        advice = f"do not use {doomed} any more: the memory ends with the broker" if doomed else "unmap it when done"
        return f"this process still holds {held}: {advice}"

    def summary(self) -> str:
        """Return the totals in one line."""
        tables, accounts = self._tables, self._tables.accounts.values()
        lent = sum(account.allocated for account in accounts)
        budget = sum(account.device.budget for account in accounts)
        versions = sum(len(pool.versions) for pool in tables.pools.values())
        counts = {"version": versions, "session": len(tables.sessions), "lease": len(tables.leases)}
        told = ", ".join(error_text.count(number, noun) for noun, number in counts.items())
        lends = "" if not tables.drained and tables.shutdown_leases is None else "draining; "
        return f"{lends}{told}; {lent >> 20} of {budget >> 20} MiB lent"

    def view(self, *, everything: bool) -> View:
        """Return ``everything``, or only what a user may see who can read no private pool."""
        uid = self._tables.uid if everything else HIDDEN_ID
        return status.view(self._tables, Session(0, 0, User(uid, Quota()), HIDDEN_ID, verified=True))

    def beyond_leases(self) -> Mapping[int, int]:
        """Return the bytes that processes refer to beyond leases, by uid; users without known bytes are left out."""
        return {
            uid: footprint.nbytes
            for uid, footprint in self._tables.footprints.items()
            if any(memory is not None for memory in footprint.processes.values())
        }

    def excesses(self) -> Mapping[int, str]:
        """Return a text by uid for each user who has more memory beyond leases than the quota allows."""
        found = {uid: memory.excess(self._tables, uid) for uid in self._tables.footprints}
        return {uid: error_text.too_much_beyond(uid, *pair) for uid, pair in found.items() if pair is not None}


_EVENTS: Mapping[type[LedgerEvent], Callable[[Tables, Any], None]] = {
    events.Allocated: create.memory_allocated,
    events.AllocationFailed: create.allocation_failed,
    events.Freed: create.memory_freed,
    events.MulticastBound: create.multicast_bound,
    events.MulticastUnbound: memory.unbound,
    events.TimerExpired: leases.timer_expired,
    events.SessionOpened: lifecycle.opened,
    events.ConnectionLost: lifecycle.connection_lost,
    events.ProcessExited: lifecycle.process_exited,
    events.Reconfigured: lifecycle.reconfigure,
    events.ShutdownStarted: lifecycle.start_shutdown,
    events.ProcessScanStarted: memory.scan_started,
    events.ProcessScanFinished: memory.scan_finished,
    events.MemoryLost: lifecycle.memory_lost,
    events.Resumed: lifecycle.resume,
}
"""The function that handles each event, except requests."""

_AT_ONCE: Mapping[type[Request], Callable[[Tables, Session, Any], Reply]] = {
    messages.Close: ipc_events.close,
    messages.SendDescriptors: leases.send_descriptors,
    messages.Seal: publish.seal,
    messages.SealDigested: publish.seal,
    messages.SealInPlace: publish.seal,
    messages.Unlock: publish.unlock,
    messages.Cancel: leases.cancel,
    messages.Retire: publish.retire,
    messages.Watch: publish.watch,
    messages.Find: publish.find_current,
    messages.Drain: lifecycle.drain,
    messages.ShareEvent: ipc_events.share,
    messages.Recorded: ipc_events.recorded,
    messages.DropEvent: ipc_events.drop,
    messages.Describe: status.describe,
    messages.ListDigests: status.list_digests,
    messages.ListPools: status.list_pools,
    messages.ListClients: status.list_clients,
    messages.ListDevices: status.list_devices,
    messages.Look: status.view,
    messages.Tell: status.tell,
}
"""The function that answers each request that never waits."""

_MAY_WAIT: Mapping[type[Request], Callable[[Tables, Session, Any, RequestReceived], Reply | None]] = {
    messages.Attach: leases.attach,
    messages.Create: create.create,
    messages.SetLayout: create.set_layout,
    messages.Lock: publish.lock,
    messages.OpenEvent: ipc_events.open_event,
    messages.AwaitEvent: ipc_events.await_event,
}
"""The function that answers each request that may wait, or has a layout; it returns None if the request waits, or was
already answered by an effect."""
