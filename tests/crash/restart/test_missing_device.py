"""A device that the broker before had and this one has not costs what had memory on it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from cubroker.client import Broker, Pool
from cubroker.protocol.errors import NotFound
from cubroker.server.monitoring.metrics import MetricsWriter
from tests.brokers import eventually
from tests.crash.content import BOTH, Form, check
from tests.stores import StoredBroker, storing
from tests.unit.cli.processes import run

TWO, ONE = "host:2@64MiB", "host:1@64MiB"

HERE = Form("vmm", (0,), durable=True)

GONE = {
    "there": Form("vmm", (1,), durable=True),
    "both": Form("vmm", BOTH, durable=True),
    "parts": Form("vmm", BOTH, sharded=True, durable=True),
    "team": Form("multicast", BOTH, writable=True, durable=True),
    "passing": Form("vmm", BOTH),
}
"""Pools that have memory on the second device."""


@pytest.fixture
def kept() -> Iterator[StoredBroker]:
    with storing(TWO) as broker:
        yield broker
        assert "Traceback" not in broker.log()


@pytest.fixture
def held(kept: StoredBroker) -> Iterator[dict[str, Pool]]:
    """All pools, each with a lease, as they are after the broker was killed and had one device less."""
    with Broker(kept.directory) as client, ExitStack() as stack:
        pools = {}
        for name, form in {"here": HERE, **GONE}.items():
            form.publish(client, name)
            device = None if form.sharded else form.devices[-1]
            pools[name] = stack.enter_context(client.attach(name, device=device))
        move(kept, ONE)
        yield pools


def move(kept: StoredBroker, devices: str) -> None:
    """Kill the broker, and start the next one on other devices."""
    kept.kill()
    kept.devices = devices
    kept.start()


def states(kept: StoredBroker) -> dict[str, str]:
    with Broker(kept.directory) as client:
        return {info.name: info.state for info in client.pools()}


def allocated(kept: StoredBroker) -> list[int]:
    """What is allocated on each device, in pieces of the smallest size."""
    with Broker(kept.directory) as client:
        return [device.allocated >> 21 for device in client.devices()]


def stored(kept: StoredBroker) -> int:
    """How many descriptors of memory are stored."""
    kept.settled()
    return sum(len(each) for name, each in kept.fdstore.stored.items() if name.startswith("m"))


def said(kept: StoredBroker, name: str) -> int:
    """How often the log says that a version is lost."""
    return kept.log().count(f"pool {name}@1 is lost")


def second(kept: StoredBroker) -> str:
    """What the log calls the second device."""
    return next(line for line in kept.log().splitlines() if "device 1:" in line).split(", ")[1]


@pytest.mark.slow
def test_only_pools_with_memory_on_a_device_that_is_gone_are_lost(kept: StoredBroker, held: dict[str, Pool]) -> None:
    assert states(kept) == {"here": "current"} | dict.fromkeys(GONE, "lost")
    for name, pool in held.items():
        if name != "here":
            eventually(lambda pool=pool: pool.lost, f"the notice of {name}")
            assert said(kept, name) == 1, "it is said once, on however many devices it was"
        check(pool)  # whatever is mapped stays mapped
    assert all(second(kept) in held[name].lost for name, form in GONE.items() if form.durable)
    assert not held["here"].lost
    with Broker(kept.directory) as client:
        with pytest.raises(NotFound, match=f"lost.*{second(kept)}"):
            client.attach("there")
        with client.attach("here") as again:
            check(again)
        HERE.publish(client, "here")
        Form("vmm", (0,)).publish(client, "there")
    kept.restart()
    assert all(said(kept, name) == 1 for name in GONE), "the next broker has nothing new to say"


def test_what_a_lost_pool_had_comes_back_everywhere_once_nobody_holds_it(
    kept: StoredBroker, held: dict[str, Pool]
) -> None:
    assert allocated(kept) == [2 + 2 + 1 + 2 + 2]  # of here, both, parts, team and passing
    assert stored(kept) == 2 + 2 + 4 + 2 + 4
    for name in GONE:
        held[name].close()
    eventually(lambda: states(kept) == {"here": "current"}, "the end of what is lost")
    eventually(lambda: stored(kept) == 2, "the store to forget its memory")
    eventually(lambda: allocated(kept) == [2], "its memory to be freed")
    check(held["here"])


@pytest.mark.slow
def test_a_device_that_comes_back_has_what_was_lost_until_it_is_given_back(
    kept: StoredBroker, held: dict[str, Pool]
) -> None:
    held["both"].close()
    move(kept, ONE)
    move(kept, TWO)
    assert states(kept) == {"here": "current"} | {name: "lost" for name in GONE if name != "both"}
    left = [2 + 1 + 2 + 2, 2 + 1 + 2 + 2]  # the last ones of a pool that was not durable
    eventually(lambda: allocated(kept) == left, "the memory of what was given back to be freed")
    with Broker(kept.directory) as client:
        GONE["both"].publish(client, "both")
        with client.attach("both", device=1) as pool:
            assert pool.version == 2
            check(pool)
    for name in GONE:
        held[name].close()
    eventually(lambda: states(kept) == {"here": "current", "both": "current"}, "the end of what is lost")
    eventually(lambda: allocated(kept) == [4, 2], "their memory to be freed")
    check(held["here"])


@pytest.mark.slow
def test_whoever_looks_sees_what_is_lost_with_its_device(kept: StoredBroker, held: dict[str, Pool]) -> None:
    with Broker(kept.directory) as client:
        view = client.look()
    assert {block.device for block in view.blocks} == {device.uuid for device in view.devices}
    assert "cubroker_pool_bytes{" in MetricsWriter(CollectorRegistry()).text(view).decode()
    for command, says in (
        (["ls"], "0,gone"),
        (["show", "parts@1"], f"device {second(kept)}"),
        (["devices"], "host device 0"),
        (["top", "--once"], "gone"),
        (["clients"], "parts@1"),
    ):
        done = run(*command, "--directory", kept.directory)
        assert (done.returncode, done.stderr) == (0, "")
        assert says in done.stdout
