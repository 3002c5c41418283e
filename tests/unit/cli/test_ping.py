"""ping: what probes hear of a broker that serves, that does not, that is being started again, and that is not there."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol import wire
from cubroker.protocol.messages import Pong, Refused, Welcome
from cubroker.protocol.paths import SESSION_SOCKET
from tests.brokers import BrokerProcess
from tests.stores import storing
from tests.unit.cli.processes import run, started

LATE = ("--timeout", "0.05")


def document(directory: Path, *options: str) -> tuple[int, dict[str, object]]:
    done = run("ping", "--json", "--directory", directory, *options)
    return done.returncode, json.loads(done.stdout)


@contextmanager
def answering(directory: Path, answer: bytes) -> Iterator[None]:
    """Somebody in place of a broker, who answers one greeting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SESSION_SOCKET))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.slow
def test_a_broker_that_serves_is_ready_and_live_and_has_no_session_more(broker: BrokerProcess) -> None:
    for options in ((), ("--live",)):
        done = run("ping", "--directory", broker.directory, *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(rf"The broker on {broker.directory} answers in [0-9.]+ m?s\.\n", done.stdout)
        status, answer = document(broker.directory, *options)
        assert status == 0
        assert answer.pop("seconds")
        assert answer == {"schema": 1, "ready": True, "obstacle": None}
    with Broker(broker.directory) as client:
        assert client.session == 1


@pytest.mark.parametrize(("options", "expected"), [((), 1), (("--live",), 0)])
def test_a_broker_that_serves_nobody_new_is_live_and_not_ready(
    tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    with answering(tmp_path, wire.pack(Pong(1, "it is told to end"))):
        status, answer = document(tmp_path, *options)
    assert status == expected
    assert answer.pop("seconds")
    assert answer == {"schema": 1, "ready": False, "obstacle": "it is told to end"}
    (tmp_path / SESSION_SOCKET).unlink()
    with answering(tmp_path, wire.pack(Pong(1, "it is told to end"))):
        done = run("ping", "--directory", tmp_path, *options)
    assert done.returncode == expected
    assert done.stdout.endswith("s, and lends nothing new: it is told to end\n")


@pytest.mark.slow
def test_a_broker_that_is_drained_is_not_ready_until_it_lends_again(broker: BrokerProcess) -> None:
    assert run("drain", "--directory", broker.directory).returncode == 0
    status, answer = document(broker.directory)
    assert (status, answer["ready"]) == (1, False)
    assert answer["obstacle"] == "its operator wants everything to be given back"
    assert document(broker.directory, "--live")[0] == 0
    assert run("ls", "--directory", broker.directory).returncode == 0, "it opens sessions, and lends nothing"
    assert run("drain", "--off", "--directory", broker.directory).returncode == 0
    assert document(broker.directory)[1]["ready"] is True


@pytest.mark.slow
def test_a_broker_that_is_being_started_again_is_live_and_not_ready_until_it_serves() -> None:
    with storing() as broker:
        broker.kill()
        done = run("ping", *LATE, "--directory", broker.directory)
        assert (done.returncode, done.stdout) == (3, "")
        assert "did not answer within 0.05 s: its socket listens" in done.stderr
        done = run("ping", "--live", *LATE, "--directory", broker.directory)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{broker.directory} is held for the broker: the broker on ")
        status, answer = document(broker.directory, "--live", *LATE)
        assert (status, answer["ready"], answer["seconds"]) == (0, False, None)
        with started("ping", "--timeout", "60", "--directory", broker.directory) as patient:
            broker.start()
            assert patient.wait() == 0


@pytest.mark.parametrize("options", [(), ("--live",)])
def test_where_there_is_no_broker_there_is_nothing_to_keep_alive(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run("ping", "--directory", tmp_path, *options)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"no broker serves {tmp_path}" in done.stderr


@pytest.mark.parametrize(("options", "expected"), [((), 1), (("--live",), 0)])
def test_a_broker_that_turns_probes_away_is_live_and_not_ready(
    tmp_path: Path, options: tuple[str, ...], expected: int
) -> None:
    with answering(tmp_path, wire.pack(Refused("unavailable", "the broker is shutting down"))):
        status, answer = document(tmp_path, *options)
    assert (status, answer["ready"], answer["obstacle"]) == (expected, False, "the broker is shutting down")


def test_a_broker_of_before_there_were_pings_is_ready(tmp_path: Path) -> None:
    with answering(tmp_path, wire.pack(Welcome(1, 7, bytes(16), "host:1@4194304"))):
        assert document(tmp_path)[1]["ready"] is True
