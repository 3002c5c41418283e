"""What a fetch tells the exporter of its own host: which bytes of its draft are there, so that other hosts read them.

The exporter listens at a Unix socket whose name, in the abstract namespace, follows from the broker's directory. A name
there is anybody's who comes first, and anybody of the same network namespace can connect, so both sides ask the kernel
whom they speak with:

- The exporter takes the announcement of a draft from the user who owns the draft, from root and from its own user. What
  the draft is, and who may read it, the broker says.
- The fetch tells of a draft only to a process whose user may attach to it, and so learns nothing new.

The fetch says which runs are there when that has changed, every :data:`~messages.NEWS` seconds at most. Once it is
done, or killed, the connection ends, and the broker says whether the version is published.

A fetch goes on without an exporter, and looks for one now and then. An exporter that cannot have the name, since
another one of the same broker has it, offers what is published alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread

from cubroker.client import Broker, digests
from cubroker.integrations.cluster import identity, messages
from cubroker.integrations.cluster.identity import Account
from cubroker.integrations.cluster.messages import NEWS, Announce, Available, Going
from cubroker.integrations.cluster.sources import cut, piece_size
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, Retired, Unsupported
from cubroker.protocol.messages import IPC
from cubroker.protocol.status import PoolInfo

log = logging.getLogger(__name__)

CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: pid, uid and gid."""

SO_PEERGROUPS = 59
"""The groups of the process at the other end (asm-generic/socket.h; Python does not name it)."""

ROOT = 0

LIMIT = 10.0
"""Seconds for a message to come, or to be taken."""

LEAVE = 1.0
"""Seconds that the thread has to end."""

AGAIN = 1.0
"""Seconds after which a fetch looks for an exporter again."""

PUBLISHED = frozenset({"current", "superseded"})
"""States of a version that has been published, and that there is."""

CONNECTIONS, OF_A_USER = 256, 32
"""Fetches of this host that an exporter listens to at once, of all users and of one."""


def name_of(directory: Path) -> bytes:
    """Return where the exporter of a broker listens to fetches of its host."""
    return b"\0cubroker-export-" + blake2b(os.fsencode(directory.resolve()), digest_size=16).hexdigest().encode()


def account_of(connection: socket.socket) -> Account:
    """Return the user at the other end, as the kernel tells it; the one who listens, if this side has connected."""
    _, uid, gid = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    raw = b""
    with suppress(OSError):  # more groups than Python asks for: it counts as one that has none
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)
    return Account(f"user {uid}", uid, frozenset([gid, *(group for (group,) in struct.iter_unpack("I", raw))]))


# -- the fetch -----------------------------------------------------------------------------------------


