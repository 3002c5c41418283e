"""Whose pools a process trusts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.client.transport.requests import Owner, uids
from cubroker.protocol.errors import Denied, Invalid, Unsupported
from tests import checkpoints
from tests.brokers import older
from tests.unit.client.conftest import LAYOUT, publish
from tests.unit.server.configured import configured
from tests.unit.server.visitor import visiting

STRANGER = 4001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users")


@pytest.mark.parametrize(
    ("owner", "variable", "meant"),
    [
        (None, "", ()),
        (None, "root, 7", (0, 7)),
        ("root", "7", (0,)),
        (7, "", (7,)),
        ((7, "root"), "", (7, 0)),
        ((), "7", ()),
    ],
)
def test_owners_are_named_by_an_argument_or_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, owner: Owner | Sequence[Owner] | None, variable: str, meant: tuple[int, ...]
) -> None:
    monkeypatch.setenv("CUBROKER_OWNER", variable)
    assert uids(owner) == meant


@pytest.mark.parametrize("owner", ["no such user", "", 1 << 32, -1])
def test_an_owner_that_nobody_is_makes_no_sense(owner: Owner) -> None:
    with pytest.raises(Invalid, match="user"):
        uids(owner)


def test_a_broker_that_is_too_old_to_check_owners_is_asked_for_none() -> None:
    with older(1) as process, Broker(process.directory) as broker:
        publish(broker, "a")
        with pytest.raises(Unsupported, match="too old"):
            broker.attach("a", owner=7)
        with pytest.raises(Unsupported, match="watch 'a' of a certain owner: the broker is too old"):
            broker.watch("a", owner=7)
        with broker.watch("a") as watch:
            assert next(watch) == 1


@needs_root
def test_a_pool_of_a_stranger_is_neither_attached_to_nor_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoints.write(tmp_path / "model.safetensors", {"x": ("U8", (4,), bytes(4))})
    with configured("[sockets]\nmode = 0o666\n") as process, Broker(process.directory) as broker:
        with visiting(process.directory, STRANGER, STRANGER) as squatter:
            assert squatter("publish", "minilm", 0o644) == 1
        with pytest.raises(Denied, match=f"belongs to user {STRANGER}, and a pool of user 7 was asked for"):
            broker.attach("minilm", owner=7)
        with pytest.raises(Denied, match="minilm belongs to user"):
            broker.attach_or_create("minilm", LAYOUT, owner=7)
        with pytest.raises(Denied, match="--owner"):
            load(broker, "minilm", files, if_absent=True)
        assert not load(broker, "minilm", files, if_absent=True, owner=STRANGER).loaded
        monkeypatch.setenv("CUBROKER_OWNER", str(STRANGER))
        with broker.attach("minilm") as pool:
            pool.sleep()
            pool.wake()
        monkeypatch.setenv("CUBROKER_OWNER", "7")
        with pytest.raises(Denied):
            broker.attach("minilm")
        with broker.attach("minilm", owner=()) as pool:
            assert pool.version == 1


@needs_root
def test_a_watch_tells_of_the_versions_of_the_owner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        configured("[sockets]\nmode = 0o666\n") as process,
        Broker(process.directory) as broker,
        visiting(process.directory, STRANGER, STRANGER) as squatter,
    ):
        assert squatter("publish", "minilm", 0o644) == 1
        monkeypatch.setenv("CUBROKER_OWNER", str(STRANGER))
        with (
            broker.watch("minilm", owner=7) as watch,
            broker.watch("minilm") as strangers,
            broker.watch("minilm", owner=()) as everybodys,
        ):
            assert [next(each) for each in (watch, strangers, everybodys)] == [None, 1, 1]
            broker.retire("minilm")
            publish(broker, "minilm")  # its own, which counts for every owner
            assert next(watch) == 2
            for each in (strangers, everybodys):
                while next(each) != 2:
                    pass
