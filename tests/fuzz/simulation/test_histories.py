from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import Attach, Attached, Create, Generation, Reply, Where
from cubroker.server.ledger import (
    Ledger,
    create,
    invariants,
    leases,
    lifecycle,
    memory,
    snapshot,
    tables,
)
from cubroker.server.ledger.events import CancelFds, Effect, LedgerEvent, SendFds
from cubroker.server.ledger.memory import rounded
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.records import DeviceAccount, Lease, Session, Ticket, User, Version, Waiter
from cubroker.server.ledger.states import VersionEvent, VersionState
from cubroker.server.ledger.tables import Kind, Tables
from tests.fuzz.simulation import DAILY, today
from tests.fuzz.simulation.histories import OBSERVER, generate
from tests.fuzz.simulation.search import attempt, search
from tests.fuzz.simulation.shrink import shrink

TELLING = (157, 11, 10, 30, 92, 138, 8, 32, 45, 28, 167)
"""Seeds of which one at least finds each mistake below, in an order in which few are played for each."""

FIXED = 24
"""Seeds that are played every time, besides those."""


def is_found() -> bool:
    """Whether a history fails, of seeds that are known to find mistakes or, if histories have changed, of others."""
    return any(attempt(generate(seed))[1] is not None for seed in (*TELLING, *range(1000)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [{*TELLING, *range(FIXED)}, range(today(), today() + DAILY)], ids=["fixed", "daily"])
def test_the_ledger_does_what_the_model_does_in_random_histories(seeds: Iterable[int]) -> None:
    report = search(sorted(seeds))
    assert report is None, report


def test_a_ledger_that_forgets_to_serve_the_next_in_line_is_found_and_its_history_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(create, "_is_ready", lambda writer: False)
    report = search(range(50))
    assert report is not None
    assert "actions are enough" in report


def test_a_ledger_that_lets_small_requests_overtake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceAccount, "position", lambda account, waiter: 0)
    assert is_found()


def test_a_ledger_that_frees_under_a_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(tables: Tables, version: Version) -> None:
        if version.state in leases.OUT_OF_SERVICE:
            leases.end_version(tables, version, VersionEvent.UNUSED)

    monkeypatch.setattr(leases, "end_if_unused", hasty)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_lets_a_users_later_creates_overtake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "position", lambda user, writer: user.queue.index(writer) if writer in user.queue else 0)
    monkeypatch.setattr(User, "affords", lambda user, writer: not exceeds(user.memory, writer.total, user.quota.memory))
    assert is_found()


def test_a_ledger_that_frees_a_draft_under_its_readers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(tables: Tables, draft: Version) -> None:
        leases.end_version(tables, draft, VersionEvent.DROPPED)

    monkeypatch.setattr(leases, "_give_up", hasty)
    monkeypatch.setattr(invariants, "_check_version", lambda *_, **__: None)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_takes_a_reader_of_a_draft_for_its_writer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "writes", property(lambda lease: lease.version.state is VersionState.DRAFT))
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_shows_a_draft_to_who_may_not_read_the_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "can_read_draft", lambda *_: True)
    assert is_found()


def test_a_ledger_that_leaves_those_waiting_who_would_read_a_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "serve_readers", lambda *_: None)
    monkeypatch.setattr(invariants, "_check_attach_waiter", lambda *_: None)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_keeps_what_was_superseded_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "kept", lambda tables, pool: set(pool.versions.values()))
    assert is_found()


def test_a_ledger_that_asks_for_no_permission_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "can_administer", lambda *_: True)
    assert is_found()


@pytest.mark.parametrize("effect", [SendFds, CancelFds])
def test_a_ledger_that_forgets_to_hand_descriptors_over_or_to_withdraw_them_is_found(
    monkeypatch: pytest.MonkeyPatch, effect: type[Effect]
) -> None:
    handle = Ledger.handle

    def forgetful(ledger: Ledger, event: LedgerEvent) -> list[Effect]:
        return [each for each in handle(ledger, event) if not isinstance(each, effect)]

    monkeypatch.setattr(Ledger, "handle", forgetful)
    assert is_found()


def test_a_ledger_that_answers_before_it_hands_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Ledger.handle

    def late(ledger: Ledger, event: LedgerEvent) -> list[Effect]:
        return sorted(handle(ledger, event), key=lambda effect: isinstance(effect, SendFds))

    monkeypatch.setattr(Ledger, "handle", late)
    assert is_found()


