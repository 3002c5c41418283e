"""The service that lets other hosts read pools of this one: ``cubroker export``, a client of this host's broker.

Every connection is TLS 1.3 with a certificate on both sides; before the handshake is complete the exporter sends
nothing of its own. It looks up the user whom the peer's certificate names on this host, and applies the modes of pools
to that user. Of pools that the user may not read it reveals nothing, not even that they exist.

Each peer that reads has a process of this host to itself (:mod:`~cubroker.integrations.cluster.source_process`), which
holds the lease, has the memory registered, and is killed when the connection ends. So a peer that crashes, stalls or
lies affects no other transfer, and no memory is unmapped or freed while a peer can read it. One such process is started
in advance, because starting takes a second; it has no engine yet.

A version that a fetch of this host is still reading is offered as well, with the runs of bytes that are there
(:mod:`~cubroker.integrations.cluster.announcements`). Its readers are notified when there are more.

A peer that has opened a version has to report its progress regularly. A peer that is silent, makes no progress, or
reads too slowly is cut off; it may open the version again, after others. The number of peers that read is limited, and
each reader has a *slot*. No peer gets all slots: it gets another one only while more are free than it has.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec

from cubroker.client import Broker, digests
from cubroker.client.notices import Watch as News
from cubroker.client.transport.requests import run_in_loop
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.announcements import PUBLISHED, AnnouncedDraft, Announcements
from cubroker.integrations.cluster.connection import (
    Account,
    can_read,
    check_serving,
    find_account,
    host_id,
    named_user,
    serving_context,
)
from cubroker.integrations.cluster.messages import (
    PARTS,
    Available,
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
    Serve,
    WatchPool,
)
from cubroker.integrations.cluster.source_process import SourceProcess
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, OverQuota, Retired, Unavailable, reason
from cubroker.protocol.fields import MAX_DEVICES
from cubroker.protocol.status import PoolInfo

log = logging.getLogger(__name__)

SOURCE = "cubroker.integrations.cluster.source_process"

GREETING = 10.0
"""Seconds that a peer has for the handshake, and then for each message until it has opened a version."""

HANG_UP = 2.0
"""Seconds that a peer has to end a connection that is over."""

STRANGERS = 64
"""The most connections that have not shown a certificate yet: more would keep out peers that have one."""

LINES = 60
"""Lines of the log that peers without a certificate can cause in a minute."""

CONNECTIONS = 256
"""The most connections of all peers together: further ones are closed immediately."""

READERS = 8
"""The most peers that read at the same time by default: each needs a process, and on GPUs a context, about 0.5 GiB."""

GONE = "the fetch that offered it has ended without publishing it"


class KnownDigests(NamedTuple):
    """The digests of a published version."""

    #: One for each allocation.
    digests: tuple[bytes, ...]
    #: The result of :func:`messages.content`.
    content: bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """What an exporter offers, and its limits."""

    #: Names of pools, or patterns as shells have them for files; others are not offered.
    pools: Sequence[str] = ("*",)
    readers: int = READERS
    connections: int = CONNECTIONS
    #: Seconds after which a peer that has opened a version and says nothing is cut off.
    silence: float = 30.0
    #: Seconds after which a peer that reports no progress is cut off.
    stall: float = 120.0
    #: Bytes a second that a peer has to read on average, after twice ``stall`` seconds. A peer's reports cannot be
    #: checked; so a lease lasts at most as long as reading at this rate takes, and the ``stall`` after it.
    rate: float = 1 << 20


class Meter:
    """The calls by which the exporter reports what it does, for metrics; this class counts nothing."""

    def watch(self, service: Exporter) -> None:
        """Observe an exporter: how many peers are connected and read, and how many drafts it offers."""

    def read(self, pool: str, nbytes: int) -> None:
        """Report how many more bytes of a pool a peer has read."""

    def took(self, pool: str) -> None:
        """Report that a peer has read all of a version."""

    def refused(self, code: str) -> None:
        """Report that a request was refused, with the code of the error."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str
    account: Account
    #: The newest protocol that both sides speak.
    version: int = 1
    #: Its slot among the peers that read; None: it does not read.
    slot: int | None = None
    #: The version that it has opened, and the process that has the memory registered.
    opened: ExportedVersion | None = None
    source: SourceProcess | None = None
    began: float = 0.0
    #: Since when it could read.
    could: float = 0.0
    #: Bytes that it reports as read, and when that number last grew.
    nbytes: int = 0
    came: float = 0.0
    #: The tasks that send it the current version of a pool, and the runs of a draft that are there.
    watch: asyncio.Task[None] | None = None
    news: asyncio.Task[None] | None = None
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return f"{self.account.name} at {self.address}"

    @property
    def who(self) -> tuple[str, str]:
        """The user and the host, by which slots are counted."""
        return self.account.name, self.address.rpartition(":")[0]

    @property
    def nbytes_in_all(self) -> int:
        """Bytes of the version that it has opened."""
        return sum(place.nbytes for place in self.opened.places) if self.opened else 0


