"""Prometheus metrics under the prefix `deltaserve_`: what clients experience, and the engine's own figures.

Times are measured at the edge, so they hold queueing, computing and the way between the processes. The engine's
figures are asked for when someone reads the metrics. Names are vLLM's where the meaning is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from deltaserve.core.types import FinishReason
from deltaserve.engine.info import EngineStats

PREFIX = "deltaserve_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
BETWEEN_TOKENS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
WHOLE_REQUEST_S = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
NUM_TOKENS = tuple(float(4**power) for power in range(10))


class Metrics:
    """One per server. Every metric carries the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Those of them that a prefix hit held.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.finished = Counter(
            f"{PREFIX}request_success",
            "Requests by the way they ended.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From arrival.", FIRST_TOKEN_S)
        self.between_tokens_s = self._histogram("inter_token_latency_seconds", "Between chunks.", BETWEEN_TOKENS_S)
        self.whole_request_s = self._histogram("e2e_request_latency_seconds", "From arrival.", WHOLE_REQUEST_S)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Per request.", NUM_TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Per request.", NUM_TOKENS)

    def start(self, num_prompt: int) -> RequestTimer:
        return RequestTimer(self, num_prompt)

    def count_finished(self, reason: str) -> None:
        self.finished.labels(self.model_name, reason).inc()

    def exposition(self, stats: EngineStats | None) -> bytes:
        """Everything in Prometheus's text format; the engine's part is absent when it cannot answer."""
        text = generate_latest(self.registry)
        if stats is None:
            return text
        engine = CollectorRegistry(auto_describe=False)
        engine.register(_EngineCollector(stats, self.model_name))
        return text + generate_latest(engine)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self.registry).labels(self.model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self.model_name)


class RequestTimer:
    """Follows one engine request from arrival to its end, whatever that is."""

    __slots__ = ("_last_s", "_metrics", "_num_prompt", "_num_tokens", "_reason", "_started_s")

    def __init__(self, metrics: Metrics, num_prompt: int) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._num_tokens = 0
        self._started_s = time.perf_counter()
        self._last_s: float | None = None
        self._reason: str = FinishReason.ABORT

    def advance(self, num_tokens: int, num_cached: int, reason: FinishReason | None) -> None:
        now_s = time.perf_counter()
        metrics = self._metrics
        if self._last_s is None:
            metrics.first_token_s.observe(now_s - self._started_s)
            metrics.prompt_tokens.inc(self._num_prompt)
            metrics.cached_tokens.inc(num_cached)
        else:
            metrics.between_tokens_s.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens
        metrics.generation_tokens.inc(num_tokens)
        if reason is not None:
            self._reason = reason

    def fail(self) -> None:
        self._reason = FinishReason.ERROR

    def close(self) -> None:
        metrics = self._metrics
        metrics.whole_request_s.observe(time.perf_counter() - self._started_s)
        metrics.request_prompt_tokens.observe(self._num_prompt)
        metrics.request_generation_tokens.observe(self._num_tokens)
        metrics.count_finished(self._reason)


# Name, what it tells, and how it is read. Counters end in `_total` when they are written out.
ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests that own pages and a row.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", lambda s: _used(s.num_free_pages, s.num_pages)),
    ("num_pages", "Pages of 64 tokens.", lambda s: s.num_pages),
    ("num_free_pages", "Pages that nothing uses.", lambda s: s.num_free_pages),
    ("num_slots", "Slots for recurrent states.", lambda s: s.num_slots),
    ("num_free_slots", "Slots that nothing uses.", lambda s: s.num_free_slots),
)
ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_preemptions", "Requests put back to make room for others.", lambda s: s.num_preemptions),
    ("num_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("steps_seconds", "Time spent in steps.", lambda s: s.steps_s),
    ("computed_tokens", "Tokens that went through the model.", lambda s: s.num_computed_tokens),
)


def _used(num_free: int, num_all: int) -> float:
    return 1 - num_free / num_all if num_all else 0.0


class _EngineCollector:
    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for kind, rows in ((GaugeMetricFamily, ENGINE_GAUGES), (CounterMetricFamily, ENGINE_COUNTERS)):
            for name, text, read in rows:
                family = kind(PREFIX + name, text, labels=("model_name",))
                family.add_metric((self._model_name,), read(self._stats))
                yield family
