from __future__ import annotations

from collections.abc import Sequence

import pytest

from cubroker.server import drafts, leases, permissions
from cubroker.server.events import Effect, Event
from cubroker.server.ledger import Ledger
from cubroker.server.policy import exceeds
from cubroker.server.records import Account, User
from cubroker.server.states import State
from tests.simulation.search import explain, search
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
    handle = Ledger.handle

    def closing(ledger: Ledger, event: Event) -> list[Effect]:
        for session in ledger._books.sessions.values():
            for lease in session.leases.values():
                lease.version.leases = 1
        return handle(ledger, event)

    monkeypatch.setattr(Ledger, "handle", closing)
    assert explain(0) is not None or search(range(100)) is not None


def test_a_ledger_that_lets_a_users_later_creates_overtake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "place", lambda user, writer: user.line.index(writer) if writer in user.line else 0)
    monkeypatch.setattr(User, "affords", lambda user, writer: not exceeds(user.memory, writer.total, user.quota.memory))
    assert search(range(500)) is not None


def test_a_ledger_that_keeps_what_was_superseded_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "is_kept", lambda books, version: version.state is State.SUPERSEDED)
    assert search(range(100)) is not None


def test_a_ledger_that_asks_for_no_permission_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permissions, "may_rule", lambda books, session, pool: True)
    assert search(range(100)) is not None


def test_a_shrunk_history_has_nothing_to_leave_out() -> None:
    def fails(history: Sequence[int]) -> bool:
        return {3, 7} <= set(history[1:])

    assert shrink([0, *range(1, 40)], fails) == [0, 3, 7]
