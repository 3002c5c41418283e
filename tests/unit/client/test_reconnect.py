"""A broker without a store is killed, and all that its clients hold is lost; they are told, and go on with the next."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubroker.client import Broker, Pool
from cubroker.client import session as session_module
from cubroker.client.session import ClientSession
from cubroker.client.transport.handshake import NotServing
from cubroker.protocol import wire
from cubroker.protocol.errors import Denied, Invalid, NotFound, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import Refused
from cubroker.protocol.paths import SESSION_SOCKET
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.stores import storing
from tests.unit.client.conftest import LAYOUT, begun, content, leases, publish
from tests.unit.client.kept import keeping
from tests.unit.client.scripts import run
from tests.unit.client.transport.test_connection import impostor
from tests.unit.server.processes import files, gateway_of

PAGE = Path(__file__).parents[3] / "docs" / "live-weights.md"

KINDS = pytest.mark.parametrize("share", ["ipc", "vmm", "multicast"])


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Broker]:
    with Broker(broker.directory) as client:
        yield client


def die(broker: BrokerProcess, client: Broker) -> None:
    """Kill the broker, and return when its client knows."""
    broker.kill()
    eventually(lambda: client.lost, "the end of the session")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of a session that is over."""
    return [record.getMessage() for record in caplog.records if "reconnect()" in record.getMessage()]


def test_a_session_that_can_unmap_nothing_any_more_is_lost(broker: BrokerProcess, client: Broker) -> None:
    """The thread that maps and unmaps fails; what it has mapped stays leased until the process ends."""
    publish(client, "pool")
    done = run(
        broker,
        """
        from cubroker.client.memory.lease import LeaseHandle
        from cubroker.protocol.errors import Unavailable
        from tests.brokers import eventually

        def fail(broker):
            real, LeaseHandle.map = LeaseHandle.map, lambda *_: 1 // 0
            try:
                broker.attach("pool")
            except Unavailable as error:
                assert "thread that maps and unmaps memory has failed" in str(error), error
            else:
                raise AssertionError("attached")
            finally:
                LeaseHandle.map = real

        threading.excepthook = lambda _: None
        with Broker(directory) as broker:
            pool = broker.attach("pool")
            fail(broker)
            eventually(lambda: broker.lost, "the end of the session")
            assert pool.lost == broker.lost
            pool.close()
            with broker.attach("pool") as again:
                assert (again.lost, broker.lost) == ("", "")
                print(again["weight"].tobytes().hex())
        with Broker(directory) as other:
            fail(other)
        with Broker(directory) as last:
            print(*(lease.pool for each in last.clients() for lease in each.leases))
        """,
    )
    assert (done.stdout.split(), done.returncode) == ([content("weight", 128).hex(), *["pool"] * 3], 0)
    logged = "the thread that maps and unmaps memory has failed, as its traceback says; all leases and locks"
    assert [line.partition(" of ")[0] for line in done.stderr.splitlines()] == [logged] * 2
    eventually(lambda: leases(client, "pool") == 0, "the leases to end with their process")


@KINDS
def test_the_pools_of_a_broker_that_died_are_lost_and_what_they_have_mapped_stays(
    broker: BrokerProcess, client: Broker, share: str
) -> None:
    publish(client, "pool", share=share)
    pool, draft = client.attach("pool"), client.create("draft", LAYOUT, share=share)
    other = Broker(broker.directory)
    assert (client.lost, pool.lost, draft.lost) == ("", "", "")
    weight = pool["weight"].numpy()
    die(broker, client)
    assert client.lost == pool.lost == draft.lost
    assert [repr(each)[-7:] for each in (client, pool, draft)] == [", lost>"] * 3
    other.close()
    assert repr(other).endswith(", closed>")
    assert "is gone" in client.lost
    assert weight.tobytes() == content("weight", 128)
    with pytest.raises(Unavailable, match=r"is gone: .*reconnect\(\) opens another session"):
        client.pools()
    with pytest.raises(Unavailable, match="is gone"):
        draft.seal()
    broker.start()
    client.reconnect()
    assert pool.lost, "it is the lost session's, whatever the next one has"
    assert weight.tobytes() == pool["weight"].tobytes() == content("weight", 128)
    pool.close()
    assert repr(pool).endswith(", closed>")
    assert weight.tobytes() == content("weight", 128)


