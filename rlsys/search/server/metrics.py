"""What a server tells Prometheus. One registry for each application, so that two in a process do not mix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

TALLIES = {
    "queries": "Queries asked for, those of the cache too.",
    "cached": "Queries answered from the cache.",
    "batches": "Batches of queries that were searched.",
    "pairs": "Pairs of query and document that were scored.",
}
"""Counters of `SearchService.tallies`, with their help."""
LEVELS = {
    "pending": "Queries that wait to be searched.",
    "pending_pairs": "Pairs that wait to be scored.",
}
"""Gauges of the same."""


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self._registry)
        self._tallies = _Tallies()
        self._registry.register(self._tallies)
        self._requests = Counter(
            "rlsys_search_requests", "Requests ended.", ["path", "status"], registry=self._registry
        )
        self._request_seconds = Histogram(
            "rlsys_search_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._stage_seconds = Histogram(
            "rlsys_search_stage_seconds",
            "Time of a batch in a stage: prepare (queries are encoded), find, rerank, pages.",
            ["stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batch_queries = Histogram(
            "rlsys_search_batch_queries",
            "Queries of a batch.",
            buckets=_SIZES,
            registry=self._registry,
        )

    def watch(self, tallies: Callable[[], Mapping[str, int]]) -> None:
        """From now on report the numbers that `tallies` gives, each time they are asked for."""
        self._tallies.source = tallies

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.labels(path).observe(seconds)

    def batch(self, queries: int) -> None:
        """A batch of queries has started."""
        self._batch_queries.observe(queries)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of a batch; from any thread."""
        began = perf_counter()
        try:
            yield
        finally:
            self._stage_seconds.labels(name).observe(perf_counter() - began)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Tallies(Collector):
    """Numbers that are kept elsewhere, read when they are asked for."""

    def __init__(self) -> None:
        self.source: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        numbers = self.source()
        for family, described in ((CounterMetricFamily, TALLIES), (GaugeMetricFamily, LEVELS)):
            for name in described.keys() & numbers:
                yield family(f"rlsys_search_{name}", described[name], value=numbers[name])
