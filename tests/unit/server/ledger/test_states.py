from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger import ledger, tables
from cubroker.server.ledger.error_text import size
from cubroker.server.ledger.states import (
    MEMORY,
    VERSION,
    Impossible,
    MemoryEvent,
    MemoryState,
    VersionEvent,
    VersionState,
    step,
)
from tests.unit.server.ledger.story import GPU0, MIB, Story, answer, asks, attaches, creates, handle, refused


def test_every_pair_of_state_and_cause_is_in_the_table_of_versions_or_forbidden() -> None:
    allowed = {(state, cause): after for state, row in VERSION.items() for cause, after in row.items()}
    assert set(VERSION) == set(VersionState)
    assert allowed == {
        (VersionState.ALLOCATING, VersionEvent.FILLED): VersionState.DRAFT,
        (VersionState.ALLOCATING, VersionEvent.DROPPED): VersionState.ENDED,
        (VersionState.DRAFT, VersionEvent.SEALED): VersionState.CURRENT,
        (VersionState.DRAFT, VersionEvent.DROPPED): VersionState.ENDED,
        (VersionState.DRAFT, VersionEvent.ABANDONED): VersionState.RETIRED,
        (VersionState.CURRENT, VersionEvent.REPLACED): VersionState.SUPERSEDED,
        (VersionState.CURRENT, VersionEvent.RETIRED): VersionState.RETIRED,
        (VersionState.SUPERSEDED, VersionEvent.RETIRED): VersionState.RETIRED,
        (VersionState.SUPERSEDED, VersionEvent.UNUSED): VersionState.ENDED,
        (VersionState.RETIRED, VersionEvent.UNUSED): VersionState.ENDED,
        (VersionState.DRAFT, VersionEvent.LOST): VersionState.LOST,
        (VersionState.CURRENT, VersionEvent.LOST): VersionState.LOST,
        (VersionState.SUPERSEDED, VersionEvent.LOST): VersionState.LOST,
        (VersionState.RETIRED, VersionEvent.LOST): VersionState.LOST,
        (VersionState.LOST, VersionEvent.UNUSED): VersionState.ENDED,
    }
    for state, cause in set(product(VersionState, VersionEvent)) - set(allowed):
        with pytest.raises(Impossible, match=f"{cause.name} cannot follow {state.name}"):
            step(VERSION, state, cause, ())


def test_memory_is_counted_from_the_promise_until_the_device_has_it_back() -> None:
    assert set(MEMORY) == set(MemoryState)
    assert [stage for stage, row in MEMORY.items() if not row] == [MemoryState.GONE]
    last = {report for row in MEMORY.values() for report, after in row.items() if after is MemoryState.GONE}
    assert last == {MemoryEvent.FAILED, MemoryEvent.FREED}
    for stage, report in product(MemoryState, MemoryEvent):
        if report not in MEMORY[stage]:
            with pytest.raises(Impossible, match=f"{report.name} cannot follow {stage.name}"):
                step(MEMORY, stage, report, ())


def test_what_cannot_follow_is_told_with_the_story_of_the_pool_and_changes_nothing() -> None:
    story = Story()
    story.joins(1)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)))
    with pytest.raises(Impossible, match=r"ALLOCATED cannot follow HELD(?s:.*)version 1 is draft: all its"):
        story.quietly(e.Allocated(1, (handle(1),)))
    with pytest.raises(Impossible, match="FREED cannot follow HELD"):
        story.quietly(e.Freed(1))
    with pytest.raises(Impossible, match="an outcome of ticket 7, which is not in the tables"):
        story.quietly(e.AllocationFailed(7, "device", "no"))
    with pytest.raises(Impossible, match=r"session 1 joined twice(?s:.*)lease 1 on a@1 began"):
        story.joins(1)
    story >> asks(1, 2, m.Seal(1))
    story << answer(1, 2, m.Sealed(1))
    story.end()


def test_an_event_or_a_request_of_no_known_kind_is_a_fault() -> None:
    story = Story()
    story.joins(1)
    with pytest.raises(KeyError):
        story.quietly("nonsense")  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        story.quietly(asks(1, 1, "nonsense"))  # type: ignore[arg-type]


def test_every_kind_of_event_and_of_request_is_handled_in_one_place() -> None:
    assert {*e.LedgerEvent.__subclasses__()} == {e.RequestReceived, *ledger._EVENTS}
    assert sorted(map(repr, get_args(m.Request))) == sorted(map(repr, [*ledger._AT_ONCE, *ledger._MAY_WAIT]))


def test_books_that_do_not_add_up_fail_the_check() -> None:
    story = Story()
    story.ledger._tables.accounts["GPU-0"].allocated = 1
    with pytest.raises(AssertionError):
        story.ledger.check()


def test_event_logs_are_short() -> None:
    story = Story()
    story.joins(1)
    for request in range(100):
        story >> attaches(1, request, "a")
        story << refused(1, request, "not_found")
    lines = story.log(1, 1)
    assert len(lines) == 32
    assert all(line.startswith("Attach was refused (not_found): no pool is named 'a'") for line in lines)
    story.publishes(1, "b")
    assert story.log(1, "b")[0] == "request 900 of session 1 (pid 101, uid 1001) began to wait"


def test_only_so_many_names_without_a_pool_keep_their_last_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, however many brokers there have been since."""
    monkeypatch.setattr(tables, "MAX_PAST_NAMES", 2)
    story = Story(store=100)
    story.joins(1)
    for number, name in enumerate(("c", "b", "a"), 1):
        story.publishes(1, name)
        story.quietly(asks(1, 1, m.Retire(name, 0)), e.Freed(number))
        story.restarts()
    for name in "ab":
        story >> attaches(1, 2, name, 1)
        story << refused(1, 2, "retired", f"{name}@1 was retired")
    story >> attaches(1, 3, "c", 1)
    story << refused(1, 3, "not_found", "no pool is named 'c'")
    story.end()


def test_two_devices_cannot_have_one_uuid() -> None:
    with pytest.raises(AssertionError, match="one UUID"):
        Story(GPU0, GPU0)


def test_sizes_are_written_for_people() -> None:
    sizes = (0, 1023, 1024, 2 * MIB, 3 * MIB // 2, 3 << 30)
    assert [size(nbytes) for nbytes in sizes] == ["0 bytes", "1023 bytes", "1 KiB", "2 MiB", "1.50 MiB", "3 GiB"]
