"""The broker's side of its gateway: the process, the pipe to it, and the probes that tell whether it still forwards.

A gateway that dies is replaced. The listening socket of ``broker.zmq`` belongs to the broker, and every gateway gets a
duplicate of it: a client that connects while there is no gateway waits in the socket's backlog for the next one.

A gateway may also hang: stopped by a signal, or with libzmq stuck while its end of the pipe still answers. Then nothing
ends that the broker would notice, and no request arrives. So the broker is also a client of its own gateway. It sends a
question to the request socket; libzmq and the gateway forward it to the broker, whose :class:`GatewayConnection` sends
it back immediately; and the request socket must return it. A gateway that returns none of :data:`UNANSWERED` questions
is killed. No other sign of life counts, and a gateway is not blamed for the faults of others:

* Time is counted in questions, one each time that the broker's own loop wakes up for one. After the broker was stopped,
  or the machine suspended, the loop wakes up once, however long that took.
* While the pipe has bytes that the broker has not read, the answer may be among them. While the gateway is behind with
  replies but takes some, it works (:meth:`GatewayConnection.waits`).
* A flood of connections may keep the broker out of the request socket's backlog, like other clients. Until the broker
  is connected, a gateway has as long as for its start. From then on the broker keeps the connection, and libzmq reads
  from each connection in turn.
* A question that cannot be asked, for want of descriptors or of the socket's file, is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, filterfalse
from pathlib import Path
from typing import cast

from cubroker.driver import system_calls
from cubroker.protocol.errors import Unavailable, Unsupported, explain
from cubroker.protocol.wire import MAX_MESSAGE, Digest, layout_start, session_of
from cubroker.server.event_queue import BatchReceived, EventQueue, GatewayStarted
from cubroker.server.hardening import obstacles
from cubroker.server.transport import framing
from cubroker.server.transport.gateway_start import GATEWAY, GatewayStart
from cubroker.server.transport.unix_sockets import is_ready

log = logging.getLogger(__name__)

# -- the pipe ----------------------------------------------------------------------------------------

HIGH_WATER = 4 << 20
"""Bytes of replies that the gateway has not taken, past which it is behind: no large reply should follow."""

MAX_READING = 32 << 20
"""Bytes of such replies past which no request is read or handed over, until the gateway is not behind any more."""

MAX_UNSENT = 64 << 20  #: Bytes of these past which one is dropped. The broker keeps it, and the client asks again.

assert framing.MAX_FRAME == MAX_MESSAGE, "the gateway forwards as much as a message may have"

AT_ONCE = framing.MAX_MESSAGES
"""Requests that are handed over in one round of the loop, which then takes some milliseconds."""


class Gathered(bytes):
    """A request that was received in pieces.

    Attributes:
        digest: the digest of the layout beside its message, if there is one.
    """

    digest: bytes = b""


class RequestDecoder(framing.BatchDecoder):
    """Cuts the gateway's stream into batches; a request received in pieces is a batch once it is whole."""

    def __init__(self) -> None:
        super().__init__()
        # The pieces so far of a request that is received in pieces. They are not kept apart until the last one: smaller
        # blocks that live longer would come to lie between them, so that the heap could not shrink afterwards.
        self._gathered = bytearray()
        self._digest: Digest | None = None  # of the layout in it
        self._start = 0  # where the layout begins

    def feed(self, data: bytes | memoryview) -> list[list[bytes]]:
        """Add received bytes and return the batches that are whole now.

        Raises:
            ValueError: the bytes are not batches; the stream cannot be used any more.
        """
        return [whole for batch in super().feed(data) if (whole := self._put_together(batch)) is not None]

    def _put_together(self, batch: list[bytes]) -> list[bytes] | None:
        """Return a batch as it is, or the whole request if it is the last piece; None if it is another piece."""
        if len(batch) != 3:
            return batch
        routing, piece, which = batch
        if not self._gathered:
            self._start = layout_start(piece) if session_of(piece) else 0
            self._digest = Digest() if self._start else None
        if self._digest:  # by pieces: hashing 12 MiB at a time would block the broker's loop for 20 milliseconds
            self._digest.add(memoryview(piece)[max(0, self._start - len(self._gathered)) :])
        self._gathered += piece
        if len(self._gathered) > framing.MAX_FRAME:
            raise ValueError(f"pieces of {len(self._gathered)} bytes in all; a request has {framing.MAX_FRAME} at most")
        if which != framing.LAST:
            return None
        whole, self._gathered = Gathered(self._gathered), bytearray()
        if self._digest:
            whole.digest = self._digest.done()
        return [routing, whole]


