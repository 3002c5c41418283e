"""The connection to a broker: one thread that owns the request socket and listens on the session socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, RLock

import zmq

from cubroker.client import headroom, notices
from cubroker.client.descriptors import Inbox
from cubroker.client.futures import Future
from cubroker.client.hello import hang_up
from cubroker.client.janitor import OwnThread
from cubroker.client.requests import RESEND, Requests
from cubroker.protocol import wire
from cubroker.protocol.directory import REQUEST_SOCKET
from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.messages import (
    Descriptors,
    Draining,
    Farewell,
    GatewayChanged,
    PoolChanged,
    PoolLost,
    Rebound,
    Welcome,
)
from cubroker.protocol.system_errors import explain

BATCH = 256
"""Answers that are read before requests get their turn."""

BATCH_BYTES = 1 << 20
"""Their bytes, but for those of the last one."""


class Waker:
    """Wakes the connection's thread from any other, and only once while it sleeps; harmless once closed."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = RLock()  # a signal handler may come into the middle, and wake the thread as well
        self._open = True
        self._asleep = True

    def set(self) -> None:
        """Wake the thread, unless it is awake: then it looks for what there is to do before it sleeps."""
        if self._asleep:
            with self._lock:
                if self._open:
                    os.eventfd_write(self.fd, 1)
                self._asleep = False

    def rest(self) -> None:
        """The thread is going to sleep: it looks once more from now on, and is woken for what comes after."""
        with self._lock:
            self._asleep = True

    def clear(self) -> None:
        """The thread was woken: forget that."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)

    def disown(self) -> None:
        """Give the descriptor back in a forked child, where a lost thread may hold the lock for ever."""
        if self._open:
            self._open = False
            os.close(self.fd)


class Connection:
    """A session's sockets and their thread, which alone makes, uses and closes what is libzmq's.

    Args:
        channel: the session socket, after the welcome. The connection closes it, once it was started.
        directory: the broker's.
        waker: what ``requests`` wakes this thread with. The connection closes it, once it was started.
        requests: where requests come from and answers go to.
        inbox: where descriptors go to.
        changed: called on this thread with every change of a watched pool.
        rebound: called on this thread when a lease is to store to all replicas by what follows.
        vanished: called on this thread when memory that was lent to this session went with an earlier broker.
        draining: called on this thread when the broker begins to call back what it lent, or lends again.
        lost: called on this thread, once, with the reason why the connection is over.
    """

    def __init__(
        self,
        channel: socket.socket,
        directory: Path,
        waker: Waker,
        requests: Requests,
        inbox: Inbox,
        changed: Callable[[PoolChanged], None],
        rebound: Callable[[Rebound], None],
        vanished: Callable[[PoolLost], None],
        draining: Callable[[Draining], None],
        lost: Callable[[CubrokerError], None],
    ) -> None:
        self._channel = channel
        self._directory = directory
        self._waker = waker
        self._requests = requests
        self._inbox = inbox
        self._changed = changed
        self._rebound = rebound
        self._vanished = vanished
        self._draining = draining
        self._lost = lost
        self._stopping = False
        self._quiet = False
        self._poller = zmq.Poller()
        self._poller.register(waker.fd, zmq.POLLIN)
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self._ready: Future[None] = Future()
        self._begun = Lock()  # taken by the thread, or by whoever closes everything in its place
        self._thread = OwnThread(target=self._run, name="cubroker-connection", daemon=True)

    def start(self) -> None:
        """Start the thread, and return when it can send.

        Raises:
            RuntimeError: threads have run out.
            Shortage: memory has.
            Unavailable: descriptors have, or threads or memory for libzmq.
        """
        with headroom.turn():
            headroom.try_memory(1)  # Thread.start() waits for ever for one that has no memory to run
            self._thread.start()
        self._ready.result()

    def discard(self) -> None:
        """Undo a :meth:`start` that failed or was interrupted, or never came: close everything."""
        if self._begun.acquire(blocking=False):
            self._close()
        else:
            self.stop()
            self._thread.join()  # nobody may close what it polls

    def stop(self, *, quietly: bool = False) -> None:
        """Tell the thread to close everything; returns at once. ``quietly``: whoever waits is left waiting."""
        self._quiet = quietly
        self._stopping = True
        self._waker.set()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end."""
        self._thread.join(timeout)

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child. libzmq's are left alone: its threads are not here."""
        self._channel.close()
        self._waker.disown()

    def _dial(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.immediate = True  # while there is no gateway, requests wait here, and are not queued twice
        dealer.sndhwm = 0
        dealer.rcvhwm = 0
        dealer.maxmsgsize = wire.MAX_MESSAGE
        dealer.connect(f"ipc://{self._directory / REQUEST_SOCKET}")
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        reason: CubrokerError = Unavailable("the thread of the connection to the broker has failed")
        try:
            reason = self._converse()
        except CubrokerError as error:
            reason = Unavailable(f"the broker on {self._directory} sent {error.message}")
        except (zmq.ZMQError, OSError, headroom.Shortage) as error:
            reason = Unavailable(f"no connection for requests to the broker on {self._directory}: {explain(error)}")
        finally:
            self._ready.fail(reason)
            if self._quiet:
                self._requests.refuse(reason)
            else:
                self._requests.close(reason)
                self._inbox.fail(reason)
                self._lost(reason)
            self._close()

    def _close(self) -> None:
        self._waker.close()
        hang_up(self._channel)

    def _converse(self) -> CubrokerError:
        with ExitStack() as undo:
            with headroom.turn():
                headroom.check()
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._dealer = self._dial()
            self._ready.set(None)
            return self._serve()

    def _serve(self) -> CubrokerError:
        while not self._stopping:
            ready = self._sleep()
            if self._channel.fileno() not in ready:
                self._inbox.drained()
            elif reason := self._listen():
                return reason
            if self._dealer in ready:
                self._receive()
            self._requests.resend_overdue()
            self._send()
            self._waker.rest()  # so it is woken for whatever comes from here on, be it the end
        return Unavailable("the connection to the broker was closed by this process")

    def _sleep(self) -> dict[object, int]:
        """Send what has come before this thread could be woken for it; return what it was woken for."""
        self._send()
        ready = dict(self._poller.poll(int(RESEND * 1000) if self._requests.waiting() else None))
        if self._waker.fd in ready:
            self._waker.clear()
        return ready

    def _listen(self) -> CubrokerError | None:
        try:
            data, descriptors = self._inbox.receive(self._channel)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            return Unavailable(f"the broker on {self._directory} is gone: the connection to it has ended")
        match notices.read(data):
            case None:
                self._inbox.close(descriptors)
            case Descriptors() as notice:
                self._inbox.put(notice, descriptors)
            case Farewell(reason):
                return Unavailable(f"the broker on {self._directory} is gone: {reason}")
            case GatewayChanged():
                self._redial()
            case PoolChanged() as change:
                self._changed(change)
            case Rebound() as notice:
                self._rebound(notice)
            case PoolLost() as loss:
                self._inbox.lose(loss)
                self._vanished(loss)
            case Draining() as recall:
                self._draining(recall)
            case Welcome():
                pass  # sent again: the broker was started again, and cannot know that the first was sent
        return None

    def _redial(self) -> None:
        self._poller.unregister(self._dealer)
        self._dealer.close()
        self._dealer = self._dial()
        self._requests.resend_all()

    def _receive(self) -> None:
        for data in self._read():
            answer = self._requests.read(data)
            if answer and (request := self._requests.answer(answer)):
                self._inbox.settled(request, answer.body)

    def _read(self) -> list[bytes]:
        """Return the answers that are there, or as many as are read before requests get their turn.

        They are read before any is settled, since whoever is woken by that would run in between, at every one.
        """
        found, room = list[bytes](), BATCH_BYTES
        while room > 0 and len(found) < BATCH:
            try:
                data = self._dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if data:  # else it follows a large answer, for the gateway to count
                found.append(data)
                room -= len(data)
        return found

    def _send(self) -> None:
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
