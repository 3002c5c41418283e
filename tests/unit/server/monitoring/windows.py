"""A window over views that a test chooses, and a client in the raw."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from cubroker.protocol.messages import View
from cubroker.server.monitoring.http import HttpThread, Site, TokenCheck
from cubroker.server.monitoring.metrics import BrokerCounters
from cubroker.server.monitoring.observer import LedgerObserver, Snapshot
from tests.brokers import PATIENCE


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop on a thread, as the broker's is for a window."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@dataclass
class Pane:
    """What can be seen, and where: assign ``view`` to show another one."""

    port: int
    _view: View
    revision: int = 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def view(self) -> View:
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        self._view = view
        self.revision += 1

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def ask(self, text: str) -> bytes:
        """Send what a test wrote, and return everything until the other side closes."""
        with self.connect() as connection:
            connection.sendall(text.encode())
            return read(connection)

    def get(self, path: str, host: str = "localhost") -> bytes:
        return self.ask(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")

    def begin(self, path: str, **headers: str) -> bytes:
        """Ask for a path, and return the beginning of the answer; ``sec_fetch_site`` is ``Sec-Fetch-Site``."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        with self.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
            return connection.recv(1 << 10)


class Looking(LedgerObserver):
    """Shows what is in a pane, or what a test's function returns, instead of a ledger."""

    def __init__(self, pane: Pane, look: Callable[[], View] | None = None) -> None:
        self._pane = pane
        self._look = look

    @property
    def revision(self) -> int:  # type: ignore[override]
        return self._pane.revision

    def snapshot(self, *, everything: bool) -> Snapshot:
        return Snapshot(self._look() if self._look else self._pane.view, self.revision)


def read(connection: socket.socket) -> bytes:
    said = b""
    try:
        while more := connection.recv(1 << 16):
            said += more
    except ConnectionResetError:
        pass
    return said


@contextmanager
def watching(view: View, look: Callable[[], View] | None = None, token: bytes | None = None) -> Iterator[Pane]:
    """A window on a port of this host, over ``view``, or whatever ``look`` gives; it may ask for a token."""
    listener = socket.create_server(("127.0.0.1", 0))
    pane = Pane(listener.getsockname()[1], view)
    with looping() as loop:
        routes = Site(loop, Looking(pane, look), BrokerCounters(), everything=True).routes
        window = HttpThread(listener, TokenCheck(token, routes, routes if token is None else None))
        try:
            yield pane
        finally:
            window.close()
