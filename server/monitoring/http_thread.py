"""The thread that serves metrics, the page, and the page's data: on a loopback port, or a Unix socket with a mode.

Parsing, encoding and slow readers are this thread's alone. It asks the broker's loop for a snapshot now and then. That
is no event of the broker's: it changes nothing, so no stage of the broker knows of it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import platform
import pwd
import re
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Thread

import msgspec

from cubroker.protocol.errors import InternalFailure, Invalid, explain
from cubroker.protocol.messages import View
from cubroker.protocol.status import HIDDEN_ID
from cubroker.server.config.schema import Metrics
from cubroker.server.monitoring.http import HttpResponse, HttpServer, Routes, TokenCheck, read_token
from cubroker.server.monitoring.metrics import CONTENT_TYPE, BrokerCounters, MetricsWriter
from cubroker.server.monitoring.observer import LedgerObserver, Snapshot
from cubroker.server.transport.unix_sockets import BoundSocket

log = logging.getLogger(__name__)

BACKLOG = 32  #: Connections that may wait to be accepted.
EVENT_INTERVAL = 1.0  #: Seconds between two pictures, at least: more are of no use to eyes.
HEARTBEAT = 10  #: Intervals after which a stream without news gets a comment, so that a dead reader is found.
MIN_AGE = 0.5  #: Seconds for which a snapshot is good enough.
COST_FACTOR = 20  #: It is good enough for as many times as long as it took: a twentieth of the loop's time at most.
VIEW_TIMEOUT = 5.0  #: Seconds that the loop may take before a reader is told that it does not answer.


def start(metrics: Metrics, observer: LedgerObserver, counters: BrokerCounters) -> HttpThread | None:
    """Serve metrics and the page, where ``metrics`` says, until the result is closed.

    A reader who shows the token of ``metrics.token_file`` sees everything; without such a file, so does everybody who
    may connect to the Unix socket. Others see what strangers to all pools may, if ``metrics.public`` says so, and else
    nothing. None, and a line in the log, if the address or the token cannot be used: the broker serves without.
    """
    where = metrics.listen
    assert where is not None
    bound: BoundSocket | None = None
    try:
        token = None if metrics.token_file is None else read_token(metrics.token_file)
        if isinstance(where, Path):
            bound = BoundSocket(where, socket.SOCK_STREAM, metrics.access, BACKLOG)
            listener = bound.listener
        else:
            family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
            listener = socket.create_server(where, family=family, backlog=BACKLOG)
    except OSError as error:
        log.error("there are no metrics, since this process cannot listen on %s: %s", where, explain(error, str(where)))
        return None
    except Invalid as error:
        log.error("there are no metrics: %s", error.message)
        return None
    site = partial(Site, asyncio.get_running_loop(), observer, counters)
    everything = site(everything=True).routes
    otherwise = everything if bound and token is None else None
    if otherwise is None and metrics.public:
        otherwise = site(everything=False).routes
    thread = HttpThread(listener, TokenCheck(token, everything, otherwise), bound)
    log.info("metrics, and a page to look at, are on %s, %s", _name(listener), _readers(metrics))
    return thread


def _readers(metrics: Metrics) -> str:
    """Say in words who sees them."""
    bearers = "for who has the token" if metrics.token_file is not None else ""
    if isinstance(metrics.listen, Path):
        passing = f"for whom mode {metrics.access.mode:03o} lets pass"
        return f"{passing} and {bearers}" if bearers else passing
    strangers = "as far as strangers may know for everybody" if metrics.public else ""
    return " and ".join(filter(None, (bearers, strangers)))


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class HttpThread:
    """Serves on a listening socket, on a thread of its own, until it is closed, and with it the socket and its file."""

    def __init__(self, listener: socket.socket, check: TokenCheck, bound: BoundSocket | None = None) -> None:
        self._listener = listener
        self._check = check
        self._bound = bound
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run, name="monitoring")
        self._thread.start()

    def close(self) -> None:
        """Serve no more. It takes a moment, in which the broker's loop has to be free."""
        if self._bound:
            self._bound.remove()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        http = HttpServer(self._check)
        server = await asyncio.start_server(http.accept, sock=self._listener)
        async with server:
            await self._stop.wait()
            await http.close()


