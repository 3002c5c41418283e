"""The connection to a broker: the one thread that owns the request socket and listens on the session socket.

The thread alone makes, uses and closes libzmq's objects. It numbers and sends requests, settles them with their
answers, receives descriptors, and passes the broker's notices on. Other threads only wake it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

import zmq

from cubroker.client.fork_guard import SessionThread
from cubroker.client.notices import Notices
from cubroker.client.transport import zmq_preflight
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.handshake import hang_up
from cubroker.client.transport.requests import RESEND, Future, Requests, read_notice
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Unavailable, explain
from cubroker.protocol.messages import Descriptors, Farewell, GatewayChanged, PoolLost
from cubroker.protocol.paths import REQUEST_SOCKET

BATCH = 256
"""The most answers that are read before requests are sent again."""

BATCH_BYTES = 1 << 20
"""The most bytes of these answers, not counting the last one."""

QUEUED = 32
"""Requests that libzmq queues for a gateway that does not read. Later requests wait in the outbox, and until it is
empty no request is sent a second time. A smaller number makes floods of requests slower: libzmq reports room only when
half of the queue was read. A larger one would keep more copies of a request for a gateway that is stopped."""


class Waker:
    """Wakes the connection's thread, when it sleeps, from any other thread; harmless once closed.

    It has no lock: a signal handler that interrupts :meth:`set` may wait for the session's own threads, which call
    :meth:`set` too.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds = [self.fd]  # until it is closed
        #: Whether the thread sleeps; the thread alone sets it.
        self._asleep = True
        self._open = True
        #: One entry for each call that may be writing to the descriptor, and so keeps it open.
        self._writing: deque[None] = deque()

    def set(self) -> None:
        """Wake the thread, unless it is awake: then it looks for work before it sleeps."""
        if self._asleep:
            try:
                self._writing.append(None)  # inside the `try`: an interrupt can only come after the call
                if self._open:  # read last: either `close` sees the entry, or this line sees `close`
                    os.eventfd_write(self.fd, 1)
            finally:
                self._writing.pop()
                if not self._open:
                    self.close()

    def rest(self) -> None:
        """Note that the thread is about to sleep: it looks for work once more, and is woken for any later work."""
        self._asleep = True

    def rise(self, *, woken: bool) -> None:
        """Note that the thread is awake, ``woken`` by :meth:`set` or by something else."""
        if woken:
            os.eventfd_read(self.fd)
        self._asleep = False

    def close(self) -> None:
        """Close the descriptor; while calls of :meth:`set` are writing to it, the last of these closes it."""
        self._open = False
        if not self._writing:
            self.disown()

    def disown(self) -> None:
        """Close the descriptor, also in a forked child, where a thread that was writing to it does not exist."""
        self._open = False
        with suppress(IndexError):
            os.close(self._fds.pop())


