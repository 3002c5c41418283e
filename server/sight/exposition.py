"""Metrics as Prometheus reads them: what is in a view of the ledger, and what was counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cubroker.protocol.infos import NOBODY, BlockInfo
from cubroker.protocol.messages import View
from cubroker.server.sight.names import HIDDEN, Names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Values = Counter[tuple[str, ...]]

DEVICE = ("index", "device")

PASSING = "freeing"
"""The state of memory that nobody needs any more and that its device has not taken back yet."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the shell knows besides the ledger.

    ``restarts`` counts the brokers before this one whose sessions and pools it took over; ``stored`` are the
    descriptors that the store has of this broker, and ``storable`` those that it takes: None without a store.
    ``beyond_leases`` are bytes by user.
    """

    restarts: int = 0
    stored: int | None = None
    storable: int | None = None
    beyond_leases: Mapping[int, int] = field(default_factory=dict)


class Exposition:
    """Writes the text of all metrics.

    Args:
        counted: what is counted while it happens.
        standing: what the shell knows besides the ledger; called on the thread that writes.
        clock: the time in seconds since 1970.
        everything: whether views have all sessions and requests: only then they are counted.
    """

    def __init__(
        self,
        counted: CollectorRegistry,
        standing: Callable[[], Standing] = Standing,
        clock: Callable[[], float] = time.time,
        *,
        everything: bool = True,
    ) -> None:
        self._everything = everything
        self._counted = counted
        self._standing = standing
        self._clock = clock
        self._pools = Names()
        self._users = Names()

    def text(self, view: View) -> bytes:
        """Return the text for a view."""
        sizes = Counter[str]()
        for block in view.blocks:
            sizes[block.pool] += block.nbytes
        self._pools.update(name for name, _ in sizes.most_common() if name)
        owners = {block.owner for block in view.blocks} | {client.uid for client in view.clients}
        standing = self._standing()
        if self._everything:
            owners |= standing.beyond_leases.keys()
        self._users.update(sorted(map(str, owners - {NOBODY})))
        counted = map(_lean, self._counted.collect()) if self._everything else ()
        return bytes(generate_latest(_Families([*self._families(view, standing), *counted])))

    def _families(self, view: View, standing: Standing) -> Iterator[Metric]:
        yield _gauge("cubroker_build_info", "The version that runs.", ("version",), {(_version(),): 1})
        yield from _devices(view)
        yield self._memory(view)
        yield self._leases(view)
        if self._everything:
            yield self._sessions(view)
            yield from self._waiting(view)
            yield self._beyond_leases(standing)
            yield from _standing(standing)

    def _memory(self, view: View) -> Metric:
        indexes = {device.uuid: str(device.index) for device in view.devices}
        values = _Values()
        for block in view.blocks:
            place = (indexes[block.device], block.device)
            labels = (self._pools.label(block.pool), _state(block), self._owner(block))
            values[place + labels] += block.nbytes
        names = (*DEVICE, "pool", "state", "owner")
        return _gauge("cubroker_pool_bytes", "Bytes that pools have, allocated or promised.", names, values)

    def _owner(self, block: BlockInfo) -> str:
        return HIDDEN if block.owner == NOBODY else self._users.label(str(block.owner))

    def _leases(self, view: View) -> Metric:
        values = _Values()
        for pool in view.pools:
            values[self._pools.label(pool.name), pool.state] += pool.leases
        return _gauge("cubroker_leases", "Leases on pools, by the state of the version.", ("pool", "state"), values)

    def _sessions(self, view: View) -> Metric:
        values = _Values()
        for client in view.clients:
            values[client.state, self._users.label(str(client.uid))] += 1
        words = "Sessions; those that are detached have lost their connection."
        return _gauge("cubroker_sessions", words, ("state", "user"), values)

    def _beyond_leases(self, standing: Standing) -> Metric:
        values = _Values()
        for uid, nbytes in standing.beyond_leases.items():
            values[(self._users.label(str(uid)),)] += nbytes
        words = "Bytes that processes have mapped or open without a lease, of users of whom the broker can tell."
        return _gauge("cubroker_mapped_beyond_leases_bytes", words, ("user",), values)

    def _waiting(self, view: View) -> Iterator[Metric]:
        number, longest = _Values(), dict[tuple[str, ...], float]()
        for what in ("attach", "create", "event"):
            since = [waiter.since for waiter in view.waiters if waiter.what == what]
            number[(what,)] = len(since)
            longest[(what,)] = max([0.0, *(self._clock() - then for then in since)])  # clocks are put back at times
        yield _gauge("cubroker_waiting_requests", "Requests that wait.", ("what",), number)
        yield _gauge("cubroker_longest_wait_seconds", "How long the first of them has waited.", ("what",), longest)


@dataclass(frozen=True, slots=True)
class _Families:
    """Metrics that were collected, as a registry has them."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _lean(family: Metric) -> Metric:
    """Leave out when each counter began: a series more for each, which nobody here asks for."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def _devices(view: View) -> Iterator[Metric]:
    columns = {
        "total": "Bytes that a device has.",
        "budget": "Bytes of a device that pools may take.",
        "allocated": "Bytes of a device that are allocated, those that are being freed among them.",
        "promised": "Bytes of a device that are granted and not allocated yet.",
    }
    for column, words in columns.items():
        values = _Values()
        for device in view.devices:
            values[str(device.index), device.uuid] = getattr(device, column)
        yield _gauge(f"cubroker_device_{column}_bytes", words, DEVICE, values)


def _standing(standing: Standing) -> Iterator[Metric]:
    words = "Brokers before this one whose pools and sessions it took over."
    restarts = CounterMetricFamily("cubroker_restarts", words, labels=())
    restarts.add_metric((), standing.restarts)
    yield restarts
    if standing.stored is not None:
        words = "Descriptors that the store has of this broker."
        yield _gauge("cubroker_store_descriptors", words, (), {(): standing.stored})
    if standing.storable is not None:
        words = "Descriptors that the store takes of this broker."
        yield _gauge("cubroker_store_descriptors_limit", words, (), {(): standing.storable})


def _gauge(name: str, words: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _state(block: BlockInfo) -> str:
    return block.state if block.stage in ("promised", "held") else PASSING


def _version() -> str:
    try:
        return version("cubroker")
    except PackageNotFoundError:  # it runs from a source tree
        return "unknown"
