from __future__ import annotations

from collections.abc import Sequence

import pytest

from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import Attach, Attached, Create, Generation, Reply, Where
from cubroker.server.ledger import (
    Ledger,
    attaching,
    drafts,
    draining,
    invariants,
    leases,
    permissions,
    reconfiguring,
    restoring,
    teams,
    vanishing,
    waiting,
)
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.entries import Account, Allocation, Session, User, Version
from cubroker.server.ledger.events import Effect, Event, HandOver, Withdraw
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.room import rounded
from cubroker.server.ledger.states import Cause, State
from cubroker.server.ledger.waiters import Waiter
from tests.simulation.histories import OBSERVER
from tests.simulation.search import search
from tests.simulation.shrink import shrink

SEEDS = 400


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_the_ledger_does_what_the_model_does_in_random_histories(first: int) -> None:
    report = search(range(first, first + 100))
    assert report is None, report


def test_a_ledger_that_forgets_to_serve_the_next_in_line_is_found_and_its_history_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "_is_ready", lambda writer: False)
    report = search(range(50))
    assert report is not None
    assert "actions are enough" in report


def test_a_ledger_that_lets_small_requests_overtake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "place", lambda account, writer: 0)
    assert search(range(500)) is not None


def test_a_ledger_that_frees_under_a_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(books: Books, version: Version) -> None:
        if version.state in leases.OUT_OF_SERVICE:
            leases.end(books, version, Cause.EMPTIED)

    monkeypatch.setattr(leases, "end_if_empty", hasty)
    report = search(range(100))
    assert report is not None
    assert "AssertionError" in report


def test_a_ledger_that_lets_a_users_later_creates_overtake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "place", lambda user, writer: user.line.index(writer) if writer in user.line else 0)
    monkeypatch.setattr(User, "affords", lambda user, writer: not exceeds(user.memory, writer.total, user.quota.memory))
    assert search(range(500)) is not None


def test_a_ledger_that_keeps_what_was_superseded_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "is_kept", lambda books, version: version.state is State.SUPERSEDED)
    assert search(range(500)) is not None


def test_a_ledger_that_asks_for_no_permission_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permissions, "may_rule", lambda books, session, pool: True)
    assert search(range(100)) is not None


@pytest.mark.parametrize("effect", [HandOver, Withdraw])
def test_a_ledger_that_forgets_to_hand_descriptors_over_or_to_withdraw_them_is_found(
    monkeypatch: pytest.MonkeyPatch, effect: type[Effect]
) -> None:
    handle = Ledger.handle

    def forgetful(ledger: Ledger, event: Event) -> list[Effect]:
        return [each for each in handle(ledger, event) if not isinstance(each, effect)]

    monkeypatch.setattr(Ledger, "handle", forgetful)
    assert search(range(100)) is not None


def test_a_ledger_that_answers_before_it_hands_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Ledger.handle

    def late(ledger: Ledger, event: Event) -> list[Effect]:
        return sorted(handle(ledger, event), key=lambda effect: isinstance(effect, HandOver))

    monkeypatch.setattr(Ledger, "handle", late)
    assert search(range(100)) is not None


def test_a_ledger_that_takes_a_shard_for_a_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = attaching.lease

    def careless(books: Books, session: Session, version: Version, where: Attach | Where) -> Attached:
        here = next((uuid for uuid in (where.device, *where.peers) if uuid in version.replicas), where.device)
        return lease(books, session, version, Where(here))

    monkeypatch.setattr(attaching, "lease", careless)
    assert search(range(200)) is not None


def test_a_ledger_that_counts_all_of_a_sharded_pool_on_each_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(body: Create, layout: Outline) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(body.devices, tuple(map(rounded, layout.allocations)))

    monkeypatch.setattr(drafts, "_sizes", whole)
    assert search(range(100)) is not None


def test_a_ledger_that_frees_memory_that_is_still_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = leases.give_up

    def hasty(books: Books, allocation: Allocation) -> None:
        team, allocation.version.team = allocation.version.team, None
        give_up(books, allocation)
        allocation.version.team = team

    monkeypatch.setattr(leases, "give_up", hasty)
    assert search(range(100)) is not None


def test_a_ledger_that_gives_objects_to_who_may_only_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "binds", lambda version, device: version.team is not None)
    assert search(range(1000)) is not None


@pytest.mark.parametrize("step", ["tolerate", "_call_back", "_refuse_for_good"])
def test_a_ledger_that_forgets_part_of_what_new_rules_mean_is_found(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(reconfiguring, step, lambda *_: None)
    assert search(range(500)) is not None


@pytest.mark.parametrize("forgets", ["the waiters of an event that ends", "those who wait for a generation"])
def test_a_ledger_that_leaves_somebody_waiting_for_an_event_is_found(
    monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    refuse, answer = waiting.refuse, waiting.answer

    def forgetful(books: Books, waiter: Waiter, error: CubrokerError) -> None:
        if not isinstance(error, Unavailable):
            refuse(books, waiter, error)

    def silent(books: Books, waiter: Waiter, body: Reply) -> None:
        if not isinstance(body, Generation):
            answer(books, waiter, body)

    if forgets.endswith("ends"):
        monkeypatch.setattr(waiting, "refuse", forgetful)
    else:
        monkeypatch.setattr(waiting, "answer", silent)
    assert search(range(500)) is not None


@pytest.mark.parametrize("kind", list(Kind))
def test_a_ledger_that_forgets_to_record_something_is_found(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    mark = Books.mark

    def forgetful(books: Books, which: Kind, number: int = 0, name: str = "") -> None:
        if which is not kind or number == OBSERVER:  # whom every history begins with
            mark(books, which, number, name)

    monkeypatch.setattr(Books, "mark", forgetful)
    assert search(range(100)) is not None


def test_a_ledger_that_is_restored_with_less_than_its_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_watch", lambda *_: None)
    monkeypatch.setattr(restoring, "_differing", lambda *_: iter(()))
    assert search(range(200)) is not None


def test_a_ledger_that_loses_a_version_under_its_holders_without_a_word_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vanishing, "_tell", lambda *_: None)
    assert search(range(200)) is not None


def test_a_ledger_that_counts_what_the_store_has_room_for_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allocation, "stored", 0)
    monkeypatch.setattr(invariants, "_check_store", lambda books: None)
    assert search(range(1000)) is not None


@pytest.mark.parametrize("forgets", ["_refuse_waiters", "check"])
def test_a_ledger_that_lends_while_the_broker_is_drained_is_found(
    monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    monkeypatch.setattr(draining, forgets, lambda *_, **__: None)
    monkeypatch.setattr(invariants, "_check_draining", lambda books: None)
    assert search(range(200)) is not None


def test_a_shrunk_history_has_nothing_to_leave_out() -> None:
    def fails(history: Sequence[int]) -> bool:
        return {3, 7} <= set(history[1:])

    assert shrink([0, *range(1, 40)], fails) == [0, 3, 7]
