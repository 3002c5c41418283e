"""What an exporter, and a command that follows, tell Prometheus: figures in its text format, on a port of their own.

The library's own server answers: these processes own no memory, and bind to loopback unless they are told otherwise.
"""

from __future__ import annotations

from cubroker.integrations.cluster.connection import PeerAddress
from cubroker.integrations.cluster.messages import Fetched
from cubroker.protocol.errors import CubrokerError, Unavailable, needing

BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds, upper ends."""


def serve(address: PeerAddress) -> None:
    """Serve the figures of this process until it ends.

    Raises:
        Unavailable: the address cannot be listened at.
        Unsupported: prometheus-client is not installed.
    """
    with needing("metrics", "cubroker[server]"):
        from prometheus_client import start_http_server
    try:
        start_http_server(address.port, address.host)
    except OSError as error:
        raise Unavailable(f"metrics at {address}: {error.strerror or error}; name another --metrics") from None


class ExportMetrics:
    """What an exporter does; a :class:`~cubroker.integrations.cluster.exporter.Meter`."""

    def __init__(self) -> None:
        with needing("metrics", "cubroker[server]"):
            from prometheus_client import Counter, Gauge
        self._connections = Gauge("cubroker_export_connections", "Peers that are connected.")
        self._readers = Gauge("cubroker_export_readers", "Peers that read a version.")
        self._drafts = Gauge("cubroker_export_drafts", "Versions that are offered while they come.")
        self._bytes = Counter("cubroker_export_read_bytes", "Bytes that peers say they have read.", ["pool"])
        self._versions = Counter("cubroker_export_versions", "Versions that peers have read whole.", ["pool"])
        self._refusals = Counter("cubroker_export_refusals", "Requests that were refused.", ["code"])

    def connected(self, count: int) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._connections.set(count)

    def reading(self, count: int) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._readers.set(count)

    def passing_on(self, count: int) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._drafts.set(count)

    def read(self, pool: str, nbytes: int) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._bytes.labels(pool).inc(nbytes)

    def took(self, pool: str) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._versions.labels(pool).inc()

    def refused(self, code: str) -> None:
        """See :class:`~cubroker.integrations.cluster.exporter.Meter`."""
        self._refusals.labels(code).inc()


class FetchMetrics:
    """What a command that follows a pool has fetched."""

    def __init__(self) -> None:
        with needing("metrics", "cubroker[server]"):
            from prometheus_client import Counter, Gauge, Histogram
        self._bytes = Counter("cubroker_fetch_bytes", "Bytes of versions that were fetched.", ["pool"])
        self._parts = Counter(
            "cubroker_fetch_part_bytes", "Bytes of these from hosts that were still fetching themselves.", ["pool"]
        )
        self._seconds = Histogram("cubroker_fetch_seconds", "How long a version took.", ["pool"], buckets=BUCKETS)
        self._version = Gauge(
            "cubroker_fetch_version", "The last version that was fetched, by its number here.", ["pool"]
        )
        self._failures = Counter("cubroker_fetch_failures", "Attempts that failed, and were made again.", ["code"])

    def fetched(self, result: Fetched) -> None:
        """A version is there."""
        self._bytes.labels(result.name).inc(result.nbytes)
        self._parts.labels(result.name).inc(result.from_parts)
        self._seconds.labels(result.name).observe(result.seconds)
        self._version.labels(result.name).set(result.version)

    def failed(self, error: CubrokerError) -> None:
        """An attempt failed."""
        self._failures.labels(error.code).inc()
