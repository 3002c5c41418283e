"""How the bytes of a block reach another process: its descriptor, for whoever knows an allocation's secret.

A handle is 64 bytes: the owner's address, the secret, its process id, zeros. The address names a datagram socket in
the abstract namespace, which any user of this network namespace can write to and which ends with
its process. One message asks (the secret), one answers (the descriptor, the device whose memory it is
and the allocation's offset, or nothing if the secret is unknown). The owner keeps no state between
the two, so a peer that writes garbage, or never reads, costs it one failed send. Events are handed
over in the same way.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import NamedTuple

from cubroker.driver.host import descriptors
from cubroker.driver.host.heap import SECRET_BYTES, Allocation, Block

HANDLE_BYTES = 64
PATIENCE = 30.0
"""Seconds that an owner has to answer; one that is stopped does not."""

_AGAIN = 1.0
"""Seconds after which the question is repeated: the answer may have been lost, or the owner gone."""

_ADDRESS_BYTES = 16
_NAMESPACE = b"\0cubroker-host-"
_INT = struct.Struct("=i")
_ANSWER = struct.Struct("=QI")


class Offer(NamedTuple):
    """What stands behind a handle: a descriptor, and the device and the offset in it that are meant."""

    fd: int
    device: int
    offset: int = 0


class Owner:
    """Answers for the allocations and the events of this process, on a thread of its own, until stopped."""

    def __init__(self) -> None:
        self._address = secrets.token_bytes(_ADDRESS_BYTES)
        self._exported: dict[bytes, Offer] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="cubroker-host-memory", daemon=True)
        with descriptors.books() as ours:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(_NAMESPACE + self._address.hex().encode())
            self._thread.start()
            ours.add(self._socket)

    def export(self, block: Block, allocation: Allocation) -> bytes:
        """Return the handle of an allocation; from now on whoever shows it gets the block."""
        return self.offer(allocation.secret, Offer(block.fd, block.device, allocation.pointer - block.pointer))

    def offer(self, secret: bytes, offer: Offer) -> bytes:
        """Return the handle with which others get what is offered."""
        with self._lock:
            self._exported[secret] = offer
        return (self._address + secret + _INT.pack(os.getpid())).ljust(HANDLE_BYTES, b"\0")

    def withdraw(self, secret: bytes) -> None:
        """Answer for this secret no more; the descriptor may be closed afterwards."""
        with self._lock:
            self._exported.pop(secret, None)

    def owns(self, handle: bytes) -> bool:
        """Whether a handle was made here."""
        return handle.startswith(self._address)

    def stop(self) -> None:
        """End the thread and give the address up."""
        self._stopping = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with descriptors.books() as ours:
            ours.discard(self._socket)
            self._socket.close()

    def _serve(self) -> None:
        while True:
            secret, asker = self._socket.recvfrom(SECRET_BYTES + 1)
            if self._stopping:
                return
            if asker:  # else nobody could be answered
                with suppress(OSError):  # the asker's own trouble: it is gone, or does not read
                    self._answer(secret, asker)

    def _answer(self, secret: bytes, asker: bytes) -> None:
        with self._lock:  # so that the descriptor stays open meanwhile
            if secret in self._exported:
                offer = self._exported[secret]
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(offer.fd))
                answer = _ANSWER.pack(offer.offset, offer.device)
                self._socket.sendmsg([answer], [rights], socket.MSG_DONTWAIT, asker)
            else:
                self._socket.sendto(b"", socket.MSG_DONTWAIT, asker)


class Offers:
    """What one part of this process offers, each under a secret of its own. It has an owner while there is anything."""

    def __init__(self) -> None:
        self._owner: Owner | None = None
        self._secrets: set[bytes] = set()

    def add(self, offer: Offer) -> bytes:
        """Return the handle with which others get what is offered."""
        self._owner = self._owner or Owner()
        secret = secrets.token_bytes(SECRET_BYTES)
        self._secrets.add(secret)
        return self._owner.offer(secret, offer)

    def withdraw(self, handle: bytes) -> None:
        """Answer for a handle no more; the descriptor may be closed afterwards."""
        assert self._owner is not None
        self._owner.withdraw(secret_of(handle))
        self._secrets.remove(secret_of(handle))
        if not self._secrets:
            self._owner.stop()
            self._owner = None


def by_this_process(handle: bytes) -> bool:
    """Whether a GPU would say so: it compares numbers, which mean others in another pid namespace."""
    (owner,) = _INT.unpack_from(handle, _ADDRESS_BYTES + SECRET_BYTES)
    return bool(owner == os.getpid())


def secret_of(handle: bytes) -> bytes:
    """Return the secret in a handle."""
    return handle[_ADDRESS_BYTES : _ADDRESS_BYTES + SECRET_BYTES]


def fetch(handle: bytes) -> Offer:
    """Return what stands behind a handle; the descriptor is on the books, and the caller's to close.

    Raises:
        LookupError: nobody answers for it: it is made up, or what it stood for was freed, or its owner is gone.
        TimeoutError: its owner does not answer.
    """
    address, secret = handle[:_ADDRESS_BYTES], secret_of(handle)
    left = PATIENCE  # of the owner's time: a process that is stopped while it asks loses one question, not all
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
        asker.bind("")  # the kernel picks a name; without one there is no answer
        try:
            asker.connect(_NAMESPACE + address.hex().encode())  # from now on only the owner can send to it
            while left > 0:
                asker.settimeout(min(left, _AGAIN))
                left -= _AGAIN
                with suppress(TimeoutError):
                    return _ask(asker, secret)
        except ConnectionError:
            raise LookupError("the owner of the memory is gone") from None
    raise TimeoutError(f"the owner of the memory has not answered for {PATIENCE:g} s; is it stopped?")


def _ask(asker: socket.socket, secret: bytes) -> Offer:
    asker.send(secret)
    asker.recv(1, socket.MSG_PEEK)  # waits, so that no fork has to wait below
    with descriptors.books() as ours:
        # socket.recv_fds would drop the flag, and a child that is started meanwhile would inherit the memory.
        data, ancillary, flags, _ = asker.recvmsg(_ANSWER.size, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
        received: list[int] = [_INT.unpack(rights)[0] for _, _, rights in ancillary]
        ours.update(received)
    if flags & socket.MSG_CTRUNC:
        descriptors.close(*received)
        raise OSError(errno.EMFILE, "no descriptor is left for the memory, or more than one was sent")
    if not received:
        raise LookupError("the owner of the memory does not know the handle")
    if len(data) < _ANSWER.size:  # another version of this module, or an impostor
        descriptors.close(*received)
        raise LookupError("the owner of the memory does not answer as it should")
    offset, device = _ANSWER.unpack(data)
    return Offer(received[0], device, offset)
