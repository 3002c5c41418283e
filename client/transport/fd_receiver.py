"""Descriptors that the broker sends on the session socket, on their way to the thread that maps their memory.

A descriptor keeps memory on its device, so none may be lost: this module notes each one from its receipt until it is
closed, and a forked child closes its copies.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, MSG_DONTWAIT, SCM_RIGHTS, SOL_SOCKET, socket

import msgspec

from cubroker.client.fork_guard import fork_lock
from cubroker.protocol.errors import CubrokerError, DeviceFailure, NotFound, Unsupported
from cubroker.protocol.fields import MAX_DESCRIPTORS, MAX_NOTICE
from cubroker.protocol.messages import (
    DESCRIPTOR,
    SHARES,
    VMM,
    Attached,
    Close,
    Created,
    Descriptors,
    Done,
    PoolLost,
    Rebound,
    Reply,
    Request,
    Seal,
    Sealed,
)

SIZE = array("i").itemsize

Deliver = Callable[[Sequence[int] | CubrokerError], None]
"""Receives all descriptors of a lease, in order, or the error instead. Must be quick."""


def due(reply: Attached | Created) -> int:
    """Return how many descriptors come with a lease."""
    objects = len(reply.team.sizes) if reply.team else 0
    return sum(replica.handles.count(DESCRIPTOR) for replica in reply.replicas) + objects


def fabric(reply: Attached | Created) -> tuple[bytes, ...]:
    """Return the fabric handles that come with a lease, in order; raises ``Unsupported`` for an unknown share kind."""
    if reply.share not in SHARES:
        raise Unsupported(
            f"version {reply.version} of pool {reply.name!r} is shared as {reply.share[:16]!r}, and this client knows"
            f" {', '.join(SHARES)}; use the client of the broker's release"
        )
    if reply.share != VMM:
        return ()
    handles = (handle for replica in reply.replicas for handle in replica.handles)
    return tuple(handle for handle in handles if handle not in (b"", DESCRIPTOR))


class _Lease(msgspec.Struct):
    """The descriptors that have arrived for one lease so far."""

    #: those that this process received
    descriptors: list[int] = msgspec.field(default_factory=list)
    #: how many were sent; the kernel may not have been able to give this process all of them
    count: int = 0
    #: how many will be sent in all, once the answer has said so
    left: int = 0
    #: receives them; None until the answer has come, and once they were delivered
    deliver: Deliver | None = None
    #: name and version of the pool
    version: tuple[str, int] = ("", 0)
    #: the notice that they come with; None if they come with the lease
    notice: Rebound | None = None


class FdReceiver:
    """The descriptors of one session. All but :meth:`close` and :meth:`disown` runs on the connection's thread."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        #: Leases whose descriptors are on their way.
        self._leases: dict[int, _Lease] = {}
        #: The lease of the last :meth:`expect`. :meth:`settled` is called right after an answer was handled.
        self._claimed = 0
        #: Leases that wait for no more descriptors: any that arrive are closed.
        self._over: set[int] = set()
        #: Versions whose memory is lost, and why.
        self._losses: dict[tuple[str, int], str] = {}
        #: Members of ``_over`` that have ended, though some of their descriptors may still be unread.
        self._ended: list[int] = []
        #: The descriptors that come with the last notice of each lease.
        self._rebound: dict[int, _Lease] = {}
        self._failed = False

    def empty(self) -> bool:
        """Whether no received descriptor is open."""
        return not self._open

    def receive(self, channel: socket) -> tuple[bytes, list[int]]:
        """Return the next message of a session socket, and the descriptors that came along; raises as ``recvmsg``."""
        with fork_lock:
            data, ancillary, _, _ = channel.recvmsg(
                MAX_NOTICE, CMSG_SPACE(MAX_DESCRIPTORS * SIZE), MSG_DONTWAIT | MSG_CMSG_CLOEXEC
            )
            descriptors = [
                descriptor
                for level, kind, rights in ancillary
                if (level, kind) == (SOL_SOCKET, SCM_RIGHTS)
                for descriptor in array("i", rights[: len(rights) // SIZE * SIZE])
            ]
            self._open.update(descriptors)
        return data, descriptors

    def put(self, notice: Descriptors, descriptors: Sequence[int]) -> None:
        """Deliver descriptors that have arrived, or keep them until the lease's answer comes."""
        lease = self._awaiting(notice)
        if lease is None or notice.first < lease.count:  # a broker that was started again sends them once more
            return self.close(descriptors)
        lease.descriptors += descriptors
        lease.count += notice.count
        return self._deliver(notice.lease)

    def expect(self, lease: int, count: int, deliver: Deliver, version: tuple[str, int] = ("", 0)) -> None:
        """Deliver the ``count`` descriptors, at least one, of a lease on ``version`` of a pool once all are there."""
        self._claimed = lease
        self._over.discard(lease)  # further descriptors may be sent for the lease
        waiting = self._leases.setdefault(lease, _Lease())
        waiting.left, waiting.deliver, waiting.version = count, deliver, version
        self._deliver(lease)
        if version in self._losses:
            self._give_up(lease)

    def lose(self, loss: PoolLost) -> None:
        """Note that a version's memory was lost with an earlier broker; fail the leases that wait for descriptors."""
        self._losses[loss.name, loss.version] = loss.why
        for number in [number for number, lease in self._leases.items() if lease.version == (loss.name, loss.version)]:
            self._give_up(number)

    def rebound(self, notice: Rebound, deliver: Deliver) -> None:
        """Deliver the descriptors that come with a notice, and close those of the notice before it.

        Before these, deliver the descriptors of the lease itself that have arrived: no more of them come.
        """
        self._drop_rebound(notice.lease)
        left = sum(len(replica.handles) for replica in notice.replicas) + len(notice.team.sizes)
        self._rebound[notice.lease] = _Lease(left=left, deliver=deliver, notice=notice)
        self._deliver(notice.lease)

    def later(self, lease: int, notice: Rebound | None) -> bool:
        """Whether another notice came for a lease after this one (None: after the answer). Safe in any thread."""
        last = self._rebound.get(lease)
        return self._failed or (last and last.notice) is not notice

    def settled(self, request: Request, reply: Reply) -> None:
        """Note that an answer was handled; if that called no :meth:`expect`, close the lease's descriptors."""
        if type(reply) is Attached or type(reply) is Created:
            if reply.lease != self._claimed and due(reply):
                self._over.add(reply.lease)
                if early := self._leases.pop(reply.lease, None):
                    self.close(early.descriptors)
                self._deliver(reply.lease)
        elif (
            self._over
            and isinstance(request, Close | Seal)
            and isinstance(reply, Done | Sealed)
            and request.lease in self._over
        ):
            self._ended.append(request.lease)

    def drained(self) -> None:
        """Note that the session socket had nothing to read: no descriptors come for leases that ended before."""
        self._over.difference_update(self._ended)
        for lease in self._ended:
            self._drop_rebound(lease)
        self._ended.clear()

    def fail(self, reason: CubrokerError) -> None:
        """Fail the leases that wait for descriptors, since the connection is over."""
        self._failed = True
        leases = [*self._leases.values(), *self._rebound.values()]
        self._leases, self._rebound = {}, {}
        for lease in leases:
            self.close(lease.descriptors)
            if lease.deliver:
                lease.deliver(reason.anew())

    def close(self, descriptors: Iterable[int]) -> None:
        """Close descriptors that were received, in any thread."""
        for descriptor in descriptors:
            with fork_lock:
                os.close(descriptor)
                self._open.discard(descriptor)

    def disown(self) -> None:
        """Close the inherited descriptors in a forked child."""
        while self._open:
            os.close(self._open.pop())

    def _give_up(self, number: int) -> None:
        """Fail a lease that waits for descriptors of a lost version; do nothing if they were delivered."""
        if (lease := self._leases.pop(number, None)) is None:
            return
        assert lease.deliver
        self._over.add(number)
        self.close(lease.descriptors)
        name, version = lease.version
        lease.deliver(
            NotFound(f"pool {name!r} version {version} was lost before it was mapped: {self._losses[lease.version]}")
        )

    def _awaiting(self, notice: Descriptors) -> _Lease | None:
        """Return the lease that a notice brings more descriptors for; None if they are not waited for any more."""
        if notice.rebound:
            lease = self._rebound.get(notice.lease)
            return lease if lease and lease.deliver else None
        return None if notice.lease in self._over else self._leases.setdefault(notice.lease, _Lease())

    def _deliver(self, number: int) -> None:
        lease = self._leases.get(number)
        if lease and lease.deliver and (lease.count >= lease.left or number in self._rebound):
            del self._leases[number]
            self._over.add(number)
            self._hand_on(lease, lease.deliver)
        lease = self._rebound.get(number)
        if lease and lease.deliver and lease.count >= lease.left and number in self._over:
            deliver, lease.deliver = lease.deliver, None
            self._hand_on(lease, deliver)

    def _hand_on(self, lease: _Lease, deliver: Deliver) -> None:
        given, lease.descriptors = tuple(lease.descriptors), []
        if len(given) == lease.count:
            return deliver(given)
        self.close(given)
        return deliver(
            DeviceFailure(
                f"this process has no room for the {lease.count} descriptors of the memory that it asked for; raise its"
                f" limit of open files (ulimit -n), or make pools of fewer and larger allocations"
            )
        )

    def _drop_rebound(self, lease: int) -> None:
        if dropped := self._rebound.pop(lease, None):
            self.close(dropped.descriptors)
