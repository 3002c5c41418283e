"""Going on where an earlier broker was killed: from its journal and its descriptors to sessions and memory.

What the journal says and what is there may differ by what happened while no broker ran: processes ended, connections
closed, memory that was not durable went. The ledger is told, as it would have been at the time.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Mapping, Sequence

from cubroker.server import scribe
from cubroker.server.broker import Broker
from cubroker.server.devices import DeviceMemory, stored_as
from cubroker.server.ledger import Held, Ledger
from cubroker.server.ledger.events import Event, Gone, Lost, Resumed, Vanished
from cubroker.server.peers import Peer
from cubroker.server.sessions import label
from cubroker.server.store.damaged import Damaged
from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

UNSTORED = "it was not durable, and its memory went with the broker"
MISSING = "descriptors of its memory are missing from the store"


def restore(broker: Broker, ledger: Ledger, memory: Mapping[str, DeviceMemory], store: Store) -> None:
    """Have ``broker`` go on with all that ``ledger`` knows, and drop what the store has beyond that.

    Raises:
        Damaged: the journal contradicts itself. The store keeps everything.
    """
    remembered = scribe.recall(store.items())
    sessions = ledger.sessions()
    if halves := {each.session for each in sessions} ^ remembered.keys():
        raise Damaged(f"the journal has one half of the sessions {sorted(halves)} and not the other")
    news: list[Event] = []
    for known in sessions:
        connection, pidfd = _ends(store.take(label(known.session)))
        peer = Peer(known.pid, known.uid, known.gid, pidfd, known.groups)
        broker.take_over(known.session, connection, peer, remembered[known.session])
        if pidfd < 0:
            news.append(Gone(known.session))
        elif connection is None and not ledger.is_detached(known.session):
            news.append(Lost(known.session))
    news += [
        Vanished(held.ticket, why)
        for held in ledger.memory()
        if (why := _vanished(held, memory[held.device], broker, store))
    ]
    broker.go_on([*news, Resumed()], remembered)
    store.sweep()


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
    descriptors = tuple(descriptor for piece in stored for descriptor in piece)
    memory.adopt(held.ticket, held.sizes, stored)
    if not held.served or not all(stored):
        why = MISSING if held.served else f"its device {held.device} is not served any more"
        log.error("pool %s is lost: %s", held.label, why)
        return why
    broker.has(held.ticket, descriptors)
    return ""
