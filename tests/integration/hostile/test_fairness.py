"""Floods of dear requests: what they cost the broker is bounded for each user, and others wait for a turn at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cubroker.protocol.messages import Describe, Description, ListPools, Look, Pools
from cubroker.server.transport.requests import MAX_REMEMBERED
from tests.brokers import BrokerProcess, eventually, serving
from tests.integration.hostile.floods import BIG, flooding, furnish, processor, settled
from tests.integration.hostile.hostile_peers import HOSTILITY, MIB, Witness, witnessed
from tests.unit.server.clients import RawClient, session
from tests.unit.server.processes import resident

POOLS = 150
VIEWS = 1500

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    """A client of a broker that has many pools, and one with the largest layout."""
    with serving("host:1@4GiB") as process:
        furnish(process.directory, POOLS)
        with witnessed(process) as witness:
            yield witness


def test_layouts_without_end_cost_what_one_user_may_and_nothing_once_their_sessions_are_over(
    broker: BrokerProcess, witness: Witness
) -> None:
    before, sessions, peak = resident(broker.pid), len(witness.client.clients()), 0
    for _ in range(HOSTILITY):
        with flooding(broker.directory, "layouts"):
            began = processor(broker.pid)
            while processor(broker.pid) - began < 0.5:
                witness.attach(witness.client)
                peak = max(peak, resident(broker.pid))
        eventually(lambda: len(witness.client.clients()) == sessions, "the sessions to end")
        ended = processor(broker.pid)
        settled(broker.pid)
        assert processor(broker.pid) - ended < 1.0, "something is still checked, and nobody wants it"
    assert peak - before < 160 * MIB
    assert resident(broker.pid) - before < MAX_REMEMBERED + 12 * MIB, "memory is not given back to the system"
    witness.check()


@pytest.mark.parametrize("kind", ["lists", "descriptions", "attaches"])
def test_answers_without_end_cost_what_one_user_may(broker: BrokerProcess, witness: Witness, kind: str) -> None:
    before, peak = resident(broker.pid), 0
    with flooding(broker.directory, kind):
        began = processor(broker.pid)
        while processor(broker.pid) - began < 0.3 * HOSTILITY:
            witness.attach(witness.client)
            peak = max(peak, resident(broker.pid))
    assert peak - before < 160 * MIB
    witness.check()


def test_a_list_waits_for_no_flood_of_views_of_another_session(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client:
        for _ in range(HOSTILITY):
            with session(broker.directory) as flood:
                for _ in range(VIEWS):
                    flood.send(Look())
                assert flood.receive()
                client.ask(ListPools(), Pools)
                assert answered(flood) < VIEWS // 3
            witness.check()


def answered(client: RawClient) -> int:
    """How many answers have come to a client that it has not read."""
    count = 0
    while client.dealer.poll(0):
        count += bool(client.dealer.recv())  # those without bytes follow a large one
    return count


def test_descriptions_that_sessions_do_not_acknowledge_are_not_kept(broker: BrokerProcess, witness: Witness) -> None:
    before = resident(broker.pid)
    with ExitStack() as opened:
        for _ in range(3 * HOSTILITY):
            client = opened.enter_context(session(broker.directory))
            for _ in range(5):
                client.ask(Describe(BIG, 0), Description)
        assert resident(broker.pid) - before < 64 * MIB
