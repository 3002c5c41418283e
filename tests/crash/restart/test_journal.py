"""What the journal has when the broker is killed at an unlucky moment, and what happens while it takes nothing."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from cubroker.client import Broker, Pool
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.protocol import wire
from cubroker.protocol.errors import NotFound, Unavailable
from cubroker.protocol.messages import (
    VERSIONS,
    Attach,
    Attached,
    Close,
    Done,
    GatewayChanged,
    Hello,
    ListDevices,
    PoolLost,
)
from tests.brokers import eventually
from tests.crash.content import Form
from tests.stores import StoredBroker
from tests.unit.client.conftest import content, leases, publish
from tests.unit.client.test_restart import LAYOUT
from tests.unit.server.clients import session


@contextmanager
def without_room(broker: StoredBroker) -> Iterator[None]:
    """The journal cannot grow: no file of the broker can, beyond the journal's size."""
    size = os.fstat(broker.fdstore.stored["ledger"][0]).st_size
    unlimited = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, unlimited)


def test_a_session_that_asks_on_behind_its_last_words_spoils_no_record(kept: StoredBroker) -> None:
    with session(kept.directory) as client:
        client.publish("pool", share="vmm")
        lease = client.attach("pool").lease
        client.connection.close()
        with Broker(kept.directory) as observer:
            eventually(lambda: "detached" in [each.state for each in observer.clients()], "the end of the connection")
        for number, body in enumerate((Close(lease), ListDevices(), ListDevices()), start=10):
            client.dealer.send(client.frame(number, 1, body))
        client.receive()
    kept.restart()
    with Broker(kept.directory) as observer:
        assert [each.pid for each in observer.clients()] == [os.getpid()]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_of_every_version_is_known_to_the_next_broker(kept: StoredBroker, version: int) -> None:
    with session(kept.directory, wire.pack(Hello("cubroker", (version,)))) as client:
        assert client.welcome.version == version
        client.publish("pool", share="vmm")
        attach = Attach("pool", 0, None, 0.0)
        attached = client.answer(client.send(attach, 40))
        assert isinstance(attached, Attached)
        kept.restart()
        while client.notice() != GatewayChanged():
            pass
        client.dial_again()
        assert client.answer(client.send(attach, 40)) == attached, "done again, or not answered again"
        assert client.ask(Close(attached.lease), Done)
        assert client.clients()[0].leases == ()


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True])
def test_descriptors_on_their_way_cost_the_next_broker_nothing_if_there_are_none_any_more(
    kept: StoredBroker, durable: bool
) -> None:
    with Broker(kept.directory) as client:
        Form("vmm", durable=durable).publish(client, "pool")
    with session(kept.directory) as reader:
        while not any(key.startswith(b"d/") for key in kept.fdstore.journal()):  # it does not read them
            reader.attach("pool")
        kept.kill()
        for name in [each for each in kept.fdstore.stored if each.startswith("m")]:
            kept.fdstore.forget(name)
        kept.start()
        kept.restart()
        with Broker(kept.directory) as client:
            assert [(pool.name, pool.state) for pool in client.pools()] == [("pool", "lost")]


def test_holders_are_told_again_what_was_lost_since_the_last_broker_may_not_have_come_to_it(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        Form("ipc").publish(client, "pool")
    with session(kept.directory) as reader:
        reader.attach("pool")
        for _ in range(2):
            kept.restart()
            heard = [reader.notice() for _ in range(2)]
            assert "pool" in [each.name for each in heard if isinstance(each, PoolLost)]


def test_a_reader_whose_memory_was_lost_before_it_came_does_not_wait_for_it(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        Form("vmm").publish(client, "pool")
        held, real = threading.Event(), FdReceiver.put

        def lose(inbox: FdReceiver, *_: object) -> None:
            held.set()

        FdReceiver.put = lose  # type: ignore[method-assign]
        try:
            errors: list[Exception] = []

            def attach() -> None:
                try:
                    client.attach("pool")
                except NotFound as error:
                    errors.append(error)

            thread = threading.Thread(target=attach)
            thread.start()
            assert held.wait(60)
        finally:
            FdReceiver.put = real  # type: ignore[method-assign]
        kept.restart()
        thread.join()
        assert "lost" in str(errors[0])
        eventually(lambda: not client.pools(), "the end of its lease")


@pytest.mark.parametrize("killed", [False, True])
def test_while_the_journal_has_no_room_nobody_hears_anything_and_then_everything(
    kept: StoredBroker, killed: bool
) -> None:
    with Broker(kept.directory) as client, Broker(kept.directory) as other:
        publish(client, "pool", LAYOUT, share="vmm", durable=True)
        pools: list[Pool] = []
        with without_room(kept):
            asker = threading.Thread(target=lambda: pools.append(client.attach("pool")))
            asker.start()
            eventually(lambda: "cannot write to the journal" in kept.log(), "the broker to notice")
            with pytest.raises(Unavailable, match="journal"):
                Broker(kept.directory)
            assert not pools
            if killed:
                kept.kill()
        if killed:
            kept.start()
        asker.join()
        (pool,) = pools
        assert pool["weight"].tobytes() == content("weight", 300)
        assert leases(other, "pool") == 1
        pool.close()
        kept.restart()
        assert leases(other, "pool") == 0
