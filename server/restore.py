"""Going on where an earlier broker was killed: from its journal and its descriptors to sessions and memory.

What the journal says and what is there may differ by what happened while no broker ran: processes ended, connections
closed, memory that was not durable went. The ledger is told, as it would have been at the time.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from cubroker.server.broker import Broker
from cubroker.server.devices import DeviceMemory, stored_as
from cubroker.server.ledger import Held, Ledger
from cubroker.server.ledger.events import Event, Gone, Joined, Lost, Resumed, Vanished
from cubroker.server.peers import Peer
from cubroker.server.scribe import Remembered, Scribe, recall
from cubroker.server.sessions import label
from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

UNSTORED = "it was not durable, and its memory went with the broker"
MISSING = "descriptors of its memory are missing from the store"


def restore(
    broker: Broker,
    ledger: Ledger,
    memory: Mapping[str, DeviceMemory],
    store: Store,
    scribe: Scribe,
    items: Mapping[bytes, bytes],
) -> None:
    """Have ``broker`` go on with all that ``ledger`` knows, and drop what the store has beyond that.

    Args:
        broker: has no sessions yet.
        ledger: restored from the journal.
        memory: of every device that the ledger has memory on.
        store: has the descriptors.
        scribe: strikes out what belongs to no session.
        items: what is in the journal.

    Raises:
        Damaged: the journal cannot be understood. The store keeps everything.
    """
    for finding in ledger.findings:
        log.error("the ledger's record contradicted itself: %s", finding)
    sessions = ledger.sessions()
    remembered, stray = recall(items, [each.session for each in sessions])
    if stray:
        log.error("the journal has %d values of sessions that the ledger does not know, and forgets them", len(stray))
        scribe.forget(stray)
    news = [
        event for known in sessions for event in _take_over(broker, ledger, known, remembered[known.session], store)
    ]
    missing = [
        Vanished(held.ticket, why)
        for held in ledger.memory()
        if (why := _vanished(held, memory[held.device], broker, store))
    ]
    broker.go_on([*news, *missing, Resumed()], remembered)
    store.sweep()


def _take_over(broker: Broker, ledger: Ledger, known: Joined, remembered: Remembered, store: Store) -> Iterator[Event]:
    """Take a session over, and tell what became of it meanwhile."""
    connection, pidfd = _ends(store.take(label(known.session)))
    if remembered.mute:
        log.error("session %d (pid %d) is detached: the journal has no secret of it", known.session, known.pid)
        _shut(connection)
        connection = None
    peer = Peer(known.pid, known.uid, known.gid, pidfd, known.groups, known.verified)
    broker.take_over(known.session, connection, peer, remembered)
    holder = ledger.holder(known.session)
    assert holder
    if pidfd < 0:
        yield Gone(known.session)
    elif connection is None and (holder.connected or not holder.leases):  # without both it should have ended before
        yield Lost(known.session)


def _shut(connection: socket.socket | None) -> None:
    """End a connection, also for the store, which has it too."""
    if connection is not None:
        with connection, suppress(OSError):  # it has ended
            connection.shutdown(socket.SHUT_RDWR)


def _ends(descriptors: Sequence[int]) -> tuple[socket.socket | None, int]:
    """Tell the connection of a session from the pidfd of its process; None and -1 if they are not there any more."""
    connection, pidfd = None, -1
    for descriptor in descriptors:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
        else:
            pidfd = descriptor
    return connection, pidfd


def _vanished(held: Held, memory: DeviceMemory, broker: Broker, store: Store) -> str:
    """Take memory over if it is there; else return why it is not. What there is of it is kept until it is freed."""
    if not held.durable:
        log.warning("pool %s is lost: %s", held.label, UNSTORED)
        return UNSTORED
    stored = [store.take(stored_as(held.ticket, number)) for number in range(len(held.sizes))]
    memory.adopt(held.ticket, held.sizes, stored)
    if not held.served or not all(stored):
        why = MISSING if held.served else f"its device {held.device} is not served any more"
        log.error("pool %s is lost: %s", held.label, why)
        return why
    broker.has(held.ticket, tuple(piece[0] for piece in stored))  # one for each, even of what was stored twice
    return ""
