"""Host memory in memfds: mapped and unmapped by address, the devices' memory in it, and handles for other processes.

``mmap.mmap`` would keep a descriptor of its own per mapping, and could not unmap under a live buffer, which is what
freeing device memory does.

A forked child must not keep memory alive that its parent frees: it closes every descriptor of :func:`fork_lock`.
A descriptor is in that set from the moment that it is open until it is closed, whichever thread forks. Descriptors that
the driver's functions return are the caller's, and not in it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cubroker.driver import system_calls
from cubroker.driver.buffers import HANDLE_BYTES, round_up

BLOCK = 2 << 20  #: Bytes: the granularity of device memory; larger allocations are multiples, small ones share one.
SMALL = 1 << 20  #: Bytes: allocations up to this size share blocks.
ALIGNMENT = 512  #: Bytes: the alignment of allocations within a block.

SECRET_BYTES = 16
PATIENCE = 30.0
"""Seconds that a server has to reply; a stopped process does not."""

_AGAIN = 1.0  #: Seconds after which a request is repeated: the reply may have been lost, or the server gone.

_SEALS = system_calls.F_SEAL_SHRINK | system_calls.F_SEAL_GROW | system_calls.F_SEAL_SEAL
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_NO_ACCESS = 0
_ALL_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE

_libc = system_calls.libc

_fork_lock = threading.RLock()
_open: set[int | socket.socket] = set()

# -- descriptors ---------------------------------------------------------------------------------------


@contextmanager
def fork_lock() -> Iterator[set[int | socket.socket]]:
    """Keep other threads from forking, and yield the set that new descriptors are added to. The block must not wait."""
    with _fork_lock:
        yield _open


def fork_lock_held() -> bool:
    """Whether this thread is in a block of :func:`fork_lock`."""
    return _fork_lock._is_owned()  # type: ignore[attr-defined,no-any-return]


def duplicate(fd: int) -> int:
    """Return a duplicate of a descriptor."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def close(*fds: int) -> None:
    """Close descriptors of :func:`fork_lock`'s set."""
    with fork_lock() as ours:
        for fd in fds:
            ours.discard(fd)
            os.close(fd)


def _close_all() -> None:
    while _open:
        inherited = _open.pop()
        if isinstance(inherited, int):
            os.close(inherited)
        else:
            inherited.close()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_fork_lock.release)
os.register_at_fork(after_in_child=_close_all)

# -- files in memory -----------------------------------------------------------------------------------


