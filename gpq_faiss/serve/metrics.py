"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of a service.

    Args:
        sizes: returns the number of items, and of changes not yet in the index file.
    """

    def __init__(self, sizes: Callable[[], tuple[int, int]]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        items = Gauge("gpq_items", "Items in the index.", registry=self._registry)
        items.set_function(lambda: sizes()[0])
        what = "Changed ids that the index file does not have yet."
        changes = Gauge("gpq_log_changes", what, registry=self._registry)
        changes.set_function(lambda: sizes()[1])
        self.requests = Counter(
            "gpq_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "gpq_request_seconds", "Time of a request.", ["route"], buckets=_SECONDS, registry=self._registry
        )
        self.batch = Histogram(
            "gpq_batch_queries",
            "Queries searched together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self._registry,
        )
        self.compactions = Counter(
            "gpq_compactions",
            "Times that the index file was written with its changes.",
            registry=self._registry,
        )
        self.reloads = Counter(
            "gpq_reloads", "Index files opened again.", ["result"], registry=self._registry
        )

    def text(self) -> bytes:
        """Text in Prometheus format."""
        return generate_latest(self._registry)
