"""A broker that is looked at: real requests in its metrics, its log and its page, and nothing of it where it is off."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import NotFound
from cubroker.protocol.status import BlockInfo
from tests.brokers import PATIENCE, B, BrokerProcess, eventually, serving
from tests.stores import ROOM, FdStore, storing
from tests.unit.server.clients import LAYOUT
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.windows import read
from tests.unit.server.processes import gateway_of


class Watched(Generic[B]):
    """A broker that serves metrics on a Unix socket, and logs in JSON."""

    def __init__(self, process: B, window: Path) -> None:
        self.process = process
        self.window = window

    def get(self, path: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(self.window))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return read(connection).decode().partition("\r\n\r\n")[2]

    def metric(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.process.log().splitlines() if line.startswith("{")]


@contextmanager
def watching(serving: Callable[[], AbstractContextManager[B]]) -> Iterator[Watched[B]]:
    """A broker whose environment says that it is to be looked at; so does that of every later start in the block."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        window = Path(folder) / "window"
        patch.setenv("CUBROKER_METRICS_LISTEN", f"unix:{window}")
        patch.setenv("CUBROKER_LOG_FORMAT", "json")
        with serving() as process:
            yield Watched(process, window)


@pytest.fixture
def watched() -> Iterator[Watched[BrokerProcess]]:
    with watching(serving) as watched:
        yield watched


def test_what_clients_do_is_in_the_metrics_the_picture_and_the_log(watched: Watched[BrokerProcess]) -> None:
    with Broker(watched.process.directory) as broker:
        broker.create("llama", LAYOUT).seal()
        with pytest.raises(NotFound):
            broker.attach("lama")
        with broker.attach("llama"):
            assert watched.metric("cubroker_pool_bytes", pool="llama", state="current") == 2 << 20
            eventually(lambda: watched.metric("cubroker_leases", pool="llama") == 1, "a view with the lease")
            picture = json.loads(watched.get("/view"))
            assert [pool["name"] for pool in picture["pools"]] == ["llama"]
            assert [client["session"] for client in picture["clients"]] == [broker.session]
        session = broker.session
    assert watched.metric("cubroker_refusals_total", request="Attach", code="not_found") == 1
    assert (watched.metric("cubroker_request_seconds_count", request="Seal") or 0) == 1
    mine: list[dict[str, Any]] = []

    def written() -> bool:
        mine[:] = [line for line in watched.lines() if line.get("session") == session]
        return len(mine) == 3

    eventually(written, "the log to be written")
    assert [(line["message"].partition(": ")[2][:15], line["uid"], line["pid"]) for line in mine] == [
        ("writes llama@1", os.getuid(), os.getpid()),
        ("published llama", os.getuid(), os.getpid()),
        ("Attach of lama ", os.getuid(), os.getpid()),
    ]
    assert (mine[2]["code"], mine[2]["pool"]) == ("not_found", "lama")


def test_the_picture_tells_what_retiring_a_version_frees_and_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBROKER_KEEP", "2")
    layout = Layout.pack([(name, "U8", (1 << 20,)) for name in "abcd"], slab=2 << 20)
    changed = {name: np.full(1 << 20, 7, np.uint8) for name in "ab"}
    with watching(serving) as watched, Broker(watched.process.directory) as broker:

        def picture() -> Any:
            return json.loads(watched.get("/view"))

        broker.create("policy", layout).seal()
        with broker.attach("policy", device=0):
            broker.publish("policy", changed, base=1)
            holds = [lease for client in picture()["clients"] for lease in client["leases"]]
            assert [(each["pool"], each["version"]) for each in holds] == [("policy", 1)]
        eventually(lambda: not any(client["leases"] for client in picture()["clients"]), "a view without the lease")
        seen = picture()
        now = seen["time"]
        assert all(now - 2 * PATIENCE < pool["published"] <= now for pool in seen["pools"])
        assert now - 2 * PATIENCE < holds[0]["held_since"] <= now
        assert [client["process"]["name"] for client in seen["clients"]] == [
            Path("/proc/self/comm").read_text().strip()
        ]
        blocks = msgspec.convert(seen["blocks"], tuple[BlockInfo, ...])
        assert scenes.freed(blocks, ["policy@2"]) == scenes.freed(blocks, ["policy@1"]) == 2 << 20
        before = allocated(broker)
        assert scenes.freed(blocks, ["policy@1", "policy@2"]) == before == 6 << 20
        broker.retire("policy", version=1)
        eventually(lambda: allocated(broker) == before - (2 << 20), "the bytes that version 1 alone had")
        broker.retire("policy", version=2)
        eventually(lambda: allocated(broker) == 0, "all bytes")


