"""The states of a lease, and what moves it from one to the next."""

from __future__ import annotations

from itertools import product

import pytest

from cubroker.client import Broker, Pool
from cubroker.client.memory.lease import TRANSITIONS, LeaseEvent, LeaseHandle, LeaseState
from cubroker.protocol.errors import NotFound
from tests.brokers import eventually
from tests.unit.client.conftest import LAYOUT, leases, publish, session_of

A, H, S, E, O = LeaseState  # noqa: E741  # asked, held, asleep, ending, over

WAYS = {
    LeaseEvent.MAPPED: {A: H},
    LeaseEvent.REFUSED: {A: O},
    LeaseEvent.UNWANTED: {A: E},
    LeaseEvent.SLEPT: {H: S},
    LeaseEvent.WOKEN: {H: H, S: H},
    LeaseEvent.SWITCHED: {H: H},
    LeaseEvent.DROPPED: {H: E, S: E},
    LeaseEvent.CLOSED: {E: O},
}
"""Where each event leads from each state in which it may come; in all others it is forbidden."""


@pytest.mark.parametrize(("state", "event"), [*product(LeaseState, LeaseEvent)])
def test_every_event_leads_somewhere_or_is_forbidden_in_every_state(state: LeaseState, event: LeaseEvent) -> None:
    assert TRANSITIONS[state].get(event) == WAYS[event].get(state)


def test_every_state_can_be_reached_and_every_lease_can_end() -> None:
    def after(state: LeaseState) -> set[LeaseState]:
        found: set[LeaseState] = set()
        new = {state}
        while new:
            found |= new
            new = {each for one in new for each in TRANSITIONS[one].values()} - found
        return found

    assert after(LeaseState.ASKED) == set(LeaseState)
    assert all(LeaseState.ENDED in after(state) for state in LeaseState)


def lease_of(client: Broker, pool: Pool) -> LeaseHandle:
    """The lease of a pool, among all that the session holds."""
    (lease,) = (
        each
        for each in session_of(client).held
        if isinstance(each, LeaseHandle) and each.number == pool.lease and each.state in (H, S)
    )
    return lease


def test_a_lease_goes_through_its_states_as_its_pool_is_used(client: Broker, name: str) -> None:
    publish(client, name, share="vmm")
    pool = client.attach(name)
    lease, first = lease_of(client, pool), pool.lease
    assert lease.state is LeaseState.HELD
    pool.sleep()
    assert (lease.state, pool.lease) == (LeaseState.ASLEEP, 0)
    pool.wake()
    assert lease.state is LeaseState.HELD
    assert pool.lease > first
    publish(client, name, share="vmm")
    second = pool.lease
    pool.switch()
    assert lease.state is LeaseState.HELD
    assert pool.lease > second
    pool.close()
    assert lease.state is LeaseState.ENDED
    asleep = client.attach(name)
    asleep.sleep()
    lease = lease_of(client, asleep)
    asleep.close()
    eventually(lambda: lease.state is LeaseState.ENDED, "the end of a lease that sleeps")
    assert leases(client, name) == 0


def test_a_lease_that_is_refused_or_never_asked_for_is_held_no_more(client: Broker, name: str) -> None:
    with pytest.raises(NotFound):
        client.attach(name)
    with client.create(name, LAYOUT) as draft:
        lease = lease_of(client, draft)
    eventually(lambda: lease.state is LeaseState.ENDED, "the end of a discarded draft")
    eventually(lambda: not session_of(client).held, "the end of both")
