"""An exporter that says whatever a test wants, over TLS."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import PeerAddress, serving_context
from cubroker.integrations.cluster.messages import Going, Offer, Offers, PeerWelcome, Request
from tests.unit.integrations.cluster.hosts import HOST

HONEST: dict[str, object] = {"PeerHello": PeerWelcome(1, "root"), "List": Offers((), 0, 8), "Progress": Going()}


class Liar:
    """An exporter that answers requests by their names.

    Attributes:
        heard: the requests of all connections.
        answers: a message, bytes, None for no answer, or a function that gets this and what sends bytes.
    """

    def __init__(self, folder: Path, answers: Mapping[str, object], pause: float, at: tuple[str, int]) -> None:
        self.answers = HONEST | dict(answers)
        self.heard: list[Request] = []
        self._pause = pause
        self.certificate(folder)
        self._server = socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        self._peers: list[ssl.SSLSocket] = []
        self._threads: list[Thread] = []
        self.address = PeerAddress(*self._server.getsockname()[:2])
        self._start(self._accept)

    def certificate(self, folder: Path) -> None:
        """Show the certificate in a folder, in connections from now on."""
        self._context = serving_context(folder)

    def opens(self, opened: object, name: str = "m", version: int = 1) -> None:
        """Offer a pool, and answer with this when it is opened."""
        self.answers |= {"List": Offers((Offer(name, version, 1, 1, True),), 0, 8), "Open": opened}

    def asked(self, kind: type[Request]) -> int:
        """How many requests of a kind have come."""
        return sum(isinstance(each, kind) for each in self.heard)

    def close(self) -> None:
        """End all connections, and take no more; a test may do so before the end."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join()
        for peer in self._peers:
            with suppress(OSError):  # it has gone by itself
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _start(self, function: Callable[..., object], *arguments: object) -> None:
        thread = Thread(target=function, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._server.accept()
            except OSError:
                return
            try:
                peer = self._context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            self._peers.append(peer)
            self._start(self._serve, peer)

    def _serve(self, peer: ssl.SSLSocket) -> None:
        def send(data: bytes) -> None:
            if self._pause:
                time.sleep(self._pause)
            peer.sendall(data)

        with peer, suppress(OSError), peer.makefile("rb") as received:  # OSError: the peer, or the test, is done
            while head := received.read(4):
                body = received.read(messages.length(head, messages.MAX_REQUEST))
                if not body:  # the connection was shut down in the middle of a request
                    return
                request = messages.request(body)
                self.heard.append(request)
                answer: Any = self.answers.get(type(request).__name__)
                if callable(answer):
                    answer(self, send)
                elif answer is not None:
                    send(answer if isinstance(answer, bytes) else messages.frame(answer))


@contextmanager
def lying(
    folder: Path, answers: Mapping[str, object] | None = None, pause: float = 0.0, at: tuple[str, int] = (HOST, 0)
) -> Iterator[Liar]:
    """Serve until the end of the block.

    Args:
        folder: that of the certificate.
        answers: by the names of requests; else those of :data:`HONEST`.
        pause: seconds before whatever is sent.
        at: the address and the port to listen at; port 0: any.
    """
    liar = Liar(folder, answers or {}, pause, at)
    try:
        yield liar
    finally:
        liar.close()
