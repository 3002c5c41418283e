"""What the host driver's functions share: its tables, and which context a thread works in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

from cubroker.driver.host.answers import Refusal, Result
from cubroker.driver.host.captures import Captures
from cubroker.driver.host.heap import AddressMap, Block, Heap, Opened
from cubroker.driver.host.sharing import Owner

PEERS = "CUBROKER_HOST_PEERS"
"""The environment variable with how many peers a device can have in this process, for tests; unset, any number."""


class State:
    """``count`` devices of ``size`` bytes each, as one process sees them.

    So many of them as an ``island`` says, counted from the first, reach each other's memory; then come the next.
    ``lock`` guards the tables. It is never held while bytes are copied or another process is asked.
    """

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        self.lock = threading.RLock()  # a finalizer that copies may come into the middle of a call
        self.initialised_by: int | None = None
        self.addresses = AddressMap()
        self.heaps = [Heap(device, size, self.addresses) for device in range(count)]
        self.island = island or count
        self.retained = [0] * count
        self.created: dict[int, int] = {}
        self.opened: dict[tuple[int, bytes], Opened] = {}
        self.owner: Owner | None = None
        self.captures = Captures()
        self._thread = threading.local()

    def check_usable(self) -> None:
        """Refuse before ``cuInit``, and in a forked child for good."""
        if self.initialised_by != os.getpid():
            raise Refusal(Result.CUDA_ERROR_NOT_INITIALIZED)

    @property
    def stack(self) -> list[int]:
        """The contexts that this thread has pushed, by number, the current one last."""
        stack: list[int] = self._thread.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> int:
        """Return the device whose context is current on this thread."""
        return self.device_of(self.stack[-1] if self.stack else 0)

    def device_of(self, context: Any) -> int:
        """Return the device that a context is of.

        A device's primary context has its index plus 1 for a number; ``created`` has the others, each with its device.
        """
        number = int(context)
        if number in self.created:
            return self.created[number]
        if not 0 < number <= len(self.retained) or not self.retained[number - 1]:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return number - 1

    def reaches(self, device: int, other: int) -> bool:
        """Whether a device can access another's memory, or its own."""
        return device // self.island == other // self.island

    def peers(self, device: int) -> set[int]:
        """Return the other devices whose memory a device has access to; the caller holds the lock."""
        return {region.owner for region in self.opened.values() if region.device == device} - {device}

    def admit(self, device: int, peer: int) -> None:
        """Refuse a device that would be a peer too many of another; the caller holds the lock."""
        limit = os.environ.get(PEERS, "")
        if limit.isdecimal() and len(self.peers(device) | {peer} - {device}) > int(limit):
            raise Refusal(Result.CUDA_ERROR_TOO_MANY_PEERS)

    def reached(self, device: int) -> int:
        """How many devices reach each other, of which this is one."""
        return sum(self.reaches(device, other) for other in range(len(self.heaps)))

    def index(self, dev: Any) -> int:
        """Return the number of a device."""
        if not 0 <= int(dev) < len(self.heaps):
            raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
        return int(dev)

    def destroy(self, device: int) -> None:
        """Free and unmap everything in the context of a device; the caller holds the lock."""
        for region in tuple(self.opened.values()):
            if region.device == device:
                self.unmap(region)
        for block in self.heaps[device].blocks():
            self.free(block, tuple(block.allocations))

    def free(self, block: Block, pointers: Iterable[int]) -> None:
        """Free these allocations of one block; the caller holds the lock."""
        for pointer in pointers:
            if self.owner:
                self.owner.withdraw(block.allocations[pointer].secret)
            self.heaps[block.device].free(block, pointer)

    def unmap(self, region: Opened) -> None:
        """Let go of another process's memory; the caller holds the lock."""
        del self.opened[region.device, region.handle]
        self.addresses.remove(region)
