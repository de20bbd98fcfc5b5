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

_Family = GaugeMetricFamily | CounterMetricFamily

PREFIX = "deltaserve_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
BETWEEN_TOKENS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
WHOLE_REQUEST_S = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
NUM_TOKENS = tuple(float(4**power) for power in range(10))


class Metrics:
    """One per server. Every metric carries the label `model_name`.

    `synthetic_acceptance` (tokens a step) appears as a metric of its own where it is not None.
    """

    def __init__(self, model_name: str, synthetic_acceptance: float | None = None) -> None:
        self.model_name = model_name
        self._synthetic_acceptance = synthetic_acceptance
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
        engine.register(_EngineCollector(stats, self.model_name, self._synthetic_acceptance))
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
Figures = tuple[tuple[str, str, Callable[[EngineStats], float]], ...]
ENGINE_GAUGES: Figures = (
    ("num_requests_running", "Requests that own pages and a row.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", lambda s: _used(s.num_available_pages, s.num_pages)),
    ("num_pages", "Pages of 64 tokens.", lambda s: s.num_pages),
    ("num_free_pages", "Pages that hold nothing.", lambda s: s.num_free_pages),
    ("num_available_pages", "Pages that are free, or hold what may be dropped.", lambda s: s.num_available_pages),
    ("num_cached_pages", "Pages that the prefix cache knows.", lambda s: s.cache.pages_now),
    ("num_slots", "Slots for recurrent states.", lambda s: s.num_slots),
    ("num_free_slots", "Slots that hold nothing.", lambda s: s.num_free_slots),
    ("num_snapshots", "Slots that the prefix cache has for snapshots beyond those of rows.", lambda s: s.num_snapshots),
    ("num_snapshots_held", "Snapshots in the prefix cache.", lambda s: s.cache.snapshots_now),
    ("host_cache_pages", "Pages of the host tier.", lambda s: s.num_host_pages),
    ("host_cache_pages_held", "Those of them in use.", lambda s: s.cache.host_pages_now),
    ("host_cache_snapshots", "Snapshots that the host tier has room for.", lambda s: s.num_host_slots),
    ("host_cache_snapshots_held", "Those of them in use.", lambda s: s.cache.host_snapshots_now),
)
ENGINE_COUNTERS: Figures = (
    ("num_preemptions", "Requests put back to make room for others.", lambda s: s.num_preemptions),
    ("admission_rejections", "Requests refused because the queue was full.", lambda s: s.num_refused),
    ("num_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("steps_seconds", "Time spent in steps.", lambda s: s.steps_s),
    ("computed_tokens", "Tokens that went through the model.", lambda s: s.num_computed_tokens),
    ("long_prefill_seconds", "Time that long prompts took beside others.", lambda s: s.long_prefill_s),
    ("contended_seconds", "Time of steps in which others than long prompts had rows.", lambda s: s.contended_s),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.cache.num_looked_up),
    ("prefix_cache_hits", "Those of them that need no computing.", lambda s: s.cache.num_hit),
    ("prefix_cache_restored_tokens", "Hits that came from the host tier.", lambda s: s.cache.num_restored),
    ("snapshots_published", "Snapshots that entered the prefix cache.", lambda s: s.cache.snapshots_published),
    ("snapshots_refused", "Snapshots wanted, but there was no slot.", lambda s: s.cache.snapshots_refused),
    ("snapshots_evicted", "Snapshots that left the device.", lambda s: s.cache.snapshots_evicted),
    ("snapshots_saved", "Those of them that went to the host.", lambda s: s.cache.snapshots_saved),
    ("snapshots_restored", "Snapshots that came back from the host.", lambda s: s.cache.snapshots_restored),
    ("snapshots_dropped", "Snapshots that are gone for good.", lambda s: s.cache.snapshots_dropped),
    ("pages_evicted", "Cached pages that left the device.", lambda s: s.cache.pages_evicted),
    ("pages_saved", "Those of them that went to the host.", lambda s: s.cache.pages_saved),
    ("pages_restored", "Pages that came back from the host.", lambda s: s.cache.pages_restored),
    ("pages_dropped", "Cached pages that are gone for good.", lambda s: s.cache.pages_dropped),
    ("cache_events_dropped", "Cache events that nobody fetched in time.", lambda s: s.cache.events_dropped),
    ("spec_decode_num_drafts", "Rows that verified drafts.", lambda s: s.drafts.num_rows),
    ("spec_decode_num_draft_tokens", "Drafts in them.", lambda s: s.drafts.num_verified),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: s.drafts.num_accepted),
)
PER_POSITION = ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by their place in the row.")
SYNTHETIC = (
    "synthetic_acceptance_length",
    "Tokens a step by a schedule instead of a comparison: for measuring speed, the texts mean nothing.",
)


def _used(num_left: int, num_all: int) -> float:
    return 1 - num_left / num_all if num_all else 0.0


class _EngineCollector:
    def __init__(self, stats: EngineStats, model_name: str, synthetic_acceptance: float | None) -> None:
        self._stats = stats
        self._model_name = model_name
        self._synthetic_acceptance = synthetic_acceptance

    def collect(self) -> Iterator[Metric]:
        for kind, rows in ((GaugeMetricFamily, ENGINE_GAUGES), (CounterMetricFamily, ENGINE_COUNTERS)):
            for name, text, read in rows:
                yield self._family(kind, name, text, read(self._stats))
        by_position = CounterMetricFamily(PREFIX + PER_POSITION[0], PER_POSITION[1], labels=("model_name", "position"))
        for position, count in enumerate(self._stats.drafts.accepted_by_position):
            by_position.add_metric((self._model_name, str(position)), count)
        yield by_position
        if self._synthetic_acceptance is not None:
            yield self._family(GaugeMetricFamily, *SYNTHETIC, self._synthetic_acceptance)

    def _family(self, kind: type[_Family], name: str, text: str, value: float) -> Metric:
        family = kind(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family
