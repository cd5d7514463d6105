"""The totals as Prometheus and as JSON.

`vllm:spec_decode_*` are the names that dashboards know; the server's own begin with `eagle:`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from .totals import SECONDS, Histogram, Totals


class Gauges(Protocol):
    """The server's present state, beside its totals."""

    totals: Totals

    @property
    def running(self) -> int:
        """Requests that decode."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        ...

    @property
    def max_running(self) -> int: ...

    @property
    def kv_bytes(self) -> tuple[int, int, int]:
        """Of keys and values: of rows, of past prompts, and what both may take together."""
        ...

    @property
    def ready(self) -> bool: ...


class ServerCollector(Collector):
    """Reads the totals whenever somebody asks for the metrics."""

    def __init__(self, server: Gauges):
        self.server = server

    def collect(self) -> Iterator[Metric]:
        totals = self.server.totals
        yield from _speculation(totals)
        yield from _rounds(totals)
        yield _counter("eagle:prompt_tokens", "Prompt tokens of requests that have ended", totals.prompt_tokens)
        yield _counter("eagle:cached_prompt_tokens", "Those of them from the prefix cache", totals.cached_tokens)
        yield _labelled("eagle:requests", "Requests by how they ended", "outcome", dict(totals.requests))
        yield GaugeMetricFamily("eagle:rows", "Requests that decode", self.server.running)
        yield GaugeMetricFamily("eagle:rows_max", "Requests that can decode at once", self.server.max_running)
        yield GaugeMetricFamily("eagle:queue", "Requests that wait for their turn", self.server.waiting)
        requests, past, most = self.server.kv_bytes
        yield GaugeMetricFamily("eagle:kv_bytes", "Keys and values of requests, at most", requests)
        yield GaugeMetricFamily("eagle:prefix_cache_bytes", "Keys and values of past prompts", past)
        yield GaugeMetricFamily("eagle:kv_bytes_max", "What both may take together", most)
        yield GaugeMetricFamily("eagle:ready", "1 while requests are taken", int(self.server.ready))
        yield _histogram("eagle:time_to_first_token_seconds", "From a request's arrival", totals.first_token)
        yield _histogram("eagle:request_seconds", "From a request's arrival to its end", totals.whole)


def _speculation(totals: Totals) -> Iterator[Metric]:
    name = "vllm:spec_decode_num_"
    yield _counter(f"{name}drafts", "Rounds of a request in which tokens were drafted", totals.drafts)
    yield _counter(f"{name}draft_tokens", "Tokens drafted", totals.drafted)
    yield _counter(f"{name}accepted_tokens", "Drafted tokens that were accepted and emitted", totals.accepted)
    by_position = {str(position): count for position, count in enumerate(list(totals.accepted_by_position))}
    yield _labelled(f"{name}accepted_tokens_per_pos", "Those by their place in the draft", "position", by_position)


def _rounds(totals: Totals) -> Iterator[Metric]:
    yield _counter("eagle:rounds", "Target forwards", totals.rounds)
    yield _counter("eagle:plain_rounds", "Target forwards in which nothing was drafted", totals.plain_rounds)
    yield _counter("eagle:row_rounds", "Target forwards, each counted for every request in it", totals.row_rounds)
    yield _counter("eagle:generation_tokens", "Tokens emitted", totals.emitted)
    yield _counter("eagle:verify_seconds", "Time in rounds, drafting left out", totals.verify_seconds)
    yield _counter("eagle:draft_seconds", "Time in drafting", totals.draft_seconds)
    yield GaugeMetricFamily("eagle:depth", "Draft tokens that the policy asked for in the last round", totals.depth)
    by_depth = {str(depth): count for depth, count in sorted(totals.rounds_by_depth.copy().items())}
    yield _labelled("eagle:rounds_by_depth", "Rounds by the depth that the policy chose", "depth", by_depth)


def registry(server: Gauges) -> CollectorRegistry:
    """A registry of this server's own."""
    own = CollectorRegistry(auto_describe=False)
    own.register(ServerCollector(server))
    return own


def speculation_json(totals: Totals, mode: str, most: int) -> dict[str, Any]:
    """The summary of `/v1/spec_decode/metrics`; a step is a target forward of one request."""
    steps = totals.row_rounds
    return {
        "spec_decode_enabled": mode != "none",
        "spec_decode_mode": mode,
        "acceptance_rate_ema": round(totals.acceptance_ema, 4),
        "acceptance_rate_overall": round(totals.accepted / totals.drafted, 4) if totals.drafted else 0.0,
        "avg_tokens_per_step": round(totals.emitted / steps, 4) if steps else 0.0,
        "total_steps": steps,
        "total_fallback_steps": steps - totals.drafts,
        "total_proposed": totals.drafted,
        "total_accepted": totals.accepted,
        "total_bonus_tokens": totals.emitted - totals.accepted,
        "current_k": most,
        "adaptive_k_current": totals.depth,
    }


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    counts, total = [], 0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), list(histogram.buckets), strict=True):
        total += count
        counts.append((bound, total))
    return HistogramMetricFamily(name, text, buckets=counts, sum_value=histogram.sum)
