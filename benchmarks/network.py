"""A network of hosts in simulated time, in which a transfer takes as long as the links allow.

Each host has one link, which carries its rate in both directions at the same time, into a fabric that is never the
bottleneck. Connections that share a link share it in the max-min fair way: no connection can get more unless one that
has less gets even less. A connection delivers pieces one after the other, in the order in which they were asked for. A
piece begins a latency after it was asked for, at the earliest.

Rates are computed again at intervals, not at every change, since that takes most of the time. Until then, a connection
that begins gets what is free on its two links, and the rate of a connection that ends stays free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

EPSILON = 1e-9
"""Rates that differ by less than this fraction count as equal."""


class Connection:
    """A connection that carries pieces from one host to another."""

    __slots__ = ("_turn", "brought", "closed", "left", "queue", "rate", "reader", "settled", "source")

    def __init__(self, source: int, reader: int, brought: Callable[[Hashable], None]) -> None:
        self.source = source
        self.reader = reader
        #: Called with every piece that has arrived.
        self.brought = brought
        #: Pieces that were asked for: the piece, its bytes, and when it begins at the earliest.
        self.queue: deque[tuple[Hashable, float, float]] = deque()
        #: Bytes a second now; bytes of the first piece that had not arrived at the time ``settled``; that time.
        self.rate = 0.0
        self.left = 0.0
        self.settled = 0.0
        self.closed = False
        self._turn = 0


class Network:
    """Hosts, connections, and the clock.

    Args:
        rates: bytes a second of each host's link, in each direction.
        latency: seconds from asking for a piece to its first byte.
        pace: the least seconds between two computations of rates; there is none if nothing has changed.
    """

    def __init__(self, rates: Sequence[float], latency: float = 0.0, pace: float = 0.0) -> None:
        self.now = 0.0
        #: Bytes that each host has sent, and received.
        self.sent = [0.0] * len(rates)
        self.received = [0.0] * len(rates)
        self.dead = [False] * len(rates)
        self._latency = latency
        self._pace = pace
        #: Each host's two links: outwards, and inwards.
        self._capacity = [*rates, *rates]
        self._free = [*self._capacity]
        self._hosts = len(rates)
        #: Connections that carry a piece now, in a fixed order.
        self._active: dict[Connection, None] = {}
        self._of: list[dict[Connection, None]] = [{} for _ in self._capacity]
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._due = False
        self._shared = float("-inf")

    def at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        """Call ``what`` at the time ``when``."""
        heappush(self._events, (max(when, self.now), next(self._numbers), what, arguments))

    def run(self, until: float = float("inf")) -> None:
        """Let time pass until no events are left, or until the time ``until``."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, arguments = heappop(events)
            what(*arguments)

    # -- connections -------------------------------------------------------------------------------

    def ask(self, connection: Connection, piece: Hashable, nbytes: float) -> None:
        """Have a connection deliver a piece, after those that it was asked for before."""
        begins = self.now + self._latency
        connection.queue.append((piece, nbytes, begins))
        if len(connection.queue) == 1 and connection not in self._active:
            self._await(connection)

    def close(self, connection: Connection) -> None:
        """Have a connection deliver nothing more; bytes of an unfinished piece stay counted as sent."""
        if not connection.closed:
            self._settle(connection)
            self._stop(connection)
            connection.queue.clear()
            connection.closed = True

    def kill(self, host: int) -> None:
        """Have a host send and receive nothing any more; other hosts are not notified."""
        self.dead[host] = True
        for link in (host, self._hosts + host):
            for connection in [*self._of[link]]:
                self._settle(connection)
                self._stop(connection)

    def _await(self, connection: Connection) -> None:
        """Have the first piece of the queue begin when it may."""
        _, nbytes, begins = connection.queue[0]
        connection.left = nbytes
        if begins > self.now:
            self.at(begins, self._begin, connection)
        else:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        if connection.closed or self.dead[connection.source] or self.dead[connection.reader]:
            return
        links = connection.source, self._hosts + connection.reader
        self._active[connection] = None
        for link in links:
            self._of[link][connection] = None
        connection.settled = self.now
        shared = any(len(self._of[link]) > 1 for link in links)
        self._set(connection, max(0.0, min(self._free[link] for link in links)))
        if shared:
            self._change()

    def _stop(self, connection: Connection) -> None:
        """Remove a connection that carries nothing from its links."""
        if connection not in self._active:
            return
        del self._active[connection]
        for link in (connection.source, self._hosts + connection.reader):
            del self._of[link][connection]
            self._free[link] += connection.rate
            if self._of[link]:
                self._change()
            else:
                self._free[link] = self._capacity[link]  # so that rounding errors do not add up
        connection.rate = 0.0
        connection._turn += 1

    def _settle(self, connection: Connection) -> None:
        """Count the bytes that a connection has carried since the last call."""
        nbytes = min(connection.left, connection.rate * (self.now - connection.settled))
        connection.left -= nbytes
        connection.settled = self.now
        self.sent[connection.source] += nbytes
        self.received[connection.reader] += nbytes

    def _set(self, connection: Connection, rate: float) -> None:
        """Change the rate of a connection."""
        self._settle(connection)
        for link in (connection.source, self._hosts + connection.reader):
            self._free[link] += connection.rate - rate
        connection.rate = rate
        self._expect(connection)

    def _expect(self, connection: Connection) -> None:
        connection._turn += 1
        if connection.rate > 0:
            self.at(self.now + connection.left / connection.rate, self._end, connection, connection._turn)

    def _end(self, connection: Connection, turn: int) -> None:
        """Deliver a piece that has arrived, and begin the next; do nothing if the rate has changed since ``turn``."""
        if turn != connection._turn:
            return
        self.sent[connection.source] += connection.left
        self.received[connection.reader] += connection.left
        connection.left, connection.settled = 0.0, self.now
        piece, _, _ = connection.queue.popleft()
        connection.brought(piece)
        if connection.closed:
            return
        if connection.queue and connection.queue[0][2] <= self.now:
            connection.left = connection.queue[0][1]
            self._expect(connection)
        else:
            self._stop(connection)
            if connection.queue:
                self._await(connection)

    # -- rates -------------------------------------------------------------------------------------

    def _change(self) -> None:
        if not self._due:
            self._due = True
            self.at(self._shared + self._pace, self._share)

    def _share(self) -> None:
        """Compute all rates, beginning with the link that has the least for each of its connections."""
        self._due = False
        self._shared = self.now
        free = [*self._capacity]
        waiting = [len(each) for each in self._of]
        links = [(free[link] / number, link) for link, number in enumerate(waiting) if number]
        heapify(links)
        rates: dict[Connection, float] = {}
        while links:
            share, link = links[0]
            if not waiting[link]:
                heappop(links)
                continue
            now = free[link] / waiting[link]
            if now > share * (1 + EPSILON):
                heapreplace(links, (now, link))
                continue
            heappop(links)
            for connection in self._of[link]:
                if connection not in rates:
                    rates[connection] = now
                    other = connection.source if link >= self._hosts else self._hosts + connection.reader
                    free[other] -= now
                    waiting[other] -= 1
            waiting[link] = 0
        for connection, rate in rates.items():
            if abs(rate - connection.rate) > EPSILON * rate:
                self._set(connection, rate)