def allocated(broker: Broker) -> int:
    return sum(device.allocated for device in broker.devices())


def test_a_gateway_that_died_is_counted(watched: Watched[BrokerProcess]) -> None:
    assert watched.metric("cubroker_gateway_restarts_total") == 0
    os.kill(gateway_of(watched.process.pid), signal.SIGKILL)
    eventually(lambda: watched.metric("cubroker_gateway_restarts_total") == 1, "another gateway")


@pytest.mark.slow
def test_a_broker_that_ends_ends_its_window_while_somebody_watches(watched: Watched[BrokerProcess]) -> None:
    with socket.socket(socket.AF_UNIX) as watcher:
        watcher.connect(str(watched.window))
        watcher.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert watcher.recv(12) == b"HTTP/1.1 200"
        assert watched.process.stop() == 0
        read(watcher)
    watched.process.start()
    assert watched.metric("cubroker_sessions") is None


@pytest.mark.slow
def test_a_restart_and_what_the_store_has_are_counted() -> None:
    with watching(storing) as watched, Broker(watched.process.directory) as broker:
        broker.create("llama", LAYOUT, share="vmm", durable=True).seal()
        before = watched.metric("cubroker_store_descriptors")
        for restarts in (1, 2):
            watched.process.restart()
            assert watched.metric("cubroker_restarts_total") == restarts
        assert watched.metric("cubroker_gateway_restarts_total") == 0
        assert watched.metric("cubroker_store_descriptors") == before == stored(watched.process.fdstore)
        assert watched.metric("cubroker_store_descriptors_limit") == ROOM
        assert watched.metric("cubroker_pool_bytes", pool="llama") == 2 << 20


def stored(fdstore: FdStore) -> int:
    return sum(map(len, fdstore.stored.values()))


def test_off_is_the_default_and_nothing_of_it_is_loaded() -> None:
    script = "import sys, cubroker.server.main; print([m for m in ('prometheus_client', 'h11') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_port_is_served_to_who_has_the_token_and_without_one_no_broker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_METRICS_LISTEN", "127.0.0.1:0")
    command = [sys.executable, "-m", "cubroker.server", str(tmp_path / "run"), "--devices", "host:1"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 1
    assert "$CUBROKER_METRICS_LISTEN: metrics.listen: every user of this host can read a port; name a" in refused.stderr
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    monkeypatch.setenv("CUBROKER_METRICS_TOKEN_FILE", str(token))
    with serving() as process, Broker(process.directory) as broker:
        said = re.search(
            r"a page to look at, are on (http://127\.0\.0\.1:\d+/), for readers with the token", process.log()
        )
        assert said
        broker.create("llama", LAYOUT, mode=0o600).seal()
        with pytest.raises(HTTPError, match="401") as caught:
            urlopen(said[1] + "metrics", timeout=PATIENCE)
        with caught.value as answer:
            assert b"llama" not in answer.read()
        asked = Request(said[1] + "metrics", headers={"Authorization": "Bearer 0123456789abcdef"})
        with urlopen(asked, timeout=PATIENCE) as answer:
            assert b'pool="llama"' in answer.read()
