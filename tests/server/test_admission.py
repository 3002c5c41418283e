"""How a session comes into the ledger, the journal and the store, or into none of them: a broker, its ledger and its
store in this process, clients at the other ends of socketpairs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from cubroker.protocol import wire
from cubroker.protocol.messages import Greeting, Refused, Welcome
from cubroker.server.assembly import Assembly
from cubroker.server.broker import Broker
from cubroker.server.ledger import Ledger, drafts
from cubroker.server.peers import Peer
from cubroker.server.scribe import Scribe
from cubroker.server.store.notify import Manager
from cubroker.server.store.store import Store
from tests.brokers import PATIENCE
from tests.server.loops import run
from tests.stores import Warehouse


class Stage:
    """A broker without devices, whose ``warehouse`` has what it stores."""

    def __init__(self, warehouse: Warehouse) -> None:
        self.warehouse = warehouse
        self.manager = Manager(str(warehouse.path), limit=100)
        self.store = Store(self.manager, {})
        self.store.begin()
        self.ledger = Ledger([], os.geteuid(), store=self.store.limit)
        self.broker = Broker(
            self.ledger, {}, cast(Assembly, None), "host:1", lambda _: None, store=self.store, scribe=Scribe()
        )

    def close(self) -> None:
        """End the broker, and leave what is stored."""
        self.broker.close("the end")
        self.store.close()
        self.manager.close()

    def greets(self) -> socket.socket:
        """Return the client's end of a connection that was let in, or was not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.settimeout(PATIENCE)
        self.broker.admit(ours, Peer(os.getpid(), os.geteuid(), os.getegid(), os.pidfd_open(os.getpid())), 1)
        return theirs

    def stored(self) -> dict[str, int]:
        """How many descriptors of each name the warehouse has."""
        self.warehouse.settle()
        return {name: len(descriptors) for name, descriptors in self.warehouse.stored.items()}


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    house = Warehouse(tmp_path / "notify")
    yield house
    house.close()


def hears(client: socket.socket) -> Greeting:
    return wire.unpack(client.recv(4096), Greeting)


def failing(times: int) -> Callable[..., None]:
    """Return what fails so many times, and does nothing after that."""
    left = iter(range(times))

    def fail(*_: object) -> None:
        if next(left, None) is not None:
            raise ZeroDivisionError("a mistake")

    return fail


@pytest.mark.parametrize(
    ("where", "what", "times"),
    [(Ledger, "_joined", 1), (drafts, "settle", 1), (drafts, "settle", 2)],
    ids=["at all", "as a whole", "and does not let go"],
)
def test_a_session_that_the_ledger_does_not_take_is_turned_away_and_leaves_nothing_behind(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, where: object, what: str, times: int
) -> None:
    async def test() -> None:
        stage = Stage(warehouse)
        with stage.greets() as before:
            assert isinstance(hears(before), Welcome)
            journal, stored = warehouse.journal(), stage.stored()
            with monkeypatch.context() as broken:
                broken.setattr(where, what, failing(times))
                client = stage.greets()
            with client:
                refused = hears(client)
                assert isinstance(refused, Refused)
                assert (refused.code, "a mistake" in refused.message) == ("internal", True)
                assert client.recv(1) == b""
            assert stage.stored() == stored
            assert warehouse.journal().keys() == journal.keys()
            with stage.greets() as after:
                assert isinstance(hears(after), Welcome)
                assert len(stage.ledger.sessions()) == 2
                stage.ledger.check()
        stage.close()

    run(test())
