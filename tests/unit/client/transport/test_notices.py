"""Notices that a client does not know, as a newer broker may send them."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.transport.requests import read_notice
from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.fields import MAX_DESCRIPTORS
from cubroker.protocol.messages import Draining
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from tests.brokers import BrokerProcess
from tests.crash.content import NBYTES, Form

PACKET = 1 << 16


def test_a_notice_of_an_unknown_kind_is_skipped_and_a_broken_one_of_a_known_kind_is_not() -> None:
    assert read_notice(wire.pack(Draining("why"))) == Draining("why")
    assert read_notice(wire.pack(["Later", {"what": [1]}, 2.5])) is None
    for broken in (["Draining", 7], ["Draining", "why", "more"], [7], {}, "Later", []):
        with pytest.raises(Invalid):
            read_notice(wire.pack(broken))
    with pytest.raises(Invalid):
        read_notice(b"\xc1")


@contextmanager
def newer(lender: BrokerProcess, notice: bytes, descriptor: int) -> Iterator[Path]:
    """A directory where the broker serves one client, and says something of its own after the welcome."""

    def relay() -> None:
        client, _ = listener.accept()
        with client, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broker:
            broker.connect(str(lender.directory / SESSION_SOCKET))
            broker.send(client.recv(PACKET))
            client.send(broker.recv(PACKET))
            socket.send_fds(client, [notice], [descriptor])
            back = threading.Thread(target=pass_on, args=(client, broker))
            back.start()
            pass_on(broker, client)
            back.join()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(source, PACKET, MAX_DESCRIPTORS)
            if not data:
                break
            socket.send_fds(target, [data], descriptors)
            for each in descriptors:
                os.close(each)
        target.shutdown(socket.SHUT_RDWR)

    with (
        tempfile.TemporaryDirectory(prefix="cubroker-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        (Path(folder) / REQUEST_SOCKET).symlink_to(lender.directory / REQUEST_SOCKET)
        listener.bind(str(Path(folder) / SESSION_SOCKET))
        listener.listen()
        thread = threading.Thread(target=relay)
        thread.start()
        yield Path(folder)
        thread.join()


def test_a_client_goes_on_with_a_broker_that_says_more_than_it_knows(
    client: Broker, lender: BrokerProcess, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    Form("vmm").publish(client, name)
    reading, writing = os.pipe()
    with (
        caplog.at_level(logging.WARNING),
        newer(lender, wire.pack(["Later", 1]), writing) as directory,
        Broker(directory) as broker,
        broker.attach(name) as pool,  # its descriptors come behind what is unknown
    ):
        assert len(pool["first"].tobytes()) == NBYTES
        os.close(writing)
        assert os.read(reading, 1) == b"", "the client has closed what came with it"
    os.close(reading)
    assert "the broker says 'Later', which this version of cubroker does not know" in caplog.text
