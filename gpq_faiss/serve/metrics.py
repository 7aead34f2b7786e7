"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Sizes(Collector):
    """Collector of index metrics."""

    def __init__(self, sizes: Callable[[], tuple[int, int]]) -> None:
        self._sizes = sizes

    def collect(self) -> Iterator[Metric]:
        items, changes = self._sizes()
        yield GaugeMetricFamily("gpq_items", "Items in the index.", value=items)
        yield GaugeMetricFamily(
            "gpq_log_changes", "Changed ids that the index file does not have yet.", value=changes
        )


class Metrics:
    """Metrics of a service.

    Args:
        sizes: returns the number of items, and of changes not yet in the index file.
    """

    def __init__(self, sizes: Callable[[], tuple[int, int]]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Sizes(sizes))
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
