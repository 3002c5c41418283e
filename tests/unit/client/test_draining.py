"""A broker calls back what it lent: what its clients hear of it, and what they keep when it ends."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import nan

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import CubrokerError, Invalid, Unavailable
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.unit.client.conftest import LAYOUT, content, publish

BY_HAND = "its operator wants everything to be given back"


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def test_a_client_is_told_to_give_back_what_it_holds_and_the_broker_ends_when_it_has(
    patient: BrokerProcess, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Broker(patient.directory) as client, caplog.at_level(logging.WARNING):
        publish(client, name)
        pool = client.attach(name)
        assert not client.wait_draining(0)
        assert client.wait_draining(0, over=True)
        for limit in (-1.0, nan):
            with pytest.raises(Invalid, match="a timeout of"):
                client.wait_draining(limit)
        assert client.draining == ""
        patient.process.send_signal(signal.SIGTERM)
        assert client.wait_draining()
        assert client.draining == "it was told to end"
        with pytest.raises(Unavailable, match="lends nothing new: it was told to end"):
            client.attach(name)
        assert pool["bias"].tobytes() == content("bias", pool["bias"].nbytes)
        pool.close()
        assert patient.process.wait(PATIENCE) == 0
    assert f"the broker on {patient.directory} is draining, give back what you hold: it was told to end" in caplog.text


@pytest.mark.parametrize("share", ["ipc", "vmm"])
def test_what_is_held_when_the_broker_ends_stays_readable_for_who_has_it_mapped(
    patient: BrokerProcess, name: str, share: str
) -> None:
    with Broker(patient.directory) as client:
        with client.create(name, LAYOUT, share=share) as draft:
            for each, tensor in draft.items():
                tensor.copy_from_bytes(content(each, tensor.nbytes))
            draft.seal()
        pool = client.attach(name)
        patient.process.send_signal(signal.SIGTERM)
        assert client.wait_draining()
        patient.process.send_signal(signal.SIGTERM)
        assert patient.process.wait(PATIENCE) == 0
        with pytest.raises(Unavailable, match=f"still holds {name}@1"):
            client.wait_draining(over=True)
        for each, tensor in pool.items():
            assert tensor.tobytes() == content(each, tensor.nbytes)


def test_whoever_waits_for_the_draining_hears_of_both_its_beginning_and_its_end(
    patient: BrokerProcess, others: ThreadPoolExecutor
) -> None:
    with Broker(patient.directory) as client, Broker(patient.directory) as operator:
        begins = others.submit(client.wait_draining, PATIENCE)
        operator.drain()
        assert begins.result(PATIENCE)
        assert client.draining == BY_HAND
        over = others.submit(client.wait_draining, PATIENCE, over=True)
        with Broker(patient.directory) as late:
            assert late.wait_draining(PATIENCE)
        operator.drain(on=False)
        assert over.result(PATIENCE)
        assert client.draining == ""


@pytest.mark.parametrize("end", [Broker.close, lambda client: None])
def test_a_wait_for_the_draining_ends_with_the_session_or_the_broker(
    patient: BrokerProcess, others: ThreadPoolExecutor, end: Callable[[Broker], None]
) -> None:
    client = Broker(patient.directory)
    waiting = others.submit(client.wait_draining)
    eventually(waiting.running, "the thread that waits")
    end(client)
    if end is not Broker.close:
        patient.kill()
    with pytest.raises(Unavailable):
        waiting.result(PATIENCE)
    with pytest.raises(CubrokerError):
        client.wait_draining(0)
    client.close()