def test_a_ledger_that_takes_a_shard_for_a_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = leases.lend

    def careless(tables: Tables, session: Session, version: Version, where: Attach | Where) -> Attached:
        here = next((uuid for uuid in (where.device, *where.peers) if uuid in version.replicas), where.device)
        return lease(tables, session, version, Where(here))

    monkeypatch.setattr(leases, "lend", careless)
    assert is_found()


def test_a_ledger_that_counts_all_of_a_sharded_pool_on_each_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(body: Create, layout: Outline) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(body.devices, tuple(map(rounded, layout.allocations)))

    monkeypatch.setattr(create, "_sizes", whole)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_frees_memory_that_is_still_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release_memory = memory.release_memory

    def hasty(tables: Tables, version: Version) -> None:
        release_memory(tables, version)
        if version.multicast_group is not None:
            for ticket in {allocation.ticket for allocation in version.allocations}:
                memory._free(tables, ticket, tuple(ticket.allocations))

    monkeypatch.setattr(memory, "release_memory", hasty)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_gives_objects_to_who_may_only_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "replicas_for", lambda version, chosen, device: memory._reachable(version, chosen[0]))
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_frees_what_another_version_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release_memory = memory.release_memory

    def hasty(tables: Tables, version: Version) -> None:
        shared = [allocation for allocation in version.allocations if len(allocation.versions) > 1]
        release_memory(tables, version)
        for allocation in shared:
            memory._free(tables, allocation.ticket, (allocation.number,))

    monkeypatch.setattr(memory, "release_memory", hasty)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_lends_a_writer_what_is_shared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "own", lambda _, replica: [each for each in replica.allocations if each is not None])
    assert is_found()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["accept_present", "_unpark_all", "_refuse_unaffordable"])
def test_a_ledger_that_forgets_part_of_what_new_rules_mean_is_found(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(lifecycle, step, lambda *_: None)
    assert is_found()


@pytest.mark.slow
@pytest.mark.parametrize("forgets", ["the waiters of an event that ends", "those who wait for a generation"])
def test_a_ledger_that_leaves_somebody_waiting_for_an_event_is_found(
    monkeypatch: pytest.MonkeyPatch, forgets: str
) -> None:
    refuse, answer = leases.refuse, leases.answer

    def forgetful(tables: Tables, waiter: Waiter, error: CubrokerError) -> None:
        if not isinstance(error, Unavailable):
            refuse(tables, waiter, error)

    def silent(tables: Tables, waiter: Waiter, body: Reply) -> None:
        if not isinstance(body, Generation):
            answer(tables, waiter, body)

    if forgets.endswith("ends"):
        monkeypatch.setattr(leases, "refuse", forgetful)
    else:
        monkeypatch.setattr(leases, "answer", silent)
    assert is_found()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Kind))
def test_a_ledger_that_forgets_to_record_something_is_found(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    mark_dirty = Tables.mark_dirty

    def forgetful(tables: Tables, which: Kind, number: int = 0, name: str = "") -> None:
        if which is not kind or number == OBSERVER:  # whom every history begins with
            mark_dirty(tables, which, number, name)

    monkeypatch.setattr(Tables, "mark_dirty", forgetful)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_is_restored_with_less_than_its_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = snapshot._CODECS[Kind.WATCH]._replace(read=lambda *_: None)
    monkeypatch.setattr(snapshot, "_CODECS", {**snapshot._CODECS, Kind.WATCH: unread})
    monkeypatch.setattr(snapshot, "_check", lambda *_: None)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_loses_a_version_under_its_holders_without_a_word_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_notify_holders", lambda *_: None)
    assert is_found()


@pytest.mark.slow
def test_a_ledger_that_counts_what_the_store_has_room_for_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticket, "stored", 0)
    monkeypatch.setattr(invariants, "_check_store", lambda tables: None)
    assert is_found()


@pytest.mark.slow
@pytest.mark.parametrize(("where", "forgets"), [(lifecycle, "_refuse_waiters"), (Tables, "lends")])
def test_a_ledger_that_lends_while_the_broker_is_drained_is_found(
    monkeypatch: pytest.MonkeyPatch, where: object, forgets: str
) -> None:
    monkeypatch.setattr(where, forgets, lambda *_, **__: True)
    monkeypatch.setattr(invariants, "_check_draining", lambda tables: None)
    assert is_found()


def test_a_shrunk_history_has_nothing_to_leave_out() -> None:
    def fails(history: Sequence[int]) -> bool:
        return {3, 7} <= set(history[1:])

    assert shrink([0, *range(1, 40)], fails) == [0, 3, 7]
