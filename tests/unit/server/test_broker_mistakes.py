"""What is found, and said, after a mistake in the ledger."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn, cast

import pytest

from cubroker.protocol import messages as m
from cubroker.server import broker
from cubroker.server.broker import Recovery
from cubroker.server.ledger import Ledger, leases
from cubroker.server.ledger import events as e
from cubroker.server.ledger.records import CreateWaiter, DeviceAccount
from cubroker.server.ledger.snapshot import Audit
from tests.unit.server.ledger.story import MIB, Story, answer, asks, attaches, creates
from tests.unit.server.loops import plans, run, until


class Mistake(Exception):
    pass


def fail(*_: object) -> NoReturn:
    raise Mistake


def mistaken(monkeypatch: pytest.MonkeyPatch, store: int | None) -> Ledger:
    """Return a ledger that failed half-way over the seal of a second version, which both are current now."""
    story = Story(store=store)
    story.joins(1, 2)
    story.publishes(1, "a")
    story.quietly(attaches(2, 1, "a"), creates(1, 1, "a", MIB), e.Allocated(2, (b"handle",)))
    monkeypatch.setattr(leases, "release", fail)
    with pytest.raises(Mistake):
        story.ledger.handle(asks(1, 2, m.Seal(3)))
    return story.ledger


def told(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is said of a ledger, level by level, once it was looked at."""

    async def look() -> None:
        after = Recovery(ledger)
        after.recover()
        await until(lambda: caplog.records)
        after.close()

    with caplog.at_level(logging.WARNING):
        run(look())
    return [f"{line.levelname} {line.getMessage()}" for line in caplog.records]


def test_what_does_not_agree_is_said_at_once_and_what_the_next_broker_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, later, advice = told(mistaken(monkeypatch, 100), caplog)
    assert pool.startswith(
        "ERROR the ledger's tables are not consistent after that mistake: pool a: failed: assert current =="
    )
    assert later.startswith(
        "ERROR the next broker would drop or lose what contradicts the rest: a@1 is lost: 2 versions are"
    )
    assert "restart the broker at a convenient time" in advice
    assert "publish lost versions again" in advice


def test_without_a_store_nothing_is_said_of_a_next_broker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, advice = told(mistaken(monkeypatch, None), caplog)
    assert "not consistent after that mistake: pool a: " in pool
    assert "publish lost versions again" not in advice


def test_books_that_agree_are_said_to(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = told(Story(store=100).ledger, caplog)
    assert line.startswith("WARNING the ledger's tables are consistent")


def test_a_record_that_the_next_broker_would_refuse_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    story = Story(store=100)
    story.joins(1)
    story.ledger._tables.last_session = 0
    *_, refused, advice = told(story.ledger, caplog)
    assert refused.startswith("ERROR the next broker would refuse this broker's journal: ")
    assert "do not restart the broker before all leases have ended" in advice


def test_what_was_to_be_done_is_done_at_once_although_the_event_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    story.joins(1)
    story.publishes(1, "a")
    monkeypatch.setattr(leases, "announce", fail)
    with pytest.raises(Mistake):
        story.ledger.handle(asks(1, 1, m.Retire("a", 1)))

    async def go_on() -> None:
        after = Recovery(story.ledger)
        assert after.recover() == [e.Free(1, "GPU-0")]
        after.close()

    run(go_on())


def test_a_line_that_a_mistake_left_broken_keeps_nothing_else_from_being_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story()
    story.joins(1, 2)
    story.publishes(1, "a")
    place = DeviceAccount.position

    def fail_at_the_second(account: DeviceAccount, writer: CreateWaiter) -> int:
        return fail() if account.device.index else place(account, writer)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceAccount, "position", fail_at_the_second)
        with pytest.raises(Mistake):
            story.ledger.handle(creates(2, 1, "b", MIB, devices=("GPU-0", "GPU-1")))

    async def go_on() -> None:
        after = Recovery(story.ledger)
        assert after.recover() == []
        effects = story.ledger.handle(asks(1, 1, m.Retire("a", 1)))
        assert effects == [e.Free(1, "GPU-0"), answer(1, 1, m.Retirement(1, 0))]
        after.close()

    run(go_on())
    assert "the broker failed at recovering from that mistake" in caplog.text


def test_an_exception_that_names_a_record_does_not_tell_of_all_that_is_linked_to_it() -> None:
    story = Story()
    story.joins(1, 2, 3)
    for name in ("a", "b"):
        story.publishes(1, name)
        story.quietly(*(attaches(session, 1, name) for session in (1, 2, 3)))
    story.quietly(attaches(1, 9, "c", wait=5.0), creates(1, 10, "d", 9 * MIB, wait=5.0))
    tables = story.ledger._tables
    every = (
        tables.sessions,
        tables.users,
        tables.pools,
        tables.leases,
        tables.tickets,
        tables.accounts,
        tables.timers,
    )
    records = [record for each in every for record in each.values()]
    records += [version for pool in tables.pools.values() for version in pool.versions.values()]
    assert max(len(repr(KeyError(record))) for record in records) < 200


class Scarred:
    """A ledger that cannot go on, and is looked at."""

    looked = 0

    def recover(self) -> list[e.Effect]:
        raise Mistake

    def take_effects(self) -> list[e.Effect]:
        return []

    def audit(self) -> Audit:
        self.looked += 1
        return Audit((), (), "")


def test_however_many_mistakes_there_are_the_books_are_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistakes() -> None:
        ledger, planned = Scarred(), plans()
        after = Recovery(cast(Ledger, ledger))
        assert [after.recover() for _ in range(3)] == [[]] * 3
        monkeypatch.setattr(broker, "AUDIT_SHARE", 1e12)
        while not ledger.looked:
            await asyncio.sleep(0)
        after.recover()
        for _ in range(10):
            await asyncio.sleep(0)
        assert ledger.looked == 1
        assert planned[-1].left, "it is to be looked at again"
        after.close()

    run(mistakes())
    assert caplog.text.count("the broker failed at recovering from that mistake") == 4