class DraftAnnouncement:
    """Tells the exporter of this host of a draft, on a thread of its own, until it is closed.

    Args:
        broker: the broker that has the draft.
        name: the pool.
        version: the draft's number.
        sums: the digest that each allocation will have.
        piece: bytes of the largest run.
        have: returns the runs that are there, as bits; any thread may call it.
        mode: the mode that the pool will have with it; None: the one that it has.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        version: int,
        sums: Sequence[bytes],
        piece: int,
        have: Callable[[], int],
        mode: int | None = None,
    ) -> None:
        self._broker = broker
        self._name = name
        self._version = version
        self._sums = tuple(sums)
        self._piece = piece
        self._have = have
        self._mode = mode
        self._over = Event()
        self._thread = Thread(target=self._run, name="cubroker-announcement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: what is published by now is offered as such, and what is not no longer."""
        self._over.set()
        self._thread.join(LEAVE)  # an exporter that hangs delays no fetch; its connection ends with this process

    def _run(self) -> None:
        try:
            info, *_ = self._broker.describe(self._name, self._version)
            while not self._over.is_set():
                with suppress(OSError):  # there is no exporter, or it has ended
                    self._announce(info)
                self._over.wait(AGAIN)
        except CubrokerError as error:
            log.info("%s@%d is not passed on while it comes: %s", self._name, self._version, error.message)

    def _announce(self, info: PoolInfo) -> None:
        """Connect and tell, until this is closed; raises ``CubrokerError`` if another attempt would be no better."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(LIMIT)
            connection.connect(name_of(self._broker.directory))
            account = account_of(connection)
            if account.uid != self._broker.uid and not identity.can_read(account, info, self._mode):
                raise Denied(f"the exporter of this host runs as {account.name}, who may not read it")
            said = self._have()
            host = identity.host(self._broker.directory)
            runs = messages.to_runs(said)
            what = self._name, self._version, digests.DEFINITION, self._sums, self._piece
            self._say(connection, Announce(host, *what, runs, self._mode))
            messages.expect(_reply(connection), Going)
            while not self._over.wait(NEWS):
                if select.select([connection], [], [], 0)[0]:  # it has nothing more to say: it has ended
                    return
                if (have := self._have()) != said:
                    said = have
                    self._say(connection, Available(messages.to_runs(have)))

    def _say(self, connection: socket.socket, message: messages.Local) -> None:
        connection.sendall(messages.frame(message))


def _reply(connection: socket.socket) -> messages.Reply:
    with connection.makefile("rb") as stream:
        head = stream.read(messages.LENGTH.size)
        body = stream.read(messages.length(head, messages.MAX_REQUEST)) if len(head) == messages.LENGTH.size else b""
    if not body:
        raise ConnectionResetError
    return messages.reply(body)


# -- the exporter --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AnnouncedDraft:
    """A draft that a fetch of this host fills."""

    name: str
    version: int
    uid: int
    digests: tuple[bytes, ...]
    #: As :func:`messages.content` has it.
    content: bytes
    #: Bytes of each run, and of the largest.
    sizes: tuple[int, ...]
    piece: int
    #: The mode that the pool will have with it; None: the one that it has.
    mode: int | None
    #: The runs that are there, as they travel; None: it is published.
    runs: bytes | None
    #: Whether it will never be published.
    gone: bool = False
    #: Set when any of this has changed, and replaced then by another one.
    change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nbytes(self) -> int:
        """Bytes that are there."""
        have = messages.from_runs(self.runs)
        if have is None:
            return sum(self.sizes)
        return sum(size for size, bit in zip(self.sizes, reversed(f"{have:b}"), strict=False) if bit == "1")

    def changed(self) -> None:
        """Wake all that wait for a change."""
        self.change.set()
        self.change = asyncio.Event()


class Announcements:
    """Listens to the fetches of this host. To be used in one event loop.

    Args:
        live: returns the broker; not for the event loop.
        counted: is told how many drafts there are.
    """

    def __init__(self, live: Callable[[], Broker], counted: Callable[[int], None]) -> None:
        self._live = live
        self._counted = counted
        self._drafts: dict[tuple[str, int], AnnouncedDraft] = {}
        self._connections: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    def find(self, name: str, version: int) -> AnnouncedDraft | None:
        """Return a draft that is being filled; None: none that is known."""
        return self._drafts.get((name, version))

    @asynccontextmanager
    async def listening(self, directory: Path) -> AsyncIterator[None]:
        """Listen within an ``async with`` block, if the name can be had."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.bind(name_of(directory))
        except OSError as error:
            end.close()
            log.warning("what fetches of this host bring is offered once it is published: %s", error.strerror)
            yield
            return
        server = await asyncio.start_unix_server(self._accept, sock=end)
        try:
            yield
        finally:
            self._ending = True
            server.close()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        account = account_of(writer.get_extra_info("socket"))
        self._connections.append(account.uid)
        try:
            if len(self._connections) <= CONNECTIONS and self._connections.count(account.uid) <= OF_A_USER:
                await self._listen(account, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # its end says as much
        except CubrokerError as error:
            log.warning("a fetch of %s is not passed on while it comes: %s", account.name, error.message)
            with suppress(OSError):
                writer.write(messages.frame(messages.refusal(error)))
        except asyncio.CancelledError:  # the exporter ends
            pass
        finally:
            self._tasks.discard(task)
            self._connections.remove(account.uid)
            writer.close()

    async def _listen(self, account: Account, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(LIMIT):
            announced = await _next(reader)
        if not isinstance(announced, Announce):
            raise Invalid("it did not begin with an announcement")
        draft = await asyncio.to_thread(self._check, account, announced)
        key = draft.name, draft.version
        if key in self._drafts:
            raise Invalid("another connection has announced it")
        self._drafts[key] = draft
        self._counted(len(self._drafts))
        log.info("%s@%d is passed on while it comes", *key)
        try:
            writer.write(messages.frame(Going()))
            while isinstance(told := await _next(reader), Available) and told.runs is not None:
                draft.runs = told.runs
                draft.changed()
                await asyncio.sleep(NEWS / 2)  # one that says more than it should waits
            raise Invalid("it said what is not to be said after an announcement")
        finally:
            del self._drafts[key]
            self._counted(len(self._drafts))
            if not self._ending:
                await self._settle(draft)

    async def _settle(self, draft: AnnouncedDraft) -> None:
        """Find out what has become of a draft, and wake those that wait for it."""
        try:
            published = await asyncio.to_thread(self._published, draft)
        except CubrokerError as error:
            log.warning("what became of %s@%d is not known: %s", draft.name, draft.version, error.message)
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
        # A draft that was discarded is retired, too, while others read it; and not all brokers tell when it was published.
        return info.state in PUBLISHED or info.published is not None

    def _check(self, account: Account, announced: Announce) -> AnnouncedDraft:
        """Return what the broker says of a draft that was announced; raises ``CubrokerError`` if that is not so."""
        broker = self._live()
        if announced.host != identity.host(broker.directory):
            raise Invalid("it is a draft of another broker")
        if not broker.lends_drafts:
            raise Unsupported("the broker is too old to lend drafts to readers; upgrade it")
        info, layout, _ = broker.describe(announced.name, announced.version)
        if account.uid not in (ROOT, os.geteuid(), info.owner):
            raise Denied(f"{announced.name}@{announced.version} is another user's")
        fits = len(announced.digests) == len(layout.allocations) and announced.piece == piece_size(layout.nbytes)
        if info.state != "draft" or info.sharded or not fits or announced.algorithm != digests.DEFINITION:
            raise Invalid(f"{announced.name}@{announced.version} is no draft that can be passed on")
        if info.share == IPC and os.geteuid() not in (ROOT, broker.uid, info.owner):  # the broker lends it to no other
            raise Unsupported(f"{announced.name}@{announced.version} is `ipc`, and is passed on once it is published")
        return AnnouncedDraft(
            name=announced.name,
            version=announced.version,
            uid=account.uid,
            digests=announced.digests,
            content=messages.content(layout.encode(), announced.algorithm, announced.digests),
            sizes=tuple(piece.nbytes for piece in cut(layout.allocations, [0])),
            piece=announced.piece,
            mode=announced.mode,
            runs=announced.runs,
        )


async def _next(reader: asyncio.StreamReader) -> messages.Local:
    head = await reader.readexactly(messages.LENGTH.size)
    return messages.local(await reader.readexactly(messages.length(head, messages.MAX_ANNOUNCEMENT)))
