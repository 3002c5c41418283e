"""The gateway: a process that holds the ZeroMQ socket and nothing else.

It forwards whole requests to the broker, and the broker's replies to the clients, in batches. It is a process of its
own since any permitted peer can crash libzmq, by exhausting its descriptors or memory or by triggering one of its
assertions, and GPU memory must survive that. Its cost is bounded: it has its own limits, stops reading requests while
the broker does not take them, and drops replies for a client that does not read. libzmq counts a client's replies and
not their bytes, so the gateway sends empty messages after a large reply, in proportion to the reply's size.

Small requests go first. libzmq delivers messages of any size from all clients in turn, and forwarding a layout of ten
megabytes takes as long as forwarding thousands of other requests. So the gateway reads on while it forwards, and sets
large requests aside. It forwards them in pieces, one piece after each batch of small requests, and clients take turns.
What is set aside for a client is bounded; a request past the bound is dropped, and its client sends it again.

:mod:`cubroker.server.transport.gateway_start` starts it as ``python -m cubroker.server.transport.gateway PIPE LISTENER
PATH``; the first two are inherited descriptors. One that is started in advance gets PIPE alone: the first message there
has the path of the request socket and, as a descriptor, the socket that listens there. The gateway ends when the
broker's end of the pipe closes, and the kernel kills it when the broker dies: a gateway that hangs would not notice the
end of a pipe.
"""

from __future__ import annotations

import errno
import linecache  # noqa: F401  a traceback imports this, and cannot once files are shut
import os
import resource
import signal
import socket
import sys
import tokenize  # noqa: F401
import traceback  # noqa: F401
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import zmq

from cubroker.server.hardening import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    filter_calls,
    hide,
    prctl,
    restrict_files,
)
from cubroker.server.transport import framing

MAX_DESCRIPTORS = 65_536
MAX_MEMORY = 2 << 30
"""Bytes of data. libzmq collects an endless multipart message in memory; past this limit it ends the process."""

HIGH_WATER = 1024  #: Messages queued per client, each way.

WEIGHT = 64 << 10
"""Bytes of a reply that count as one message, so that 64 MiB and one reply wait for a client which does not read."""

HANDSHAKE = 10_000  #: Milliseconds that a peer may take to begin speaking ZMTP.

MAX_PATH = 108  #: Bytes of a Unix socket's path (sun_path, unix(7)).

NOT_LAST = zmq.SNDMORE | zmq.NOBLOCK
READ_AND_WRITE = zmq.POLLIN | zmq.POLLOUT  #: Worked out once: joining two flags takes longer than sending a message.

LARGE = 64 << 10  #: Bytes of a request past which it is set aside.
MAX_ASIDE = 32 << 20  #: Bytes of requests that are set aside for one client.
MAX_ALL_ASIDE = 256 << 20  #: Bytes of requests that are set aside for all clients together.

Buffer = bytes | memoryview


