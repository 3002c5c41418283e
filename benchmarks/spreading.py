"""Hosts that fetch a version in simulated time, each with the product's own choice of which piece to read from where.

:class:`Fetcher` does what :mod:`cubroker.integrations.cluster.source_choice` does, with the same
:class:`~cubroker.integrations.cluster.striping.Striping`, the same
:func:`~cubroker.integrations.cluster.striping.by_room` and the same limits of time, on a simulated clock and network.
:func:`along` sends the version along a fixed chain or tree, for comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from benchmarks.network import Connection, Network
from cubroker.integrations.cluster import exporter, messages, source_choice, source_thread, striping
from cubroker.integrations.cluster.connection import CONNECT
from cubroker.integrations.cluster.striping import Striping, VersionPiece

POLL = 0.02
"""Seconds between two checks whether an idle source may deliver what a slower one has not: 0.005 in the product."""


@dataclass(frozen=True)
class Costs:
    """What takes time in addition to the bytes, in seconds."""

    #: From asking for a piece to its first byte.
    latency: float = 1e-4
    #: To connect to a host and receive its offers.
    ask: float = 0.01
    #: To open a version there: to start a process and register the memory.
    open: float = 0.0
    #: Between two messages of a host about the parts that it has.
    news: float = 0.05


@dataclass(frozen=True)
class Policy:
    """How hosts choose."""

    #: Whether a host that is fetching serves the part that it has.
    parts: bool = False
    #: The most sources of one fetch, and the most readers of one host.
    width: int = striping.WIDTH
    readers: int = exporter.READERS
    #: Whether each host asks the others in an order of its own; else all ask in the same order, the origin first.
    shuffled: bool = True
    #: Whether each reader of a host begins with different runs.
    shares: bool = True
    #: Whether a host offers parts from the moment it begins to fetch; else once its first source has opened.
    early: bool = False
    #: Seconds until a host that had nothing to offer is asked again, at first.
    again: float = source_choice.AGAIN[0]


@dataclass
class Cluster:
    """The hosts: host 0 is the origin, which has the version; the others fetch it."""

    network: Network
    pieces: Sequence[VersionPiece]
    hosts: int
    costs: Costs
    #: When each host had the whole version.
    finished: dict[int, float] = field(default_factory=dict)
    #: When each host that dies does.
    deaths: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Schedule the deaths of hosts."""
        for host, when in self.deaths.items():
            self.network.at(when, self._die, host)

    def _die(self, host: int) -> None:
        if not self.network.dead[host]:
            self.network.kill(host)
            self.finished.pop(host, None)

    def finish(self, host: int) -> None:
        """Record that a host has the whole version."""
        self.finished[host] = self.network.now

    @property
    def waiting(self) -> int:
        """How many hosts live and lack some of the version."""
        return sum(host not in self.finished and not self.network.dead[host] for host in range(1, self.hosts + 1))


# -- fixed ways ----------------------------------------------------------------------------------------