class Site:
    """The responses for one kind of reader, by path in ``routes``: the page, its data, and the metrics.

    They are made of snapshots, which are taken on the broker's ``loop``, no more often than that has time for, and show
    ``everything``, or else what strangers may know.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        observer: LedgerObserver,
        counters: BrokerCounters,
        *,
        everything: bool,
    ) -> None:
        self._loop = loop
        self._observer = observer
        self._everything = everything
        self._writer = MetricsWriter(counters.registry, everything=everything)
        self._turn = asyncio.Lock()
        self._latest: Snapshot | None = None
        self._until = 0.0
        self._encoded: tuple[View | None, bytes] = (None, b"")
        self.routes: Routes = {
            "/": self._get_page,
            "/metrics": self._get_metrics,
            "/view": self._get_view,
            "/events": self._get_events,
        }

    async def _get_page(self) -> HttpResponse:
        return _page()

    async def _get_metrics(self) -> HttpResponse:
        snapshot = await self.take()
        return HttpResponse(CONTENT_TYPE, self._writer.text(snapshot.view, snapshot.gauges))

    async def _get_view(self) -> HttpResponse:
        return HttpResponse("application/json", self._picture((await self.take()).view))

    async def _get_events(self) -> HttpResponse:
        return HttpResponse("text/event-stream", self._pictures())

    async def take(self) -> Snapshot:
        """Return a recent snapshot; raises ``TimeoutError`` if the loop does not answer."""
        # All readers that wait for the lock wait for the same loop, and time out as soon.
        async with asyncio.timeout(VIEW_TIMEOUT), self._turn:
            if self._latest is not None and time.monotonic() < self._until:
                return self._latest
            taken: Future[tuple[Snapshot, float]] = Future()
            self._loop.call_soon_threadsafe(self._take, taken)
            snapshot, cost = await asyncio.wrap_future(taken)
            self._latest, self._until = snapshot, time.monotonic() + max(MIN_AGE, COST_FACTOR * cost)
            return snapshot

    def _take(self, taken: Future[tuple[Snapshot, float]]) -> None:
        """Take a snapshot, on the broker's loop, unless its reader has given up."""
        if not taken.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            snapshot = self._observer.snapshot(everything=self._everything)
            taken.set_result((snapshot, time.monotonic() - began))
        finally:
            if not taken.done():  # by a mistake of ours, which the loop logs
                taken.set_exception(InternalFailure("the broker failed at looking at itself; its log says more"))

    def _picture(self, view: View) -> bytes:
        if self._encoded[0] is not view:
            self._encoded = (view, _encode(view))
        return self._encoded[1]

    async def _pictures(self) -> AsyncIterator[bytes]:
        """Yield a picture now, and whenever there is something new to see."""
        shown, quiet = -1, 0
        while True:
            # A snapshot that was taken for another reader may be older than the news: then the next one is taken.
            snapshot = await self.take() if self._observer.revision != shown else None
            if snapshot and snapshot.revision != shown:
                shown, quiet = snapshot.revision, 0
                yield b"data: " + self._picture(snapshot.view) + b"\n\n"
            elif quiet == HEARTBEAT:
                quiet = 0
                yield b": nothing new\n\n"
            quiet += 1
            await asyncio.sleep(EVENT_INTERVAL)  # a pace: all that is new meanwhile comes in one picture


def _encode(view: View) -> bytes:
    """Return the page's data for a view, as one line of JSON."""
    users = {client.uid for client in view.clients} | {block.owner for block in view.blocks}
    users |= {pool.owner for pool in view.pools}
    return msgspec.json.encode(
        {
            "time": time.time(),
            "host": platform.node(),
            "users": {str(uid): _user_name(uid) for uid in sorted(users)},
            **msgspec.structs.asdict(view),
        }
    )


@cache
def _user_name(uid: int) -> str:
    """Return the name of a user, or the number where there is none."""
    if uid == HIDDEN_ID:
        return "other users"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def _page() -> HttpResponse:
    """Return the page, with the policy that lets it run and show what is in it, and nothing else."""
    page = files(__package__).joinpath("page.html").read_bytes()
    hashes = {}
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        hashes[tag] = f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
    policy = (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; connect-src 'self';"
        f" img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HttpResponse("text/html; charset=utf-8", page, headers=(("Content-Security-Policy", policy),))
