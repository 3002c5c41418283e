"""What is counted while it happens. Everything else that metrics tell is in a view of the ledger."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from cubroker.protocol.errors import ERRORS

BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds. What is answered at once takes less than a millisecond; the rest waits, for memory or for others."""


class Meters:
    """Counters and times of one broker process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "cubroker_request_seconds",
            "Time from a request's arrival at the ledger to its answer, waiting included.",
            ["request"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._refusals = Counter(
            "cubroker_refusals", "Requests that the ledger refused.", ["request", "code"], registry=self.registry
        )
        self._turned_away = Counter(
            "cubroker_sessions_refused", "Sessions refused to who had greeted.", ["code"], registry=self.registry
        )
        self._gateways = Counter(
            "cubroker_gateway_restarts",
            "Gateways that took the place of one that had died, or hung and was killed.",
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def answered(self, request: str, seconds: float, code: str = "") -> None:
        """Count an answered request of a kind; ``code`` says why it was refused, if it was."""
        self._seconds.labels(request).observe(seconds)
        if code:
            self._refusals.labels(request, _known(code)).inc()

    def turned_away(self, code: str) -> None:
        """Count a session that was refused."""
        self._turned_away.labels(_known(code)).inc()

    def gateway_changed(self) -> None:
        """Count a gateway that is not the first."""
        self._gateways.inc()


def _known(code: str) -> str:
    return code if code in ERRORS else "other"
