"""How the bytes of a block reach another process: its descriptor, for whoever knows an allocation's secret.

A handle is 64 bytes: the owner's address, the secret, zeros. The address names a datagram socket in
the abstract namespace, which any user of this network namespace can write to and which ends with
its process. One message asks (the secret), one answers (the descriptor and the allocation's offset,
or nothing if the secret is unknown). The owner keeps no state between the two, so a peer that
writes garbage, or never reads, costs it one failed send.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress

from cubroker.driver.host.heap import SECRET_BYTES, Allocation, Block

HANDLE_BYTES = 64
PATIENCE = 30.0
"""Seconds that an owner has to answer; one that is stopped does not."""

_AGAIN = 1.0
"""Seconds after which the question is repeated: the answer may have been lost, or the owner gone."""

_ADDRESS_BYTES = 16
_NAMESPACE = b"\0cubroker-host-"
_INT = struct.Struct("=i")
_OFFSET_BYTES = 8


class Owner:
    """Answers for the allocations of this process, on a thread of its own, until stopped."""

    def __init__(self) -> None:
        self._address = secrets.token_bytes(_ADDRESS_BYTES)
        self._exported: dict[bytes, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_NAMESPACE + self._address.hex().encode())
        self._thread = threading.Thread(target=self._serve, name="cubroker-host-memory", daemon=True)
        self._thread.start()

    def export(self, block: Block, allocation: Allocation) -> bytes:
        """Return the handle of an allocation; from now on whoever shows it gets the block."""
        with self._lock:
            self._exported[allocation.secret] = block.fd, allocation.pointer - block.pointer
        return (self._address + allocation.secret).ljust(HANDLE_BYTES, b"\0")

    def withdraw(self, allocation: Allocation) -> None:
        """Answer for this allocation no more; its block's descriptor may be closed afterwards."""
        with self._lock:
            self._exported.pop(allocation.secret, None)

    def owns(self, handle: bytes) -> bool:
        """Whether a handle was made here."""
        return handle.startswith(self._address)

    def stop(self) -> None:
        """End the thread and give the address up."""
        self._stopping = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def forked(self) -> None:
        """In a forked child, which has no such thread: let go of the parent's address."""
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
                fd, offset = self._exported[secret]
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))
                self._socket.sendmsg([offset.to_bytes(_OFFSET_BYTES, "little")], [rights], socket.MSG_DONTWAIT, asker)
            else:
                self._socket.sendto(b"", socket.MSG_DONTWAIT, asker)


def fetch(handle: bytes) -> tuple[int, int]:
    """Return a descriptor of the block that the allocation of ``handle`` lies in, and its offset there.

    Raises:
        LookupError: nobody answers for it: it is made up, or the memory was freed, or its owner is gone.
        TimeoutError: its owner does not answer.
    """
    address, secret = handle[:_ADDRESS_BYTES], handle[_ADDRESS_BYTES : _ADDRESS_BYTES + SECRET_BYTES]
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


def _ask(asker: socket.socket, secret: bytes) -> tuple[int, int]:
    asker.send(secret)
    # socket.recv_fds would drop the flag, and a child that is started meanwhile would inherit the memory.
    data, ancillary, flags, _ = asker.recvmsg(_OFFSET_BYTES, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    received = [_INT.unpack(rights)[0] for _, _, rights in ancillary]
    if flags & socket.MSG_CTRUNC:
        for fd in received:
            os.close(fd)
        raise OSError(errno.EMFILE, "no descriptor is left for the memory, or more than one was sent")
    if not received:
        raise LookupError("the owner of the memory does not know the handle")
    return received[0], int.from_bytes(data, "little")
