"""Metrics, as Prometheus reads them: gauges of a snapshot of the broker, and counters of what happened."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from math import inf

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cubroker.protocol.errors import ERRORS
from cubroker.protocol.messages import View
from cubroker.protocol.status import HIDDEN_ID, WAITS, PoolInfo
from cubroker.server.monitoring.observer import BrokerGauges, EventCounter

disable_created_metrics()  # type: ignore[no-untyped-call]  # no samples of when each counter began

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DEVICE = ("index", "device")  #: The labels of a device.

BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds. A request that need not wait takes less than a millisecond; the rest wait for memory or a version."""

COLUMNS = {
    "total": "Bytes that a device has.",
    "budget": "Bytes of a device that pools may take.",
    "allocated": "Bytes of a device that are allocated, those that are being freed among them.",
    "promised": "Bytes of a device that are granted and not allocated yet.",
}
"""The gauges of each device, by field of :class:`cubroker.protocol.status.DeviceInfo`."""

OUT_OF_SERVICE = ("superseded", "retired")  #: States of versions that workers should leave.
FREEING = "freeing"  #: The state of memory that no version needs and that its device has not taken back yet.
OTHER = "(other)"  #: Stands for all names without a label of their own. No pool can have this name.
HIDDEN = "(private)"  #: Stands for pools and users whose names the reader may not know.
MAX_NAMES = 200  #: Names that may have a label at the same time.
LINGER = 3600.0  #: Seconds for which a name that is gone keeps its label; only then may another name have its place.


class LabelLimiter:
    """The names that have a label of their own: limited at any time and over time, lest users fill a database.

    A name that has a label keeps it for as long as it exists.
    """

    def __init__(self) -> None:
        #: When each name was seen last.
        self._seen: dict[str, float] = {}

    def update(self, names: Iterable[str], now: float) -> None:
        """Note which names exist ``now``, in seconds since an arbitrary moment; the most important first."""
        there = dict.fromkeys(names, now)
        self._seen = {name: then for name, then in self._seen.items() if name in there or now - then < LINGER}
        for name in there:
            if name in self._seen or len(self._seen) < MAX_NAMES:
                self._seen[name] = now

    def label(self, name: str) -> str:
        """Return the label for a name."""
        if not name:
            return HIDDEN
        return name if name in self._seen else OTHER


class VersionAges:
    """Since when versions have been superseded or retired, as far as that is known.

    No listing has that time. It is taken as the earlier of two: when the version was first seen in such a state, and
    when the next version that still exists was published.
    """

    def __init__(self) -> None:
        #: When each version was first seen so, by name, number and publication.
        self._seen: dict[tuple[str, int, float | None], float] = {}

    def update(self, pools: Iterable[PoolInfo], now: float) -> Mapping[tuple[str, int], float]:
        """Return that time for each such version of all ``pools``, by name and number, in seconds since 1970."""
        seen: dict[tuple[str, int, float | None], float] = {}
        found: dict[tuple[str, int], float] = {}
        later: dict[str, float] = {}
        for pool in sorted(pools, key=lambda pool: pool.version, reverse=True):
            if pool.state in OUT_OF_SERVICE:
                key = (pool.name, pool.version, pool.published)
                seen[key] = self._seen.get(key, now)
                found[pool.name, pool.version] = min(seen[key], later.get(pool.name, inf))
            if pool.published is not None:
                later[pool.name] = min(pool.published, later.get(pool.name, inf))
        self._seen = seen
        return found