def create(nbytes: int, name: str = "cubroker-host") -> int:
    """Return the descriptor of new shared memory, all zero, sealed at its size, so that no access to it can fault."""
    with fork_lock() as ours:
        ours.add(fd := system_calls.memfd_create(name, system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, system_calls.F_ADD_SEALS, _SEALS)
    except OSError:
        close(fd)
        raise
    return fd


def sealed(fd: int) -> bool:
    """Whether the size of shared memory can never change."""
    return fcntl.fcntl(fd, system_calls.F_GET_SEALS) & _SEALS == _SEALS


def writable(fd: int) -> bool:
    """Whether shared memory can be written with this descriptor."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def name_of(fd: int) -> str:
    """Return the name that shared memory was created with."""
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")


# -- mappings ------------------------------------------------------------------------------------------


def map_shared(fd: int, nbytes: int) -> int:
    """Map the memory of ``fd`` and return its address; the descriptor is not needed afterwards."""
    return _map(fd, nbytes, _ALL_ACCESS, mmap.MAP_SHARED | _MAP_NORESERVE)


def map_unforked(fd: int, nbytes: int) -> int:
    """Map the memory of ``fd`` and return its address; forked children do not inherit the mapping."""
    with fork_lock():
        pointer = map_shared(fd, nbytes)
        if _libc.madvise(pointer, nbytes, mmap.MADV_DONTFORK):
            error = _error("madvise")
            unmap(pointer, nbytes)
            raise error
    return pointer


def map_private(nbytes: int) -> int:
    """Map ``nbytes`` of this process's own memory and return their address."""
    return _map(-1, nbytes, _ALL_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def reserve(nbytes: int, alignment: int) -> int:
    """Reserve addresses, with nothing mapped there, and return the first, a multiple of ``alignment``."""
    whole = _map(-1, nbytes + alignment, _NO_ACCESS, _EMPTY)
    before = -whole % alignment
    for start, size in ((whole, before), (whole + before + nbytes, alignment - before)):
        if size:
            unmap(start, size)
    return whole + before


def map_at(pointer: int, fd: int, nbytes: int) -> None:
    """Map the memory of ``fd`` at a reserved address, without access."""
    _map(fd, nbytes, _NO_ACCESS, mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED, pointer)


def map_again(pointer: int, nbytes: int, at: int | None = None) -> int:
    """Map shared memory, which is mapped at ``pointer``, once more, without access, at ``at`` if given; return where.

    An old size of 0 makes mremap(2) do so, without a descriptor of the memory.
    """
    flags = _MREMAP_MAYMOVE if at is None else _MREMAP_MAYMOVE | _MREMAP_FIXED
    again: int | None = _libc.mremap(pointer, 0, nbytes, flags, at)
    if again is None or again == system_calls.FAILED:
        raise _error("mremap")
    try:
        protect(again, nbytes, _NO_ACCESS)
    except OSError:
        if at is None:
            unmap(again, nbytes)
        else:
            unmap_at(at, nbytes)
        raise
    return again


def unmap_at(pointer: int, nbytes: int) -> None:
    """Undo ``map_at``: the addresses are reserved again."""
    _map(-1, nbytes, _NO_ACCESS, _EMPTY | _MAP_FIXED, pointer)


def protect(pointer: int, nbytes: int, access: int) -> None:
    """Set the access to mapped memory: ``PROT_READ``, ``PROT_WRITE``, both or 0."""
    if _libc.mprotect(pointer, nbytes, access):
        raise _error("mprotect")


def unmap(pointer: int, nbytes: int) -> None:
    """Undo a mapping; the pages of shared memory are freed with its last mapping and descriptor."""
    if _libc.munmap(pointer, nbytes):
        raise _error("munmap")


def fill(pointer: int, value: int, nbytes: int) -> None:
    """Set shared memory to a value. Whole pages of zeros are given back to the system instead of written."""
    if value == 0 and pointer % mmap.PAGESIZE == 0 and nbytes and nbytes % mmap.PAGESIZE == 0:
        if _libc.madvise(pointer, nbytes, mmap.MADV_REMOVE):
            raise _error("madvise")
    else:
        ctypes.memset(pointer, value, nbytes)


def _map(fd: int, nbytes: int, access: int, flags: int, at: int | None = None) -> int:
    pointer: int | None = _libc.mmap(at, nbytes, access, flags, fd, 0)
    if pointer is None or pointer == system_calls.FAILED:
        raise _error("mmap")
    return pointer


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


# -- device memory as this process sees it; the driver holds its lock around every call -----------------


@dataclass(eq=False)
class Region:
    """Mapped memory in one piece, in the context of one device."""

    device: int
    pointer: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.pointer + self.nbytes

    @property
    def whole(self) -> object:
        """The object that it is a part of: adjacent regions of the same one can be copied together."""
        return self

    def allows(self, device: int, *, writing: bool) -> bool:
        """Whether the work of a device may read, or write, here."""
        return True


@dataclass(eq=False)
class OpenedRegion(Region):
    """A region that another process owns, opened by handle."""

    handle: bytes = field(repr=False)
    #: The pointer that opening returned.
    opened: int
    #: The device whose memory it is.
    owner: int
    #: How often it is open.
    count: int = 1


@dataclass(eq=False)
class Block(Region):
    """A region that this process owns, by descriptor too, and the allocations in it."""

    fd: int
    #: The bytes of each allocation, by pointer.
    allocations: dict[int, int] = field(default_factory=dict)
    #: The handles of those that were exported, by pointer.
    handles: dict[int, bytes] = field(default_factory=dict, repr=False)

    def holding(self, address: int) -> int | None:
        """Return the pointer of the allocation that an address lies in."""
        return next((start for start, size in self.allocations.items() if start <= address < start + size), None)

    def gap(self, nbytes: int) -> int | None:
        """Return the first address at which ``nbytes`` more fit."""
        start = self.pointer
        for pointer, taken in sorted(self.allocations.items()):
            if pointer - start >= nbytes:
                return start
            start = round_up(pointer + taken, ALIGNMENT)
        return start if self.pointer + self.nbytes - start >= nbytes else None


class AddressMap:
    """The regions of all devices, found by any address in them."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []

    def add(self, region: Region) -> None:
        self._regions[region.pointer] = region
        insort(self._starts, region.pointer)

    def remove(self, region: Region) -> None:
        """Forget a region, then unmap it: other memory may be mapped at its address immediately."""
        self.forget(region)
        unmap(region.pointer, region.nbytes)

    def forget(self, region: Region) -> None:
        del self._regions[region.pointer]
        self._starts.remove(region.pointer)

    def find(self, pointer: int, nbytes: int = 1) -> Region | None:
        """Return the region in which all of the bytes lie."""
        place = bisect_right(self._starts, pointer)
        region = self._regions[self._starts[place - 1]] if place else None
        return region if region and pointer + nbytes <= region.end else None

    def allows(self, device: int, pointer: int, nbytes: int, *, writing: bool) -> bool:
        """Whether the work of a device may read, or write, all of the bytes."""
        region = self.find(pointer, 0)
        while region and region.allows(device, writing=writing):
            if pointer + nbytes <= region.end:
                return True
            following = self._regions.get(region.end)
            region = following if following and following.whole is region.whole else None
        return False


class Heap:
    """The memory that this process has allocated on one device, counted against the device's size."""

    def __init__(self, device: int, total: int, addresses: AddressMap) -> None:
        self.total = total
        self.used = 0
        self._device = device
        self._addresses = addresses
        #: Its blocks, by pointer.
        self.blocks: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> int:
        """Return a new allocation's pointer; raises MemoryError if the device is full, OSError if the system is."""
        shared = (block for block in self.blocks.values() if nbytes <= SMALL and block.nbytes == BLOCK)
        block = next((block for block in shared if block.gap(nbytes) is not None), None)
        block = block or self._grow(round_up(nbytes, BLOCK))
        pointer = block.gap(nbytes)
        assert pointer is not None
        block.allocations[pointer] = nbytes
        return pointer

    def free(self, block: Block, pointer: int) -> None:
        """Free an allocation of this device, and its block with the last one in it.

        Processes that have the block open keep its bytes until they close it.
        """
        del block.allocations[pointer]
        if not block.allocations:
            del self.blocks[block.pointer]
            self.used -= block.nbytes
            self._addresses.remove(block)
            close(block.fd)

    def require(self, nbytes: int) -> None:
        """Raise MemoryError if the device has less than ``nbytes`` left."""
        if self.used + nbytes > self.total:
            raise MemoryError

    def _grow(self, nbytes: int) -> Block:
        self.require(nbytes)
        fd = create(nbytes)
        try:
            block = Block(self._device, map_shared(fd, nbytes), nbytes, fd)
        except OSError:
            close(fd)
            raise
        self._addresses.add(block)
        self.blocks[block.pointer] = block
        self.used += nbytes
        return block


# -- handles of 64 bytes -------------------------------------------------------------------------------
#
# With a handle, another process gets a descriptor of this one's memory or event. A handle is the server's address, a
# secret, the server's process id, and zeros. The address names a datagram socket in the abstract namespace, which any
# user of this network namespace can send to and which ends with its process. A request is the secret; the reply is the
# descriptor, its device and an offset, or empty if the secret is unknown. The server keeps no state between the two, so
# a peer that sends garbage, or never reads, costs it one failed send.

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


class HandleServer:
    """Serves the handles of this process, on a thread of its own, until stopped.

    The collector may call any object's finalizer on that thread, and such a finalizer may call the driver. So the
    thread holds no lock that a driver call takes except :func:`fork_lock`, and no thread waits for it
    while it has the driver's lock (:func:`join_stopped`).
    """

    def __init__(self) -> None:
        self._address = secrets.token_bytes(_ADDRESS_BYTES)
        self._shared: dict[bytes, SharedFd] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="cubroker-host-memory", daemon=True)
        with fork_lock() as ours:
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
        with fork_lock() as ours:
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
            close(shared.fd)

    def _duplicated(self, secret: bytes) -> SharedFd | None:
        """Return what a secret stands for, with a descriptor to be closed; None if it stands for nothing.

        A handle is withdrawn before its descriptor is closed. If it still exists afterwards, the descriptor was open.
        """
        shared = self._shared.get(secret)
        if shared is None:
            return None
        with fork_lock() as ours:
            ours.add(fd := duplicate(shared.fd))
        if self._shared.get(secret) is shared:
            return shared._replace(fd=fd)
        close(fd)
        return None


def join_stopped() -> None:
    """Wait for the threads of stopped servers, except this thread. The caller must not have the driver's lock."""
    with suppress(IndexError):
        while True:
            thread = stopped.popleft()
            if thread is not threading.current_thread():
                thread.join()


def by_this_process(handle: bytes) -> bool:
    """Whether a GPU would take a handle for this process's: it compares ids, which another pid namespace repeats."""
    (owner,) = _INT.unpack_from(handle, _ADDRESS_BYTES + SECRET_BYTES)
    return bool(owner == os.getpid())


def secret_of(handle: bytes) -> bytes:
    """Return the secret in a handle."""
    return handle[_ADDRESS_BYTES : _ADDRESS_BYTES + SECRET_BYTES]


def fetch(handle: bytes) -> SharedFd:
    """Return what a handle stands for. The caller closes the descriptor.

    Until then it is in the set of :func:`fork_lock`.

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
    with fork_lock() as ours:
        # socket.recv_fds would drop the flag, and a child that is started meanwhile would inherit the memory.
        data, ancillary, flags, _ = client.recvmsg(_ANSWER.size, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
        received: list[int] = [_INT.unpack(rights)[0] for _, _, rights in ancillary]
        ours.update(received)
    if flags & socket.MSG_CTRUNC:
        close(*received)
        raise OSError(errno.EMFILE, "no descriptor is left for the memory, or more than one was sent")
    if not received:
        raise LookupError("the owner of the memory does not know the handle")
    if len(data) < _ANSWER.size:  # another version of this module, or an impostor
        close(*received)
        raise LookupError("the owner of the memory does not answer as it should")
    offset, device = _ANSWER.unpack(data)
    return SharedFd(received[0], device, offset)
