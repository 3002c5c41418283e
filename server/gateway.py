"""The gateway: a process that holds the ZeroMQ socket and nothing else.

It forwards whole requests to the broker and the broker's answers to the clients, in batches. It is
a process of its own since any permitted peer can bring libzmq down, by running it out of
descriptors or memory or into one of its assertions, and GPU memory must not go down with it. What
it costs is bounded: it has its own limits, reads no further request while the broker has not taken
the last batch, and drops replies for a client that does not read. libzmq counts the replies of a client, and
not their bytes; so a large one is followed by as many empty messages as make it count for its bytes.

Started by :mod:`cubroker.server.supervisor` as ``python -m cubroker.server.gateway PIPE LISTENER PATH``,
the first two being inherited descriptors. It ends when the broker's end of the pipe closes, and is killed should the
broker be: one that hangs would notice no end of a pipe, and nobody else looks after it.
"""

from __future__ import annotations

import errno
import resource
import signal
import socket
import sys
from contextlib import suppress

import zmq

from cubroker.protocol import wire
from cubroker.server import batches, sandbox
from cubroker.server.hiding import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, hide, prctl
from cubroker.server.intake import Intake

MAX_DESCRIPTORS = 65_536
MAX_MEMORY = 2 << 30
"""Bytes of data. libzmq collects a multipart message without end in memory; past this it ends the process."""

HIGH_WATER = 1024
"""Messages queued per client, each way."""

WEIGHT = 64 << 10
"""Bytes of a reply that count as one message, so that a client which does not read has 64 MiB and one reply waiting."""

HANDSHAKE = 10_000
"""Milliseconds that a peer may take to begin speaking ZMTP."""

NOT_LAST = zmq.SNDMORE | zmq.NOBLOCK
READ_AND_WRITE = zmq.POLLIN | zmq.POLLOUT
"""Worked out once: joining two flags takes longer than sending a message."""

_READ = 1 << 20


class Gateway:
    """The forwarding loop between one ROUTER socket and the broker."""

    def __init__(self, pipe: socket.socket, router: zmq.Socket[bytes]) -> None:
        self._pipe = pipe
        self._router = router
        self._intake = Intake(router)
        self._inbound = batches.Batches()
        self._unsent = memoryview(batches.encode(()))  # "I am listening"
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Forward until the broker's end closes."""
        while True:
            # While the broker has not taken a batch the next one fills up. Then requests wait in their clients'
            # pipes, which are bounded.
            busy = bool(self._unsent or self._intake)
            self._poller.register(self._pipe, READ_AND_WRITE if busy else zmq.POLLIN)
            self._poller.register(self._router, 0 if self._intake.full else zmq.POLLIN)
            ready = dict(self._poller.poll())
            answered = ready.get(self._pipe.fileno(), zmq.POLLOUT) != zmq.POLLOUT
            if answered and not self._read():
                return
            # A large answer comes in many pieces, and all after it wait: its next piece goes before the next requests.
            if self._router in ready and not (answered and self._inbound.within):
                self._intake.receive()
            if not self._unsent and (frames := self._intake.batch()):
                self._unsent = memoryview(batches.encode(frames))
            if self._unsent:
                self._write()

    def _read(self) -> bool:
        """Deliver what the broker sent; False at its end."""
        try:
            data = self._pipe.recv(_READ)
        except ConnectionError:
            return False
        for batch in self._inbound.feed(data):
            self._deliver(batch)
        return bool(data)

    def _write(self) -> None:
        # Full: there will be room. Broken: the broker is gone, as the next read will say.
        with suppress(BlockingIOError, ConnectionError):
            self._unsent = self._unsent[self._pipe.send(self._unsent) :]

    def _deliver(self, batch: list[bytes]) -> None:
        for routing, frame in batches.pairs(batch):
            weight = len(frame) // WEIGHT
            while self._send(routing, frame) and weight:
                weight, frame = weight - 1, b""

    def _send(self, routing: bytes, frame: bytes) -> bool:
        """Send a message to a client; False if it has gone, or does not read: the broker keeps its replies for it."""
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
        (zmq.MAXMSGSIZE, wire.MAX_MESSAGE),
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


def limit() -> None:
    """Bound this process's descriptors, memory, life and rights, and leave signals to the broker."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # A terminal or service manager signals the whole group; the broker ends the gateway when it is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for kind, value in ((resource.RLIMIT_NOFILE, MAX_DESCRIPTORS), (resource.RLIMIT_DATA, MAX_MEMORY)):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, hard))


def main() -> None:
    """Run the gateway on the descriptors named on the command line."""
    hide()
    limit()
    pipe, listener, path = sys.argv[1:]
    with socket.socket(fileno=int(pipe)) as end, zmq.Context() as context:
        end.setblocking(False)
        sandbox.shut_files()  # before the context has threads
        with bind(context, int(listener), path) as router:
            sandbox.filter_calls()
            try:
                Gateway(end, router).run()
            except (MemoryError, zmq.ZMQError) as error:
                if getattr(error, "errno", errno.ENOMEM) != errno.ENOMEM:
                    raise
                sys.exit("no memory is left to it; a peer sends without end, or does not read")


if __name__ == "__main__":
    main()
