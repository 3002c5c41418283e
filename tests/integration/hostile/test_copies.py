"""A worker that copies or pickles all that it has, on many threads at once: each is refused, and no lease changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest

from cubroker.client import Broker
from tests.brokers import PATIENCE, BrokerProcess
from tests.integration.hostile.hostile_peers import HOSTILITY, Witness
from tests.unit.client.conftest import LAYOUT, content, publish

THREADS = 8

WAYS: tuple[Callable[[object], object], ...] = (
    copy.copy,
    copy.deepcopy,
    lambda thing: copy.deepcopy({"state": [thing]}),
    ForkingPickler.dumps,
    *(lambda thing, number=number: pickle.dumps(thing, number) for number in range(pickle.HIGHEST_PROTOCOL + 1)),
    *(lambda thing, number=number: thing.__reduce_ex__(number) for number in range(pickle.HIGHEST_PROTOCOL + 1)),
)


def test_copies_on_many_threads_are_all_refused_and_leave_every_lease_as_it_is(
    broker: BrokerProcess, witness: Witness
) -> None:
    with Broker(broker.directory, timeout=PATIENCE) as client:
        publish(client, "copied", writable=True)
        client.attach("copied").close()
        with (
            client.attach("copied") as pool,
            client.create("copied", LAYOUT) as draft,
            client.watch("copied") as watch,
            pool.event("done") as event,
        ):
            things = (client, pool, pool["weight"], draft, draft.replicas[0], draft["weight"], watch, event)

            def refuse(thing: object) -> None:
                for way in WAYS:
                    with pytest.raises(TypeError, match="cannot be copied, nor be sent to another process"):
                        way(thing)

            with ThreadPoolExecutor(THREADS) as threads:
                done = [threads.submit(refuse, thing) for thing in things * THREADS * HOSTILITY]
                witness.check()
                for each in done:
                    each.result()
            assert pool["weight"].tobytes() == content("weight", 128)
            assert sorted(info.leases for info in client.pools() if info.name == "copied") == [1, 1]
            draft["weight"].copy_from_bytes(bytes(128))
