"""When the memory that processes refer to is compared with their leases: now and then, and soon after leases end.

Reading /proc takes a while, so a thread does it. The ledger is told when it begins and what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cubroker.server.ledger.events import Event, Measured, Measuring, Process
from cubroker.server.ledger.permissions import ROOT
from cubroker.server.orders import Orders
from cubroker.server.process_memory import MemoryWatch

log = logging.getLogger(__name__)

SOON = 0.2
"""Seconds from the end of a lease to the next check: other leases may end with it."""

SHARE = 20
"""The pause after a check is at least so many times as long as that took: a twentieth of a processor at most."""

MAX_USERS = 4096
"""Users whose processes without a session are looked at; beyond it those are forgotten who came first."""


class Client(NamedTuple):
    """A process that has a session: its number, its user as the session has it, and its pidfd, -1 once it has ended."""

    pid: int
    uid: int
    pidfd: int


class Check(NamedTuple):
    """What is to be looked at: these processes, and all others of these users."""

    clients: frozenset[tuple[int, int]]
    users: frozenset[int]


class MappedChecks(Orders[Check]):
    """Has the ledger told what processes have mapped and open; everything but ``_do`` runs on the broker's loop.

    Processes without a session count as well, so that nothing is hidden by hanging up; but not those of root and of
    the broker's user, who have the broker's memory in their care: as its keeper, or as process 1.

    Args:
        watch: looks at the processes.
        seconds: from one check to the next; 0: there are none.
    """

    def __init__(self, watch: MemoryWatch, seconds: float) -> None:
        self._watch = watch
        self._seconds = seconds
        watch.adjust(looked_at=seconds > 0)
        self._loop = asyncio.get_running_loop()
        self._handle: Callable[[Event], None] = lambda _: None
        self._clients: Callable[[], Iterable[Client]] = tuple
        self._users: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rested = 0.0
        self._under_way = self._again = self._void = self._closed = False
        super().__init__("mapped-checks")

    def attend(self, handle: Callable[[Event], None], clients: Callable[[], Iterable[Client]]) -> None:
        """Begin: ``handle`` brings the ledger an event, ``clients`` returns all processes that have a session."""
        self._handle, self._clients = handle, clients
        self._schedule(self._seconds)

    def adjust(self, seconds: float) -> None:
        """Have another time from one check to the next; without checks nothing is known any more."""
        self._seconds = seconds
        self._watch.adjust(looked_at=seconds > 0)
        if not seconds:
            self._void = self._under_way  # leases that end from now on are not noted
            self._handle(Measured(()))
        self._schedule(SOON)

    def joined(self, uid: int) -> None:
        """Note that a user has a session."""
        if uid not in (ROOT, os.geteuid()):
            self._users.pop(uid, None)
            self._users[uid] = None
            if len(self._users) > MAX_USERS:
                del self._users[next(iter(self._users))]
        self.soon()

    def soon(self) -> None:
        """Look soon: a lease has ended."""
        if self._under_way:
            self._again = True
        elif self._timer is None or self._timer.when() > max(self._loop.time() + SOON, self._rested):
            self._schedule(SOON)

    def stop(self) -> None:
        """Tell the ledger nothing more; the thread goes on until :meth:`close`."""
        self._closed = True
        self._schedule(0)

    def _schedule(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._seconds and not self._closed and not self._under_way:
            self._timer = self._loop.call_at(max(self._loop.time() + seconds, self._rested), self._begin)

    def _begin(self) -> None:
        self._timer = None
        clients = frozenset(self._living())
        if not clients and not self._users:
            return  # until somebody comes
        self._under_way, self._again, self._void = True, False, False
        self._handle(Measuring())
        self.submit(Check(clients, frozenset(self._users)))

    def _do(self, request: Check) -> None:
        began = time.monotonic()
        found: list[Process] = []
        try:
            found = self._watch.look(request.clients, request.users)
        # A thread that ended here would look no more, and a mistake in looking must not harm what is looked at.
        except Exception:
            log.exception("the broker failed at looking at the memory of processes")
        cost = time.monotonic() - began
        self._loop.call_soon_threadsafe(self._done, request, found, cost)

    def _give_all_back(self) -> None:
        """Nothing is held between two checks."""

    def _done(self, request: Check, found: list[Process], cost: float) -> None:
        self._under_way = False
        if self._closed:
            return
        self._rested = self._loop.time() + SHARE * cost
        if not self._void:
            gone = request.clients - self._living()
            self._handle(Measured(tuple(each for each in found if (each.pid, each.uid) not in gone)))
        self._schedule(SOON if self._again else self._seconds)

    def _living(self) -> set[tuple[int, int]]:
        """Return the clients that live: what was found of another may be of the process that had its number next."""
        clients = list(self._clients())
        ended = _ended(client.pidfd for client in clients if client.pidfd >= 0) | {-1}
        return {(client.pid, client.uid) for client in clients if client.pidfd not in ended}


def _ended(pidfds: Iterable[int]) -> set[int]:
    """Return those pidfds whose process has ended."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return {pidfd for pidfd, _ in poll.poll(0)}
