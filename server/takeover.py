"""Takeover from an earlier broker: the service manager, the store and the sockets, then its sessions and memory.

The journal does not have what happened while no broker ran: processes exited, connections closed, and memory that was
not durable is gone. This module reports that to the ledger, in the events that a running broker would have put.
:mod:`cubroker.server.ledger.snapshot` reads the ledger's own part of the journal.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from cubroker.protocol.errors import CorruptJournal, Unavailable
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import DeviceAllocator, stored_as
from cubroker.server.directory_lock import LISTENERS
from cubroker.server.ledger import HeldMemory, Ledger
from cubroker.server.ledger.events import ConnectionLost, LedgerEvent, MemoryLost, ProcessExited, Resumed
from cubroker.server.ledger.records import Session
from cubroker.server.store.sd_notify import VARIABLES, Manager, close_all, inherit, is_offered
from cubroker.server.store.store import AsyncNotifier, Store
from cubroker.server.transport.session import LoggedSession, SessionLog, label, recall
from cubroker.server.transport.unix_sockets import Peer

log = logging.getLogger(__name__)

OWN = "own-"  #: The prefix of names of stored sockets that a broker made; it does not change those of socket units.

UNSTORED = "it was not durable, so its memory ended with the broker"
MISSING = "descriptors of its memory are missing from the store"


@dataclass(frozen=True, slots=True)
class InheritedFds:
    """What a broker inherits at its start."""

    #: Sends to the service manager; None: there is no service manager.
    notifier: AsyncNotifier | None
    #: Keeps descriptors beyond the broker's end; None: there is no store.
    store: Store | None
    #: Sockets that listen already, by name.
    listening: Mapping[str, int]
    #: The names of ``listening`` sockets that an earlier broker made, and not a socket unit.
    own: frozenset[str] = frozenset()
    #: Whether the service manager can have the next broker stand by.
    standby: bool = False

    @property
    def lasting(self) -> bool:
        """Whether other processes have the listening sockets too, so that they outlive this broker."""
        return self.store is not None or bool(self.listening)

    def keep(self, fresh: Mapping[str, socket.socket]) -> None:
        """Store the journal and sockets that this broker made, if there is a store. Blocks; not for the event loop.

        It is called when the broker is about to serve. So a first start that fails stores nothing, and a keeper without
        stored descriptors gives up instead of trying for ever.

        Raises:
            Unavailable: the store does not take the descriptors.
        """
        if self.store:
            self.store.begin()
            for name, listener in fresh.items():
                self.store.replace(OWN + name, listener.fileno())


@contextmanager
def inherited(
    environ: MutableMapping[str, str], handed: Mapping[str, Sequence[int]] | None = None
) -> Iterator[InheritedFds]:
    """Take over what this process inherits, while the context lasts; stored descriptors stay stored.

    Args:
        environ: the environment; the variables of the protocol are removed, since the gateway need not know them.
        handed: descriptors by name that a process received after it stood by; other processes start with them.

    Raises:
        Unavailable: the stored journal cannot be read. Everything stays stored.
    """
    with ExitStack() as undo:
        manager = Manager.from_environment(environ)
        notifier = AsyncNotifier(manager) if manager else None
        if notifier:
            undo.callback(notifier.close)
        stored = inherit(environ)
        for name, descriptors in (handed or {}).items():
            stored.setdefault(name, []).extend(descriptors)
        offered = is_offered(environ)
        for name in VARIABLES:
            environ.pop(name, None)
        listening = {name: stored.pop(name)[0] for name in LISTENERS if name in stored}
        if not (notifier and notifier.manager.limit):
            for name, descriptors in stored.items():
                log.warning("closing inherited descriptors named %s: no store is configured", name)
                close_all(descriptors)
            yield InheritedFds(notifier, None, listening, standby=offered)
            return
        made = [name for name in LISTENERS if OWN + name in stored and name not in listening]
        own = {name: stored.pop(OWN + name)[0] for name in made}
        with readable():
            store = Store(notifier, stored)
        undo.callback(store.journal.close)
        yield InheritedFds(notifier, store, {**own, **listening}, frozenset(own), offered)


@contextmanager
def readable() -> Iterator[None]:
    """Turn an unreadable journal into an error that says what to do."""
    try:
        yield
    except CorruptJournal as error:
        raise Unavailable(
            f"cannot take over from an earlier broker, and nothing was changed: {error}; repair that, or start the"
            f" version of cubroker that wrote the journal; or give up all sessions, leases and pools: end `cubroker"
            f" keep`, or, under systemd, stop the service and its sockets, and from version 254 on also: systemctl"
            f" clean --what=fdstore cubroker.service"
        ) from error


def restore(
    broker: Broker,
    ledger: Ledger,
    memory: Mapping[str, DeviceAllocator],
    store: Store,
    session_log: SessionLog,
    items: Mapping[bytes, bytes],
) -> None:
    """Have ``broker`` take over the sessions and memory that ``ledger`` has, and drop everything else from the store.

    The broker has no sessions yet. ``memory`` has the allocators of all devices on which the ledger has memory, by
    UUID, and ``items`` is the content of the journal.

    Raises:
        CorruptJournal: the journal cannot be understood. The store keeps everything.
    """
    for finding in ledger.findings:
        log.error("the ledger's record contradicted itself: %s", finding)
    sessions = ledger.sessions()
    logged, stray = recall(items, [each.id for each in sessions])
    if stray:
        log.error("dropping %d journal entries of sessions that the ledger does not know", len(stray))
        session_log.forget(stray)
    news: list[LedgerEvent] = []
    for known in sessions:
        news += _adopt_session(broker, known, logged[known.id], store)
    lost: dict[str, str] = {}
    for held in ledger.held_memory():
        if why := _lost(held, memory[held.device], broker, store):
            news.append(MemoryLost(held.ticket, why))
            if not held.lost:  # otherwise an earlier broker has logged it
                lost.setdefault(held.label, why)
    for name, why in lost.items():
        log.log(logging.WARNING if why == UNSTORED else logging.ERROR, "pool %s is lost: %s", name, why)
    broker.resume([*news, Resumed()], logged)
    store.sweep()


def _adopt_session(broker: Broker, known: Session, logged: LoggedSession, store: Store) -> Iterator[LedgerEvent]:
    """Take a session over, and yield what happened to it while no broker ran."""
    connection, pidfd = _ends(store.take(label(known.id)))
    if logged.no_secret:
        log.error("session %d (pid %d) is detached: the journal has no secret of it", known.id, known.pid)
        if connection is not None:
            with connection, suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)  # closing does not end it: the store has a duplicate
        connection = None
    peer = Peer(known.pid, known.uid, known.gid, pidfd, known.groups, known.verified)
    broker.sessions.adopt(known.id, connection, peer, logged)
    if pidfd < 0:
        yield ProcessExited(known.id)
    elif connection is None and (known.connected or not known.leases):  # without either, it should have ended
        yield ConnectionLost(known.id)


def _ends(descriptors: Sequence[int]) -> tuple[socket.socket | None, int]:
    """Return the connection of a session and the pidfd of its process; None and -1 if they are gone."""
    connection, pidfd = None, -1
    for descriptor in descriptors:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
        else:
            pidfd = descriptor
    return connection, pidfd


def _lost(held: HeldMemory, memory: DeviceAllocator, broker: Broker, store: Store) -> str:
    """Take a ticket's memory over; return why it is lost, if it is. Parts that remain are kept until it is freed."""
    if not held.durable:
        return UNSTORED
    stored = {number: store.take(stored_as(held.ticket, number)) for number in held.sizes}
    memory.adopt(held.ticket, held.sizes, stored)
    if not held.served or not all(stored.values()):
        return MISSING if held.served else f"its device {held.device} is not served any more"
    # One descriptor of each allocation, even if the store has two.
    broker.adopt_fds(held.ticket, {number: pieces[0] for number, pieces in stored.items()})
    return ""
