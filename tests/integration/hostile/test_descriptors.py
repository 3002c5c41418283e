"""A process that was lent memory to read tries to change it, with the descriptor that it was given and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import BrokerProcess
from tests.integration.hostile.memory_attacker import ATTACKS
from tests.stores import StoredBroker, storing
from tests.unit.server.clients import ROOT

STRANGER = 4002
BYTES = bytes(range(256)) * 16
LAYOUT = Layout.pack([("x", "U8", (len(BYTES),))])

OWNERS = ["has everybody open it", "opens it again", "opens it again to append"]
"""What a process of the broker's own user can do, or of root, by whom the memory can be opened for writing."""

WRITING = sorted(ATTACKS.keys() - {"shrinks it", "seals it", "has everybody open it", *OWNERS})
"""What a writer can do."""

users = pytest.mark.parametrize(
    ("uid", "besides"),
    [
        pytest.param(
            STRANGER,
            [],
            id="another user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users"),
        ),
        pytest.param(os.geteuid(), OWNERS, id="the broker's user"),
    ],
)


@pytest.fixture(scope="module")
def kept() -> Iterator[StoredBroker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBROKER_SOCKETS_MODE", "0o666")
        patch.setenv("CUBROKER_MODE", "0o666")
        with storing() as broker:
            broker.directory.parent.chmod(0o755)
            yield broker


@pytest.fixture
def client(kept: StoredBroker) -> Iterator[Broker]:
    with Broker(kept.directory) as broker:
        yield broker


def publish(client: Broker, name: str, share: str, *, writable: bool = False) -> None:
    with client.create(name, LAYOUT, devices=(0, 1), share=share, writable=writable, durable=True) as draft:
        draft["x"].copy_from_bytes(BYTES)
        draft.seal()


def meddles(broker: BrokerProcess, uid: int, what: str, name: str) -> dict[str, Any]:
    """Have a process of a user try everything, and return what it says."""
    command = [
        sys.executable,
        "-m",
        "tests.integration.hostile.memory_attacker",
        str(broker.directory),
        str(uid),
        what,
        name,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@users
@pytest.mark.parametrize("share", ["vmm", "multicast"])
def test_a_reader_changes_nothing_with_the_descriptor_that_it_was_lent(
    kept: StoredBroker, client: Broker, share: str, uid: int, besides: list[str]
) -> None:
    name = f"{share}-{uid}"
    publish(client, name, share)
    with client.attach(name, device=0) as pool:
        for restart in (False, True):
            if restart:
                kept.restart()
            assert meddles(kept, uid, "attach", name) == {"through": besides, "reads": True, "mode": 0o600}
            assert pool["x"].tobytes() == BYTES
            with Broker(kept.directory) as other, other.attach(name, device=0) as again:
                assert again["x"].numpy().tobytes() == BYTES


@users
def test_a_writer_of_a_draft_can_write_and_so_can_a_reader_of_a_writable_version(
    kept: StoredBroker, client: Broker, uid: int, besides: list[str]
) -> None:
    name = f"scratch-{uid}"
    publish(client, name, "vmm", writable=True)
    for what, pool in (("attach", name), ("create", f"draft-{uid}")):
        found = meddles(kept, uid, what, pool)
        assert not found["reads"]
        assert set(WRITING) <= set(found["through"])
        assert not {"shrinks it", "seals it"} & set(found["through"])
