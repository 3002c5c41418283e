from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cubroker.protocol import wire
from cubroker.protocol.messages import (
    Close,
    Done,
    GatewayChanged,
    ListPools,
    Notice,
    PoolChanged,
    Pools,
    Seal,
    Sealed,
    Watch,
)
from cubroker.server.denials import Denials
from cubroker.server.events import Gone, Lost
from cubroker.server.peers import Peer
from cubroker.server.sessions import Session
from tests.brokers import BrokerProcess, eventually
from tests.server.clients import RawClient, holder, session
from tests.server.loops import run, until


def leases(client: RawClient) -> list[tuple[str, int]]:
    """State and number of leases of every other session."""
    others = [other for other in client.clients() if other.session != client.welcome.session]
    return [(other.state, len(other.leases)) for other in others]


def test_a_lease_falls_when_its_holder_is_killed(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with holder(broker.directory, "pool") as process:
        assert leases(client) == [("connected", 1)]
        process.send_signal(signal.SIGKILL)
        eventually(lambda: leases(client) == [], "the lease to fall")


def test_a_holder_that_hangs_up_keeps_its_lease_until_it_ends(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with holder(broker.directory, "pool") as process:
        assert process.stdin
        process.stdin.write("hang up\n")
        process.stdin.flush()
        eventually(lambda: leases(client) == [("detached", 1)], "the session to be detached")
        process.stdin.close()
        eventually(lambda: leases(client) == [], "the session to end with its process")


def test_a_detached_holder_may_still_give_its_lease_back(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with session(broker.directory) as detached:
        lease = detached.attach("pool").lease
        detached.connection.close()
        eventually(lambda: leases(client) == [("detached", 1)], "the session to be detached")
        detached.ask(Close(lease), Done)
        assert leases(client) == []


def test_whatever_a_client_says_after_its_greeting_ends_the_connection(broker: BrokerProcess) -> None:
    for said in (b"", b"anything"):
        assert "sent something on the session socket" not in broker.log()
        with session(broker.directory) as talker:
            talker.connection.send(said)
            assert talker.connection.recv(1) == b""
    assert "sent something on the session socket" in broker.log()


def test_a_watcher_hears_of_every_publication(broker: BrokerProcess, client: RawClient) -> None:
    client.ask(Watch("pool", True), Done)
    assert client.notice() == PoolChanged("pool", 0)
    client.publish("pool")
    assert client.notice() == PoolChanged("pool", 1)


def test_sealing_twice_is_answered_twice_and_published_once(broker: BrokerProcess, client: RawClient) -> None:
    assert client.publish("pool") == 1
    lease = client.create("pool").lease
    number = client.send(Seal(lease))
    client.send(Seal(lease), number)
    assert [client.receive().body for _ in range(2)] == [Sealed(2), Sealed(2)]
    assert [pool.version for pool in client.ask(ListPools(), Pools).pools] == [2]


# -- a session alone -------------------------------------------------------------------------------


class Ends:
    """A session over a socketpair, the client's end of it, and what it reported."""

    def __init__(self, pid: int) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.client.setblocking(False)
        self.events: list[Lost | Gone] = []
        peer = Peer(pid, os.getuid(), os.getgid(), os.pidfd_open(pid))
        self.session = Session(1, ours, peer, self.events.append, Denials())
        self.session.watch()

    def heard(self) -> list[Notice]:
        notices: list[Notice] = []
        while True:
            try:
                data = self.client.recv(1 << 16)
            except BlockingIOError:
                return notices
            notices.append(wire.unpack(data, Notice))


@asynccontextmanager
async def ends(pid: int | None = None) -> AsyncIterator[Ends]:
    pair = Ends(pid or os.getpid())
    try:
        yield pair
    finally:
        pair.session.close()
        pair.client.close()


def test_notices_that_are_not_read_are_merged_and_lose_nothing_that_matters() -> None:
    async def test() -> None:
        async with ends() as pair:
            for version in range(20_000):
                pair.session.notify(PoolChanged(f"pool-{version % 3}", version))
            pair.session.notify(GatewayChanged())
            heard: list[Notice] = []
            while GatewayChanged() not in heard:
                heard += pair.heard()
                await asyncio.sleep(0)
            assert len(heard) < 20_000
            last = {notice.name: notice.version for notice in heard if isinstance(notice, PoolChanged)}
            assert last == {"pool-0": 19_998, "pool-1": 19_999, "pool-2": 19_997}
            pair.session.notify(PoolChanged("late", 1))
            assert pair.heard() == [PoolChanged("late", 1)]

    run(test())


def test_the_end_of_a_connection_is_reported_once_and_notices_after_it_go_nowhere() -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.client.close()
            pair.session.notify(GatewayChanged())
            await until(lambda: pair.events)
            pair.session.notify(GatewayChanged())
            await asyncio.sleep(0)
            assert pair.events == [Lost(1)]

    run(test())


def test_the_end_of_a_process_is_reported_even_if_its_connection_lives_on() -> None:
    async def test() -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            async with ends(process.pid) as pair:
                process.kill()
                await until(lambda: pair.events)
                assert pair.events == [Gone(1)]
                assert pair.client.recv(1) == b""

    run(test())


def test_a_connection_that_breaks_is_lost() -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(GatewayChanged())
            pair.client.close()  # with a notice unread, so that reading fails with ECONNRESET
            await until(lambda: pair.events)
            assert pair.events == [Lost(1)]

    run(test())
