"""``cubroker drain``, beside a broker that lends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cubroker.client import Broker, Pool
from cubroker.protocol import Layout
from cubroker.server.transport.unix_sockets import read_process
from tests.brokers import PATIENCE, BrokerProcess, Patient, eventually
from tests.brokers import started as serving
from tests.unit.cli.processes import run, started

LAYOUT = Layout.pack([("x", "F32", (8,))])
DRAINED = "Nothing is held any more. The broker lends nothing until: cubroker drain --off\n"


@pytest.fixture
def client(shared: BrokerProcess) -> Iterator[Broker]:
    with Broker(shared.directory) as client:
        yield client


@pytest.fixture
def pools(client: Broker) -> Iterator[list[Pool]]:
    """Two leases of the client's on one pool; at the end the broker lends again."""
    with client.create("llama", LAYOUT) as draft:
        version = draft.seal()
    yield [client.attach("llama"), client.attach("llama")]
    client.drain(on=False)
    client.retire("llama", version)


def who(client: Broker) -> str:
    process = read_process(os.getpid())
    assert process is not None
    return f"session {client.session}, {process.name} {os.getpid()} ("


def test_it_tells_what_it_waits_for_and_ends_when_nothing_is_left(
    shared: BrokerProcess, client: Broker, pools: list[Pool]
) -> None:
    with started("drain", "--directory", shared.directory) as drain:
        assert drain.stdout
        first = drain.stdout.readline()
        assert first.startswith(who(client))
        assert "@" in first
        assert first.endswith("(2 times)\n")
        assert client.wait_draining(PATIENCE)
        for pool in pools:
            pool.close()
        *changes, last = drain.stdout.readlines()
        assert drain.wait(PATIENCE) == 0
    assert changes[-1].endswith("holds nothing any more\n")
    assert last == DRAINED
    assert run("drain", "--directory", shared.directory).stdout == DRAINED


def test_it_gives_up_when_its_time_is_up_and_the_broker_goes_on_draining_until_that_is_taken_back(
    shared: BrokerProcess, client: Broker, pools: list[Pool]
) -> None:
    result = run("drain", "--wait", "0.1", "--directory", shared.directory)
    assert result.returncode == 1
    assert "1 client still held something after 0.1 s; the broker still lends nothing new" in result.stderr
    assert client.wait_draining(PATIENCE)
    result = run("drain", "--off", "--directory", shared.directory)
    assert (result.returncode, result.stdout) == (0, "The broker lends again.\n")
    assert client.wait_draining(PATIENCE, over=True)
    client.attach("llama").close()


def test_a_broker_that_was_told_to_end_is_not_said_to_lend_again_before_it_is_started_again() -> None:
    with serving(Patient) as broker, Broker(broker.directory) as client:
        with client.create("llama", LAYOUT) as draft:
            draft.seal()
        with client.attach("llama"):
            broker.process.send_signal(signal.SIGTERM)
            assert client.wait_draining(PATIENCE)
            result = run("drain", "--wait", "0", "--directory", broker.directory)
        assert result.returncode == 1
        assert result.stderr == (
            "cubroker: 1 client still held something after 0 s; the broker still lends nothing new, until another"
            " one takes its place: it was told to end. With its store, that one lends nothing either, until: cubroker"
            " drain --off\n"
        )


def test_it_ends_when_somebody_else_takes_it_back(shared: BrokerProcess, client: Broker, pools: list[Pool]) -> None:
    with started("drain", "--directory", shared.directory) as drain:
        assert client.wait_draining(PATIENCE)
        assert drain.stdout
        drain.stdout.readline()
        client.drain(on=False)
        assert drain.wait(PATIENCE) == 1
        assert drain.stderr
        assert "lend again" in drain.stderr.read()


def test_it_ends_when_it_is_taken_back_before_the_command_has_heard_of_it(
    shared: BrokerProcess, client: Broker, pools: list[Pool]
) -> None:
    with started("drain", "--directory", shared.directory) as drain:
        assert client.wait_draining(PATIENCE)
        drain.send_signal(signal.SIGSTOP)
        client.drain(on=False)
        assert client.wait_draining(PATIENCE, over=True)
        drain.send_signal(signal.SIGCONT)
        assert drain.wait(PATIENCE) == 1
        assert drain.stderr
        assert "lend again" in drain.stderr.read()


def test_ctrl_c_ends_the_command_and_not_the_draining(shared: BrokerProcess, client: Broker, pools: list[Pool]) -> None:
    with started("drain", "--directory", shared.directory) as drain:
        assert client.wait_draining(PATIENCE)
        assert drain.stdout
        drain.stdout.readline()
        drain.send_signal(signal.SIGINT)
        assert drain.wait(PATIENCE) == 130
    eventually(lambda: len(client.clients()) == 1, "the end of its session")
    assert client.draining
