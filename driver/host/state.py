"""What the host driver's functions share: its tables, and which context a thread works in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

from cubroker.driver.host.answers import Refusal, Result
from cubroker.driver.host.heap import AddressMap, Block, Heap, Opened
from cubroker.driver.host.sharing import Owner


class State:
    """``count`` devices of ``size`` bytes each, as one process sees them.

    ``lock`` guards the tables. It is never held while bytes are copied or another process is asked.
    """

    def __init__(self, count: int, size: int) -> None:
        self.lock = threading.Lock()
        self.initialised_by: int | None = None
        self.addresses = AddressMap()
        self.heaps = [Heap(device, size, self.addresses) for device in range(count)]
        self.retained = [0] * count
        self.opened: dict[tuple[int, bytes], Opened] = {}
        self.owner: Owner | None = None
        self._thread = threading.local()

    def check_usable(self) -> None:
        """Refuse before ``cuInit``, and in a forked child for good."""
        if self.initialised_by != os.getpid():
            raise Refusal(Result.CUDA_ERROR_NOT_INITIALIZED)

    def forked(self) -> None:
        """In a forked child: let go of the parent's address and descriptors. What it had mapped stays readable."""
        if self.owner:
            self.owner.forked()
        for heap in self.heaps:
            heap.forked()

    @property
    def stack(self) -> list[int]:
        """The devices whose contexts this thread has pushed, the current one last."""
        stack: list[int] = self._thread.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> int:
        """Return the device whose context is current on this thread."""
        if not self.stack or not self.retained[self.stack[-1]]:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return self.stack[-1]

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
                self.owner.withdraw(block.allocations[pointer])
            self.heaps[block.device].free(block, pointer)

    def unmap(self, region: Opened) -> None:
        """Let go of another process's memory; the caller holds the lock."""
        del self.opened[region.device, region.handle]
        self.addresses.remove(region)