class Connection:
    """A session's sockets and their thread, which closes the session socket ``channel`` and the ``waker``."""

    def __init__(
        self,
        channel: socket.socket,
        directory: Path,
        waker: Waker,
        requests: Requests,
        receiver: FdReceiver,
        notices: Notices,
    ) -> None:
        self._channel = channel
        self._directory = directory
        self._endpoint = f"ipc://{directory / REQUEST_SOCKET}"
        self._waker = waker
        self._requests = requests
        self._receiver = receiver
        self._notices = notices
        #: Why the session is over; empty while it lives, and when this process ended it.
        self.lost = ""
        self._stopping = False
        self._quiet = False
        self._failure: CubrokerError | None = None
        self._poller = zmq.Poller()
        self._poller.register(waker.fd, zmq.POLLIN)
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._ready: Future[None] = Future()
        #: Delivered at the end of the thread.
        self.ended: Future[None] = Future()
        self._begun = Lock()  # taken by the thread, or by a caller that closes everything in its place
        self._thread = SessionThread(target=self._run, name="cubroker-connection", daemon=True)

    def start(self) -> None:
        """Start the thread and return when it can send; raise an error that names the resource that it lacks."""
        with zmq_preflight.turn():
            zmq_preflight.try_memory(1)  # Thread.start() waits for ever for a thread without memory to run in
            self._thread.start()
        self._ready.result()

    def discard(self) -> None:
        """Undo a :meth:`start` that failed, was interrupted or was never called: close everything."""
        if self._begun.acquire(blocking=False):
            self._close()
        else:
            self.stop()
            self._thread.join()  # it polls the descriptors that would be closed

    def stop(self, *, quietly: bool = False) -> None:
        """Tell the thread to close everything; do not wait for it. ``quietly``: threads that wait are left waiting."""
        self._quiet = quietly
        self._stopping = True
        self._waker.set()

    def fail(self, reason: CubrokerError) -> None:
        """Have the session be lost, for a reason in this process; do not wait for that."""
        self._failure = reason
        self._waker.set()

    def join(self) -> None:
        """Wait for the thread, which has ``ended``."""
        self._thread.join()

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child, except libzmq's: its threads do not exist there."""
        self._channel.close()
        self._waker.disown()

    def _dial(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer
        dealer.linger = 0
        dealer.immediate = True  # while there is no gateway, requests wait in the outbox, not in libzmq as well
        dealer.sndhwm = QUEUED
        dealer.rcvhwm = 0
        dealer.maxmsgsize = wire.MAX_MESSAGE
        dealer.connect(self._endpoint)
        self._poller.register(dealer, zmq.POLLIN)

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        reason: CubrokerError = Unavailable("the thread of the connection to the broker has failed")
        try:
            reason = self._converse()
        except CubrokerError as error:
            reason = Unavailable(f"the broker on {self._directory} sent {error.message}")
        except (zmq.ZMQError, OSError, zmq_preflight.Shortage) as error:
            reason = Unavailable(f"no connection for requests to the broker on {self._directory}: {explain(error)}")
        finally:
            if self._ready.done() and not self._stopping:
                self.lost = reason.message  # set before the threads that wait are woken
            self._ready.fail(reason)
            self._requests.close(reason, quietly=self._quiet)
            if not self._quiet:
                self._receiver.fail(reason)
                self._notices.end(reason, lost=bool(self.lost))
            self._close()
            self.ended.set(None)

    def _close(self) -> None:
        self._waker.close()
        hang_up(self._channel)

    def _converse(self) -> CubrokerError:
        with ExitStack() as undo:
            with zmq_preflight.turn():
                zmq_preflight.check()
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._dial(self._context.socket(zmq.DEALER))
            self._ready.set(None)
            return self._serve()

    def _serve(self) -> CubrokerError:
        while not (self._stopping or self._failure):
            self._send()  # what was posted before this thread could be woken for it
            ready = dict(self._poller.poll(int(RESEND * 1000) if self._requests.waiting() else None))
            self._waker.rise(woken=self._waker.fd in ready)
            if self._channel.fileno() not in ready:
                self._receiver.drained()
            elif reason := self._listen():
                return reason
            if self._dealer in ready:
                self._receive()
            self._requests.resend_overdue()
            self._send()
            self._waker.rest()  # from here on it is woken for everything, the end included
        return self._failure or Unavailable("the connection to the broker was closed by this process")

    def _listen(self) -> CubrokerError | None:
        try:
            data, descriptors = self._receiver.receive(self._channel)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            return Unavailable(f"the broker on {self._directory} is gone: the connection to it has ended")
        match read_notice(data):
            case None:
                self._receiver.close(descriptors)
            case Descriptors() as notice:
                self._receiver.put(notice, descriptors)
            case Farewell(reason):
                return Unavailable(f"the broker on {self._directory} is gone: {reason}")
            case GatewayChanged():
                self._redial()
            case notice:
                if isinstance(notice, PoolLost):
                    self._receiver.lose(notice)
                self._notices.hear(notice)
        return None

    def _redial(self) -> None:
        """Connect to the next gateway by a new socket: one that is disconnected still accepts requests, and loses them.

        If the process has no descriptor left for a new socket, reconnect the old one; the requests that it loses are
        sent again when they are overdue.
        """
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:
            self._dealer.disconnect(self._endpoint)
            self._dealer.connect(self._endpoint)
        else:
            self._poller.unregister(self._dealer)
            self._dealer.close()
            self._dial(dealer)
        self._requests.resend_all()

    def _receive(self) -> None:
        for data in self._read():
            answer = self._requests.read(data)
            if answer and (request := self._requests.answer(answer)):
                self._receiver.settled(request, answer.body)

    def _read(self) -> list[bytes]:
        """Return the answers that have arrived, up to the limits of a batch.

        All are read before any is settled: otherwise each answer would wake a thread, which runs before the next read.
        """
        found, room = list[bytes](), BATCH_BYTES
        while room > 0 and len(found) < BATCH:
            try:
                data = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if data:  # an empty message follows a large answer, so that the gateway's count of messages allows for it
                found.append(data)
                room -= len(data)
        return found

    def _send(self) -> None:
        self._requests.take()
        outbox = self._requests.outbox
        events = zmq.POLLIN
        while outbox:
            try:
                self._dealer.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                events |= zmq.POLLOUT
                break
            outbox.popleft()
        self._poller.register(self._dealer, events)