class Intake:
    """Receives requests from a ROUTER, and puts them into batches."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._small: list[bytes] = []  # routing ids and frames, as they travel
        self._room = framing.FULL
        self._large: dict[bytes, deque[zmq.Frame]] = {}  # by routing id, in the order of turns
        self._aside = 0
        self._current: tuple[bytes, memoryview] | None = None  # routing id and rest of the large one under way
        self._piece_is_next = False

    def __bool__(self) -> bool:
        """Whether there is anything to forward."""
        return bool(self._small or self._large or self._current)

    @property
    def full(self) -> bool:
        """Whether the small requests that were received fill a batch."""
        return self._room <= 0 or len(self._small) >= 2 * framing.MAX_MESSAGES

    def receive(self) -> None:
        """Receive the requests that have arrived, up to as many as a batch has."""
        receive = self._router.recv
        for _ in range(framing.MAX_MESSAGES):
            if self.full:
                return
            try:
                routing = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = receive(copy=False)  # the frame tells faster than the socket whether more follow
            if message.more:
                self._router.recv_multipart()  # a request has one frame: drop the whole message
            elif len(message) > LARGE:
                self._set_aside(routing, message)
            else:
                frame = message.bytes
                self._small += (routing, frame)
                self._room -= len(frame)

    def batch(self) -> Sequence[Buffer]:
        """Return the next batch: all small requests, or a piece of a large one; empty if nothing waits."""
        if self._piece_is_next or not self._small:
            self._piece_is_next = False
            if self._current or self._large:
                return self._piece()
        self._piece_is_next = True
        batch, self._small, self._room = self._small, [], framing.FULL
        return batch

    def _set_aside(self, routing: bytes, message: zmq.Frame) -> None:
        line = self._large.get(routing, ())
        size = len(message)
        if sum(map(len, line)) + size <= MAX_ASIDE and self._aside + size <= MAX_ALL_ASIDE:
            self._large.setdefault(routing, deque()).append(message)  # uncopied: a copy would take milliseconds
            self._aside += size

    def _piece(self) -> Sequence[Buffer]:
        routing, left = self._current or self._next_large()
        piece, left = left[: framing.PIECE], left[framing.PIECE :]
        self._current = (routing, left) if left else None
        return (routing, piece, framing.MORE if left else framing.LAST)

    def _next_large(self) -> tuple[bytes, memoryview]:
        routing = next(iter(self._large))
        line = self._large.pop(routing)
        frame = line.popleft()
        self._aside -= len(frame)
        if line:
            self._large[routing] = line
        return routing, frame.buffer


class Gateway:
    """The forwarding loop between one ROUTER socket and the broker."""

    def __init__(self, pipe: socket.socket, router: zmq.Socket[bytes]) -> None:
        self._pipe = pipe
        self._router = router
        self._intake = Intake(router)
        self._inbound = framing.BatchDecoder()
        self._received = framing.room()
        self._unsent = memoryview(framing.encode(()))  # "I am listening"
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Forward until the broker's end closes."""
        while True:
            # While the broker has not taken a batch, the next one fills; then requests wait in bounded client pipes.
            busy = bool(self._unsent or self._intake)
            self._poller.register(self._pipe, READ_AND_WRITE if busy else zmq.POLLIN)
            self._poller.register(self._router, 0 if self._intake.full else zmq.POLLIN)
            ready = dict(self._poller.poll())
            answered = ready.get(self._pipe.fileno(), zmq.POLLOUT) != zmq.POLLOUT
            if answered and not self._read():
                return
            # A large reply takes many reads, and delays all later ones, so no requests are received until it is whole.
            if self._router in ready and not (answered and self._inbound.within):
                self._intake.receive()
            if not self._unsent and (frames := self._intake.batch()):
                self._unsent = memoryview(framing.encode(frames))
            if self._unsent:
                self._write()

    def _read(self) -> bool:
        """Deliver the replies that the broker sent; False if its end has closed."""
        try:
            size = self._pipe.recv_into(self._received)
        except ConnectionError:
            return False
        for batch in self._inbound.feed(self._received[:size]):
            self._deliver(batch)
        return size > 0

    def _write(self) -> None:
        # If the pipe is full, there will be room later. If it is broken, the next read shows that the broker is gone.
        with suppress(BlockingIOError, ConnectionError):
            self._unsent = self._unsent[self._pipe.send(self._unsent) :]

    def _deliver(self, batch: list[bytes]) -> None:
        for routing, frame in framing.pairs(batch):
            weight = len(frame) // WEIGHT
            while self._send(routing, frame) and weight:
                weight, frame = weight - 1, b""

    def _send(self, routing: bytes, frame: bytes) -> bool:
        """Send a message to a client; False if it has gone, or does not read: the broker keeps the reply."""
        try:
            self._router.send(routing, NOT_LAST)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        self._router.send(frame, zmq.NOBLOCK)
        return True


def bind(context: zmq.Context[zmq.Socket[bytes]], listener: int, path: str) -> zmq.Socket[bytes]:
    """Return a ROUTER on ``listener``, a listening socket's descriptor, which it takes over."""
    router = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.USE_FD, listener),
        (zmq.MAXMSGSIZE, framing.MAX_FRAME),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.HANDSHAKE_IVL, HANDSHAKE),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 0),
        (zmq.LINGER, 0),
    ):
        router.setsockopt(option, value)
    router.bind(f"ipc://{path}")
    return router


def receive(pipe: socket.socket) -> tuple[int, str]:
    """Wait for the listening socket, and return its descriptor and its path; the path is empty if the broker ended."""
    path, listeners, _, _ = socket.recv_fds(pipe, MAX_PATH, 1)
    return (listeners[0], os.fsdecode(path)) if listeners else (-1, "")


def limit() -> None:
    """Bound this process's descriptors, memory, life and rights."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for kind, value in ((resource.RLIMIT_NOFILE, MAX_DESCRIPTORS), (resource.RLIMIT_DATA, MAX_MEMORY)):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, hard))


def main() -> None:
    """Run the gateway on the descriptors named on the command line."""
    hide()
    limit()
    pipe, *given = sys.argv[1:]
    with socket.socket(fileno=int(pipe)) as end, zmq.Context() as context:
        restrict_files()  # before the context has threads
        listener, path = given or receive(end)
        if not path:  # the broker has ended
            return
        end.setblocking(False)
        with bind(context, int(listener), path) as router:
            filter_calls()
            try:
                Gateway(end, router).run()
            except (MemoryError, zmq.ZMQError) as error:
                if getattr(error, "errno", errno.ENOMEM) != errno.ENOMEM:
                    raise
                sys.exit("the gateway is out of memory: a peer sends an endless message, or does not read its replies")


if __name__ == "__main__":
    main()