def along(cluster: Cluster, parents: Sequence[int], *, pipelined: bool) -> None:
    """Send the version along a tree in which host n, from 1 on, reads from ``parents[n - 1]``, a lower number.

    If it is pipelined, a host passes each piece on as soon as it has the piece. Otherwise it passes on the whole
    version, to one child after the other.
    """
    network, sizes = cluster.network, [piece.nbytes for piece in cluster.pieces]
    children: list[list[int]] = [[] for _ in range(cluster.hosts + 1)]
    for child, parent in enumerate(parents, 1):
        children[parent].append(child)
    counts = [0] * (cluster.hosts + 1)
    ways: dict[int, Connection] = {}

    def connect(child: int) -> None:
        ways[child] = Connection(parents[child - 1], child, lambda piece: brought(child, piece))

    def ask(child: int, piece: Hashable) -> None:
        assert isinstance(piece, int)
        network.ask(ways[child], piece, sizes[piece])

    def brought(host: int, piece: Hashable) -> None:
        counts[host] += 1
        if pipelined:
            for child in children[host]:
                ask(child, piece)
        if counts[host] == len(sizes):
            cluster.finish(host)
            if not pipelined:
                serve(host)
                serve(parents[host - 1])

    def serve(host: int) -> None:
        """Have the next child read the whole version."""
        if children[host]:
            network.at(network.now + cluster.costs.open, read, children[host].pop(0))

    def read(child: int) -> None:
        if child in cluster.deaths:
            network.at(cluster.deaths[child] + messages.PATIENCE, pass_over, child)
        connect(child)
        for piece in range(len(sizes)):
            ask(child, piece)

    def pass_over(child: int) -> None:
        """Continue with the next child after one that died before it had the whole version."""
        if counts[child] < len(sizes):
            serve(parents[child - 1])

    def start() -> None:
        for child in range(1, cluster.hosts + 1):
            connect(child)
        for child in children[0]:
            for piece in range(len(sizes)):
                ask(child, piece)

    cluster.begin()
    if pipelined:
        network.at(cluster.costs.open, start)
    else:
        serve(0)


def all_at_once(cluster: Cluster) -> None:
    """Have every host read from the origin."""
    along(cluster, [0] * cluster.hosts, pipelined=True)


def chain(hosts: int) -> list[int]:
    """Return the parents of hosts in a row."""
    return [*range(hosts)]


