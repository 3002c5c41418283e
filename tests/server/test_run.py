from __future__ import annotations

from tests.brokers import BrokerProcess


def test_a_broker_serves_until_it_is_told_to_stop(broker: BrokerProcess) -> None:
    assert {entry.name for entry in broker.directory.iterdir()} == {"lock", "session.sock", "broker.zmq"}
    assert broker.stop() == 0
    assert {entry.name for entry in broker.directory.iterdir()} == {"lock"}
