"""The service that lets other hosts read pools of this one: ``cubroker export``, beside a broker, as its client.

Every connection is TLS 1.3 with a certificate on both sides; until that is done not one byte of ours is sent. The user
whom the peer's certificate names is looked up on this host, and the modes of pools hold for that user. Of pools that
the user may not read nothing is said, not even that there are any.

Each peer that reads has a process of this host to itself (:mod:`~cubroker.integrations.cluster.source_process`), which
holds the lease, has the memory registered, and is killed when the connection ends. So a peer that crashes, stalls or
lies takes no other transfer along, and no memory is unmapped or freed while a peer can read it. One such process is
started in advance, because that takes a second.

A peer that has opened a version has to say now and then how far it has come. One that says nothing, or does not come
any further, is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from cubroker.client import Broker
from cubroker.client.notices import Watch as News
from cubroker.client.transport.requests import run_in_loop
from cubroker.integrations.cluster import identity, messages
from cubroker.integrations.cluster.identity import Account
from cubroker.integrations.cluster.messages import (
    CurrentVersion,
    ExportedVersion,
    Going,
    List,
    Offer,
    Offers,
    Open,
    PeerHello,
    PeerWelcome,
    Progress,
    Reply,
    Request,
    WatchPool,
)
from cubroker.integrations.cluster.processes import PythonProcess
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, OverQuota, Retired, Unavailable
from cubroker.protocol.status import PoolInfo

log = logging.getLogger(__name__)

SOURCE = "cubroker.integrations.cluster.source_process"

GREETING = 10.0
"""Seconds that a peer has for the handshake, and then for each message until it has opened a version."""

SILENCE = 30.0
"""Seconds after which a peer that has opened a version and says nothing is cut off."""

STALL = 120.0
"""Seconds after which a peer that says that it has come no further is cut off."""

STRANGERS = 64
"""Connections at once that have not shown a certificate yet: more would keep out those that have one."""

LINES = 60
"""Lines of the log that peers without a certificate can cause in a minute."""

CONNECTIONS = 256
"""Connections at once, of all peers together: those past it are closed at once."""

READERS = 8
"""Peers that read at once, if nothing else is said: each takes a process, and on GPUs a context, about 0.5 GiB."""

PUBLISHED = frozenset({"current", "superseded"})


@dataclass(frozen=True, slots=True)
class Rules:
    """What an exporter does, and for how many."""

    #: Names of pools, or patterns as shells have them for files; others are not offered.
    pools: Sequence[str] = ("*",)
    readers: int = READERS
    connections: int = CONNECTIONS
    silence: float = SILENCE
    stall: float = STALL


class Meter(Protocol):
    """Is told what the exporter does, for metrics."""

    def connected(self, count: int) -> None:
        """So many peers are connected now."""

    def reading(self, count: int) -> None:
        """So many peers read now."""

    def read(self, pool: str, nbytes: int) -> None:
        """A peer has read so many bytes more of a pool."""

    def took(self, pool: str) -> None:
        """A peer has read all of a version."""

    def refused(self, code: str) -> None:
        """A request was refused, for this reason."""


class NullMeter:
    """A meter that nobody reads."""

    def connected(self, count: int) -> None:
        """See :class:`Meter`."""

    reading = connected

    def read(self, pool: str, nbytes: int) -> None:
        """See :class:`Meter`."""

    def took(self, pool: str) -> None:
        """See :class:`Meter`."""

    refused = took


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str
    account: Account
    #: Whether it counts as one that reads.
    reads: bool = False
    #: What it has opened, and the process that has that registered.
    opened: ExportedVersion | None = None
    source: PythonProcess | None = None
    began: float = 0.0
    #: Bytes that it says it has read, and when it last said more.
    nbytes: int = 0
    came: float = 0.0
    watches: set[asyncio.Task[None]] = field(default_factory=set)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return f"{self.account.name} at {self.address}"


class _CutOff(Unavailable):
    """Ends the connection that it is raised for, once the peer was told."""


class Exporter:
    """Serves peers until it is closed. To be used in one event loop.

    Args:
        directory: that of the broker; None: where clients find it.
        certificates: the folder with this host's certificate.
        rules: what is offered, and to how many.
        meter: is told what happens.
    """

    def __init__(
        self, directory: Path | None, certificates: Path, rules: Rules | None = None, meter: Meter | None = None
    ) -> None:
        self._directory = directory
        self._certificates = certificates
        self._rules = rules or Rules()
        self._meter: Meter = meter or NullMeter()
        self._context = identity.serving_context(certificates)
        self._broker: Broker | None = None
        self._peers: set[_Peer] = set()
        self._readers = 0
        #: When a line was written that anybody can cause, and how many were not since.
        self._warned: deque[float] = deque(maxlen=LINES)
        self._unsaid = 0
        self._spare: asyncio.Task[PythonProcess] | None = None

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
        """Listen at an address within an ``async with`` block, which gets the address and the port.

        Raises:
            Unavailable: there is no broker, or the address cannot be listened at.
            CubrokerError: as opening a :class:`~cubroker.client.Broker` does.
        """
        async with AsyncExitStack() as undo:
            self._broker = await asyncio.to_thread(Broker, self._directory)
            undo.push_async_callback(asyncio.to_thread, self._broker.close)
            undo.push_async_callback(self._end)
            self._prepare()
            try:
                server = await asyncio.start_server(self._accept, host, port, limit=2 * messages.MAX_REQUEST)
            except OSError as error:
                raise Unavailable(f"listening at {host} port {port}: {error.strerror}; name another --listen") from None
            undo.callback(server.close)
            address: tuple[str, int] = server.sockets[0].getsockname()[:2]
            yield address

    def reload(self) -> None:
        """Use the certificates that are in the folder now, for connections to come.

        Raises:
            CubrokerError: as :func:`~cubroker.integrations.cluster.identity.serving_context`; nothing has changed then.
        """
        self._context = identity.serving_context(self._certificates)  # a new one: it forgets an authority that is gone

    @property
    def _strangers(self) -> int:
        """How many of the connections have not shown a certificate."""
        return sum(peer.account.uid < 0 for peer in self._peers)

    def _warn(self, text: str, *arguments: object) -> None:
        """Write a line that anybody can cause: so many a minute, with the number of those that were left out."""
        now = time.monotonic()
        if len(self._warned) == LINES and now - self._warned[0] < 60.0:
            self._unsaid += 1
            return
        if self._unsaid:
            text, arguments = f"{text} (and %d more such lines)", (*arguments, self._unsaid)
        self._warned.append(now)
        self._unsaid = 0
        log.warning(text, *arguments)

    async def _end(self) -> None:
        for peer in [*self._peers]:
            peer.writer.close()
        if self._spare:
            self._spare.cancel()
            with suppress(asyncio.CancelledError, CubrokerError):
                await (await self._spare).kill()

    # -- a connection ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        if len(self._peers) >= self._rules.connections or self._strangers >= STRANGERS:
            self._warn("the connection of %s is closed: there are %d already", address, len(self._peers))
            writer.close()
            return
        peer = _Peer(reader, writer, address, Account("", -1, frozenset()))
        self._peers.add(peer)
        self._meter.connected(len(self._peers))
        try:
            await writer.start_tls(self._context, ssl_handshake_timeout=GREETING)
            await self._serve(peer)
        except ssl.SSLError as error:
            self._warn("%s is refused: %s", address, getattr(error, "verify_message", "") or error.reason)
        except asyncio.IncompleteReadError:
            pass  # it closed the connection; how far it had come is told with its end
        except (TimeoutError, OSError) as error:
            if peer.opened or peer.watches:
                log.warning("%s is gone: %s", peer, str(error) or "it says nothing, or does not take what is said")
        except CubrokerError as error:
            log.warning("%s is cut off: %s", peer, error.message)
        finally:
            self._peers.discard(peer)
            self._meter.connected(len(self._peers))
            for watch in peer.watches:
                watch.cancel()
            writer.close()
            await self._release(peer)

    async def _serve(self, peer: _Peer) -> None:
        hello = await self._hear(peer)
        if not isinstance(hello, PeerHello):
            raise Invalid("it did not begin with a hello")
        certificate = peer.writer.get_extra_info("peercert") or {}
        try:
            peer.account = await asyncio.to_thread(identity.account, identity.named_user(certificate))
        except CubrokerError as error:
            await self._refuse(peer, error)
            return
        await self._say(peer, PeerWelcome(min(hello.version, messages.VERSION), peer.account.name))
        while True:
            request = await self._hear(peer)
            try:
                answer = await self._answer(peer, request)
            except CubrokerError as error:
                await self._refuse(peer, error)
                if isinstance(error, _CutOff):
                    raise
            else:
                if answer:
                    await self._say(peer, answer)

    async def _hear(self, peer: _Peer) -> Request:
        """Return the next message; raises ``TimeoutError`` if it does not come in time."""
        limit = self._rules.silence if peer.opened or peer.watches else GREETING
        async with asyncio.timeout(None if peer.watches and not peer.opened else limit):
            head = await peer.reader.readexactly(messages.LENGTH.size)
            body = await peer.reader.readexactly(messages.length(head, messages.MAX_REQUEST))
        return messages.request(body)

    async def _say(self, peer: _Peer, message: Reply) -> None:
        """Send a message; raises ``TimeoutError``, and ends the connection, if the peer does not take it in time."""
        try:
            async with asyncio.timeout(self._rules.silence), peer.sending:
                peer.writer.write(messages.frame(message))
                await peer.writer.drain()
        except TimeoutError:
            peer.writer.transport.abort()  # or it would wait until that is sent
            raise

    async def _refuse(self, peer: _Peer, error: CubrokerError) -> None:
        self._meter.refused(error.code)
        log.info("%s is refused (%s): %s", peer, error.code, error.message)
        await self._say(peer, messages.refusal(error))

    async def _answer(self, peer: _Peer, request: Request) -> Reply | None:
        match request:
            case List():
                return await self._list(peer)
            case Open():
                return await self._open(peer, request)
            case WatchPool(name):
                self._watch(peer, name)
                return None
            case Progress(nbytes):
                return self._progress(peer, nbytes)
        raise Invalid("a connection has one hello")

    # -- what there is -----------------------------------------------------------------------------

    async def _list(self, peer: _Peer) -> Offers:
        found = await asyncio.to_thread(lambda: self._live().pools())
        offers = tuple(
            Offer(each.name, each.version, each.nbytes, each.tensors, each.state == "current")
            for each in found
            if each.state in PUBLISHED and self._offered(peer.account, each)
        )
        return Offers(offers, self._readers, self._rules.readers)

    def _offered(self, account: Account, pool: PoolInfo) -> bool:
        return self._named(pool.name) and not pool.writable and identity.can_read(account, pool)

    def _named(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._rules.pools)

    def _live(self) -> Broker:
        """Return the broker, of another session if the last one is lost; not for the event loop, which would wait."""
        assert self._broker is not None
        if self._broker.lost:
            self._broker.reconnect()
        return self._broker

    async def _find(self, peer: _Peer, request: Open) -> PoolInfo:
        """Return the version that is asked for; to a peer that may not read it, it is not there."""
        wanted = f"{request.name}@{request.version}" if request.version else f"current version of {request.name}"
        absent = NotFound(f"the exporting host has no {wanted} that its user {peer.account.name} may fetch")
        try:
            info, *_ = await asyncio.to_thread(lambda: self._live().describe(request.name, request.version or None))
        except (NotFound, Retired, Denied):
            raise absent from None
        if info.state not in PUBLISHED or not self._offered(peer.account, info):
            raise absent
        return info

    # -- what is read ------------------------------------------------------------------------------

    async def _open(self, peer: _Peer, request: Open) -> ExportedVersion:
        if peer.opened:
            raise Invalid("a connection opens one version; make another connection for another")
        info = await self._find(peer, request)
        if self._readers >= self._rules.readers:
            raise OverQuota(f"{self._readers} peers read from this host, and so many may; ask another host, or later")
        peer.reads = True
        self._count(+1)
        try:
            peer.source, peer.began = await self._take(), time.monotonic()
            peer.came = peer.began
            answer = await peer.source.ask(Open(info.name, info.version, request.engine))
            peer.opened = messages.expect(answer, ExportedVersion)
        except CubrokerError:
            await self._release(peer)
            raise
        log.info("%s reads %s@%d, %d bytes", peer, info.name, info.version, info.nbytes)
        return peer.opened

    def _progress(self, peer: _Peer, nbytes: int) -> Going:
        now = time.monotonic()
        if peer.opened is None:
            raise Invalid("nothing was opened on this connection")
        if peer.source and not peer.source.alive:
            raise _CutOff("the process that it was read from has ended; open it again")
        if nbytes > peer.nbytes:
            self._meter.read(peer.opened.name, nbytes - peer.nbytes)
            peer.nbytes, peer.came = nbytes, now
        elif now - peer.came > self._rules.stall:
            raise _CutOff(f"it has read nothing for {self._rules.stall:g} s")
        return Going()

    async def _release(self, peer: _Peer) -> None:
        """End what a peer has: its process, and with it the lease."""
        if not peer.reads:
            return
        peer.reads = False
        source, peer.source = peer.source, None
        if source:
            await source.kill()
        self._count(-1)
        if peer.opened:
            seconds = time.monotonic() - peer.began
            whole = peer.nbytes >= sum(each.nbytes for each in peer.opened.places)
            if whole:
                self._meter.took(peer.opened.name)
            what = f"{peer.opened.name}@{peer.opened.version}"
            log.info("%s has %s %s: %d bytes in %.3f s", peer, "read" if whole else "left", what, peer.nbytes, seconds)

    def _count(self, change: int) -> None:
        self._readers += change
        self._meter.reading(self._readers)

    # -- processes ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._spare = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> PythonProcess:
        assert self._broker is not None
        return await PythonProcess.start(SOURCE, str(self._broker.directory))

    async def _take(self) -> PythonProcess:
        """Return the process that was started in advance, or one in its place if it is no more; and start the next."""
        spare = self._spare
        assert spare is not None
        self._prepare()  # before anything is awaited: two peers never get the same one
        try:
            found = await spare
            if found.alive:
                return found
            why = "it has ended"
        except CubrokerError as error:
            why = error.message
        log.warning("a process that was started in advance is replaced: %s", why)
        return await self._start()

    # -- news --------------------------------------------------------------------------------------

    def _watch(self, peer: _Peer, name: str) -> None:
        if peer.watches:
            raise Invalid("a connection watches one pool; make another connection for another")
        task = asyncio.get_running_loop().create_task(self._tell(peer, name))
        peer.watches.add(task)

    async def _tell(self, peer: _Peer, name: str) -> None:
        """Say which version is current, now and after every change, as far as the peer may know it."""
        said, when = -1, 0.0
        try:
            async for _ in _changes(await asyncio.to_thread(self._live), name):
                try:
                    version = (await self._find(peer, Open(name))).version
                except NotFound:
                    version = 0
                now = time.monotonic()
                if (
                    version or said or now - when >= messages.WATCH_BEAT
                ):  # of changes that it may not see it hears nothing
                    await self._say(peer, CurrentVersion(version))
                    said, when = version, now
        except (CubrokerError, OSError) as error:
            log.info("%s cannot watch %s any longer: %s", peer, name, error)
            peer.writer.close()  # it asks again, here or elsewhere


async def _changes(broker: Broker, name: str) -> AsyncGenerator[None]:
    """Yield at once, after every change of a pool's current version, and when long there was none."""
    while (watch := await asyncio.to_thread(_watched, broker, name)) is None:
        yield
        await asyncio.sleep(messages.WATCH_BEAT)
    change: asyncio.Task[int | None] | None = None
    try:
        while True:
            yield
            change = change or asyncio.ensure_future(run_in_loop(watch.change()))
            await asyncio.wait({change}, timeout=messages.WATCH_BEAT)
            if change.done():
                change.result()
                change = None
    finally:
        if change:
            change.cancel()
        watch.close()


def _watched(broker: Broker, name: str) -> News | None:
    """Watch a pool; None: this process's own user may not read it, which no peer is to know."""
    try:
        return broker.watch(name)
    except Denied:
        return None