@pytest.mark.parametrize(("holds", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_the_end_of_a_session_is_told_once(
    broker: BrokerProcess, client: Broker, caplog: pytest.LogCaptureFixture, holds: bool, level: int
) -> None:
    caplog.set_level(logging.INFO)
    publish(client, "pool")
    pools = [client.attach("pool") for _ in range(3 * holds)]
    with client.watch("pool") as watch:
        assert watch.next() == 1, "what is known by then is told before the end of the session"
        die(broker, client)
        for call in (client.pools, client.reconnect, watch.next):
            with pytest.raises(Unavailable):
                call()
    broker.start()
    client.reconnect()
    for pool in pools:
        pool.close()
    eventually(lambda: lines(caplog), "the line")
    assert len(lines(caplog)) == 1
    assert [each.levelno for each in caplog.records if "reconnect()" in each.getMessage()] == [level]
    assert "follows session" in caplog.text


def test_a_session_that_ends_in_order_is_not_lost(
    broker: BrokerProcess, client: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Broker(broker.directory) as other:
        publish(other, "pool")
        pool = other.attach("pool")
    assert (other.lost, pool.lost) == ("", "")
    with pytest.raises(Unavailable, match="closed"):
        other.reconnect(wait=60)
    assert not lines(caplog)


def test_reconnect_goes_on_with_the_next_broker_in_place(broker: BrokerProcess, client: Broker) -> None:
    publish(client, "pool")
    old = client.attach("pool")
    die(broker, client)
    with pytest.raises(Unavailable, match="no broker serves"):
        client.reconnect()
    broker.start()
    client.reconnect()
    assert not client.lost
    with pytest.raises(NotFound):
        client.attach("pool")
    publish(client, "pool")
    with client.attach("pool") as pool:
        assert (pool.lost, pool.version, leases(client, "pool")) == ("", 1, 1)
        old.close()
        assert old.closed
        assert leases(client, "pool") == 1, "the lost pool had no lease here"
        assert client.clients()[0].session == client.session


def test_a_pool_of_a_broker_that_died_is_no_base_for_a_version_of_the_next_one(
    broker: BrokerProcess, client: Broker
) -> None:
    ours, theirs = ({key: np.full(8, value) for key in "ab"} for value in (1, 2))
    client.publish("pool", ours, share="vmm")
    with client.attach("pool") as pool:
        die(broker, client)
        broker.start()
        client.reconnect()
        with Broker(broker.directory) as other:
            other.publish("pool", theirs, share="vmm")
        with pytest.raises(Invalid, match=r"the base of an update: it is lost .*attach again"):
            client.publish("pool", {"a": np.full(8, 3)}, base=pool)
    assert [info.version for info in client.pools()] == [1]


def test_a_session_that_lives_is_left_alone(broker: BrokerProcess, client: Broker) -> None:
    publish(client, "pool")
    session = client.session
    with client.attach("pool") as pool:
        client.reconnect()
        client.reconnect(wait=60)
        assert (client.session, pool.lost) == (session, "")
    assert len(client.clients()) == 1


@pytest.mark.slow
def test_the_worker_of_the_page_goes_on_from_broker_to_broker(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(broker.directory))
    sample = re.search(r"^## Reconnect\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert sample
    program: dict[str, Any] = {}
    exec(sample[1], program)
    seen: list[Pool] = []

    def step(pool: Pool) -> bool:
        assert pool["weight"].tobytes() == content("weight", 128)
        seen.append(pool)
        if len(seen) == 4:
            return False
        broker.kill()
        eventually(lambda: pool.lost, "the loss")
        started = begun(broker.start)
        with Broker(broker.directory, wait=PATIENCE) as other:
            publish(other, "policy")
        started.result(PATIENCE)
        return True

    broker.kill()
    worker = begun(lambda: program["work"](step))
    broker.start()
    with Broker(broker.directory) as other:
        publish(other, "policy")
    worker.result(PATIENCE)
    assert [(each.version, each.closed, bool(each.lost)) for each in seen] == [(1, True, True)] * 3 + [(1, True, False)]


def test_an_attach_opens_the_next_session_by_itself(broker: BrokerProcess, client: Broker) -> None:
    publish(client, "pool")
    old = client.attach("pool")
    die(broker, client)
    with pytest.raises(Unavailable, match="no broker serves"):
        client.attach("pool")
    broker.start()
    with Broker(broker.directory) as other:
        publish(other, "pool")
    with pytest.raises(Unavailable, match=r"reconnect\(\)"):
        client.attach("pool", version=1)  # version 1 of another broker
    with client.attach("pool") as pool:
        assert not pool.lost
        assert old.lost
    with client.attach("pool", version=1):
        pass


def test_a_broker_that_comes_later_is_waited_for(broker: BrokerProcess, client: Broker) -> None:
    die(broker, client)
    for wait in (0.05, 1e-9):
        with pytest.raises(TimedOut, match=rf"waited {wait:g} s for a broker: no broker serves"):
            client.reconnect(wait=wait)
    waiting = [begun(lambda: client.reconnect(wait=PATIENCE)) for _ in range(4)]
    opened = begun(lambda: Broker(broker.directory, wait=PATIENCE))
    broker.start()
    for each in waiting:
        each.result(PATIENCE)
    with opened.result(PATIENCE) as other:
        assert len(client.clients()) == 2, "the four opened one session together"
        assert other.session != client.session
    assert not client.lost


def test_a_broker_that_shuts_down_is_waited_for_as_one_that_is_not_there(tmp_path: Path) -> None:
    refusal = wire.pack(Refused("unavailable", "the broker is shutting down"))
    with impostor(tmp_path, refusal), pytest.raises(NotServing, match="shutting down"):
        Broker(tmp_path)
    (tmp_path / SESSION_SOCKET).unlink()
    complaint = r"waited 0\.2 s for a broker: the broker on .* did not answer within 0\.1 s"
    with impostor(tmp_path, refusal), pytest.raises(TimedOut, match=complaint):
        Broker(tmp_path, connect_timeout=0.1, wait=0.2)
    with pytest.raises(Invalid, match="wait of -1"):
        Broker(tmp_path, wait=-1)


def test_what_waiting_does_not_mend_is_told_at_once(tmp_path: Path) -> None:
    refusal = wire.pack(Refused("unsupported", "versions differ"))
    with impostor(tmp_path, refusal), pytest.raises(Unsupported, match="versions differ"):
        Broker(tmp_path, wait=PATIENCE)
    with pytest.raises(Invalid, match="choose a shorter directory"):
        Broker(tmp_path / ("x" * 100), wait=PATIENCE)


def test_a_socket_that_is_not_open_to_this_user_yet_is_tried_again(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 1

    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            nonlocal refusals
            if refusals and "session" in str(address):
                refusals -= 1
                raise PermissionError(13, "Permission denied")
            super().connect(address)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Forbidden)
        with Broker(broker.directory, wait=PATIENCE) as client:
            assert client.pools() == ()
        for refusals, wait in ((1, 0), (2, PATIENCE)):
            with pytest.raises(Denied, match="may not connect"):
                Broker(broker.directory, wait=wait)
            assert refusals == 0


def test_closing_a_broker_ends_the_wait_for_the_next_one(
    broker: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(broker, client)
    looked = threading.Event()

    def opening(*args: object) -> ClientSession:
        looked.set()
        return ClientSession(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(session_module, "ClientSession", opening)
    waiting = begun(lambda: client.reconnect(wait=3600))
    assert looked.wait(PATIENCE)
    client.close()
    with pytest.raises(Unavailable, match="this Broker is closed"):
        waiting.result(PATIENCE)
    with pytest.raises(Unavailable, match="this Broker is closed"):
        client.reconnect()


def test_a_broker_that_is_closed_while_it_reconnects_opens_nothing(
    broker: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(broker, client)
    broker.start()

    def opening(*args: object) -> ClientSession:
        session = ClientSession(*args)  # type: ignore[arg-type]
        client.close()
        return session

    with monkeypatch.context() as patch:
        patch.setattr(session_module, "ClientSession", opening)
        with pytest.raises(Unavailable, match="this Broker is closed"):
            client.reconnect()
    with Broker(broker.directory) as other:
        eventually(lambda: len(other.clients()) == 1, "the end of the session")


def test_a_signal_handler_that_reconnects_in_the_middle_of_it_leaves_one_session(
    broker: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(broker, client)
    broker.start()

    def opening(*args: object) -> ClientSession:
        monkeypatch.setattr(session_module, "ClientSession", ClientSession)
        client.reconnect()
        return ClientSession(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(session_module, "ClientSession", opening)
    client.reconnect()
    eventually(lambda: [info.session for info in client.clients()] == [client.session], "the end of the others")


def test_a_session_without_its_gateway_is_lost_though_the_broker_lives(
    broker: BrokerProcess, client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zmq

    publish(client, "pool")
    pool = client.attach("pool")
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "connect", lambda *_: (_ for _ in ()).throw(zmq.ZMQError(24)))
        os.kill(gateway_of(broker.pid), signal.SIGKILL)
        eventually(lambda: pool.lost, "the end of the session")
    assert "no connection for requests" in pool.lost
    with client.attach("pool") as again:
        assert again["weight"].tobytes() == content("weight", 128)


@pytest.mark.slow
def test_a_session_survives_a_kill_under_cubroker_keep() -> None:
    with keeping() as kept, Broker(kept.directory) as client:
        publish(client, "pool", share="vmm", durable=True)
        session = client.session
        with client.attach("pool") as pool, client.watch("pool") as watch:
            assert watch.next() == 1
            for version in (2, 3):
                kept.strike()
                assert client.pools()
                client.reconnect()
                assert (client.session, client.lost, pool.lost) == (session, "", "")
                publish(client, "pool", share="vmm", durable=True)
                assert watch.next() == version
            assert pool["weight"].tobytes() == content("weight", 128)


def test_a_pool_that_was_not_durable_is_lost_and_its_session_is_not() -> None:
    with storing() as kept, Broker(kept.directory) as client:
        publish(client, "pool", durable=False)
        with client.attach("pool") as pool:
            kept.restart()
            eventually(lambda: pool.lost, "the notice")
            assert not client.lost


def test_nothing_is_left_open_behind_lost_sessions(broker: BrokerProcess) -> None:
    Broker(broker.directory).close()
    before, threads = files(os.getpid()).total(), set(threading.enumerate())
    with Broker(broker.directory) as client:
        for _ in range(2):
            publish(client, "pool", share="vmm")
            pool = client.attach("pool")
            die(broker, client)
            broker.start()
            client.reconnect()
            pool.close()
    eventually(lambda: set(threading.enumerate()) <= threads, "the end of the threads")
    assert files(os.getpid()).total() <= before
