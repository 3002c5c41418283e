"""Brokers that are told to end, while others hold what they lent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.protocol.messages import (
    Attach,
    Close,
    Create,
    Created,
    Done,
    Draining,
    Failed,
    Farewell,
    GatewayChanged,
    Notice,
    Seal,
    Sealed,
)
from cubroker.protocol.paths import LOCK
from tests.brokers import DEVICES, PATIENCE, BrokerProcess, eventually, started
from tests.stores import StoredBroker
from tests.unit.server.clients import LAYOUT, RawClient, holder, session
from tests.unit.server.configured import Configured, configured
from tests.unit.server.processes import open_files


class Storing(StoredBroker):
    drain = "3600"


class Drained(Configured):
    def command(self) -> list[str]:
        return [each for each in super().command() if each not in ("--drain", self.drain)]


@pytest.fixture
def storing() -> Iterator[Storing]:
    with started(Storing) as broker:
        yield broker
        broker.kill()
        broker.fdstore.close()


def lasting(client: RawClient, name: str) -> Created:
    """Create a durable pool."""
    device = client.devices()[0].uuid
    return client.ask(Create(name, LAYOUT.encode(), (device,), "vmm", 0.0, None, durable=True), Created)


def drains(broker: BrokerProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Tell a broker to end, which somebody holds something of; return when it drains."""
    broker.process.send_signal(number)
    eventually(lambda: "draining; what is held: " in broker.log(), "the broker to drain")


def heard(client: RawClient, kind: type[Notice]) -> Notice:
    """Return the next notice of a kind."""
    while not isinstance(notice := client.notice(), kind):
        pass
    return notice


def test_a_broker_that_lends_nothing_ends_at_once(patient: BrokerProcess) -> None:
    with session(patient.directory) as client:
        client.publish("free")
        waiting = client.send(Attach("never", 0, None, 600.0))
        client.devices()
        assert patient.stop() == 0
        assert waiting
        assert client.notice() == Farewell("the broker is shutting down")
        assert "draining" not in patient.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_that_is_told_to_end_waits_for_what_it_lent_and_lends_nothing_new(
    patient: BrokerProcess, number: signal.Signals
) -> None:
    with session(patient.directory) as client:
        client.publish("held")
        lease, draft = client.attach("held").lease, client.create("draft").lease
        waiting = client.send(Attach("never", 0, None, 600.0))
        client.devices()
        drains(patient, number)
        assert client.notice() == Draining("it was told to end")
        refused = client.answer(waiting)
        assert isinstance(refused, Failed)
        assert (refused.code, "told to end" in refused.message) == ("unavailable", True)
        assert client.ask(Attach("held", 0, None, 0.0), Failed).code == "unavailable"
        with session(patient.directory) as late:
            assert late.notice() == Draining("it was told to end")
            assert late.clients()
        assert client.ask(Seal(draft), Sealed).version == 1
        client.send(Close(lease))
        assert heard(client, Farewell) == Farewell("the broker is shutting down")
    assert patient.process.wait(PATIENCE) == 0
    assert "still held" not in patient.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_waiting_and_what_is_held_is_told(
    patient: BrokerProcess, number: signal.Signals
) -> None:
    with session(patient.directory) as client, session(patient.directory) as other:
        client.publish("held")
        client.publish("kept", share="vmm")
        client.attach("held")
        other.attach("kept")
        drains(patient)
        patient.process.send_signal(number)
        last = heard(client, Farewell)
        assert last == Farewell(
            "the broker is shutting down; this process still holds held@1:"
            " do not use held@1 any more: the memory ends with the broker"
        )
        assert heard(other, Farewell) == Farewell(
            "the broker is shutting down; this process still holds kept@1: unmap it when done"
        )
        assert patient.process.wait(PATIENCE) == 0
    told = next(line for line in patient.log().splitlines() if "still held, so not freed" in line)
    assert f"held@1 by session {client.welcome.session} (pid " in told
    assert f"kept@1 by session {other.welcome.session} (pid " in told


def test_a_process_that_ends_is_waited_for_no_longer(patient: BrokerProcess) -> None:
    with session(patient.directory) as client:
        client.publish("held")
        with holder(patient.directory, "held") as worker:
            drains(patient)
            worker.kill()
            assert patient.process.wait(PATIENCE) == 0


def test_the_waiting_ends_after_so_many_seconds_as_the_configuration_says() -> None:
    with configured("[shutdown]\ndrain_seconds = 0.2", Drained) as broker, session(broker.directory) as client:
        client.publish("held")
        client.attach("held")
        drains(broker)
        assert broker.process.wait(PATIENCE) == 0
        assert "still held" in broker.log()


def test_a_broker_that_is_to_leave_what_lasts_to_the_next_one_ends_at_once_and_nobody_hears(storing: Storing) -> None:
    with session(storing.directory) as client:
        draft = lasting(client, "lasting")
        client.ask(Seal(draft.lease), Sealed)
        lease = client.attach("lasting").lease
        client.descriptors(draft.lease, 1), client.descriptors(lease, 1)
        waiting = client.send(Attach("never", 0, None, 600.0))
        client.devices()
        storing.process.send_signal(signal.SIGUSR1)
        assert storing.process.wait(PATIENCE) == 0
        assert "draining" not in storing.log()
        storing.start()
        assert client.notice() == Draining("")
        client.redial()
        client.send(Attach("never", 0, None, 0.0), number=waiting)
        refused = client.answer(waiting)
        assert isinstance(refused, Failed)
        assert refused.code == "not_found"
        assert client.ask(Close(lease), Done)


