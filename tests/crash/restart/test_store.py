"""What keeps the descriptors fails the broker: its journal is damaged, it is full, or it is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from cubroker.client import Broker, Pool
from cubroker.protocol.errors import OverQuota, Unavailable
from cubroker.server.store.store import AREA, SLOTS, Journal, newest_slot
from tests.brokers import PATIENCE, eventually
from tests.crash.content import Form, check
from tests.stores import StoredBroker, storing
from tests.unit.client.conftest import content, leases, publish
from tests.unit.client.test_restart import LAYOUT

lasting = partial(publish, layout=LAYOUT, share="vmm", durable=True)
"""Publishes a durable pool of two allocations."""


# -- a journal that is cut or damaged ----------------------------------------------------------------


def cut(journal: int) -> None:
    """Cut it off in the middle of what is committed."""
    os.truncate(journal, AREA + newest_slot(journal).length // 2)


def flip(journal: int) -> None:
    """Flip a bit of what is committed."""
    slot = newest_slot(journal)
    at = slot.start + slot.length // 2
    os.pwrite(journal, bytes([os.pread(journal, 1, at)[0] ^ 4]), at)


def empty(journal: int) -> None:
    """Lose everything."""
    os.truncate(journal, 0)


def halve(journal: int) -> None:
    """Take the newest commit away, with both slots."""
    for at in SLOTS:
        os.pwrite(journal, b"\0" * 8, at)


def commit(*changes: tuple[bytes, bytes | None]) -> Callable[[int], None]:
    """Return what writes something into it that no broker would."""

    def write(descriptor: int) -> None:
        Journal.open(descriptor).commit(changes)

    return write


DAMAGES = {
    "cut": (cut, "the journal is damaged"),
    "flipped": (flip, "the journal is damaged"),
    "emptied": (empty, "no journal"),
    "without slots": (halve, "no journal"),
    "of another format": (commit((b"l/format", b"\x63")), "format 99"),
    "with a lease that cannot be read": (commit((b"l/lease/77/", b"\x96\x01\xa4pool\x09\x90\xc2")), "l/lease/77/"),
    "with a session that cannot be read": (commit((b"s/1", b"\x90")), "_Session"),
    "with what is not known": (commit((b"x/1", b"")), "x/1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_journal_is_refused_loudly_and_everything_is_kept(kept: StoredBroker, how: str) -> None:
    damage, complaint = DAMAGES[how]
    with Broker(kept.directory) as client:
        lasting(client, "pool")
        with client.attach("pool") as pool:
            kept.kill()
            (journal,) = kept.fdstore.stored["ledger"]
            whole = os.pread(journal, os.fstat(journal).st_size, 0)
            before = inodes(kept)
            damage(journal)
            damaged = os.pread(journal, os.fstat(journal).st_size, 0)
            for _ in range(2):
                assert complaint in refusal(kept)
                assert inodes(kept) == before
                assert os.pread(journal, os.fstat(journal).st_size, 0) == damaged
            os.truncate(journal, len(whole))
            os.pwrite(journal, whole, 0)
            kept.start()
            assert pool["weight"].tobytes() == content("weight", 300)
            assert leases(client, "pool") == 1
        eventually(lambda: leases(client, "pool") == 0, "the end of the lease")


def test_a_store_with_sessions_and_memory_and_no_journal_is_refused_and_kept(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        lasting(client, "pool")
        with client.attach("pool") as pool:
            kept.kill()
            journal = kept.fdstore.stored.pop("ledger")
            before = inodes(kept)
            assert "no journal" in refusal(kept)
            assert inodes(kept) == before
            kept.fdstore.stored["ledger"] = journal
            kept.start()
            check_weight(pool)
            assert leases(client, "pool") == 1


def test_what_cannot_be_used_can_be_given_up_and_holders_keep_what_they_have_mapped(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        lasting(client, "pool")
        pool = client.attach("pool")
        kept.kill()
        cut(*kept.fdstore.stored["ledger"])
        refusal(kept)
        for name in list(kept.fdstore.stored):
            kept.fdstore.forget(name)  # as `systemctl clean --what=fdstore` does, and the end of `cubroker keep`
        kept.start()
        with Broker(kept.directory) as another:
            assert another.pools() == ()
            assert not any(device.allocated for device in another.devices())
        with pytest.raises(Unavailable):
            client.pools()
        assert pool["weight"].tobytes() == content("weight", 300)
        pool.close()


def inodes(kept: StoredBroker) -> dict[str, list[int]]:
    """Which files are stored, by name."""
    kept.settled()
    return {name: [os.fstat(each).st_ino for each in stored] for name, stored in kept.fdstore.stored.items()}


def refusal(kept: StoredBroker) -> str:
    """Return what a broker says that does not start."""
    written = len(kept.log())
    with open(kept.directory.with_name("run.log"), "ab") as log:
        process = kept.spawn(log.fileno())
        try:
            assert process.wait(PATIENCE) == 1
        finally:
            process.kill()
            process.wait()
    said = kept.log()[written:]
    assert "nothing was changed" in said
    assert "Traceback" not in said
    return said


# -- a store that hands over more than it got, or in another order -----------------------------------


def test_what_is_stored_twice_and_in_any_order_is_taken_for_what_it_is(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        Form("vmm", durable=True).publish(client, "pool")  # which has two allocations
        kept.kill()
        for name, stored in reversed(list(kept.fdstore.stored.items())):
            again = [] if name == "ledger" else [os.dup(each) for each in stored]
            kept.fdstore.stored[name] = [*reversed(kept.fdstore.stored.pop(name)), *again]
        kept.start()
        with client.attach("pool") as pool:
            check(pool)
        client.retire("pool")
        eventually(lambda: not any(each.allocated for each in client.devices()), "the memory to be freed")
        kept.settled()
        assert kept.fdstore.stored.keys() == {"ledger", "own-door", "own-requests", f"s{client.session}"}


# -- a store that is full ---------------------------------------------------------------------------


def test_a_full_store_refuses_sessions_and_durable_pools_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota in ("DESCRIPTORS", "SESSIONS"):
        monkeypatch.setenv(f"CUBROKER_QUOTA_{quota}", "1000")
    with storing(room=3 + 2 * 2 + 3) as kept, Broker(kept.directory) as client, ExitStack() as stack:
        other = stack.enter_context(Broker(kept.directory))
        lasting(client, "pool")  # which has two allocations
        with pytest.raises(OverQuota, match="store"):
            lasting(client, "another")
        with pytest.raises(OverQuota, match="store"):
            Broker(kept.directory)
        Form("vmm").publish(other, "passing")
        kept.restart()
        with client.attach("pool") as pool:
            assert pool["weight"].tobytes() == content("weight", 300)
        with pytest.raises(OverQuota, match="store"):
            Broker(kept.directory)
        other.close()
        with Broker(kept.directory) as another, another.attach("pool"):
            kept.settled()
            assert sum(map(len, kept.fdstore.stored.values())) == 3 + 2 * 2 + 2


# -- a store that takes nothing ---------------------------------------------------------------------


def test_without_the_one_who_keeps_the_store_those_who_are_there_go_on() -> None:
    with storing() as kept, Broker(kept.directory) as client:
        lasting(client, "pool")
        held = client.attach("pool")
        kept.fdstore.close()
        with pytest.raises(Unavailable, match="cubroker keep"):
            Broker(kept.directory)
        with pytest.raises(Unavailable, match="cannot be told"):
            lasting(client, "another")
        with Form("vmm").create(client, "passing") as draft:
            draft.seal()
        with client.attach("pool") as pool:
            assert pool["weight"].tobytes() == content("weight", 300)
        held.close()
        client.retire("pool")
        client.retire("passing")
        eventually(lambda: not client.pools(), "the end of the pools")
        eventually(lambda: not any(each.allocated for each in client.devices()), "their memory to be freed")
        assert "Traceback" not in kept.log()


def test_one_that_takes_nothing_for_a_while_is_asked_again(kept: StoredBroker) -> None:
    with Broker(kept.directory) as client:
        with kept.fdstore.away(), pytest.raises(Unavailable, match="cannot be told"):
            Broker(kept.directory)
        lasting(client, "pool")
        with Broker(kept.directory) as another, another.attach("pool") as pool:
            kept.restart()
            check_weight(pool)
            assert leases(client, "pool") == 1


def check_weight(pool: Pool) -> None:
    assert pool["weight"].tobytes() == content("weight", 300)