class BrokerCounters(EventCounter):
    """Counters and times of one broker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        words = "Time from a request's arrival at the ledger to its answer, waiting included."
        seconds = histogram("cubroker_request_seconds", words, ["request"], buckets=BUCKETS)
        self._seconds = cache(seconds.labels)  # which would look for the histogram under a lock, for each request
        self._refusals = counter("cubroker_refusals", "Requests that the ledger refused.", ["request", "code"])
        self._turned_away = counter(
            "cubroker_sessions_refused", "Sessions that were refused after a proper greeting.", ["code"]
        )
        words = "Gateways that took the place of one that had died, or hung and was killed."
        self._gateways = counter("cubroker_gateway_restarts", words)
        ProcessCollector(registry=self.registry)

    def request_answered(self, request: str, seconds: float, code: str = "") -> None:
        """Count an answered request of a kind; ``code`` says why it was rejected, if it was."""
        self._seconds(request).observe(seconds)
        if code:
            self._refusals.labels(request, _known(code)).inc()

    def turned_away(self, code: str) -> None:
        """Count a session that was rejected."""
        self._turned_away.labels(_known(code)).inc()

    def gateway_changed(self) -> None:
        """Count a gateway that is not the first."""
        self._gateways.inc()


def _known(code: str) -> str:
    return code if code in ERRORS else "other"


class MetricsWriter:
    """Writes the text of all metrics; sessions, requests and ``counters`` only if views have ``everything``."""

    def __init__(self, counters: CollectorRegistry, *, everything: bool = True) -> None:
        self._everything = everything
        self._counters = counters
        self._pools = LabelLimiter()
        self._users = LabelLimiter()
        self._ages = VersionAges()

    def text(self, view: View, gauges: BrokerGauges | None = None, now: float | None = None) -> bytes:
        """Return the text for a view and gauges, at a time in seconds since 1970."""
        gauges = gauges or BrokerGauges()
        now = time.time() if now is None else now
        sizes = Tally[str]()
        for block in view.blocks:
            sizes[block.pool] += block.nbytes
        self._pools.update((name for name, _ in sizes.most_common() if name), time.monotonic())
        owners = {block.owner for block in view.blocks} | {client.uid for client in view.clients}
        if self._everything:
            owners |= gauges.beyond_leases.keys()
        self._users.update(sorted(map(str, owners - {HIDDEN_ID})), time.monotonic())
        counters = self._counters.collect() if self._everything else ()
        return bytes(generate_latest(_Families([*self._gauges(view, gauges, now), *counters])))

    def _gauges(self, view: View, gauges: BrokerGauges, now: float) -> Iterator[Metric]:
        yield _gauge("cubroker_build_info", "The version that runs.", ("version",), [((version("cubroker"),), 1)])
        indexes = {device.uuid: str(device.index) for device in view.devices}
        for column, words in COLUMNS.items():
            of_devices = [((indexes[device.uuid], device.uuid), getattr(device, column)) for device in view.devices]
            yield _gauge(f"cubroker_device_{column}_bytes", words, DEVICE, of_devices)
        memory = []
        for block in view.blocks:
            state = block.state if block.stage in ("promised", "held") else FREEING
            owner = HIDDEN if block.owner == HIDDEN_ID else self._users.label(str(block.owner))
            key = (indexes[block.device], block.device, self._pools.label(block.pool), state, owner)
            memory.append((key, block.nbytes))
        labels = (*DEVICE, "pool", "state", "owner")
        yield _gauge("cubroker_pool_bytes", "Bytes that pools have, allocated or promised.", labels, memory)
        leases = [((self._pools.label(pool.name), pool.state), pool.leases) for pool in view.pools]
        words = "Leases on pools, by the state of the version."
        yield _gauge("cubroker_leases", words, ("pool", "state"), leases)
        if self._everything:
            yield from self._private(view, gauges, now)

    def _private(self, view: View, gauges: BrokerGauges, now: float) -> Iterator[Metric]:
        """Yield the gauges that are shown only if views have everything."""
        sessions = [((client.state, self._users.label(str(client.uid))), 1) for client in view.clients]
        words = "Sessions; those that are detached have lost their connection."
        yield _gauge("cubroker_sessions", words, ("state", "user"), sessions)
        waits = {what: [0.0] for what in WAITS}
        for waiter in view.waiters:
            waits[waiter.what].append(now - waiter.since)
        number = [((what,), len(times) - 1) for what, times in waits.items()]
        longest = [((what,), max(times)) for what, times in waits.items()]  # at least 0: clocks are put back at times
        yield _gauge("cubroker_waiting_requests", "Requests that wait.", ("what",), number)
        yield _gauge("cubroker_longest_wait_seconds", "How long the first of them has waited.", ("what",), longest)
        words = "How long the longest lease on a superseded or retired version has been one."
        yield _gauge("cubroker_longest_old_lease_seconds", words, ("pool",), self._old_leases(view, now).items())
        words = "How long a device has been freeing the first of what it is to free."
        busy = [((str(each.index), each.uuid), gauges.freeing.get(each.uuid, 0.0)) for each in view.devices]
        yield _gauge("cubroker_longest_free_seconds", words, DEVICE, busy)
        beyond = [((self._users.label(str(uid)),), nbytes) for uid, nbytes in gauges.beyond_leases.items()]
        words = "Bytes that processes have mapped or open without a lease, of users of whom the broker can tell."
        yield _gauge("cubroker_mapped_beyond_leases_bytes", words, ("user",), beyond)
        words = "Brokers before this one whose pools and sessions it took over."
        yield CounterMetricFamily("cubroker_restarts", words, gauges.restarts)
        if gauges.stored is not None:
            words = "Descriptors that the store has of this broker."
            yield GaugeMetricFamily("cubroker_store_descriptors", words, gauges.stored)
        if gauges.storable is not None:
            words = "Descriptors that the store takes of this broker."
            yield GaugeMetricFamily("cubroker_store_descriptors_limit", words, gauges.storable)

    def _old_leases(self, view: View, now: float) -> Mapping[tuple[str], float]:
        """Return for how long a lease has been on a version out of service: the longest time, by label of the pool."""
        longest = {(self._pools.label(pool.name),): 0.0 for pool in view.pools}
        ages = self._ages.update(view.pools, now)
        for lease in (lease for client in view.clients for lease in client.leases):
            if (since := ages.get((lease.pool, lease.version))) is not None:
                label = (self._pools.label(lease.pool),)
                longest[label] = max(longest[label], now - max(since, lease.held_since or 0.0))
        return longest


class _Families(list[Metric]):
    """Collected metrics, with the interface of a registry."""

    def collect(self) -> Iterable[Metric]:
        return self


def _gauge(name: str, words: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return a gauge; values with the same labels are added up."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for key, value in values:
        sums[key] += value
    family = GaugeMetricFamily(name, words, labels=labels)
    for key, value in sums.items():
        family.add_metric(key, value)
    return family