class _CutOff(Unavailable):
    """An error after which the connection is closed, once it was sent to the peer."""


class Exporter:
    """Serves peers until it is closed. To be used in one event loop.

    Args:
        directory: that of the broker; None: where clients find it.
        certificates: the folder with this host's certificate.
        connect: opens the session, in a thread of its own.

    Raises:
        CubrokerError: as :func:`~cubroker.integrations.cluster.connection.serving_context` and ``check_serving`` say.
    """

    def __init__(
        self,
        directory: Path | None,
        certificates: Path,
        rules: Rules | None = None,
        meter: Meter | None = None,
        connect: Callable[[Path | None], Broker] = Broker,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._certificates = certificates
        self._rules = rules or Rules()
        self._meter: Meter = meter or Meter()
        self._context = serving_context(certificates)
        check_serving(self._context, certificates)
        self._broker: Broker | None = None
        self._peers: set[_Peer] = set()
        #: The peers that read, by slot.
        self._readers: dict[int, _Peer] = {}
        self._announcements = Announcements(self._live, self._warn)
        #: The digests of published versions, by name and number, as far as they are known.
        self._digests: dict[tuple[str, int], KnownDigests] = {}
        #: When lines were logged that anybody can cause, and how many were left out since the last of them.
        self._warned: deque[float] = deque(maxlen=LINES)
        self._unsaid = 0
        self._spare: asyncio.Task[SourceProcess] | None = None
        self._meter.watch(self)

    @property
    def connections(self) -> int:
        """How many peers are connected. Any thread may ask."""
        return len(self._peers)

    @property
    def readers(self) -> int:
        """How many peers read. Any thread may ask."""
        return len(self._readers)

    @property
    def drafts(self) -> int:
        """How many versions are offered that are still being fetched. Any thread may ask."""
        return len(self._announcements.drafts)

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
        """Listen at an address within an ``async with`` block; yields the address and the port.

        Raises:
            Unavailable: there is no broker, or the address cannot be listened at.
            CubrokerError: as opening a :class:`~cubroker.client.Broker` does.
        """
        async with AsyncExitStack() as undo:
            self._broker = await asyncio.to_thread(self._connect, self._directory)
            undo.push_async_callback(asyncio.to_thread, self._broker.close)
            undo.push_async_callback(self._end)
            self._spare = asyncio.create_task(self._start())
            try:
                server = await asyncio.start_server(self._accept, host, port, limit=2 * messages.MAX_REQUEST)
            except OSError as error:
                raise Unavailable(f"listening at {host} port {port}: {reason(error)}; name another --listen") from None
            undo.callback(server.close)
            await undo.enter_async_context(self._announcements.listening(self._broker.directory))
            address: tuple[str, int] = server.sockets[0].getsockname()[:2]
            yield address

    def reload(self) -> None:
        """Use the certificates that are in the folder now, for new connections.

        If hosts refuse them, a line in the log says so; peers that were revoked are kept out all the same.

        Raises:
            CubrokerError: as :func:`~.connection.serving_context`; nothing has changed then.
        """
        self._context = serving_context(self._certificates)  # a new one: it has no authority that is gone
        try:
            check_serving(self._context, self._certificates)
        except Invalid as error:
            log.error(error.message)

    @property
    def _strangers(self) -> int:
        """How many of the connections have not shown a certificate."""
        return sum(peer.account.uid < 0 for peer in self._peers)

    def _warn(self, text: str, *arguments: object) -> None:
        """Log a line that anybody can cause: at most ``LINES`` a minute, with the number of those left out."""
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
            _close(peer.writer)
        if self._spare:
            self._spare.cancel()
            with suppress(asyncio.CancelledError, CubrokerError):
                await (await self._spare).kill()

    # -- a connection ------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = "{}:{}".format(*writer.get_extra_info("peername")[:2])
        if len(self._peers) >= self._rules.connections or self._strangers >= STRANGERS:
            self._warn("a connection from %s is closed: %d others are open already", address, len(self._peers))
            writer.close()
            return
        peer = _Peer(reader, writer, address, Account("", -1, frozenset()))
        self._peers.add(peer)
        encrypted = False
        try:
            await self._encrypt(writer)
            encrypted = True
            await self._serve(peer)
        except ssl.SSLError as error:
            self._warn("%s is refused: %s", address, getattr(error, "verify_message", "") or error.reason)
        except asyncio.IncompleteReadError:
            pass  # the peer closed the connection; `_release` logs how far it had read
        except (TimeoutError, OSError) as error:
            # A peer may leave before it has received all news of a draft; `_release` logs that.
            left = peer.news and isinstance(error, ConnectionError)
            if (peer.opened or peer.watch) and not left:
                log.warning("%s is gone: %s", peer, str(error) or "it sends nothing, or does not read what is sent")
        except CubrokerError as error:
            log.warning("%s is cut off: %s", peer, error.message)
        except asyncio.CancelledError:  # the exporter ends, and waits for no peer
            _abort(writer)
            raise
        finally:
            for task in (peer.watch, peer.news):
                if task:
                    task.cancel()
            _close(writer)
            try:
                await self._release(peer)
                if encrypted:  # else it is closed, and asyncio does not tell
                    await _finish(writer)
            finally:  # not before: a connection counts as long as it has a descriptor
                self._peers.discard(peer)

    async def _encrypt(self, writer: asyncio.StreamWriter) -> None:
        """Shake hands; raises ``OSError``."""
        try:
            await writer.start_tls(self._context, ssl_handshake_timeout=GREETING)
        except OSError as error:
            # The error and asyncio's frames in its traceback refer to each other. Through them the 256 KiB of buffer of
            # a connection would stay until the garbage collector runs, and hundreds of those add up before it does.
            raise error.with_traceback(None) from None

    async def _serve(self, peer: _Peer) -> None:
        hello = await self._hear(peer)
        if not isinstance(hello, PeerHello):
            raise Invalid("it did not begin with a hello")
        certificate = peer.writer.get_extra_info("peercert") or {}
        try:
            peer.account = await asyncio.to_thread(find_account, named_user(certificate))
        except CubrokerError as error:
            await self._refuse(peer, error)
            return
        peer.version = min(hello.version, messages.VERSION)
        assert self._broker is not None
        await self._say(peer, PeerWelcome(peer.version, peer.account.name, host_id(self._broker.directory)))
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
        """Return the next message; raises ``TimeoutError`` if it does not arrive in time."""
        limit = self._rules.silence if peer.opened or peer.watch else GREETING
        async with asyncio.timeout(None if peer.watch and not peer.opened else limit):
            head = await peer.reader.readexactly(messages.LENGTH.size)
            body = await peer.reader.readexactly(messages.length(head, messages.MAX_REQUEST))
        return messages.request(body)

    async def _say(self, peer: _Peer, message: Reply) -> None:
        """Send a message; raises ``TimeoutError``, and ends the connection, if the peer does not receive it in time."""
        try:
            async with asyncio.timeout(self._rules.silence), peer.sending:
                if peer.writer.is_closing():  # asyncio's TLS raises AttributeError if it is closed and then written to
                    raise ConnectionResetError("it has closed the connection")
                peer.writer.write(messages.frame(message))
                await peer.writer.drain()
        except TimeoutError:
            _abort(peer.writer)  # else the close would wait until the message is sent
            raise

    async def _refuse(self, peer: _Peer, error: CubrokerError) -> None:
        self._meter.refused(error.code)
        log.info("%s is refused (%s): %s", peer, error.code, error.message)
        await self._say(peer, messages.refusal(error))

    async def _answer(self, peer: _Peer, request: Request) -> Reply | None:
        match request:
            case List():
                return await asyncio.to_thread(self._offers, peer)
            case Open():
                return await self._open(peer, request)
            case WatchPool(name):
                if peer.watch:
                    raise Invalid("a connection watches one pool; make another connection for another")
                peer.watch = asyncio.create_task(self._tell(peer, name))
                return None
            case Progress(nbytes):
                return self._progress(peer, nbytes)
        raise Invalid("a connection has one hello")

    # -- what there is -----------------------------------------------------------------------------

    def _offers(self, peer: _Peer) -> Offers:
        """Return the versions that a peer may read. It blocks: not for the event loop."""
        pools = self._live().pools()
        numbers = {(each.name, each.version) for each in pools}
        for gone in [key for key in [*self._digests] if key not in numbers]:
            self._digests.pop(gone, None)
        offers = []
        for info in pools:
            draft = self._draft(info)
            if self._offered(peer, info, draft):
                content, there = (draft.content, draft.nbytes) if draft else (self._content(info), None)
                current = info.state == "current"
                offers.append(Offer(info.name, info.version, info.nbytes, info.tensors, current, content, there))
        return Offers(tuple(offers), len(self._readers), self._rules.readers)

    def _content(self, pool: PoolInfo) -> bytes | None:
        """Return the id of a published version (:func:`messages.content`), if it has digests or was read before."""
        key = pool.name, pool.version
        if key not in self._digests and pool.state in PUBLISHED and pool.digest == digests.DEFINITION:
            with suppress(NotFound, Retired, Denied):  # the version may have ended
                _, layout, _ = self._live().describe(*key)
                found = digests.sealed(pool.name, [], self._live().digests(*key))
                self._know(key, layout.encode(), tuple(found[number] for number in range(len(layout.allocations))))
        return self._digests[key].content if key in self._digests else None

    def _know(self, key: tuple[str, int], layout: bytes, found: tuple[bytes, ...]) -> None:
        content = messages.content(layout, digests.DEFINITION, found)
        self._digests[key] = KnownDigests(found, content)

    def _draft(self, pool: PoolInfo) -> AnnouncedDraft | None:
        """Return a version that a fetch of this host still fills; None: it is published, or was not announced."""
        return None if pool.state in PUBLISHED else self._announcements.drafts.get((pool.name, pool.version))

    def _offered(self, peer: _Peer, pool: PoolInfo, draft: AnnouncedDraft | None) -> bool:
        there = pool.state in PUBLISHED or (draft is not None and peer.version >= PARTS)
        named = any(fnmatchcase(pool.name, pattern) for pattern in self._rules.pools)
        return there and named and not pool.writable and can_read(peer.account, pool, draft.mode if draft else None)

    def _live(self) -> Broker:
        """Return the broker, with a new session if the last one is lost. It blocks: not for the event loop."""
        assert self._broker is not None
        if self._broker.lost:
            self._broker.reconnect()
            self._digests.clear()  # the next broker may have given its numbers to other versions
        return self._broker

    async def _find(self, peer: _Peer, request: Open) -> tuple[PoolInfo, AnnouncedDraft | None]:
        """Return the requested version, and its draft; raises ``NotFound`` also if the peer may not read it."""
        wanted = f"{request.name}@{request.version}" if request.version else f"current version of {request.name}"
        absent = NotFound(f"the exporting host has no {wanted} that its user {peer.account.name} may fetch")
        try:
            info, *_ = await asyncio.to_thread(lambda: self._live().describe(request.name, request.version or None))
        except (NotFound, Retired, Denied):
            raise absent from None
        draft = self._draft(info)
        if not self._offered(peer, info, draft):
            raise absent
        return info, draft

    # -- what is read ------------------------------------------------------------------------------

    async def _open(self, peer: _Peer, request: Open) -> ExportedVersion:
        if peer.opened:
            raise Invalid("a connection opens one version; make another connection for another")
        info, draft = await self._find(peer, request)
        peer.slot = self._free_slot(peer)
        self._readers[peer.slot] = peer
        try:
            peer.source, peer.began = await self._take(), time.monotonic()
            opened = await self._opened(peer.source, info, draft, request.engine)
        except CubrokerError:
            await self._release(peer)
            raise
        peer.opened = msgspec.structs.replace(opened, slot=peer.slot, slots=self._rules.readers)
        peer.came = peer.could = time.monotonic()
        if draft:
            peer.news = asyncio.create_task(self._tell_runs(peer, draft, opened.runs))
        there = f", of which {draft.nbytes} are there" if draft else ""
        log.info("%s reads %s@%d, %d bytes%s", peer, info.name, info.version, info.nbytes, there)
        return peer.opened

    def _free_slot(self, peer: _Peer) -> int:
        """Return a free slot for a peer; raises ``OverQuota``."""
        readers, limit = self._readers, self._rules.readers
        free, own = limit - len(readers), [other.who for other in readers.values()].count(peer.who)
        if not free:
            raise OverQuota(f"{limit} peers read from this host, which is its limit; ask another host, or try later")
        if free <= own:
            raise OverQuota(
                f"user {peer.account.name} at this address reads {own} versions already, and the {free} free places are"
                " kept for others; ask another host, or try later"
            )
        return next(slot for slot in range(limit) if slot not in readers)

    async def _opened(
        self, source: SourceProcess, info: PoolInfo, draft: AnnouncedDraft | None, engine: str
    ) -> ExportedVersion:
        """Have a process open a version, and return its answer."""
        key = info.name, info.version
        known = self._digests.get(key)
        sums = draft.digests if draft else known.digests if known else ()
        answer = await source.ask(Serve(*key, engine, draft is not None, sums))
        opened = messages.expect(answer, ExportedVersion)
        if draft is None:
            self._know(key, opened.layout, tuple(place.digest for place in opened.places))
            return opened
        if draft.gone:
            raise NotFound(GONE)
        return msgspec.structs.replace(opened, runs=draft.runs, piece=draft.cut.piece)

    async def _tell_runs(self, peer: _Peer, draft: AnnouncedDraft, said: bytes | None) -> None:
        """Send a peer the runs of a draft that are there, whenever there are more, until it is published or ends."""
        try:
            while said is not None:
                change = draft.change
                if draft.gone:
                    await self._release(peer)  # before the peer answers: the memory is useless now, and is freed
                    await self._hang_up(peer, Unavailable(GONE))
                    return
                if draft.runs == said:
                    await change.wait()
                    continue
                said = draft.runs
                await self._say(peer, Available(said))
                await asyncio.sleep(messages.NEWS)
        except (TimeoutError, OSError):
            _close(peer.writer)

    async def _hang_up(self, peer: _Peer, error: CubrokerError) -> None:
        """Send the error, and end the connection even if the peer does not."""
        try:
            async with asyncio.timeout(HANG_UP):
                await self._refuse(peer, error)
        finally:
            await _finish(peer.writer)

    def _progress(self, peer: _Peer, nbytes: int) -> Going:
        now, rules = time.monotonic(), self._rules
        if peer.opened is None:
            raise Invalid("nothing was opened on this connection")
        if peer.source and not peer.source.alive:
            raise _CutOff("the process that it was read from has ended; open it again")
        size = peer.nbytes_in_all
        if nbytes > size * MAX_DEVICES:
            raise _CutOff(f"it says that it has read {nbytes} bytes of a version that has {size}")
        if nbytes > peer.nbytes:
            self._meter.read(peer.opened.name, nbytes - peer.nbytes)
            peer.came = now if peer.nbytes < size else peer.came  # bytes beyond `size` are read again: no progress
            peer.nbytes = nbytes
        elif now - peer.came > rules.stall:
            raise _CutOff(f"it has read nothing for {rules.stall:g} s")
        if now - peer.could > 2 * rules.stall + min(nbytes, size) / rules.rate:
            raise _CutOff(f"it reads more slowly than {rules.rate / 1e6:.1f} MB/s; it may open the version again")
        return Going()

    async def _release(self, peer: _Peer) -> None:
        """End the process of a peer, and with it the lease."""
        slot, peer.slot = peer.slot, None
        if slot is None:
            return
        source, peer.source = peer.source, None
        try:
            if source:
                await source.kill()
        finally:  # also if the wait for the process is cancelled: the connection is over
            del self._readers[slot]
        if peer.opened:
            seconds = time.monotonic() - peer.began
            whole = peer.nbytes >= peer.nbytes_in_all
            if whole:
                self._meter.took(peer.opened.name)
            what = f"{peer.opened.name}@{peer.opened.version}"
            log.info("%s has %s %s: %d bytes in %.3f s", peer, "read" if whole else "left", what, peer.nbytes, seconds)

    # -- processes ---------------------------------------------------------------------------------

    async def _start(self) -> SourceProcess:
        assert self._broker is not None
        return await SourceProcess.start(SOURCE, str(self._broker.directory))

    async def _take(self) -> SourceProcess:
        """Return the process started in advance, or a new one if that is of no use; and start the next spare."""
        spare = self._spare
        assert spare is not None
        # Before anything is awaited, so that two peers never get the same process.
        self._spare = asyncio.create_task(self._start())
        try:
            found = await spare
            if not found.outdated and found.alive:
                return found
            why = "cubroker was upgraded" if found.outdated else "it has ended"
            await found.kill()
        except CubrokerError as error:
            why = error.message
        log.warning("a process that was started in advance is replaced: %s", why)
        return await self._start()

    # -- news --------------------------------------------------------------------------------------

    async def _tell(self, peer: _Peer, name: str) -> None:
        """Send the number of the current version, now and after every change, if the peer may know it."""
        said, when = -1, 0.0
        try:
            async for _ in _changes(await asyncio.to_thread(self._live), name):
                try:
                    version = (await self._find(peer, Open(name)))[0].version
                except NotFound:
                    version = 0
                now = time.monotonic()
                # Changes that the peer may not see are not sent.
                if version or said or now - when >= messages.WATCH_BEAT:
                    await self._say(peer, CurrentVersion(version))
                    said, when = version, now
        except (CubrokerError, OSError) as error:
            log.info("%s cannot watch %s any longer: %s", peer, name, error)
            _close(peer.writer)  # the peer asks again, here or elsewhere


async def _changes(broker: Broker, name: str) -> AsyncGenerator[None]:
    """Yield immediately, after every change of a pool's current version, and every ``WATCH_BEAT`` without one."""
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
    """Watch a pool; None if this process's own user may not read it, which no peer may learn."""
    try:
        return broker.watch(name)
    except Denied:
        return None


def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once: after a second close, asyncio's TLS ignores :func:`_abort`."""
    if not writer.is_closing():
        writer.close()


async def _finish(writer: asyncio.StreamWriter) -> None:
    """End a TLS connection within ``HANG_UP`` seconds, even if the peer does not; asyncio would wait 30 s for it."""
    _close(writer)
    abort = asyncio.get_running_loop().call_later(HANG_UP, _abort, writer)
    try:
        with suppress(OSError):
            await asyncio.shield(writer.wait_closed())  # a cancelled wait would cancel the waits of other tasks
    finally:
        abort.cancel()


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection immediately, if it has not ended."""
    with suppress(AttributeError):  # asyncio of Python 3.11.2 (Debian) raises it for a TLS connection that has ended
        writer.transport.abort()
