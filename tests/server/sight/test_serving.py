"""A broker that is looked at: real requests in its metrics, its log and its page, and nothing of it where it is off."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cubroker.client import Broker
from cubroker.protocol.errors import NotFound
from tests.brokers import PATIENCE, BrokerProcess, eventually, started
from tests.server.clients import LAYOUT
from tests.server.processes import gateway_of
from tests.server.sight.windows import read


class Watched(BrokerProcess):
    """A broker that serves metrics on a Unix socket, and logs in JSON."""

    @property
    def window(self) -> Path:
        return self.directory.with_name("window")

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        settings = {"CUBROKER_METRICS_LISTEN": f"unix:{self.window}", "CUBROKER_LOG_FORMAT": "json"}
        command, env = self.command(), os.environ | settings
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

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

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]


@pytest.fixture
def watched() -> Iterator[Watched]:
    with started(Watched) as broker:
        yield broker


def test_what_clients_do_is_in_the_metrics_the_picture_and_the_log(watched: Watched) -> None:
    with Broker(watched.directory) as broker:
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
    mine = [line for line in watched.lines() if line.get("session") == session]
    assert [(line["message"].partition(": ")[2][:15], line["uid"], line["pid"]) for line in mine] == [
        ("writes llama@1", os.getuid(), os.getpid()),
        ("published llama", os.getuid(), os.getpid()),
        ("Attach of lama ", os.getuid(), os.getpid()),
    ]
    assert (mine[2]["code"], mine[2]["pool"]) == ("not_found", "lama")


def test_a_gateway_that_died_is_counted(watched: Watched) -> None:
    assert watched.metric("cubroker_gateway_restarts_total") == 0
    os.kill(gateway_of(watched.pid), signal.SIGKILL)
    eventually(lambda: watched.metric("cubroker_gateway_restarts_total") == 1, "another gateway")


def test_a_broker_that_ends_ends_its_window_while_somebody_watches(watched: Watched) -> None:
    with socket.socket(socket.AF_UNIX) as watcher:
        watcher.connect(str(watched.window))
        watcher.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert watcher.recv(12) == b"HTTP/1.1 200"
        assert watched.stop() == 0
        read(watcher)
    watched.start()
    assert watched.metric("cubroker_sessions") is None


def test_off_is_the_default_and_nothing_of_it_is_loaded() -> None:
    script = "import sys, cubroker.server.run; print([m for m in ('prometheus_client', 'h11') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "[]\n"
