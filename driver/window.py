"""Addresses in which a store goes to the memory of several devices at once; see :mod:`cubroker.driver.multicast`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cubroker.driver import guard
from cubroker.driver.kernel import Kernel
from cubroker.driver.vmm import Reservation

if TYPE_CHECKING:
    from cubroker.driver.context import Context

PIECE = 16
"""Bytes that one store of the kernel has; what is broadcast is a multiple of it."""

KERNEL = "multimem.ptx", b"cubroker_broadcast"
"""The kernel's file and entry, for sm_90 and later."""

_THREADS = 512
_BLOCKS = 64
"""Threads and blocks of a launch at most: few of each keep all links of a device busy."""


class Window(Reservation):
    """A multicast object, mapped whole; see :meth:`Context.window`. Ordinary loads and stores must not touch it."""

    def __init__(self, context: Context, nbytes: int) -> None:
        guard.check(context.calls.module, "cuMemMap")
        super().__init__(context, nbytes)
        self._kernel: Kernel | None = None
        self._loading = threading.Lock()
        self._state = threading.Lock()
        self._under_way = 0  # maps that have not returned
        self._over = False

    def map(self, source: int | bytes, *, readonly: bool = False) -> None:
        """Map the object of a descriptor, for one-to-all stores; the descriptor is not needed afterwards.

        It waits until all of the object's devices were added, perhaps for ever. Whoever gave it up meanwhile may
        close the window: then the addresses are given back when this returns, and nothing is mapped.
        A window is never read-only: nothing is read from it.

        Raises:
            DriverError: as :meth:`Reservation.map`.
        """
        if readonly:
            raise ValueError("a multicast object is mapped for stores, and nothing can be read through it")
        guard.check(self._calls.module, "cuMemImportFromShareableHandle")
        with self._state:
            self._under_way += 1
        try:
            super().map(source, readonly=False)
        finally:
            with self._state:
                self._under_way -= 1
                last = self._over and not self._under_way
            if last:
                super().close()

    def broadcast(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes to every device's memory; done when it returns, everywhere.

        Args:
            source: the address of memory that this context's device can read, a multiple of 16.
            target: an address in this window, a multiple of 16.
            nbytes: a multiple of 16.

        Raises:
            ValueError: one of the three is something else.
            DriverError: some of the bytes have no memory on some device.
        """
        if source % PIECE or target % PIECE or nbytes % PIECE:
            raise ValueError(f"{source:#x}, {target:#x} and {nbytes} bytes; all must be multiples of {PIECE}")
        if not self.pointer <= target <= target + nbytes <= self.pointer + self.nbytes:
            raise ValueError(f"{nbytes} bytes at {target:#x} do not lie in this window")
        if not nbytes:
            return
        guard.check(self._calls.module, "cuLaunchKernel")
        pieces = nbytes // PIECE
        blocks = min(_BLOCKS, -(-pieces // _THREADS))
        copies = self._context.copies()
        with self._context.current():
            self._loaded().launch(copies, blocks, _THREADS, target, source, pieces)
            copies.synchronize()

    def close(self) -> None:
        """Unmap what is mapped and give the addresses back; to be called once.

        While something is still being mapped there they stay: it would be mapped where somebody else has memory.
        """
        try:
            if self._kernel is not None:
                self._kernel.close()
        finally:
            self._kernel = None
            with self._state:
                self._over, wait = True, self._under_way > 0
            if not wait:
                super().close()

    def _loaded(self) -> Kernel:
        """Return the kernel, loaded with the first use, whichever thread's that is."""
        with self._loading:
            if self._kernel is None:
                self._kernel = Kernel(self._context, *KERNEL)
            return self._kernel