def test_what_the_next_broker_cannot_go_on_with_is_waited_for_and_the_rest_goes_on(storing: Storing) -> None:
    with session(storing.directory) as client, session(storing.directory) as other:
        client.publish("held")
        lease = client.attach("held").lease
        drains(storing, signal.SIGUSR1)
        assert client.notice() == Draining("it was told to end")
        assert client.ask(Attach("held", 0, None, 0.0), Failed).code == "unavailable"
        draft = lasting(other, "lasting")
        assert other.descriptors(draft.lease, 1)
        client.send(Close(lease))
        assert storing.process.wait(PATIENCE) == 0
        storing.start()
        for each in (client, other):
            assert each.notice() == Draining("")
            each.redial()
        assert other.ask(Seal(draft.lease), Sealed).version == 1
    assert ("STOPPING", "1") in storing.fdstore.said
    extended = dict(storing.fdstore.said)["EXTEND_TIMEOUT_USEC"]
    assert int(extended) > 3600 * 1_000_000
    assert any(name == "STATUS" and text.startswith("draining; ") for name, text in storing.fdstore.said)


def test_without_a_store_there_is_nothing_to_leave_to_the_next_one(patient: BrokerProcess) -> None:
    with session(patient.directory) as client:
        client.publish("held")
        lease = client.attach("held").lease
        drains(patient, signal.SIGUSR1)
        client.send(Close(lease))
        assert heard(client, Farewell) == Farewell("the broker is shutting down")
    assert patient.process.wait(PATIENCE) == 0


@contextmanager
def kept() -> Iterator[tuple[subprocess.Popen[bytes], Path, Callable[[], str]]]:
    """A broker under `cubroker keep`: the keeper, the broker's directory, and what both have said."""
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        directory, log = Path(folder) / "run", Path(folder) / "log"
        serve = [sys.executable, "-m", "cubroker.server", str(directory), "--devices", DEVICES, "--drain", "3600"]
        with log.open("wb") as file:
            command = [sys.executable, "-m", "cubroker.cli", "keep", "--", *serve]
            keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            eventually(lambda: "is ready" in log.read_text(), "the broker to serve")
            yield keeper, directory, log.read_text
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM):  # the second ends the waiting
                keeper.send_signal(number)
            keeper.wait(PATIENCE)


@pytest.mark.slow
def test_a_keeper_that_is_told_to_end_takes_nothing_away_that_lasts_before_it_is_given_back() -> None:
    with kept() as (keeper, directory, said), session(directory) as client, session(directory) as other:
        draft = lasting(client, "lasting")
        client.ask(Seal(draft.lease), Sealed)
        lease = client.attach("lasting").lease
        keeper.send_signal(signal.SIGTERM)
        eventually(lambda: "draining; what is held: lasting@1 by session 1" in said(), "the broker to drain")
        assert heard(other, Draining) == Draining("it was told to end")
        assert other.ask(Attach("lasting", 0, None, 0.0), Failed).code == "unavailable"
        client.ask(Close(lease), Done)
        assert keeper.wait(PATIENCE) == 0
        assert "still held" not in said()


@pytest.mark.slow
def test_a_keeper_passes_on_that_the_next_broker_is_to_go_on() -> None:
    with kept() as (keeper, directory, said), session(directory) as client:
        draft = lasting(client, "lasting")
        client.ask(Seal(draft.lease), Sealed)
        lease = client.attach("lasting").lease
        keeper.send_signal(signal.SIGUSR1)
        eventually(lambda: said().count("is ready") == 2, "the next broker")
        assert "draining" not in said()
        assert heard(client, GatewayChanged) == GatewayChanged()
        client.dealer.close()
        client.dealer = client.dial()
        assert client.ask(Close(lease), Done)


def test_a_broker_that_is_killed_is_followed_by_the_one_that_stood_by() -> None:
    with kept() as (_, directory, said), session(directory) as client:
        draft = lasting(client, "lasting")
        client.ask(Seal(draft.lease), Sealed)
        lease = client.attach("lasting").lease
        eventually(lambda: "stands by" in said(), "the next broker to stand by")
        waiting = int(re.findall("process ([0-9]+) stands by", said())[0])
        opened = {str(entry.readlink()) for entry in open_files(waiting)}
        assert not {name for name in opened if str(directory) in name or "memfd" in name}
        os.kill(int((directory / LOCK).read_text()), signal.SIGKILL)
        assert heard(client, GatewayChanged) == GatewayChanged()
        assert int((directory / LOCK).read_text()) == waiting
        client.dealer.close()
        client.dealer = client.dial()
        assert client.ask(Close(lease), Done)
        assert f"process {waiting}, which stood by, starts again" in said()
