"""Which processes keep GPU memory that the broker has freed, as far as NVML's figures tell.

Measured on an H200 with driver 580.159, with an exporter that had a context: while the exporter has memory, NVML counts
it for no importer. From the moment that the exporter frees it, it counts for the process that still has it mapped or
open, if that has a context; by legacy handle and by descriptor alike. So a process whose figure rises by the very size
of a piece as that is freed keeps the piece. It has let go when its figure has fallen by as much. A broker that lends
``vmm`` memory alone has no context; tests/gpu/test_process_memory.py measures with one and without.

That is evidence, and no proof: a process's own allocations are in the same figure. A process that allocates or frees
exactly as much at the same moment is mistaken for one that keeps memory, or hides it. A holder without a context is in
no figure. So of a process of which nothing is seen nothing is known.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from cubroker.server.ledger.events import Process
from cubroker.server.nvml import Nvml, NvmlError
from cubroker.server.process_memory import MemoryWatch, started, user

log = logging.getLogger(__name__)

MAX_KEEPERS, MAX_PIECES = 4096, 4096
"""Processes, and pieces of each, that are remembered; beyond it the oldest are forgotten."""


@dataclass(slots=True, eq=False)
class Retention:
    """A process that keeps freed memory of a device. It started at ``began``, and keeps ``pieces``: ticket and bytes.

    ``peak`` is its largest figure since, less what it has let go of.
    """

    pid: int
    began: int
    device: str
    peak: int
    pieces: deque[tuple[int, int]] = field(default_factory=partial(deque, maxlen=MAX_PIECES))

    def add(self, ticket: int, nbytes: int) -> None:
        """Note a piece, by which its figure has just risen."""
        self.pieces.append((ticket, nbytes))
        self.peak += nbytes

    def see(self, figure: int) -> None:
        """Take note of its figure: by as much as that has fallen it has let go, of what it has longest."""
        self.peak = max(self.peak, figure)
        while self.pieces and self.peak - figure >= self.pieces[0][1]:
            self.peak -= self.pieces.popleft()[1]


class GpuFigures(MemoryWatch):
    """Compares the figures of processes before and after the broker frees memory.

    Args:
        load: returns what tells the figures; called once, on the first thread that asks.
    """

    def __init__(self, load: Callable[[], Nvml] = Nvml) -> None:
        self._load = load
        self._looked_at = True
        self._lock = threading.Lock()
        self._keepers: dict[tuple[str, int], Retention] = {}

    def adjust(self, *, looked_at: bool) -> None:
        """Ask for no figures as memory is freed while they are looked at by nobody; what is known stays known."""
        self._looked_at = looked_at

    def freeing(self, device: str, ticket: int) -> Callable[[int], None]:
        """The broker lets go of a ticket's memory, on a device by UUID; to be told each piece's bytes once it has."""
        before = self._figures(device) if self._looked_at else None

        def freed(nbytes: int) -> None:
            nonlocal before
            if before:
                after = self._figures(device)
                self._compare(device, ticket, nbytes, before, after or {})
                before = after

        return freed

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[Process]:
        """Return the processes that keep freed memory: those that have a session, and others of these users."""
        memory: dict[int, dict[int, int]] = {}
        with self._lock:
            figures = {device: self._figures(device) for device in {device for device, _ in self._keepers}}
            for key, keeper in tuple(self._keepers.items()):
                if (seen := figures[keeper.device]) is not None:
                    keeper.see(seen.get(keeper.pid, 0))
                if not keeper.pieces or started(keeper.pid) != keeper.began:
                    del self._keepers[key]
                for ticket, nbytes in keeper.pieces if key in self._keepers else ():
                    sizes = memory.setdefault(keeper.pid, {})
                    sizes[ticket] = sizes.get(ticket, 0) + nbytes
        looked = [Process(pid, uid, memory.get(pid)) for pid, uid in clients]
        others = ((pid, user(pid)) for pid in memory.keys() - {pid for pid, _ in clients})
        return looked + [Process(pid, uid, memory[pid]) for pid, uid in others if uid in users]

    def _compare(
        self, device: str, ticket: int, nbytes: int, before: Mapping[int, int], after: Mapping[int, int]
    ) -> None:
        """Note the processes whose figures rose by a piece."""
        for pid, figure in after.items():
            if figure - before.get(pid, 0) == nbytes and (began := started(pid)) is not None:
                with self._lock:
                    self._kept(device, pid, began, figure - nbytes).add(ticket, nbytes)

    def _kept(self, device: str, pid: int, began: int, figure: int) -> Retention:
        """Return the record of a process, a new one if there is none of it."""
        keeper = self._keepers.pop((device, pid), None)
        if keeper is None or keeper.began != began:
            keeper = Retention(pid, began, device, figure)
        self._keepers[device, pid] = keeper
        if len(self._keepers) > MAX_KEEPERS:
            del self._keepers[next(iter(self._keepers))]
        return keeper

    @cached_property
    def _nvml(self) -> Nvml | None:
        try:
            return self._load()
        except (OSError, NvmlError) as error:
            log.warning("which processes keep freed GPU memory is unknown: NVML cannot be used: %s", error)
            return None

    def _figures(self, device: str) -> Mapping[int, int] | None:
        """Return the figure of every process on a device; None if they cannot be had."""
        try:
            return self._nvml.processes(device) if self._nvml else None
        except NvmlError as error:
            log.debug("device %s: %s", device, error)
            return None
