"""A host that exports, within this process, and what tests of it need."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.integrations.cluster import exporter
from cubroker.integrations.cluster.connection import PeerAddress, PeerConnection
from cubroker.integrations.cluster.exporter import Exporter, Meter, Rules
from cubroker.protocol import Layout
from tests.brokers import PATIENCE

HOST = "127.0.0.1"


class Certificates:
    """An authority, and certificates of it that are made as they are asked for, once each."""

    def __init__(self, folder: Path) -> None:
        from cubroker.integrations.cluster import certificates as making

        self._folder = folder
        self._issue = making.issue
        self.authority = making.make_authority(folder / "authority").parent
        #: Of a host whose user may read all.
        self.host = self.of("root", HOST, "::1", "localhost")

    def of(self, user: str, *hosts: str, days: float = 1, called: str = "") -> Path:
        """Return the folder with a user's certificate."""
        folder = self._folder / (called or "-".join(("of", user, *hosts, str(days))).replace(":", "."))
        if not folder.exists():
            self._issue(self.authority, folder, user, hosts, days=days)  # type: ignore[arg-type]
        return folder


def private_key(password: bytes = b"") -> bytes:
    """Return a new key as PEM, with a password if one is given."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(encoding, kind, lock)


class Recorder(Meter):
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self.whole: list[str] = []
        self.refusals: list[str] = []

    def watch(self, service: Exporter) -> None:
        self.service = service

    def read(self, pool: str, nbytes: int) -> None:
        self.nbytes[pool] = self.nbytes.get(pool, 0) + nbytes

    def took(self, pool: str) -> None:
        self.whole.append(pool)

    def refused(self, code: str) -> None:
        self.refusals.append(code)


class Serving:
    """An exporter that serves on a thread of this process."""

    def __init__(self, service: Exporter, address: PeerAddress, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self.service = service
        self.address = address
        self.meter: Recorder
        self._loop = loop
        self._folder = folder

    def connect(self, folder: Path | None = None) -> PeerConnection:
        """Connect with a certificate, by default the host's own."""
        return PeerConnection(self.address, folder or self._folder)

    def greet(self, folder: Path | None = None) -> str:
        """Connect, and end the connection; returns the user who this peer is there."""
        with self.connect(folder) as connection:
            return connection.user

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function on the exporter's thread, and return when it has; raises what it raises."""

        async def called() -> None:
            function()

        asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE)


@contextmanager
def exporting(
    directory: Path,
    folder: Path,
    meter: Meter | None = None,
    connect: Callable[[Path | None], Broker] = Broker,
    **rules: Any,
) -> Iterator[Serving]:
    """Serve with these rules; an exception that the event loop gets is a failure, and so is a task that stays."""
    meter = meter or Recorder()
    service = Exporter(directory, folder, Rules(**rules), meter, connect)
    loop = asyncio.new_event_loop()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    thread = Thread(target=loop.run_forever)
    thread.start()

    def run(steps: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(steps, loop).result(PATIENCE)

    async def finish() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
            assert not pending, pending
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    opened = service.serving(HOST, 0)
    try:
        found = Serving(service, PeerAddress(*run(opened.__aenter__())), loop, folder)
        found.meter = meter  # type: ignore[assignment]
        try:
            yield found
        finally:
            run(opened.__aexit__(None, None, None))
            run(finish())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert not faults, faults


def children(module: str) -> list[int]:
    """The processes that this one has started to run a module, and that have not ended."""
    pids: list[str] = []
    for each in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            pids += each.read_text().split()
    found = []
    for pid in map(int, pids):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def sources() -> list[int]:
    """The processes that exporters of this process have started, each for a peer."""
    return children(exporter.SOURCE)


LAYOUT = Layout.pack([("a", "U8", (300,)), ("b", "U8", (400,))], slab=512)
"""Two allocations."""


def content(seed: int = 1) -> bytes:
    """The bytes of ``a`` and ``b``."""
    return bytes([seed]) * 700


def publish(directory: Path, name: str, seed: int = 1, *, digest: Any = False, **options: Any) -> int:
    """Publish a version with two small allocations."""
    data = content(seed)
    with Broker(directory) as broker, broker.create(name, LAYOUT, **options) as draft:
        draft["a"].copy_from_bytes(data[:300])
        draft["b"].copy_from_bytes(data[300:])
        return draft.seal(digest=digest)


def leases(directory: Path) -> int:
    """How many there are."""
    with Broker(directory) as broker:
        return sum(pool.leases for pool in broker.pools())


def here() -> str:
    """The folder with the modules that run as programs."""
    return os.fspath(Path(__file__).parent)


def nobody() -> str:
    """A user who is neither this one nor root."""
    try:
        return pwd.getpwnam("nobody").pw_name
    except KeyError:
        pytest.skip("this host has no user nobody")
