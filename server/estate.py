"""What whoever started the broker handed over: a service manager, its store, and sockets that listen already."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from socket import socket

from cubroker.protocol.errors import Unavailable
from cubroker.server.directory import DOOR, REQUESTS
from cubroker.server.store.damaged import Damaged
from cubroker.server.store.notify import VARIABLES, Manager, inherit
from cubroker.server.store.outbox import Outbox
from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

OWN = "own-"
"""What the names of stored sockets begin with that a broker made: those of socket units are others' to change."""


@dataclass(frozen=True, slots=True)
class Estate:
    """What a broker starts with.

    Attributes:
        outbox: leads to who is told how the broker fares; None: nobody.
        store: where descriptors outlive the broker; None: nowhere.
        listening: sockets that listen already, by name.
        own: the names of those that an earlier broker made, and no socket unit.
    """

    outbox: Outbox | None
    store: Store | None
    listening: Mapping[str, int]
    own: frozenset[str] = frozenset()

    @property
    def lasting(self) -> bool:
        """Whether others have the listening sockets too, so that they outlive this broker."""
        return self.store is not None or bool(self.listening)

    def keep(self, fresh: Mapping[str, socket]) -> None:
        """Store what this broker made, its journal and sockets, if there is a store: not before it is about to serve.

        A first start that fails leaves nothing behind, so that whoever keeps the store need not try for ever. It waits
        for the store, as an event loop must not.

        Raises:
            Unavailable: the store does not take it.
        """
        if self.store:
            self.store.begin()
            for name, listener in fresh.items():
                self.store.replace(OWN + name, listener.fileno())


@contextmanager
def inherited(environ: MutableMapping[str, str]) -> Iterator[Estate]:
    """Take over what was handed to this process, for as long as the context lasts; what is stored stays stored.

    Args:
        environ: the environment, out of which the variables that speak of it are taken: the gateway need not know.

    Raises:
        Unavailable: what is stored cannot be read. All of it stays as it is.
    """
    with ExitStack() as undo:
        manager = Manager.from_environment(environ)
        outbox = Outbox(manager) if manager else None
        if outbox:
            undo.callback(outbox.close)
        stored = inherit(environ)
        for name in VARIABLES:
            environ.pop(name, None)
        listening = {name: stored.pop(name)[0] for name in (DOOR, REQUESTS) if name in stored}
        if not (outbox and outbox.manager.limit):
            _close(stored)
            yield Estate(outbox, None, listening)
            return
        made = [name for name in (DOOR, REQUESTS) if OWN + name in stored and name not in listening]
        own = {name: stored.pop(OWN + name)[0] for name in made}
        with readable():
            store = Store(outbox, stored)
        undo.callback(store.close)
        yield Estate(outbox, store, {**own, **listening}, frozenset(own))


@contextmanager
def readable() -> Iterator[None]:
    """Say what to do about an earlier broker's record that cannot be read."""
    try:
        yield
    except Damaged as error:
        raise Unavailable(
            f"what an earlier broker left cannot be used, and nothing of it was changed: {error}; mend that, or start"
            f" the version of cubroker that wrote it; or give up all sessions, leases and pools: end `cubroker keep`,"
            f" or, under systemd, stop the service and its sockets, and from version 254 on also: systemctl clean"
            f" --what=fdstore cubroker.service"
        ) from error


def _close(stored: Mapping[str, list[int]]) -> None:
    for name, descriptors in stored.items():
        if descriptors:
            log.warning("%s was handed over, and is closed: nothing is known of a store that it is from", name)
        while descriptors:
            os.close(descriptors.pop())
