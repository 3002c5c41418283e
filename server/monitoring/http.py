"""Metrics and a page over HTTP, on a thread of their own: on a loopback port, or a Unix socket with a mode.

Parsing, encoding and slow readers occupy only this thread. It asks the broker's loop for a snapshot now and then. That
is not an event of the broker: it changes nothing, so no stage of the broker handles it.

Readers may be slow, hostile or many, and must cost the broker nothing. So a reader has a bounded time to send its
request and to receive each piece of the reply, and the numbers of connections and streams are bounded. The standard
library's ``http.server``, which prometheus_client uses, limits only the time of each single read and write, and has a
thread for each connection. So h11 parses and writes HTTP here, and asyncio enforces the time limits.

Programs send the token as ``Authorization: Bearer TOKEN`` (RFC 6750), browsers as the password of HTTP Basic (RFC
7617), with any user name. Browsers keep such a password for one scheme, host and port, so another user's port on this
host gets none of it; a cookie would go to every port.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import gzip
import hashlib
import hmac
import ipaddress
import logging
import os
import platform
import pwd
import re
import socket
import stat
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from threading import Thread

import h11
import msgspec

from cubroker.protocol.encoding import encode_json
from cubroker.protocol.errors import InternalFailure, Invalid, explain
from cubroker.protocol.messages import View
from cubroker.protocol.status import HIDDEN_ID
from cubroker.server.config.schema import Address, Metrics
from cubroker.server.monitoring.metrics import CONTENT_TYPE, BrokerCounters, MetricsWriter
from cubroker.server.monitoring.observer import LedgerObserver, Snapshot
from cubroker.server.transport.unix_sockets import BoundSocket, overflow_id

log = logging.getLogger(__name__)

MAX_HEAD = 8192  #: Bytes of a request: its line and its headers.
MAX_CONNECTIONS = 32  #: Connections at the same time; further ones are closed. Each uses a descriptor of the broker.
MAX_STREAMS = 8  #: How many of these may have an endless reply.
TIMEOUT = 10.0  #: Seconds that a reader may take to send its request, and to receive each piece of the reply.
CHUNK = 64 << 10  #: Bytes of a piece.
GZIP_LEVEL = 3  #: A view of 200 pools, 130 KB, takes a third of a millisecond and becomes 12 KB; level 6 takes 0.8 ms.
MIN_GZIP = 1024  #: Bytes of a body that is worth compressing.
MAX_TOKEN_FILE = 1024  #: Bytes of a token file.
TOKEN = re.compile(rb"[!-~]{16,}")  #: A token: printable, without spaces, and too long to be guessed if it is random.
FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP  #: Bits that the mode of a token file must not have.

HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Connection", "close"),
)

CHALLENGE = (("WWW-Authenticate", 'Basic realm="cubroker", charset="UTF-8"'), ("WWW-Authenticate", "Bearer"))
"""Asks a reader for the token: a browser asks its user."""

Body = bytes | AsyncIterator[bytes]

BACKLOG = 32  #: Connections that may wait to be accepted.
EVENT_INTERVAL = 1.0  #: Seconds between two pictures, at least: more would be of no use to people.
HEARTBEAT = 10  #: Intervals after which a stream without news gets a comment, so that a dead reader is found.
MIN_AGE = 0.5  #: Seconds for which a snapshot is reused, at least.
COST_FACTOR = 20  #: It is reused for so many times as long as it took: a twentieth of the loop's time at most.
VIEW_TIMEOUT = 5.0  #: Seconds that the loop may take before a reader is told that it does not answer.


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response: a whole body, or a stream that ends when its reader disconnects."""

    #: The media type.
    kind: str
    body: Body
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Routes = Mapping[str, Callable[[], Awaitable[HttpResponse]]]  #: The functions that make the responses, by path.


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Decides which routes a reader may use."""

    #: The token that opens everything; None if no token is required.
    token: bytes | None
    #: The routes for readers who send the token.
    everything: Routes
    #: The routes for readers who send no token; None if they must send it.
    otherwise: Routes | None

    def admit(self, headers: Mapping[bytes, bytes]) -> Routes | None:
        """Return the routes for the sender of a request with these headers; None if it must send the token."""
        shown = headers.get(b"authorization")
        if self.token is None or shown is None:
            return self.otherwise
        return self.everything if hmac.compare_digest(_token(shown), self.token) else None


def _token(authorization: bytes) -> bytes:
    """Return the token of a header, an empty one if it has none."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class HttpServer:
    """Answers each connection with the response of its path's route, if ``check`` lets the reader use that route."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams = 0
        self._closed = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it."""
        if self._closed or len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
        else:
            task = asyncio.create_task(self._serve(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections, also later ones: asyncio's server waits for all of them, and streams have no end."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            try:
                async with asyncio.timeout(TIMEOUT):
                    while (event := http.next_event()) is h11.NEED_DATA:
                        http.receive_data(await reader.read(MAX_HEAD))
            except h11.RemoteProtocolError as error:
                await self._send(http, writer, _error(error.error_status_hint, str(error)))
            else:
                if isinstance(event, h11.Request):  # and not the end of a connection without one
                    response = await self._respond(event)
                    if _takes_gzip(dict(event.headers).get(b"accept-encoding", b"")):
                        response = _compressed(response)
                    await self._send(http, writer, response, empty=event.method == b"HEAD")
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            log.debug("a reader of metrics lost its connection: %r", error)
        finally:
            writer.transport.abort()

    async def _respond(self, request: h11.Request) -> HttpResponse:
        path = request.target.partition(b"?")[0].decode("ascii")
        headers = dict(request.headers)
        if not _is_here(headers.get(b"host", b"").decode("ascii", "replace")):
            return _error(
                421, "this address serves requests to localhost, 127.0.0.1 and [::1] only; use one of these names"
            )
        if _is_foreign(path, headers):
            return _error(403, "a page of another origin has no access here; open / in a tab of its own")
        routes = self._check.admit(headers)
        if routes is None:
            return _error(401, "this takes the token of this broker's metrics, as Bearer or as a password", CHALLENGE)
        if request.method not in (b"GET", b"HEAD"):
            return _error(405, "there is nothing here to change; use GET")
        if path not in routes:
            return _error(404, f"there is no such path; the paths are {', '.join(routes)}")
        try:
            return await routes[path]()
        except TimeoutError:
            return _error(503, "the broker does not answer")
        except InternalFailure as error:
            return _error(500, error.message)

    async def _send(
        self, http: h11.Connection, writer: asyncio.StreamWriter, response: HttpResponse, *, empty: bool = False
    ) -> None:
        if not isinstance(response.body, bytes) and self._streams >= MAX_STREAMS:
            response = _error(503, f"{MAX_STREAMS} readers watch already; close one of them")
        body = response.body
        length = [("Content-Length", str(len(body)))] if isinstance(body, bytes) else []
        headers = [("Content-Type", response.kind), *length, *HEADERS, *response.headers]
        await _write(writer, http.send(h11.Response(status_code=response.status, headers=headers)))
        if isinstance(body, bytes):
            for start in range(0, 0 if empty else len(body), CHUNK):
                await _write(writer, http.send(h11.Data(body[start : start + CHUNK])))
            await _write(writer, http.send(h11.EndOfMessage()))
            with suppress(TimeoutError, OSError):  # closing immediately would lose what is not read yet
                async with asyncio.timeout(TIMEOUT):
                    writer.close()
                    await writer.wait_closed()
        elif not empty:
            self._streams += 1
            try:
                async for piece in body:
                    await _write(writer, http.send(h11.Data(piece)))
            finally:
                self._streams -= 1


def _error(status: int, reason: str, headers: tuple[tuple[str, str], ...] = ()) -> HttpResponse:
    return HttpResponse("text/plain; charset=utf-8", f"{reason}\n".encode(), status, headers)


def _takes_gzip(accepted: bytes) -> bool:
    """Whether a value of ``Accept-Encoding`` names gzip (RFC 9110, section 12.5.3)."""
    for coding in accepted.lower().split(b","):
        name, _, weight = coding.replace(b" ", b"").partition(b";q=")
        if name == b"gzip":
            return not weight or weight.strip(b"0.") != b""
    return False


def _compressed(response: HttpResponse) -> HttpResponse:
    """Return a response as gzip, if it is long."""
    body = response.body
    if isinstance(body, bytes) and len(body) < MIN_GZIP:
        return response
    packed = gzip.compress(body, GZIP_LEVEL) if isinstance(body, bytes) else _compressed_pieces(body)
    return replace(response, body=packed, headers=(*response.headers, ("Content-Encoding", "gzip")))


async def _compressed_pieces(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces as one gzip stream, flushed so that a reader can decode each piece when it arrives."""
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    async for piece in pieces:
        yield packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)


async def _write(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    if data:
        writer.write(data)
        async with asyncio.timeout(TIMEOUT):  # and not wait_for, which may lose a cancellation in Python 3.11
            await writer.drain()


def _is_foreign(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another origin sent a request, other than one for ``/`` as the document of a tab.

    Such a page cannot read the response, but each request holds a connection, and ``/events`` a stream permanently.
    Another port of this host is another origin, and may be another user's. Programs other than browsers send no
    ``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/).
    """
    if headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin"):
        return False
    into = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return path != "/" or into != (b"navigate", b"document")


def _is_here(host: str) -> bool:
    """Whether ``Host`` is localhost or a loopback address: a foreign name that resolves to this host is neither."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> bytes:
    """Return the token in a file; raises ``Invalid`` if it has none, or others than root and this user have access."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(MAX_TOKEN_FILE + 1)
    except OSError as error:
        raise Invalid(f"cannot read the token in {path}: {explain(error, path)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Invalid(f"the token file {path} is no regular file")
    if status.st_uid not in (0, os.geteuid(), overflow_id("uid")):
        raise Invalid(f"the token file {path} belongs to user {status.st_uid}; have root or the broker's user own it")
    if (mode := stat.S_IMODE(status.st_mode)) & FORBIDDEN_MODE:
        raise Invalid(f"the token file {path} has mode {mode:03o}, which is for others too; `chmod 600 {path}`")
    token = content.strip()
    if len(content) > MAX_TOKEN_FILE or not TOKEN.fullmatch(token):
        raise Invalid(
            f"the token file {path} has no token of 16 to {MAX_TOKEN_FILE} printable characters without spaces;"
            f" write one with `head -c 24 /dev/urandom | base64`"
        )
    return token


# -- what is served ------------------------------------------------------------------------------------


def start(metrics: Metrics, observer: LedgerObserver, counters: BrokerCounters) -> HttpThread | None:
    """Serve metrics and the page, where ``metrics`` says, until the result is closed.

    A reader who sends the token of ``metrics.token_file`` sees everything; without such a file, so does everybody who
    may connect to the Unix socket. Others see what strangers to all pools may see, if ``metrics.public`` is set, or
    nothing. If the address or the token cannot be used, the reason is logged and the result is None: the broker then
    serves without metrics.
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
            listener = _listen(where)
    except OSError as error:
        name = where if isinstance(where, Path) else _written(*where)
        log.error("there are no metrics, since this process cannot listen on %s: %s", name, explain(error, str(where)))
        return None
    except Invalid as error:
        log.error("there are no metrics: %s", error.message)
        return None
    _page()  # read now: later the file may be of another release
    site = partial(Site, asyncio.get_running_loop(), observer, counters)
    everything = site(everything=True).routes
    otherwise = everything if bound and token is None else None
    if otherwise is None and metrics.public:
        otherwise = site(everything=False).routes
    thread = HttpThread(listener, TokenCheck(token, everything, otherwise), bound)
    log.info("metrics, and a page to look at, are on %s, %s", _name(listener), _readers(metrics))
    return thread


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:  # Python appends the address to the system's text, as a tuple
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None


def _readers(metrics: Metrics) -> str:
    """Return a text that says who can read the metrics."""
    unix, mode = isinstance(metrics.listen, Path), f"mode {metrics.access.mode:03o} admits"
    if unix and metrics.token_file is None:
        return f"for users whom {mode}"
    bearers = "for readers with the token" if metrics.token_file is not None else ""
    strangers = "for everybody, limited to what strangers may know" if metrics.public else ""
    readers = " and ".join(filter(None, (bearers, strangers)))
    return f"{readers}, if {mode} them" if unix else readers


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    return f"http://{_written(*address[:2])}/"


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpThread:
    """Serves on a listening socket, on a thread of its own. Closing it also closes the socket and removes its file."""

    def __init__(self, listener: socket.socket, check: TokenCheck, bound: BoundSocket | None = None) -> None:
        self._listener = listener
        self._check = check
        self._bound = bound
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run, name="monitoring")
        self._thread.start()

    def close(self) -> None:
        """Stop serving. This takes a moment, in which the broker's loop must not be blocked."""
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

    They are made of snapshots, which are taken on the broker's ``loop``, no more often than :data:`COST_FACTOR` allows,
    and have ``everything``, or else what strangers may know.
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
        # The time limit includes the lock: all readers that wait for it wait for the same loop.
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
            if not taken.done():  # because of a bug, whose exception the loop logs
                taken.set_exception(
                    InternalFailure("the broker failed at taking a snapshot of its state; its log says more")
                )

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
            await asyncio.sleep(EVENT_INTERVAL)  # all changes in this time are in one picture


def _encode(view: View) -> bytes:
    """Return the page's data for a view, as one line of JSON."""
    users = {client.uid for client in view.clients} | {block.owner for block in view.blocks}
    users |= {pool.owner for pool in view.pools}
    return encode_json(
        {
            "time": time.time(),
            "host": platform.node(),
            "users": {str(uid): _user_name(uid) for uid in sorted(users)},
            **msgspec.structs.asdict(view),
        }
    )


@cache
def _user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is no name."""
    if uid == HIDDEN_ID:
        return "other users"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def _page() -> HttpResponse:
    """Return the page, with a security policy that permits its own script and style, and nothing else."""
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
