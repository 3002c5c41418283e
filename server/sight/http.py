"""HTTP, as little as serves metrics and a page: a GET for each connection, and limits on whoever asks."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import h11

from cubroker.protocol.errors import InternalFailure
from cubroker.server.sight.tokens import CHALLENGE

log = logging.getLogger(__name__)

MAX_HEAD = 8192
"""Bytes of a request: its line and its headers."""

MAX_CONNECTIONS = 32
"""Connections at once; more are closed as they come. Each takes one of the broker's descriptors."""

MAX_STREAMS = 8
"""Of these, those that an endless answer may have."""

PATIENCE = 10.0
"""Seconds that a reader may take to say what it wants, and to take what was sent."""

CHUNK = 64 << 10

HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Connection", "close"),
)

Body = bytes | AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: all of it, or a stream that ends when its reader goes."""

    kind: str
    body: Body
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[], Awaitable[Reply]]
Routes = Mapping[str, Route]

Admit = Callable[[Mapping[bytes, bytes]], Routes | None]


def refusal(status: int, reason: str, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    """Return an answer that says what is wrong."""
    return Reply("text/plain; charset=utf-8", f"{reason}\n".encode(), status, headers)


@dataclass(slots=True)
class Service:
    """Answers each connection with what the route of its path gives.

    Args:
        admit: returns the routes that are there, by path, for the sender of a request with certain headers; None: it
            has to show a token.
    """

    admit: Admit
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _streams: int = 0
    _closed: bool = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it."""
        if self._closed or len(self._tasks) >= MAX_CONNECTIONS:
            return writer.transport.abort()
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        return task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections, and those that come yet: a server waits for the end of all, and streams have none."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            log.debug("a reader of metrics went: %r", error)
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            async with asyncio.timeout(PATIENCE):
                request = await _receive(http, reader)
        except h11.RemoteProtocolError as error:
            return await self._send(http, writer, refusal(error.error_status_hint, str(error)))
        if request is None:
            return None
        reply = await self._reply(request)
        return await self._send(http, writer, reply, empty=request.method == b"HEAD")

    async def _reply(self, request: h11.Request) -> Reply:
        path = request.target.partition(b"?")[0].decode("ascii")
        headers = dict(request.headers)
        if not _is_here(headers.get(b"host", b"").decode("ascii", "replace")):
            return refusal(421, "this is read by the names of this host alone: localhost, 127.0.0.1, [::1]")
        if _is_foreign(headers) and not (path == "/" and _is_link(headers)):
            return refusal(403, "a page of another origin has no access here; open / in a tab of its own")
        routes = self.admit(headers)
        if routes is None:
            return refusal(401, "this takes the token of this broker's metrics, as Bearer or as a password", CHALLENGE)
        if request.method not in (b"GET", b"HEAD"):
            return refusal(405, "there is nothing here to change; use GET")
        if path not in routes:
            return refusal(404, f"there is nothing there; there are {', '.join(routes)}")
        try:
            return await routes[path]()
        except TimeoutError:
            return refusal(503, "the broker does not answer")
        except InternalFailure as error:
            return refusal(500, error.message)

    async def _send(
        self, http: h11.Connection, writer: asyncio.StreamWriter, reply: Reply, *, empty: bool = False
    ) -> None:
        whole = isinstance(reply.body, bytes)
        if not whole and self._streams >= MAX_STREAMS:
            reply, whole = refusal(503, f"{MAX_STREAMS} watch already; close one of them"), True
        length = [("Content-Length", str(len(reply.body)))] if isinstance(reply.body, bytes) else []
        headers = [("Content-Type", reply.kind), *length, *HEADERS, *reply.headers]
        await _write(writer, http.send(h11.Response(status_code=reply.status, headers=headers)))
        if isinstance(reply.body, bytes):
            for start in range(0, 0 if empty else len(reply.body), CHUNK):
                await _write(writer, http.send(h11.Data(reply.body[start : start + CHUNK])))
            await _write(writer, http.send(h11.EndOfMessage()))
            with suppress(TimeoutError, OSError):  # what is not read yet is lost with the connection, so let it be read
                async with asyncio.timeout(PATIENCE):
                    writer.close()
                    await writer.wait_closed()
        elif not empty:
            await self._stream(http, writer, reply.body)

    async def _stream(self, http: h11.Connection, writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
        self._streams += 1
        try:
            async for piece in body:
                await _write(writer, http.send(h11.Data(piece)))
        finally:
            self._streams -= 1


async def _receive(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Return the request of a connection; None if it closes without one."""
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(MAX_HEAD))
    return event if isinstance(event, h11.Request) else None


async def _write(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    if data:
        writer.write(data)
        async with asyncio.timeout(PATIENCE):  # and not wait_for, which may lose a cancellation in Python 3.11
            await writer.drain()


def _is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another origin had the browser send a request.

    Such a page cannot read the answer, but each request holds a connection, and ``/events`` holds a stream for good.
    Another port of this host is another origin, and may be another user's. Programs other than browsers send no
    ``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/).
    """
    return headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")


def _is_link(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the user follows a link, into a tab and not into a frame."""
    return (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")


def _is_here(host: str) -> bool:
    """Whether a request names this host by an address of its own: a page elsewhere whose name leads here does not."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