def tree(hosts: int, arity: int = 2) -> list[int]:
    """Return the parents of hosts in a tree in which each has ``arity`` children."""
    return [(host - 1) // arity for host in range(1, hosts + 1)]


def doubling(hosts: int) -> list[int]:
    """Return the parents of hosts if, in every round, each host that has the version passes it on to one more."""
    return [host - (1 << host.bit_length() - 1) for host in range(1, hosts + 1)]


# -- the product's choice ------------------------------------------------------------------------------


def striped(cluster: Cluster, policy: Policy, seed: int) -> list[Fetcher]:
    """Have every host fetch as the product does."""
    room = Exporters(cluster, policy)
    chance = Random(seed)
    fetchers = [Fetcher(host, room, cluster.pieces, Random(chance.random())) for host in range(1, cluster.hosts + 1)]
    cluster.begin()
    for fetcher in fetchers:
        room.fetchers[fetcher.host] = fetcher
        cluster.network.at(0.0, fetcher.look)
    for host, when in cluster.deaths.items():
        cluster.network.at(when + exporter.Rules().silence, room.fetchers[host].cut_off)
    return fetchers


class Exporters:
    """The exporters of all hosts: what each serves, and to how many."""

    def __init__(self, cluster: Cluster, policy: Policy) -> None:
        self.cluster = cluster
        self.policy = policy
        self.readers = [0] * (cluster.hosts + 1)
        #: The free slots of readers of each host.
        self.places = [[*range(policy.readers)] for _ in range(cluster.hosts + 1)]
        self.connections = [0] * (cluster.hosts + 1)
        self.fetchers: dict[int, Fetcher] = {}

    def offers(self, host: int) -> bool:
        """Whether a host has the version, or a part of it, to offer."""
        if host == 0 or host in self.cluster.finished:
            return True
        return self.policy.parts and (self.policy.early or self.fetchers[host].opened)

    def have(self, host: int) -> int | None:
        """Return which pieces a host has; None: all."""
        if host == 0 or host in self.cluster.finished:
            return None
        return self.fetchers[host].have


@dataclass
class _Peer:
    """A host that was asked."""

    host: int
    #: Its place in the order in which this side asks.
    place: int
    connection: Connection | None = None
    #: Whether it counts this side among its readers.
    reading: bool = False
    #: This side's slot among them.
    place_there: int = 0
    #: The pieces that it was last known to have; None: all.
    known: int | None = 0
    gone: bool = False


class Fetcher:
    """One host's fetch."""

    def __init__(self, host: int, room: Exporters, pieces: Sequence[VersionPiece], chance: Random) -> None:
        self.host = host
        self.room = room
        self.cluster, self.network, self.policy = room.cluster, room.cluster.network, room.policy
        #: Whether a source has opened the version for it, so that it could serve a part.
        self.opened = False
        #: The pieces that it has, as bits.
        self.have = 0
        self.duplicates = 0.0
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self._striping = Striping(pieces, chance=chance if self.policy.parts else None)
        self._chance = chance
        self._order = [each for each in range(self.cluster.hosts + 1) if each != host]
        if self.policy.shuffled:
            chance.shuffle(self._order)
        #: Places of the order that may be asked now; and the other places, with the time from which on they may be.
        self._due = [*range(len(self._order))]
        self._later: list[tuple[float, int]] = []
        self._pauses: dict[int, float] = {}
        self._peers: dict[int, _Peer] = {}
        self._candidates: list[_Peer] = []
        self._gathered = 0.0
        self._wake = float("inf")
        self._polling = False
        self._count = 0
        self.reading: dict[int, _Peer] = {}

    @property
    def _over(self) -> bool:
        return self.host in self.cluster.finished or self.network.dead[self.host]

    # -- the hosts to read from --------------------------------------------------------------------

    def look(self) -> None:
        """Do what is due: choose among the hosts that have answered, and ask others."""
        if self._over:
            return
        now = self.network.now
        self._choose()
        while self._later and self._later[0][0] <= now:
            heappush(self._due, heappop(self._later)[1])
        room = striping.ASKED if not self.reading else self.policy.width
        asked = [self._ask(heappop(self._due)) for _ in range(min(len(self._due), room - len(self._peers)))]
        if asked:
            self.network.at(now + self.cluster.costs.ask, self._answered, asked)
        times = [self._later[0][0]] if self._later and len(self._peers) < room else []
        if self._candidates:
            times.append(self._gathered)
        when = min(times, default=float("inf"))
        if when < self._wake:
            self._wake = when
            self.network.at(when, self._awake, when)

    def _awake(self, when: float) -> None:
        if when == self._wake:
            self._wake = float("inf")
            self.look()

    def _ask(self, place: int) -> _Peer:
        peer = self._peers[place] = _Peer(self._order[place], place)
        self.room.connections[peer.host] += 1
        return peer

    def _answered(self, asked: Sequence[_Peer]) -> None:
        if self._over:
            return
        for peer in asked:
            if self.network.dead[peer.host]:
                self.network.at(self.network.now + CONNECT, self._lost, peer)
            elif self.room.connections[peer.host] > exporter.CONNECTIONS or not self.room.offers(peer.host):
                self._leave(peer)
            else:
                if not self._candidates:
                    self._gathered = self.network.now + source_choice.GATHER
                self._candidates.append(peer)
        self.look()

    def _choose(self) -> None:
        if not self._candidates:
            return
        if self.network.now < self._gathered and len(self._candidates) < len(self._peers):
            return
        candidates, self._candidates = {peer.place: peer for peer in self._candidates}, []
        readers = {place: (self.room.readers[peer.host], self.policy.readers) for place, peer in candidates.items()}
        room = self.policy.width - len(self.reading)
        for place in striping.by_room(readers, self._chance)[:room]:
            self._open(candidates.pop(place))
        for peer in candidates.values():
            self._leave(peer)

    def _open(self, peer: _Peer) -> None:
        if self.network.dead[peer.host]:
            self.network.at(self.network.now + CONNECT, self._lost, peer)
        elif self.room.readers[peer.host] >= self.policy.readers:
            self._leave(peer)
        else:
            self.room.readers[peer.host] += 1
            peer.reading = True
            peer.place_there = heappop(self.room.places[peer.host])
            self.network.at(self.network.now + self.cluster.costs.open, self._ready, peer)

    def _ready(self, peer: _Peer) -> None:
        if peer.gone or self._over:
            return
        self.opened = True
        number = self._count = self._count + 1
        self.reading[number] = peer
        peer.connection = Connection(peer.host, self.host, lambda piece: self._brought(number, piece))
        peer.known = self.room.have(peer.host)
        place = (peer.place_there, self.policy.readers) if self.policy.parts and self.policy.shares else (0, 1)
        self._striping.join(number, self.network.now, peer.known, place)
        self._silent(number)
        if peer.known is not None:
            self.network.at(self.network.now + self.cluster.costs.news, self._news, number)
        self._fill(number)

    def _lost(self, peer: _Peer) -> None:
        if not peer.gone and not self._over:
            self._leave(peer)
            self.look()

    def _leave(self, peer: _Peer) -> None:
        """Leave a host, which may be asked again later."""
        if peer.gone:
            return
        peer.gone = True
        self.room.connections[peer.host] -= 1
        if peer.connection:
            self.network.close(peer.connection)
        if peer.reading:
            self.room.readers[peer.host] -= 1
            heappush(self.room.places[peer.host], peer.place_there)
        del self._peers[peer.place]
        pause = self._pauses.get(peer.place, self.policy.again)
        self._pauses[peer.place] = min(2 * pause, source_choice.AGAIN[1])
        heappush(self._later, (self.network.now + pause, peer.place))

    def cut_off(self) -> None:
        """Have the exporters cut this host off, which has died."""
        for peer in [*self._peers.values()]:
            self._leave(peer)

    # -- what is read ------------------------------------------------------------------------------

    def _fill(self, number: int) -> None:
        """Have a source begin all pieces that it may."""
        peer, now = self.reading[number], self.network.now
        assert peer.connection
        while (piece := self._striping.begin(number, now)) is not None:
            self.network.ask(peer.connection, piece, piece.nbytes)
        if not self._polling and not peer.connection.queue:
            self._polling = True
            self.network.at(now + POLL, self._poll)

    def _poll(self) -> None:
        """Check idle sources again: one may be useless, or may read a piece that a slower one has not delivered."""
        self._polling = False
        if self._over:
            return
        for number, peer in [*self.reading.items()]:
            if peer.connection and not peer.connection.queue:
                self._fill(number)
                if self.policy.parts and self._striping.useless(number, self.network.now) > striping.USELESS:
                    self._drop(number)

    def _brought(self, number: int, piece: Hashable) -> None:
        assert isinstance(piece, VersionPiece)
        before = self._striping.nbytes
        self._striping.end(number, piece, self.network.now)
        if self._striping.nbytes == before:
            self.duplicates += piece.nbytes
        self.have |= 1 << self._numbers[piece]
        if self._striping.finished:
            self.cluster.finish(self.host)
            for peer in [*self._peers.values()]:
                self._leave(peer)
        else:
            self._fill(number)

    def _drop(self, number: int) -> None:
        peer = self.reading.pop(number)
        self._striping.lose(number)
        self._leave(peer)
        for other in [*self.reading]:
            self._fill(other)
        self.look()

    def _silent(self, number: int) -> None:
        """Give up a source that delivers none of the pieces it began, or that does not answer if it began none."""
        if self._over or number not in self.reading:
            return
        now = self.network.now
        if self.network.dead[self.reading[number].host] and not self._striping.silent(number, now):
            self.network.at(now + source_thread.BEAT + CONNECT, self._unanswered, number)
        elif self._striping.silent(number, now) > messages.PATIENCE:
            self._drop(number)
        else:
            self.network.at(now + source_thread.BEAT, self._silent, number)

    def _unanswered(self, number: int) -> None:
        if not self._over and number in self.reading:
            self._drop(number)

    def _news(self, number: int) -> None:
        """Receive which pieces a source has."""
        if self._over or number not in self.reading or self.network.dead[self.reading[number].host]:
            return
        peer = self.reading[number]
        have = self.room.have(peer.host)
        if have != peer.known:
            peer.known = have
            self._striping.has(number, (1 << len(self._numbers)) - 1 if have is None else have)
            self._fill(number)
        if have is not None:
            self.network.at(self.network.now + self.cluster.costs.news, self._news, number)
