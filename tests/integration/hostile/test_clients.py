"""Permitted clients that ask for all they may: others are served all the same."""

from __future__ import annotations

import pytest

from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.layout import MAX_TENSORS, Layout
from cubroker.protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Close,
    Create,
    Created,
    Describe,
    Description,
    Done,
    Failed,
    Retire,
    Watch,
)
from cubroker.server.ledger.policy import Limits
from cubroker.server.transport.reply_cache import MAX_REQUESTS
from tests import sampling
from tests.brokers import BrokerProcess
from tests.integration.hostile.hostile_peers import HOSTILITY, MIB, Witness, acknowledge
from tests.unit.client.scripts import run
from tests.unit.server.clients import LAYOUT, session
from tests.unit.server.processes import resident


def create(name: str, layout: bytes, device: str, wait: float = 0.0) -> Create:
    return Create(name, layout, (device,), "ipc", wait, None)


@pytest.mark.slow
def test_the_largest_layouts_one_after_the_other(broker: BrokerProcess, witness: Witness) -> None:
    before, names = resident(broker.pid), [f"{number:0100d}" for number in range(MAX_TENSORS)]
    data = Layout.pack([(name, "U8", (int(name == names[0]),)) for name in names]).encode()
    assert len(data) > 10 * MIB
    with session(broker.directory) as client:
        device = client.devices()[0].uuid
        for _ in range(HOSTILITY):
            asked = [client.send(create(f"large-{number}", data, device)) for number in range(2)]
            witness.check()
            replies = [client.answer(number) for number in asked]
            for reply in replies:
                assert isinstance(reply, Created)
                assert client.ask(Describe(reply.name, reply.version), Description).layout == data
                acknowledge(client)
                witness.attach(witness.client)
                client.ask(Close(reply.lease), Done)
    assert resident(broker.pid) - before < 512 * MIB


@pytest.mark.slow
def test_as_many_waiting_requests_as_there_may_be(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client:
        for _ in range(HOSTILITY):
            waiting = [client.send(Attach("never", 0, None, MAX_WAIT)) for _ in range(Limits().requests)]
            # None of these answers is acknowledged, so the broker keeps them until it has too many.
            for _ in range(MAX_REQUESTS - len(waiting) + 100):
                assert client.ask(Attach("never", 0, None, MAX_WAIT), Failed).code == "over_quota"
            witness.check()
            for number in waiting:
                client.answer(client.send(Cancel(number), oldest=client.last + 1))
                reply = client.answer(number)
                assert isinstance(reply, Failed)
                assert reply.code == "timeout"
            witness.check()


@pytest.mark.slow
def test_watches_beyond_what_a_session_may_have(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client:
        count = Limits().watches
        for number in range(count):
            client.ask(Watch(f"pool-{number}", True), Done)
            client.notice()
        assert client.ask(Watch("one-more", True), Failed).code == "over_quota"
        witness.check()


@pytest.mark.slow
def test_as_many_leases_as_there_may_be(broker: BrokerProcess, witness: Witness) -> None:
    count = Limits().leases
    with session(broker.directory) as client:
        for start in range(0, count, 512):
            asked = [client.send(Attach("witness", 0, None, 0.0)) for _ in range(start, start + 512)]
            assert all(isinstance(client.answer(number), Attached) for number in asked)
            acknowledge(client)
        assert client.ask(Attach("witness", 0, None, 0.0), Failed).code == "over_quota"
        assert max(len(known.leases) for known in witness.client.clients()) == count
        witness.check()


def test_a_create_that_waits_for_ever_keeps_nobody_from_reading(broker: BrokerProcess, witness: Witness) -> None:
    whole = Layout((), (56 * MIB,)).encode()
    with session(broker.directory) as greedy, session(broker.directory) as client:
        first, second = (device.uuid for device in greedy.devices())
        asked = greedy.send(create("greedy", whole, first, MAX_WAIT))
        greedy.ask(Retire("nothing", 0), Failed)  # it is in line now
        witness.check()
        elsewhere = client.ask(create("elsewhere", LAYOUT.encode(), second), Created)
        client.ask(Close(elsewhere.lease), Done)
        # Whoever came later waits behind it, and is served as soon as it gives up.
        behind = client.send(create("behind", LAYOUT.encode(), first, MAX_WAIT))
        greedy.ask(Cancel(asked), Done)
        created = client.answer(behind)
        assert isinstance(created, Created)
        client.ask(Close(created.lease), Done)


def test_a_client_that_takes_all_memory_and_goes(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client:
        device = client.devices()[0].uuid
        with session(broker.directory) as greedy:
            replies = [greedy.answer(greedy.send(create(f"p-{n}", LAYOUT.encode(), device))) for n in range(40)]
            assert any(isinstance(reply, Failed) and reply.code == "over_budget" for reply in replies)
            witness.check()
            behind = client.send(create("behind", LAYOUT.encode(), device, MAX_WAIT))
            for reply in replies:
                if isinstance(reply, Created):
                    greedy.ask(Close(reply.lease), Done)
        created = client.answer(behind)
        assert isinstance(created, Created)
        client.ask(Close(created.lease), Done)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["attach", "sleep", "hand_over", "publish", "watch"])
def test_a_signal_handler_that_uses_the_broker_waits_for_nothing_that_its_own_thread_has_to_do(
    shared: BrokerProcess, what: str
) -> None:
    program = "from tests.unit.client import handlers; handlers.main(*sys.argv[1:])"
    first, step = sampling.stride(25) if HOSTILITY == 1 else (1, 1)
    done = run(shared, program, what, str(first), str(step), measured=False)
    assert (done.returncode, done.stderr) == (0, "")
    served, refused = map(int, done.stdout.split())
    assert served * step > 40
    assert first + (served + refused) * step > 100
