from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.brokers import serving
from tests.cli.processes import run

KEYS = [
    *("from", "to", "access", "performance_rank"),
    *("native_atomics", "array_access", "only_partial_atomics", "atomics"),
]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A broker whose four devices reach each other in twos."""
    with serving("host:4@8MiB/2") as broker:
        yield broker.directory


def test_the_table_says_who_reaches_whom(directory: Path) -> None:
    done = run("topology", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()[:5]
    assert header.split() == ["FROM", "TO", "0", "TO", "1", "TO", "2", "TO", "3"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    reached = [[cell not in ("no", "-") for cell in row.split()[-4:]] for row in rows]
    assert reached == [
        [False, True, False, False],
        [True, False, False, False],
        [False, False, False, True],
        [False, False, True, False],
    ]
    assert rows[0].split()[-4] == "-"
    assert "performance rank" in done.stdout


def test_json_has_one_object_per_way(directory: Path) -> None:
    done = run("topology", "--json", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    ways = json.loads(done.stdout)
    assert [list(way) for way in ways] == [KEYS] * 12
    with Broker(directory) as broker:
        uuids = [device.uuid for device in broker.driver.devices]
        links = broker.driver.peers.matrix()
    for way, link in zip(ways, links, strict=True):
        assert (way["from"], way["to"]) == (uuids[link.device], uuids[link.peer])
        assert (way["access"], way["performance_rank"]) == (link.access, link.performance_rank)
        assert all(isinstance(forms, list) for forms in way["atomics"].values())
    assert {(way["from"], way["to"]) for way in ways if way["access"]} == {
        (uuids[one], uuids[other]) for one, other in ((0, 1), (1, 0), (2, 3), (3, 2))
    }


def test_without_a_broker_there_is_no_topology(tmp_path: Path) -> None:
    assert run("topology", "--directory", tmp_path).returncode == 3
