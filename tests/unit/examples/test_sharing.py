"""The samples of docs/sharing.md, several-gpus.md and engines.md that need nothing but a session and arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cubroker import Broker, Layout
from cubroker.driver import DriverError
from tests.brokers import eventually

DOCS = Path(__file__).parents[3] / "docs"
TENSORS = [(name, "F32", (64,)) for name in ("embed", "layers.0", "layers.1")]


def run(page: str, heading: str, **names: object) -> dict[str, Any]:
    """Run the first sample below a heading with names that the page takes for granted; return all names."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2]
    found = re.search(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found, heading
    exec(compile(found[1], f"{page}: {heading}", "exec"), names)
    return names


@pytest.fixture
def clean(client: Broker) -> Iterator[Broker]:
    """A session whose pools are retired afterwards."""
    yield client
    for name in {pool.name for pool in client.pools()}:
        client.retire(name)
    eventually(lambda: not client.pools(), "the pools to end")


def test_digests_are_sealed_and_checked(clean: Broker) -> None:
    pool = run("sharing.md", "Digests", broker=clean, layout=Layout.pack(TENSORS))["pool"]
    assert [info.digest != "" for info in clean.pools()] == [True]
    assert pool.closed


def test_a_draft_is_read_before_its_seal(clean: Broker) -> None:
    layout = Layout.pack([("norm.weight", "F32", (64,))])
    pool = run("sharing.md", "Drafts", broker=clean, layout=layout, weight=np.ones(64, np.float32))["pool"]
    assert pool.closed
    assert [info.state for info in clean.pools()] == ["current"]


def test_a_pool_sleeps_and_wakes_at_its_addresses(clean: Broker) -> None:
    clean.publish("llama", {"embed": np.ones(64, np.float32)}, devices=[0])
    assert run("sharing.md", "A pool that sleeps", broker=clean)["pool"].closed


def test_a_plan_puts_tensors_on_their_devices(clean: Broker) -> None:
    names = run("several-gpus.md", "Replicated and sharded pools", broker=clean, Layout=Layout, tensors=TENSORS)
    with clean.attach("moe") as pool:
        assert {name: tensor.device.index for name, tensor in pool.items()} == names["plan"]


def test_access_between_devices_is_enabled_and_disabled(clean: Broker) -> None:
    names = run("several-gpus.md", "Direct access between devices", broker=clean)
    with pytest.raises(DriverError, match="705"):
        names["peers"].disable(names["context"], 1)


def test_a_multicast_pool_gets_an_array_and_the_bytes_of_a_device(clean: Broker) -> None:
    layout = Layout.pack([("ids", "F32", (64,))])
    clean.publish("source", {"ids": np.full(64, 7, np.float32)}, devices=[1])
    with clean.attach("source") as source, clean.attach("source") as pool:
        given = SimpleNamespace(data_ptr=lambda: source["ids"].pointer)
        run(
            "several-gpus.md",
            "Multicast pools",
            broker=clean,
            layout=layout,
            first=pool["ids"].numpy(),
            torch_tensor=given,
        )
    with clean.attach("tokens", device=0) as tokens:
        assert tokens["ids"].numpy().tolist() == [7] * 64


def test_of_those_who_need_a_pool_one_loads_it(clean: Broker) -> None:
    attach_or_load = run("engines.md", "Locks")["attach_or_load"]
    for load in (lambda: {"embed": np.ones(64, np.float32)}, lambda: pytest.fail("it was loaded already")):
        with attach_or_load(clean, "engine", load) as pool:
            assert pool.version == 1
    assert not [lock for each in clean.clients() for lock in each.locks]
