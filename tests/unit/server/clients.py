"""A client in the raw, for tests of the broker: no library between a test and the wire."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import zmq

from cubroker.protocol import wire
from cubroker.protocol.fields import MAX_DESCRIPTORS
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    VERSIONS,
    Answer,
    Attach,
    Attached,
    Clients,
    Create,
    Created,
    Descriptors,
    DeviceList,
    Envelope,
    GatewayChanged,
    Greeting,
    Hello,
    ListClients,
    ListDevices,
    Notice,
    Reply,
    Request,
    Seal,
    Sealed,
    Welcome,
)
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from cubroker.protocol.status import ClientInfo, DeviceInfo
from cubroker.protocol.wire import Keyed, authentication
from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]
HELLO = wire.pack(Hello("cubroker", VERSIONS))
HELLO_OF_3 = wire.pack(Hello("cubroker", (1, 2, 3)))
"""The greeting of a client whose requests have its secret in them."""

LAYOUT = Layout.pack([("x", "F32", (1024,))])

Body = TypeVar("Body")


def connect(directory: Path) -> socket.socket:
    """Connect to the session socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(directory / SESSION_SOCKET))  # with a time limit it would fail at once while many connect
    connection.settimeout(PATIENCE)
    return connection


def greet(connection: socket.socket, hello: bytes = HELLO) -> Greeting:
    """Say ``hello`` and return what the broker says to it."""
    connection.send(hello)
    return hear(connection)


def hear(connection: socket.socket) -> Greeting:
    data = connection.recv(1 << 16)
    assert data, "the broker hung up without a word"
    greeting: Greeting = wire.unpack(data, Greeting)
    return greeting


class RawClient:
    """One session. Requests go out as they are given; replies are found by the id of their request."""

    def __init__(self, directory: Path, hello: bytes = HELLO) -> None:
        self.connection = connect(directory)
        welcome = greet(self.connection, hello)
        assert isinstance(welcome, Welcome), welcome
        self.welcome = welcome
        self.authentication = authentication(welcome.version, welcome.session, welcome.secret)
        self.secret = self.authentication.secret
        self.context = zmq.Context()
        self._directory = directory
        self.dealer = self.dial()
        #: The number of the last request.
        self.last = 0
        self._answers: dict[int, Reply] = {}
        self._received: list[int] = []

    def send(self, body: Request, number: int | None = None, oldest: int = 1) -> int:
        """Send a request, with a new id unless one is given."""
        if number is None:
            self.last = number = self.last + 1
        self.dealer.send(self.frame(number, oldest, body))
        return number

    def frame(self, number: int, oldest: int, body: Request) -> bytes:
        """Return a request as it travels."""
        return self.authentication.request(Envelope(self.secret, number, oldest, body))

    def sign(self, data: bytes) -> bytes:
        """Return a frame of this session with ``data`` in it, whatever that is."""
        return self.authentication._requests.sign(data) if isinstance(self.authentication, Keyed) else data

    def receive(self) -> Answer:
        """Return the next reply."""
        data = b""
        while not data:  # what is empty follows a large answer, for the gateway to count
            assert self.dealer.poll(int(PATIENCE * 1000)), "no reply came"
            data = self.dealer.recv()
        answer = self.authentication.read(data)
        assert answer, "an answer that the broker did not write"
        return answer

    def answer(self, number: int) -> Reply:
        """Return the reply to request ``number``, which may come after others."""
        while number not in self._answers:
            reply = self.receive()
            self._answers[reply.id] = reply.body
        return self._answers.pop(number)

    def ask(self, body: Request, shape: type[Body]) -> Body:
        """Send a request and return its reply, which must be a ``shape``."""
        reply = self.answer(self.send(body))
        assert isinstance(reply, shape), reply
        return reply

    def ask_again(self, body: Request, shape: type[Body]) -> Body:
        """As :meth:`ask`, and let the broker forget all earlier answers, of which there may be 4,096."""
        reply = self.answer(self.send(body, oldest=self.last + 1))
        assert isinstance(reply, shape), reply
        return reply

    def dial(self) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{self._directory / REQUEST_SOCKET}")
        return dealer

    def redial(self) -> None:
        """Connect anew, as clients do when the gateway was replaced: libzmq's own way back is not always one."""
        assert self.notice() == GatewayChanged()
        self.dial_again()

    def dial_again(self) -> None:
        self.dealer.close()
        self.dealer = self.dial()

    def notice(self) -> Notice:
        """Return the next notice."""
        data = self.connection.recv(1 << 16)
        assert data, "the broker hung up"
        notice: Notice = wire.unpack(data, Notice)
        return notice

    def descriptors(self, lease: int, count: int) -> list[int]:
        """Return ``count`` descriptors, which the next notices bring and are of ``lease``; closed with the client."""
        received: list[int] = []
        while len(received) < count:
            data, descriptors, flags, _ = socket.recv_fds(
                self.connection, 1 << 16, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            self._received += descriptors
            assert not flags & socket.MSG_CTRUNC
            assert wire.unpack(data, Notice) == Descriptors(lease, len(descriptors), len(received))
            received += descriptors
        assert len(received) == count
        return received

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.connection.close()
        self.close_received()

    def close_received(self) -> None:
        """Close the descriptors that have come."""
        while self._received:
            os.close(self._received.pop())

    # -- common requests ---------------------------------------------------------------------------

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.ask(ListDevices(), DeviceList).devices

    def clients(self) -> tuple[ClientInfo, ...]:
        return self.ask(ListClients(), Clients).clients

    def create(self, name: str, layout: Layout = LAYOUT, share: str = "ipc") -> Created:
        device = self.devices()[0].uuid
        return self.ask(Create(name, layout.encode(), (device,), share, 0.0, None), Created)

    def publish(self, name: str, layout: Layout = LAYOUT, share: str = "ipc") -> int:
        return self.ask(Seal(self.create(name, layout, share).lease), Sealed).version

    def attach(self, name: str) -> Attached:
        return self.ask(Attach(name, 0, None, 0.0), Attached)


@contextmanager
def session(directory: Path, hello: bytes = HELLO) -> Iterator[RawClient]:
    """A session for the length of a block."""
    client = RawClient(directory, hello)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def holder(directory: Path, name: str, leases: str = "1") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds leases on the current version of ``name``; killed at the end of the block."""
    command = [sys.executable, "-m", "tests.unit.server.clients", str(directory), name, leases]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "attached\n"
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    with session(Path(sys.argv[1])) as worker:
        attached = [worker.attach(sys.argv[2]) for _ in range(int(sys.argv[3]))][-1]
        print("attached", flush=True)
        order = sys.stdin.readline()
        if order == "hang up\n":
            worker.connection.close()
        elif order == "count\n":
            print(len(worker.descriptors(attached.lease, len(attached.replicas[0].handles))), flush=True)
        sys.stdin.readline()