class GatewayConnection(asyncio.BufferedProtocol):
    """Reads batches of requests and writes batches of replies; stops reading while the gateway is far behind."""

    _transport: asyncio.Transport

    def __init__(self, queue: EventQueue | None = None) -> None:
        loop = asyncio.get_running_loop()
        #: Receives requests as :class:`BatchReceived`; while None they are dropped. The requests of a batch end early
        #: if the replies exceed what the gateway takes; the other requests are put later.
        self.queue = queue
        #: Done once the gateway listens; cancelled if it never does.
        self.listening: asyncio.Future[None] = loop.create_future()
        #: Done once the connection has ended.
        self.ended: asyncio.Future[None] = loop.create_future()
        #: A frame that is sent back to its sender immediately, before all waiting requests. No client knows it.
        self.question = os.urandom(16)
        self._batches = RequestDecoder()
        self._received = framing.room()
        #: Routing ids and frames of requests that are not handed over yet.
        self._requests: deque[tuple[bytes, bytes]] = deque()
        #: Set when unsent replies exceed HIGH_WATER, until the gateway has taken most of them.
        self._behind = False
        #: Set when unsent replies exceed MAX_READING, until the gateway is not behind any more.
        self._full = False
        #: Bytes of replies written in all, and of those that the gateway had taken at the last call of :meth:`waits`.
        self._sent = self._taken = 0
        self._resuming = False

    def send(self, frames: Sequence[framing.Part]) -> bool:
        """Send one batch; drop it without encoding it if the gateway is gone or far behind.

        Returns whether the gateway is behind now; an empty batch only asks for that. When the gateway is not behind any
        more, ``queue`` gets a batch of requests, perhaps an empty one.
        """
        if frames and not self._transport.is_closing() and self._transport.get_write_buffer_size() < MAX_UNSENT:
            data = framing.encode(frames)
            self._sent += len(data)
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_READING:
                self._full = True
                self._transport.pause_reading()
        return self._behind

    def waits(self) -> bool:
        """Whether the broker waits for the gateway: to send something, or, if it is behind, to take replies.

        False if the gateway is behind but has taken bytes of replies since the last call.
        """
        before, self._taken = self._taken, self._sent - self._transport.get_write_buffer_size()
        if self._behind and self._taken != before:
            return False
        if self._full:
            return True
        if self._requests or self._transport.is_closing():
            return False
        return not is_ready(self._transport.get_extra_info("socket").fileno(), select.POLLIN)

    def close(self) -> None:
        """Close immediately; ``ended`` is done soon afterwards."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Hand over all whole batches as one, so that they are journaled and answered together.

        If they have too many requests, the rest is handed over in the next rounds of the loop, and nothing is read
        before that: in those rounds :meth:`_resume` calls this with no new bytes.
        """
        try:
            whole = self._batches.feed(self._received[:nbytes]) if nbytes else []
            self._requests.extend(chain.from_iterable(map(self._requests_of, whole)))
        except ValueError as error:
            log.error("the gateway sent an invalid batch (%s) and is restarted", error)
            return self.close()
        if not all(whole) and not self.listening.done():
            self.listening.set_result(None)
        if self.queue is None:
            self._requests.clear()
        elif self._requests or not nbytes:
            try:
                self.queue.put(BatchReceived(self._next_requests()))
            except BaseException:
                self.close()
                raise
            if self._requests and not self._full:
                self._transport.pause_reading()
                self._resume_soon()
            elif not self._full:
                self._transport.resume_reading()
        return None

    def _requests_of(self, batch: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Return the requests of a batch; send questions back."""
        pairs = framing.pairs(batch)
        return filterfalse(self._returned, pairs) if self.question in batch else pairs

    def _returned(self, request: tuple[bytes, bytes]) -> bool:
        """Send a request back if it is the question; return whether it is."""
        if request[1] != self.question:
            return False
        self.send(request)
        return True

    def pause_writing(self) -> None:
        """Note that the gateway is behind."""
        self._behind = True

    def resume_writing(self) -> None:
        """Resume, after the transport has finished the call in which it calls this."""
        self._behind = self._full = False
        self._resume_soon()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self.buffer_updated(0)

    def _next_requests(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield requests until the gateway is far behind."""
        for _ in range(AT_ONCE):
            if not self._requests or self._full:
                return
            yield self._requests.popleft()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the gateway closed its end, or this side did."""
        self.listening.cancel()
        if not self.ended.done():
            self.ended.set_result(None)


# -- probes ------------------------------------------------------------------------------------------

INTERVAL = 0.5  #: Seconds between two questions.
UNANSWERED = 4  #: Unanswered questions in a row after which a gateway counts as hanging.
UNANSWERED_AT_START = 40  #: The same for one that does not listen yet: it starts an interpreter and loads libzmq first.

_READ = 4096  # the handshake has about 100 bytes, an answer 18
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_COMMAND, _MESSAGE = 4, 0


class GatewayProbe:
    """A client of the request socket that repeats one question, over a new connection when one breaks.

    The broker never loads libzmq, so this module has the bytes that a DEALER sends: ZMTP 3.0
    (https://rfc.zeromq.org/spec/23/) with the NULL mechanism. The bytes received are not parsed: a question is random,
    so wherever it is found among them, it is the answer.

    Args:
        path: the request socket.
        question: less than 256 random bytes.
    """

    def __init__(self, path: Path, question: bytes) -> None:
        self._path = path
        self._question = question
        self._channel: socket.socket | None = None
        self._ready = False
        #: The last bytes received since the last answer; at first the gateway's greeting.
        self._heard = b""

    @property
    def connected(self) -> bool:
        """Whether there is a connection; it may still be in the gateway's backlog."""
        return self._channel is not None

    def ask(self) -> bool:
        """Ask once more; False if that is impossible for reasons that are not the gateway's."""
        try:
            if self._channel is None:
                self._channel, self._ready, self._heard = self._dial(), False, b""
            elif self._ready:
                self._channel.send(_frame(_MESSAGE, self._question))
            elif len(self._heard) >= len(_GREETING):  # before its greeting libzmq 4.3.5 would hang up
                self._channel.send(_frame(_COMMAND, _READY) + _frame(_MESSAGE, self._question))
                self._ready = True
        except BlockingIOError:  # the gateway takes no connection from the backlog, or reads nothing from this one
            return True
        except (BrokenPipeError, ConnectionResetError):  # the gateway hung up
            self.close()
            return True
        except OSError:
            self.close()
            return False
        return True

    def answered(self) -> bool:
        """Whether an answer has come since the last call."""
        if self._channel is None:
            return False
        try:
            data = self._channel.recv(_READ)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
        heard = self._heard + data
        found = self._question in heard
        self._heard = b"" if found else heard[-len(_GREETING) :]
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def _dial(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.setblocking(False)
            channel.connect(str(self._path))
            channel.send(_GREETING)
        except OSError:
            channel.close()
            raise
        return channel


def _frame(kind: int, body: bytes) -> bytes:
    return bytes((kind, len(body))) + body


async def watch(connection: GatewayConnection, path: Path) -> str:
    """Wait until a gateway has ended, and return an empty text; or until it hangs, and return what it left undone.

    Args:
        connection: the pipe to the gateway.
        path: the request socket.
    """
    with contextlib.closing(GatewayProbe(path, connection.question)) as probe:
        unanswered, limit = 0, UNANSWERED_AT_START
        while unanswered < limit:
            asked = probe.ask()
            await asyncio.wait((connection.ended,), timeout=INTERVAL)
            if connection.ended.done():
                return ""
            if limit != UNANSWERED and probe.connected and connection.listening.done():
                unanswered, limit = 0, UNANSWERED
            elif probe.answered():
                unanswered = 0
            elif connection.waits() and asked:
                unanswered += 1
    return f"answered none of {limit} probes in {limit * INTERVAL:g} s"


# -- the process -------------------------------------------------------------------------------------

STEADY = 10.0  #: Seconds that a gateway must have lived for the next one to be started without a delay.

FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0

GRACE = 1.0  #: Seconds that a gateway may take to end once the pipe to it has closed: it may have to say why.
LAST_WORDS = 4000  #: Bytes of a gateway's standard error that are kept for the log.
_PART = 64 << 10  # bytes of it that are read at once


class GatewayProcess:
    """The broker's gateway: one process, and another when that one ends.

    Args:
        listener: the listening socket of ``path``.
        path: the request socket.
        begun: the start of the first one, if it was started in advance.
    """

    def __init__(self, listener: socket.socket, path: Path, begun: GatewayStart | None = None) -> None:
        self._listener = listener
        self._path = path
        self._begun = begun
        self._queue: EventQueue | None = None
        self._connection: GatewayConnection | None = None
        self._stopping = asyncio.Event()
        #: Why the first gateway ended before it listened; empty once it listens.
        self._first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the first gateway, or have the one that was started begin; :meth:`connect` waits for it."""
        for obstacle in obstacles():
            log.warning("the gateway is confined less than it could be: %s", obstacle)
        self._task = asyncio.create_task(self._keep_running())

    async def connect(self, queue: EventQueue) -> None:
        """Wait until the first gateway listens. From now on ``queue`` gets requests, and the starts of later gateways.

        Earlier requests are dropped: there was no broker, and so no session that could have sent them.

        Raises:
            Unavailable: the first gateway could not be started, or ended before it listened.
        """
        self._queue = queue
        if self._connection:
            self._connection.queue = queue
        if failure := await self._first:
            raise Unavailable(f"the gateway does not come up on {self._path}: {failure}")

    def send(self, frames: Sequence[framing.Part]) -> bool:
        """Send a batch of replies, and return whether the gateway is behind with them.

        Without a gateway the batch is dropped: clients ask again, and are answered again.
        """
        return self._connection is not None and self._connection.send(frames)

    def obstacle(self) -> str:
        """Return why no request can arrive at the moment, or an empty text."""
        listens = self._connection is not None and self._connection.listening.done()
        return "" if listens else f"its gateway is being started again{_foreign_code()}"

    async def stop(self) -> None:
        """End the gateway, and start no other one."""
        self._stopping.set()
        if self._connection:
            self._connection.close()
        if self._task:
            await self._task

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        quick = 0
        while not self._stopping.is_set():
            delay = LONGEST_DELAY
            try:
                started = loop.time()
                ending = await self._run()
                if self._stopping.is_set():
                    break
                if not self._first.done():
                    return self._first.set_result(ending)
                quick = quick + 1 if loop.time() - started < STEADY else 0
                delay = min(FIRST_DELAY * 2 ** min(quick - 2, 10), LONGEST_DELAY) if quick > 1 else 0.0
                hint = _foreign_code() if quick else ""
                log.warning("the gateway ended: %s%s; another one starts in %.2f s", ending, hint, delay)
            except MemoryError:  # which passes
                log.warning(
                    "the gateway ended, and the broker ran out of memory while handling that; another one starts soon"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        return None

    async def _run(self) -> str:
        """Start a gateway, wait until it has ended, and return how it ended."""
        try:
            process, connection = await self._spawn()
        except (OSError, MemoryError) as error:
            return f"it cannot be started: {explain(error)}"
        try:
            self._connection = connection
            connection.queue = self._queue  # connect() may have been called since
            if self._stopping.is_set():
                connection.close()
            if undone := await watch(connection, self._path):
                process.kill()
                connection.close()
                undone += ", so it was killed, and "
            await connection.ended
            self._connection = None
            status = await process.end()
            return f"process {process.pid} {undone}{_ended(status)}{process.last_words()}"
        finally:  # a step above may have failed for want of memory
            self._connection = None
            process.kill()
            connection.close()

    async def _spawn(self) -> tuple[GatewayChild, GatewayConnection]:
        with contextlib.ExitStack() as undo:
            start = self._begin()
            undo.callback(start.close)
            create = asyncio.get_running_loop().create_unix_connection
            _, connection = await create(lambda: GatewayConnection(self._queue), sock=start.pipe)
            undo.callback(connection.close)
            connection.listening.add_done_callback(self._announce)
            child = GatewayChild(start)
            undo.pop_all()
        return child, connection

    def _begin(self) -> GatewayStart:
        """Return a gateway that has the request socket: the one that was started in advance, or another one."""
        begun, self._begun = self._begun, None
        if begun:
            try:
                begun.give(self._listener, self._path)
            except OSError as error:
                begun.close()
                reason = explain(error)
                log.warning("the gateway that was started in advance gets no work (%s); another one starts", reason)
            else:
                return begun
        return GatewayStart(self._listener, self._path)

    def _announce(self, listening: asyncio.Future[None]) -> None:
        if listening.cancelled():
            return
        if not self._first.done():
            self._first.set_result("")
        elif self._queue:
            self._queue.put(GatewayStarted())


class GatewayChild:
    """A gateway's process. The loop reads its standard error, and watches for its end by a pidfd.

    Args:
        start: its start, which this object closes when the process has ended.

    Raises:
        OSError, MemoryError: the process cannot be watched.
    """

    def __init__(self, start: GatewayStart) -> None:
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._process, self._errors = start.process, start.errors
        self._said = b""
        #: Allocated in advance: if a read failed for want of memory, unread bytes would wake the loop again and again.
        self._room = bytearray(_PART)
        with contextlib.ExitStack() as undo:
            undo.callback(start.close)
            pidfd = system_calls.pidfd_open(self.pid)
            undo.callback(os.close, pidfd)
            for descriptor, readable in ((self._errors, self._listen), (pidfd, self._exited)):
                self._loop.add_reader(descriptor, readable)
                undo.callback(self._loop.remove_reader, descriptor)
            self._undo = undo.pop_all()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    async def end(self) -> int:
        """Return its status. Its pipe has closed, so it ends; after :data:`GRACE` it is killed."""
        if not (await asyncio.wait((self._status,), timeout=GRACE))[0]:
            self.kill()
        return await self._status

    def last_words(self) -> str:
        """Log the end of what it wrote to its standard error, and return the last line, which says most."""
        text = self._said.decode(errors="replace").strip()
        if not text:
            return ""
        log.error("the gateway said: %s", text)
        return f" ({text.splitlines()[-1][:200]})"

    def _listen(self) -> bool:
        """Read its standard error, and return whether there was anything; a gateway that cannot write would not end."""
        try:
            count = os.readv(self._errors, [self._room])
        except BlockingIOError:
            return False
        if not count:
            self._loop.remove_reader(self._errors)
        self._said = (self._said + self._room[max(0, count - LAST_WORDS) : count])[-LAST_WORDS:]
        return count > 0

    def _exited(self) -> None:
        try:
            while self._listen():
                pass
        finally:
            try:
                self._undo.close()
            finally:
                self._status.set_result(self._process.returncode)


def gateway_code() -> list[str]:
    """Return paths of code that a gateway imports and its broker does not; one of each package is enough."""
    pyzmq = find_spec("zmq")
    ours = str(Path(__file__).with_name("gateway.py"))
    return [ours, pyzmq.origin] if pyzmq and pyzmq.origin else [ours]


def _foreign_code() -> str:
    """Return what to do if a gateway would run other code than this process; an empty text if it would not."""
    try:
        find_spec(GATEWAY)  # it imports nothing here, but asks the import guard
    except Unsupported:
        return "; cubroker was replaced on disk after this broker had started, as by an upgrade: restart the broker"
    return ""


def _ended(status: int) -> str:
    """Say how a gateway ended. libzmq aborts where it cannot continue, and writes which call failed."""
    if status != -signal.SIGABRT:
        return f"ended with status {status}"
    return (
        "was aborted by libzmq, usually for lack of threads, descriptors or memory; look at LimitNPROC=, TasksMax=,"
        " LimitNOFILE= and LimitAS= of the broker's unit, or at ulimit -a"
    )
