"""A gateway in a peer's hands: it sees all that passes between clients and a broker, and does with it what it likes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from cubroker.protocol.messages import Answer, ListDevices
from cubroker.protocol.paths import REQUEST_SOCKET
from tests.brokers import PATIENCE, eventually
from tests.unit.server.clients import RawClient

OWN = b"own"
"""What it calls its own connection to the gateway."""

Treatment = Callable[[bytes], list[bytes]]
"""What becomes of a frame: those that go on in its place."""


def honest(frame: bytes) -> list[bytes]:
    return [frame]


class Middle:
    """Stands on the request socket, before the gateway, which forwards what it is given as it is.

    Attributes:
        requests: all that clients sent, but for the broker's own questions.
        replies: all that was sent to them.
        on_request: what becomes of a request; called on a thread of its own, as ``on_reply`` is.
        on_reply: what becomes of a reply.
    """

    def __init__(self, directory: Path) -> None:
        self.requests: list[bytes] = []
        self.replies: list[bytes] = []
        self.on_request: Treatment = honest
        self.on_reply: Treatment = honest
        self._path = directory / REQUEST_SOCKET
        self._beyond = self._path.with_name("beyond.zmq")
        self._forged: deque[bytes] = deque()
        self._answers: deque[bytes] = deque()
        self._ended = False
        self._path.rename(self._beyond)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(f"ipc://{self._path}")
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, client: RawClient, number: int, *frames: bytes) -> list[Answer | None]:
        """Send frames to the broker that no client sent, and return what is answered, as ``client`` reads it.

        A request of the client's comes last, as its ``number``, to know when all of them were looked at.
        """
        self._forged.extend((*frames, client.frame(number, 1, ListDevices())))
        answers: list[Answer | None] = []

        def answered() -> bool:
            while self._answers:
                answers.append(client.authentication.read(self._answers.popleft()))
            return any(answer and answer.id == number for answer in answers)

        eventually(answered, "an answer")
        return answers

    def close(self) -> None:
        """Give the socket back to the gateway."""
        self._ended = True
        self._thread.join(PATIENCE)
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
        self._beyond.rename(self._path)

    def _run(self) -> None:
        while not self._ended:
            ready = dict(self._poller.poll(10))
            if self._router in ready:
                routing, frame = self._router.recv_multipart()
                asked = len(frame) != 16  # as the broker's question to its gateway is
                self.requests += [frame] * asked
                for each in self.on_request(frame) if asked else [frame]:
                    self._dealer(routing).send(each)
            while self._forged:
                self._dealer(OWN).send(self._forged.popleft())
            for routing, dealer in self._dealers.items():
                if dealer in ready and routing is OWN:
                    self._answers.append(dealer.recv())
                elif dealer in ready:
                    frame = dealer.recv()
                    asked = len(frame) != 16
                    self.replies += [frame] * asked
                    for each in self.on_reply(frame) if asked else [frame]:
                        self._router.send_multipart((routing, each))

    def _dealer(self, routing: bytes) -> zmq.Socket[bytes]:
        if routing not in self._dealers:
            dealer = self._dealers[routing] = self._context.socket(zmq.DEALER)
            dealer.connect(f"ipc://{self._beyond}")
            self._poller.register(dealer, zmq.POLLIN)
        return self._dealers[routing]


@contextmanager
def between(directory: Path) -> Iterator[Middle]:
    """Stand between the broker of a directory and its clients that come from now on."""
    middle = Middle(directory)
    try:
        yield middle
    finally:
        middle.close()
