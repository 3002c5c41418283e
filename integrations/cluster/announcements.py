"""Announcements of a fetch to the exporter of its own host: which bytes of its draft other hosts can read already.

The exporter listens at a Unix socket in the abstract namespace. The socket's name is made from the device and inode of
the broker's directory, because that directory may have another path in a container. Any process can bind an abstract
name first, and any process of the same network namespace can connect. So both sides ask the kernel for the other's
user:

- The exporter accepts the announcement of a draft from the user who owns the draft, from root and from its own user. It
  asks the broker what the draft is, and who may read it.
- The fetch announces a draft only to a process whose user may attach to it, and so learns nothing new from that.

The fetch sends the runs that are there when they have changed, at most every :data:`~messages.NEWS` seconds. When the
fetch is done, or killed, the connection ends, and the exporter asks the broker whether the version is published.

A fetch continues without an exporter, and looks for one every :data:`AGAIN` seconds. An exporter that cannot bind the
name, because another exporter of the same broker has it, offers published versions alone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from cubroker.client import Broker, digests
from cubroker.client.transport.handshake import CREDENTIALS
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import BOOT, Account, can_read, host_id, readable
from cubroker.integrations.cluster.messages import MAX_ANNOUNCE, NEWS, Announce, Available, DraftContent, Going
from cubroker.integrations.cluster.striping import Runs, piece_size
from cubroker.protocol.errors import (
    CubrokerError,
    Denied,
    Invalid,
    NotFound,
    OverQuota,
    Retired,
    Unavailable,
    Unsupported,
)
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import IPC
from cubroker.protocol.status import PoolInfo

if TYPE_CHECKING:
    from cubroker.client import Draft  # which an exporter does not need

log = logging.getLogger(__name__)

SO_PEERGROUPS = 59
"""The groups of the process at the other end (asm-generic/socket.h; Python does not name it)."""

ROOT = 0

LIMIT = 10.0
"""Seconds for a message to arrive, or to be sent."""

LEAVE = 1.0
"""Seconds that the thread has to end."""

AGAIN = 1.0
"""Seconds after which a fetch looks for an exporter again."""

PUBLISHED = frozenset({"current", "superseded"})
"""States of a version that has been published and still exists."""

FINAL = (Denied, NotFound, Retired, Invalid, Unsupported)
"""Errors after which the same announcement would be refused again."""

CONNECTIONS, OF_A_USER = 256, 32
"""Fetches of this host that an exporter listens to at the same time: of all users together, and of one user."""

MEMORY = 32 << 20
"""Bytes that announcements of drafts may have together; those of large models have 100 KiB."""


def name_of(directory: Path) -> bytes:
    """Return the address at which the exporter of a broker listens to fetches of its host.

    Raises:
        FileNotFoundError: the broker's directory, or the id of the host's boot, cannot be read.
    """
    host = host_id(directory)
    if not host:
        raise FileNotFoundError(errno.ENOENT, f"{directory} or {BOOT} cannot be read")
    return b"\0cubroker-export-" + host.hex().encode()


def account_of(connection: socket.socket) -> Account:
    """Return the user at the other end, as the kernel knows it; if this side has connected, the user who listens."""
    _, uid, gid = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    raw = b""
    with suppress(OSError):  # the user has more groups than the buffer holds: it counts as one that has none
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)
    return Account(f"user {uid}", uid, frozenset([gid, *(group for (group,) in struct.iter_unpack("I", raw))]))


# -- the fetch -----------------------------------------------------------------------------------------


class DraftAnnouncement:
    """Announces a draft to the exporter of this host, on a thread of its own, until it is closed.

    Args:
        sums: the digest that each allocation will have.
        have: returns the runs that are there, as bits; any thread may call it.
        mode: the mode that the pool gets with this version; None: the pool keeps its mode.
    """

    def __init__(
        self, broker: Broker, draft: Draft, sums: Sequence[bytes], have: Callable[[], int], mode: int | None = None
    ) -> None:
        self._broker = broker
        self._name, self._version = draft.name, draft.version
        self._sums = tuple(sums)
        self._piece = piece_size(draft.layout.nbytes)
        self._have = have
        self._mode = mode
        self._over = Event()
        self._thread = Thread(target=self._run, name="cubroker-announcement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the announcement. A version that is published by now stays on offer; an unpublished one does not."""
        self._over.set()
        self._thread.join(LEAVE)  # an exporter that hangs delays no fetch; its connection ends with this process

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._announce()
            except OSError:  # there is no exporter, or it has ended
                pass
            except CubrokerError as error:
                text = "%s@%d is not offered to other hosts while it is being fetched: %s"
                log.info(text, self._name, self._version, error.message)
                if isinstance(error, FINAL):
                    return
            self._over.wait(AGAIN)

    def _announce(self) -> None:
        """Connect and announce the draft, until this is closed; raises ``CubrokerError`` if the exporter refuses it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(LIMIT)
            connection.connect(name_of(self._broker.directory))
            account = account_of(connection)
            info, *_ = self._broker.describe(self._name, self._version)
            if account.uid != self._broker.uid and not can_read(account, info, self._mode):
                raise Denied(f"the exporter of this host runs as {account.name}, who may not read it")
            said = self._have()
            host = host_id(self._broker.directory)
            self._ask(connection, Announce(host, self._name, self._version, self._mode))
            content = DraftContent(digests.DEFINITION, self._sums, self._piece, messages.to_runs(said))
            self._ask(connection, content)
            while not self._over.wait(NEWS):
                if readable(connection):  # the exporter has no more messages to send: it has ended
                    return
                if (have := self._have()) != said:
                    said = have
                    connection.sendall(messages.frame(Available(messages.to_runs(have))))

    def _ask(self, connection: socket.socket, message: messages.Local) -> None:
        connection.sendall(messages.frame(message))
        messages.expect(_reply(connection), Going)


def _reply(connection: socket.socket) -> messages.Reply:
    with connection.makefile("rb") as stream:
        body = messages.read(stream, messages.MAX_REQUEST)
    if not body:
        raise ConnectionResetError
    return messages.reply(body)


# -- the exporter --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AnnouncedDraft:
    """A draft that a fetch of this host fills."""

    name: str
    version: int
    digests: tuple[bytes, ...]
    #: The result of :func:`messages.content`.
    content: bytes
    #: The runs that the version is cut into.
    cut: Runs
    #: The mode that the pool gets with this version; None: the pool keeps its mode.
    mode: int | None
    #: The runs that are there, as in messages; None: the version is published.
    runs: bytes | None
    #: Whether it will never be published.
    gone: bool = False
    #: Set when one of these fields has changed, and then replaced by another event.
    change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nbytes(self) -> int:
        """Bytes that are there. Any thread may ask."""
        runs = self.runs
        return self.cut.total if runs is None else self.cut.nbytes(runs)

    def changed(self) -> None:
        """Wake all tasks that wait for a change."""
        self.change.set()
        self.change = asyncio.Event()


class Announcements:
    """The drafts that fetches of this host announce to its exporter. To be used in one event loop.

    Args:
        live: returns the broker; it blocks, so it is not called in the event loop.
        warn: logs a line that any process of the host can cause.
    """

    def __init__(self, live: Callable[[], Broker], warn: Callable[..., None]) -> None:
        self._live = live
        self._warn = warn
        #: Bytes that the announcement of each draft may have.
        self._expected: dict[tuple[str, int], int] = {}
        #: The drafts that are being filled, by name and number.
        self.drafts: dict[tuple[str, int], AnnouncedDraft] = {}
        #: The user of each connection, by the task that serves it.
        self._connections: dict[asyncio.Task[None], int] = {}
        self._ending = False

    @asynccontextmanager
    async def listening(self, directory: Path) -> AsyncIterator[None]:
        """Listen within an ``async with`` block, if the socket's name can be bound."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.bind(name_of(directory))
        except OSError as error:
            end.close()
            log.warning("versions that this host fetches are offered only once they are published: %s", error.strerror)
            yield
            return
        server = await asyncio.start_unix_server(self._accept, sock=end, limit=MAX_ANNOUNCE)
        try:
            yield
        finally:
            self._ending = True
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        account = account_of(writer.get_extra_info("socket"))
        self._connections[task] = account.uid
        users = [*self._connections.values()]
        try:
            if len(users) <= CONNECTIONS and users.count(account.uid) <= OF_A_USER:
                await self._listen(account, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the connection has ended, and is closed below
        except CubrokerError as error:
            text = "a version that %s fetches is not offered to other hosts while it is being fetched: %s"
            self._warn(text, account.name, error.message)
            with suppress(OSError):
                writer.write(messages.frame(messages.refusal(error)))
        except asyncio.CancelledError:  # the exporter ends
            pass
        finally:
            del self._connections[task]
            writer.close()

    async def _listen(self, account: Account, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        announced = await _next(reader, MAX_ANNOUNCE, LIMIT)
        if not isinstance(announced, Announce):
            raise Invalid("it did not begin with an announcement")
        info, layout = await asyncio.to_thread(self._check, account, announced)
        key, runs = (info.name, info.version), Runs(layout.allocations)
        with self._expecting(key, messages.content_limit(len(layout.allocations), runs.count)) as limit:
            writer.write(messages.frame(Going()))
            content = await _next(reader, limit, LIMIT)
            draft = _described(announced, content, layout, runs)
            log.info("%s@%d is offered to other hosts while it is being fetched", *key)
            self.drafts[key] = draft
            try:
                await self._follow(draft, reader, writer)
            finally:
                del self.drafts[key]
                if not self._ending:
                    await self._settle(draft)

    @contextmanager
    def _expecting(self, key: tuple[str, int], nbytes: int) -> Iterator[int]:
        """Expect the announcement of a draft, of at most ``nbytes``, within a ``with`` block.

        Raises:
            Unavailable: another connection announces the same draft.
            OverQuota: all expected announcements together would have too many bytes.
        """
        if key in self._expected:
            raise Unavailable("another connection has announced it")
        if nbytes + sum(self._expected.values()) > MEMORY:
            raise OverQuota(f"earlier announcements leave no room for another {nbytes} bytes; try again later")
        self._expected[key] = nbytes
        try:
            yield nbytes
        finally:
            del self._expected[key]

    async def _follow(self, draft: AnnouncedDraft, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the runs of a draft from its fetch, until the connection ends."""
        limit = messages.runs_limit(draft.cut.count)
        writer.write(messages.frame(Going()))
        while isinstance(told := await _next(reader, limit), Available) and told.runs is not None:
            messages.from_runs(told.runs, draft.cut.count)
            draft.runs = told.runs
            draft.changed()
            await asyncio.sleep(NEWS / 2)  # a fetch that sends more often than it should has to wait
        raise Invalid("it sent an unexpected message after the announcement")

    async def _settle(self, draft: AnnouncedDraft) -> None:
        """Find out whether a draft was published, and wake the tasks that wait for a change."""
        try:
            published = await asyncio.to_thread(self._published, draft)
        except CubrokerError as error:
            self._warn("whether %s@%d was published is not known: %s", draft.name, draft.version, error.message)
            published = False
        if published:
            draft.runs = None
        else:
            draft.gone = True
        draft.changed()

    def _published(self, draft: AnnouncedDraft) -> bool:
        try:
            info, *_ = self._live().describe(draft.name, draft.version)
        except (NotFound, Retired, Denied):
            return False
        # A discarded draft that others still read is retired, too: then only the time of publication, which not all
        # brokers report, tells it from a version that was published.
        return info.state in PUBLISHED or info.published is not None

    def _check(self, account: Account, announced: Announce) -> tuple[PoolInfo, Layout]:
        """Return the broker's description of a draft; raises ``CubrokerError`` if this user may not announce it."""
        broker = self._live()
        if announced.host != host_id(broker.directory):
            raise Invalid("it is a draft of another broker")
        if not broker.lends_drafts:
            raise Unsupported("the broker is too old to lend drafts to readers; upgrade it")
        info, layout, _ = broker.describe(announced.name, announced.version)
        if account.uid not in (ROOT, os.geteuid(), info.owner):
            raise Denied(f"{announced.name}@{announced.version} is another user's")
        if info.state != "draft" or info.sharded:
            raise _unfit(announced)
        if info.share == IPC and os.geteuid() not in (ROOT, broker.uid, info.owner):  # the broker lends it to no other
            raise Unsupported(f"{announced.name}@{announced.version} is `ipc`, and is offered once it is published")
        return info, layout


def _described(announced: Announce, content: messages.Local, layout: Layout, runs: Runs) -> AnnouncedDraft:
    """Return a draft as it was announced; raises ``Invalid`` if that does not fit the broker's description of it."""
    if not isinstance(content, DraftContent):
        raise Invalid("its announcement was not followed by a description of the draft")
    fits = len(content.digests) == len(layout.allocations) and content.piece == runs.piece
    if not fits or content.algorithm != digests.DEFINITION:
        raise _unfit(announced)
    messages.from_runs(content.runs, runs.count)
    return AnnouncedDraft(
        name=announced.name,
        version=announced.version,
        digests=content.digests,
        content=messages.content(layout.encode(), content.algorithm, content.digests),
        cut=runs,
        mode=announced.mode,
        runs=content.runs,
    )


def _unfit(announced: Announce) -> Invalid:
    return Invalid(f"{announced.name}@{announced.version} is no draft that can be offered to other hosts")


async def _next(reader: asyncio.StreamReader, limit: int, wait: float | None = None) -> messages.Local:
    """Return the next message, of at most ``limit`` bytes.

    It has to begin within ``wait`` seconds, and the rest of it has to arrive within ``LIMIT`` seconds more.

    Raises:
        Invalid: the message has more bytes, or cannot be decoded.
        TimeoutError: it does not arrive in time.
    """
    async with asyncio.timeout(wait):
        head = await reader.readexactly(messages.LENGTH.size)
    async with asyncio.timeout(LIMIT):
        return messages.local(await reader.readexactly(messages.length(head, limit)))
