"""Handles of 64 bytes, with which another process gets a descriptor of this one's memory or event.

A handle is the server's address, a secret, the server's process id, and zeros. The address names a datagram socket in
the abstract namespace, which any user of this network namespace can send to and which ends with its process. A request
is the secret; the reply is the descriptor, its device and an offset, or empty if the secret is unknown. The server
keeps no state between the two, so a peer that sends garbage, or never reads, costs it one failed send.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from cubroker.driver.buffers import HANDLE_BYTES
from cubroker.driver.host import shared_memory

SECRET_BYTES = 16
PATIENCE = 30.0
"""Seconds that a server has to reply; a stopped process does not."""

_AGAIN = 1.0  #: Seconds after which a request is repeated: the reply may have been lost, or the server gone.

_ADDRESS_BYTES = 16
_NAMESPACE = b"\0cubroker-host-"
_INT = struct.Struct("=i")
_ANSWER = struct.Struct("=QI")


stopped: deque[threading.Thread] = deque()  #: Threads of servers that were stopped and may not have ended yet.


class SharedFd(NamedTuple):
    """What a handle stands for."""

    fd: int
    #: The device that the memory or event is of.
    device: int
    #: The offset of the handle's memory in the descriptor's.
    offset: int = 0


class HandleServer:
    """Serves the handles of this process, on a thread of its own, until stopped.

    The collector may call any object's finalizer on that thread, and such a finalizer may call the driver. So the
    thread holds no lock that a driver call takes except :func:`shared_memory.fork_lock`, and no thread waits for it
    while it has the driver's lock (:func:`join_stopped`).
    """

    def __init__(self) -> None:
        self._address = secrets.token_bytes(_ADDRESS_BYTES)
        self._shared: dict[bytes, SharedFd] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="cubroker-host-memory", daemon=True)
        with shared_memory.fork_lock() as ours:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(_NAMESPACE + self._address.hex().encode())
            self._thread.start()
            ours.add(self._socket)

    def share(self, shared: SharedFd) -> bytes:
        """Return a new handle, with which other processes get a duplicate of the descriptor."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._shared[secret] = shared
        return (self._address + secret + _INT.pack(os.getpid())).ljust(HANDLE_BYTES, b"\0")

    def withdraw(self, handle: bytes) -> bool:
        """End a handle, if it is one; its descriptor may be closed afterwards. Return whether others are left."""
        self._shared.pop(secret_of(handle), None)
        return bool(self._shared)

    def stop(self) -> None:
        """Make the thread end, which frees the address; this does not wait for that."""
        self._stopping = True
        stopped.append(self._thread)
        self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            secret, client = self._socket.recvfrom(SECRET_BYTES + 1)
            if self._stopping:
                break
            if client:  # else there is no address to reply to
                with suppress(OSError):  # the client is gone, or does not read
                    self._reply(secret, client)
        with shared_memory.fork_lock() as ours:
            ours.discard(self._socket)
            self._socket.close()

    def _reply(self, secret: bytes, client: bytes) -> None:
        shared = self._duplicated(secret)
        if shared is None:
            self._socket.sendto(b"", socket.MSG_DONTWAIT, client)
            return
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(shared.fd))
            answer = _ANSWER.pack(shared.offset, shared.device)
            self._socket.sendmsg([answer], [rights], socket.MSG_DONTWAIT, client)
        finally:
            shared_memory.close(shared.fd)

    def _duplicated(self, secret: bytes) -> SharedFd | None:
        """Return what a secret stands for, with a descriptor to be closed; None if it stands for nothing.

        A handle is withdrawn before its descriptor is closed. If it still exists afterwards, the descriptor was open.
        """
        shared = self._shared.get(secret)
        if shared is None:
            return None
        with shared_memory.fork_lock() as ours:
            ours.add(fd := shared_memory.duplicate(shared.fd))
        if self._shared.get(secret) is shared:
            return shared._replace(fd=fd)
        shared_memory.close(fd)
        return None


def join_stopped() -> None:
    """Wait for the threads of stopped servers, except this thread. The caller must not have the driver's lock."""
    with suppress(IndexError):
        while True:
            thread = stopped.popleft()
            if thread is not threading.current_thread():
                thread.join()


class SharedFds:
    """Handles with a server of their own, which runs while there are any; its user holds the driver's lock."""

    def __init__(self) -> None:
        self._server: HandleServer | None = None

    def share(self, shared: SharedFd) -> bytes:
        """Return a new handle, with which other processes get a duplicate of the descriptor."""
        self._server = self._server or HandleServer()
        return self._server.share(shared)

    def withdraw(self, handle: bytes) -> None:
        if self._server and not self._server.withdraw(handle):
            self._server.stop()
            self._server = None


def by_this_process(handle: bytes) -> bool:
    """Whether a GPU would take a handle for this process's: it compares ids, which another pid namespace repeats."""
    (owner,) = _INT.unpack_from(handle, _ADDRESS_BYTES + SECRET_BYTES)
    return bool(owner == os.getpid())


def secret_of(handle: bytes) -> bytes:
    """Return the secret in a handle."""
    return handle[_ADDRESS_BYTES : _ADDRESS_BYTES + SECRET_BYTES]


def fetch(handle: bytes) -> SharedFd:
    """Return what a handle stands for. The caller closes the descriptor.

    Until then it is in the set of :func:`shared_memory.fork_lock`.

    Raises:
        LookupError: the handle is made up, its memory or event is gone, or its process is.
        TimeoutError: its process does not reply.
    """
    address, secret = handle[:_ADDRESS_BYTES], secret_of(handle)
    left = PATIENCE  # counted in requests: a client that is stopped meanwhile loses one of them, not all
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind("")  # the kernel picks a name; without one there is no reply
        try:
            client.connect(_NAMESPACE + address.hex().encode())  # from now on only the server can send to it
            while left > 0:
                client.settimeout(min(left, _AGAIN))
                left -= _AGAIN
                with suppress(TimeoutError):
                    return _ask(client, secret)
        except ConnectionError:
            raise LookupError("the owner of the memory is gone") from None
    raise TimeoutError(f"the owner of the memory has not answered for {PATIENCE:g} s; is it stopped?")


def _ask(client: socket.socket, secret: bytes) -> SharedFd:
    client.send(secret)
    client.recv(1, socket.MSG_PEEK)  # waits here, not under the lock below
    with shared_memory.fork_lock() as ours:
        # socket.recv_fds would drop the flag, and a child that is started meanwhile would inherit the memory.
        data, ancillary, flags, _ = client.recvmsg(_ANSWER.size, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
        received: list[int] = [_INT.unpack(rights)[0] for _, _, rights in ancillary]
        ours.update(received)
    if flags & socket.MSG_CTRUNC:
        shared_memory.close(*received)
        raise OSError(errno.EMFILE, "no descriptor is left for the memory, or more than one was sent")
    if not received:
        raise LookupError("the owner of the memory does not know the handle")
    if len(data) < _ANSWER.size:  # another version of this module, or an impostor
        shared_memory.close(*received)
        raise LookupError("the owner of the memory does not answer as it should")
    offset, device = _ANSWER.unpack(data)
    return SharedFd(received[0], device, offset)
