"""What the tests of hostile peers share: how hostile they are, and who must not notice."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from cubroker.client import Broker
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import ListDevices
from cubroker.protocol.paths import REQUEST_SOCKET
from tests.brokers import PATIENCE, BrokerProcess
from tests.unit.server.clients import RawClient
from tests.unit.server.processes import all_closed, files

HOSTILITY = int(os.environ.get("CUBROKER_HOSTILITY", "1"))
"""How often everything is done; the long form has 10."""

MIB = 1 << 20
WEIGHTS = bytes(range(256)) * 4096


class Witness:
    """A client like any other, with a pool whose bytes it knows, beside a broker that is under attack."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process
        self.client = Broker(process.directory, timeout=PATIENCE)
        with self.client.create("witness", Layout.pack([("weights", "U8", (len(WEIGHTS),))])) as draft:
            draft["weights"].copy_from(WEIGHTS)
            draft.seal()
        self._files = None if os.geteuid() else files(process.pid)

    def check(self) -> None:
        """The broker serves this client and a new one, and the weights are what they were."""
        self.attach(self.client)
        with Broker(self.process.directory, timeout=PATIENCE) as other:
            self.attach(other)

    def attach(self, broker: Broker) -> None:
        with broker.attach("witness") as pool:
            assert pool["weights"].tobytes() == WEIGHTS

    def check_end(self) -> None:
        """The broker is the same process, serves, and its log is in order."""
        self.check()
        assert self.process.process.poll() is None
        log = self.process.log()
        assert "Traceback" not in log, log[log.index("Traceback") :]

    def check_descriptors(self) -> None:
        """Wait until the broker has no file open that it did not have when this witness came."""
        if self._files is None:
            pytest.skip("a broker shows what it has open to root alone: run this test as root")
        all_closed(self.process.pid, self._files)


@contextmanager
def witnessed(process: BrokerProcess) -> Iterator[Witness]:
    """A witness for the length of a block, with a check at its end."""
    witness = Witness(process)
    try:
        yield witness
        witness.check_end()
    finally:
        witness.client.close()


def acknowledge(client: RawClient) -> None:
    """Tell the broker that all answers of a session have come, so that it need not keep them."""
    client.answer(client.send(ListDevices(), oldest=client.last + 1))


def push(connection: socket.socket, data: bytes, descriptors: Sequence[int]) -> bool:
    """Send ``data`` with descriptors; False if the system does not take them, which leaves nothing sent.

    It lets the receiver refuse them, or this user has too many on their way.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        connection.sendmsg([data], rights)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ETOOMANYREFS):
            raise
        return False
    return True


# -- ZMTP 3.0 (rfc.zeromq.org/spec/23), by hand --------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(identity: bytes = b"") -> bytes:
    """The command that ends the handshake of a DEALER."""
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in properties
    )
    return b"\x06" + struct.pack(">Q", len(body)) + body


def frame(data: bytes, *, more: bool = False) -> bytes:
    """One frame of a message; ``more`` of it follow."""
    return bytes([2 | more]) + struct.pack(">Q", len(data)) + data


def dial(process: BrokerProcess) -> socket.socket:
    """Connect to the request socket, and say nothing."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(process.directory / REQUEST_SOCKET))
    connection.settimeout(PATIENCE)
    return connection


def pour(connection: socket.socket, data: bytes, limit: int) -> int:
    """Send ``data`` over and over until the other side hangs up, or ``limit`` bytes; return how many it took."""
    sent = 0
    try:
        while sent < limit:
            sent += connection.send(data)
    except OSError:
        pass
    return sent
