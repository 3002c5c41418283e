"""Clients and brokers of different versions of the protocol serve each other, as docs/compatibility.md says."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubroker.cli import format as json_form
from cubroker.client import Broker
from cubroker.client.transport import handshake
from cubroker.integrations import runtime_manifest
from cubroker.protocol import Layout
from cubroker.protocol.errors import Unsupported
from cubroker.protocol.messages import VERSIONS
from cubroker.server.ledger import entries
from cubroker.server.store import store as store_module
from tests.brokers import BrokerProcess, older, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ARRAYS = {"weight": np.arange(8, dtype=np.float32)}


@pytest.fixture(scope="module")
def newest() -> Iterator[BrokerProcess]:
    with serving() as process:
        yield process


@pytest.fixture(scope="module", params=VERSIONS[:-1], ids="broker {}".format)
def earlier(request: pytest.FixtureRequest) -> Iterator[tuple[int, Broker]]:
    """A broker of an earlier version, and a session of this release with it."""
    with older(request.param) as process, Broker(process.directory) as broker:
        yield request.param, broker


def shared(broker: Broker, other: Broker) -> None:
    """Two sessions with a broker do what every version of the protocol can."""
    first = broker.publish("m", ARRAYS)
    with other.attach("m", device=0) as pool:
        assert (pool.version, pool["weight"].numpy().tolist()) == (first, ARRAYS["weight"].tolist())
        second = broker.publish("m", ARRAYS)
        assert [info.leases for info in broker.pools() if (info.name, info.version) == ("m", first)] == [1]
    assert {client.session for client in other.clients()} >= {broker.session, other.session}
    with other.watch("m") as versions:
        assert next(versions) == second > first
        broker.retire("m")
        assert next(versions) is None


# -- what later versions have --------------------------------------------------------------------------


def owned(broker: Broker) -> None:
    broker.attach("m", owner=0).close()


def digested(broker: Broker) -> None:
    with broker.create("d", Layout.pack([("weight", "F32", (8,))])) as draft:
        draft.seal(digest=True)


def in_place(broker: Broker) -> None:
    with broker.create("p", Layout.pack([("weight", "F32", (8,))]), share="vmm") as draft:
        draft.seal(in_place=True)


def locked(broker: Broker) -> None:
    broker.lock("l").close()


def updated(broker: Broker) -> None:
    broker.publish("m", ARRAYS, base="m")


def unsealed(broker: Broker) -> None:
    with broker.create("u", Layout.pack([("weight", "F32", (8,))])) as draft:
        broker.attach("u", version=draft.version, unsealed=True).close()


LATER: dict[str, Callable[[Broker], None]] = {
    "`attach(owner=…)`": owned,
    "`seal(digest=True)`": digested,
    "`seal(in_place=True)`": in_place,
    "`lock`": locked,
    "`publish(base=…)`": updated,
    "`attach(unsealed=True)`": unsealed,
}
"""By the words that the page has for it."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


def since(feature: str) -> int:
    """The version of the protocol from which the page says that something is there."""
    (found,) = (int(number) for number, what in rows("Clients and brokers") if feature in what)
    return found


def test_a_client_shares_pools_with_brokers_of_every_version(earlier: tuple[int, Broker]) -> None:
    _, broker = earlier
    with Broker(broker.directory) as other:
        shared(broker, other)


@pytest.mark.parametrize("feature", LATER)
def test_what_a_broker_is_too_old_for_is_unsupported(earlier: tuple[int, Broker], feature: str) -> None:
    version, broker = earlier
    broker.publish("m", ARRAYS)
    if version >= since(feature):
        LATER[feature](broker)
    else:
        with pytest.raises(Unsupported, match="too old"):
            LATER[feature](broker)
    broker.retire("m")


def test_a_tensor_has_several_names_at_brokers_of_the_versions_that_the_page_says(earlier: tuple[int, Broker]) -> None:
    version, broker = earlier
    both = {"one": ARRAYS["weight"], "other": ARRAYS["weight"]}
    broker.publish("t", both)
    with broker.attach("t", device=0) as pool:
        assert (pool["one"].pointer == pool["other"].pointer) == (version >= since("several names of a tensor"))
        assert pool["one"].tobytes() == pool["other"].tobytes() == ARRAYS["weight"].tobytes()
    broker.retire("t")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_broker_serves_clients_of_every_version_beside_each_other(
    newest: BrokerProcess, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker(newest.directory) as today:
        monkeypatch.setattr(handshake, "VERSIONS", VERSIONS[:version])
        with Broker(newest.directory) as other:
            shared(today, other)


@pytest.mark.parametrize("feature", LATER)
def test_this_release_has_all_that_the_page_lists(newest: BrokerProcess, feature: str) -> None:
    with Broker(newest.directory) as broker:
        broker.publish("m", ARRAYS)
        LATER[feature](broker)
        broker.retire("m")


def test_the_page_names_the_versions_and_formats_of_this_release() -> None:
    assert [int(number) for number, _ in rows("Clients and brokers")] == list(VERSIONS)
    told = {what: (reads, writes) for what, reads, writes, _ in rows("What is stored")}
    assert told == {
        "record of the ledger": (f"{entries.READABLE[0]} to {entries.READABLE[-1]}", str(entries.FORMAT)),
        "journal, the file around it": (str(store_module.FORMAT), str(store_module.FORMAT)),
        "manifest of a runtime pool": (str(runtime_manifest.FORMAT), str(runtime_manifest.FORMAT)),
    }
    assert list(entries.READABLE) == list(range(entries.READABLE[0], entries.FORMAT + 1))
    assert f'`"schema": {json_form.SCHEMA}`' in PAGE


def test_the_page_names_the_versions_of_python_and_what_is_depended_on() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = project["requires-python"].removeprefix(">=")
    assert f"Python {least} or later" in PAGE
    assert [each for each in project["classifiers"] if "Operating System" in each] == [
        "Operating System :: POSIX :: Linux"
    ]
    assert re.search(r"^## Platforms$", PAGE, re.MULTILINE)
