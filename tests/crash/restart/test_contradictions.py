"""A ledger that contradicts itself after a mistake, or that was written down so, costs what contradicts, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cubroker.client import Broker, Pool
from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.server.store.store import Journal
from tests.brokers import eventually, started
from tests.crash.content import Form, check
from tests.stores import StoredBroker
from tests.unit.client.conftest import leases

DURABLE = Form("vmm", durable=True)


class Mistaken(StoredBroker):
    """A broker whose ledger makes a mistake; those after it make none."""

    flawless = False

    def command(self) -> list[str]:
        usual = super().command()
        return usual if self.flawless else [sys.executable, "-m", "tests.crash.restart.failing_ledger", *usual[3:]]


def test_a_mistake_over_one_pool_costs_that_pool_a_version_and_no_other_anything() -> None:
    with started(Mistaken) as broker:
        try:
            with Broker(broker.directory) as client, Broker(broker.directory) as other:
                for name in ("fine", "mistake"):
                    DURABLE.publish(client, name)
                fine, old = other.attach("fine"), other.attach("mistake")
                with pytest.raises(CubrokerError, match="ZeroDivisionError"):
                    DURABLE.publish(client, "mistake")
                eventually(lambda: "restart the broker at a convenient time" in broker.log(), "all that the audit says")
                assert "drop or lose what contradicts the rest: mistake@1 is lost" in broker.log()
                broker.flawless = True
                broker.restart()
                assert {pool.name: pool.state for pool in other.pools() if pool.version == 1} == {
                    "fine": "current",
                    "mistake": "lost",
                }
                assert "record contradicted itself: mistake@1 is lost: 2 versions are current" in broker.log()
                eventually(lambda: old.lost, "its holder to be told")
                for pool in (fine, old):
                    check(pool)
                    pool.close()
                eventually(lambda: [pool.version for pool in other.pools()] == [1, 2], "the end of the version")
                with other.attach("mistake") as new:
                    check(new)
                broker.restart()
                assert broker.log().count("record contradicted itself") == 1
        finally:
            broker.stop()
            broker.fdstore.close()


@contextmanager
def holding_without(kept: StoredBroker, key: bytes) -> Iterator[tuple[Broker, Pool]]:
    """Hold a pool over a restart before which the journal lost what it had of the session: ``key``, with its number."""
    with Broker(kept.directory) as writer:
        DURABLE.publish(writer, "pool")
    with Broker(kept.directory) as client:
        pool = client.attach("pool")
        kept.kill()
        (descriptor,) = kept.fdstore.stored["ledger"]
        Journal.open(descriptor).commit([(key % client.session, None)])
        kept.start()
        yield client, pool
        pool.close()


def test_a_session_whose_secret_is_missing_is_detached_and_keeps_what_it_holds(kept: StoredBroker) -> None:
    with holding_without(kept, b"k/%d") as (client, pool):
        with Broker(kept.directory) as observer:
            assert [each.state for each in observer.clients() if each.session == client.session] == ["detached"]
            assert leases(observer, "pool") == 1
            with pytest.raises(Unavailable):
                client.pools()
            with observer.attach("pool") as again:
                check(again)
        check(pool)
        kept.restart()
        assert kept.log().count("the journal has no secret of it") == 1


def test_a_session_that_the_ledger_does_not_know_is_over_and_nothing_of_it_stays(kept: StoredBroker) -> None:
    with holding_without(kept, b"l/session/%d/") as (client, pool):
        assert "dropped lease" in kept.log()
        with Broker(kept.directory) as observer:
            assert client.session not in [each.session for each in observer.clients()]
            assert leases(observer, "pool") == 0
            with pytest.raises(Unavailable):
                client.pools()
        check(pool)
        kept.settled()
        assert f"s{client.session}" not in kept.fdstore.stored
        assert not {b"k/%d" % client.session, b"r/%d" % client.session} & kept.fdstore.journal().keys()
