"""Metrics as Prometheus and as JSON, by model.

`vllm:spec_decode_*` are the names that dashboards know; the server's own names begin with `eagle:`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from eagle_mlx.engine.disk import DiskTier

from .errors import Shape
from .models import Models
from .service import SECONDS, Histogram, Service, Totals

T = TypeVar("T")
_MODEL = "model_name"
"""The label of a model's name, as in vLLM."""
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("vllm:spec_decode_num_drafts", "Rounds of a request in which tokens were drafted", lambda t: t.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted", lambda t: t.drafted),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted and emitted", lambda t: t.accepted),
    ("eagle:rounds", "Target forwards", lambda t: t.rounds),
    ("eagle:plain_rounds", "Target forwards in which nothing was drafted", lambda t: t.plain_rounds),
    ("eagle:row_rounds", "Target forwards, each counted for every request in it", lambda t: t.row_rounds),
    ("eagle:generation_tokens", "Tokens emitted", lambda t: t.emitted),
    ("eagle:verify_seconds", "Time in rounds, drafting left out", lambda t: t.verify_seconds),
    ("eagle:draft_seconds", "Time in drafting", lambda t: t.draft_seconds),
    ("eagle:prompt_tokens", "Prompt tokens of requests that have ended", lambda t: t.prompt_tokens),
    ("eagle:cached_prompt_tokens", "Those of them from the prefix cache", lambda t: t.cached_tokens),
)
_SERVICE_COUNTERS: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    ("vllm:num_preemptions", "Times that a request was paused, to be resumed later", lambda s: s.pauses),
)
_BY_LABEL: tuple[tuple[str, str, str, Callable[[Totals], dict[Any, int]]], ...] = (
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Those by their place in the draft",
        "position",
        lambda t: dict(enumerate(list(t.accepted_by_position))),
    ),
    (
        "eagle:rounds_by_depth",
        "Rounds by the depth that the policy chose",
        "depth",
        lambda t: dict(sorted(t.rounds_by_depth.copy().items())),
    ),
    ("eagle:requests", "Requests by how they ended", "outcome", lambda t: dict(t.requests)),
)
_GAUGES: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    ("eagle:depth", "Draft tokens that the policy asked for in the last round", lambda s: s.totals.depth),
    ("eagle:rows", "Requests that decode", lambda s: s.running),
    ("eagle:rows_max", "Requests that can decode at once", lambda s: s.max_running),
    ("eagle:queue", "Requests that wait for their turn", lambda s: s.waiting),
    ("eagle:kv_bytes", "Keys and values of requests, at most", lambda s: s.kv_bytes[0]),
    ("eagle:prefix_cache_bytes", "Keys and values of past prompts", lambda s: s.kv_bytes[1]),
    ("eagle:kv_bytes_max", "What both may take together", lambda s: s.kv_bytes[2]),
    ("eagle:loaded", "1 while the model is in memory", lambda s: s.ready),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Totals], Histogram]], ...] = (
    ("eagle:time_to_first_token_seconds", "From a request's arrival", lambda t: t.first_token),
    ("eagle:request_seconds", "From a request's arrival to its end", lambda t: t.whole),
)
_DISK = "eagle:prefix_disk"
_ABOUT_CACHE = re.compile("cached_prompt|prefix_")
"""Metrics that could reveal to a client whether a text was in the prefix cache."""
_DISK_COUNTERS: tuple[tuple[str, str, Callable[[DiskTier], float]], ...] = (
    (f"{_DISK}_hits", "Prompts that went on from files", lambda d: d.hits),
    (f"{_DISK}_tokens", "Their tokens that came from files", lambda d: d.tokens),
    (f"{_DISK}_read_bytes", "Bytes read of files of past prompts", lambda d: d.bytes_read),
    (f"{_DISK}_written_bytes", "Bytes written to files of past prompts", lambda d: d.bytes_written),
    (f"{_DISK}_passed_over", "Damaged files of past prompts", lambda d: d.passed_over),
    (f"{_DISK}_left_out", "Texts not written because too much was waiting", lambda d: d.left_out),
)
_DISK_GAUGES: tuple[tuple[str, str, Callable[[DiskTier], float]], ...] = (
    (f"{_DISK}_bytes", "Files of past prompts of this model", lambda d: d.nbytes),
    (f"{_DISK}_bytes_max", "What files of all models may take together", lambda d: d.limit),
)


class ServerCollector(Collector):
    """Collects the current totals on every scrape."""

    def __init__(self, models: Models):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for metric in self._all():
            if self._models.settings.cache_report or not _ABOUT_CACHE.search(metric.name):
                yield metric

    def _all(self) -> Iterator[Metric]:
        services = [(each.name, each) for each in self._models.services.values()]
        totals = [(name, each.totals) for name, each in services]
        disks = [(name, each.prefix_files) for name, each in services]
        kept_in_files = [(name, disk) for name, disk in disks if disk is not None]
        yield from _families(CounterMetricFamily, _COUNTERS, totals)
        yield from _families(CounterMetricFamily, _SERVICE_COUNTERS, services)
        for name, text, label, counts in _BY_LABEL:
            counter = CounterMetricFamily(name, text, labels=[_MODEL, label])
            for model, each in totals:
                for key, value in counts(each).items():
                    counter.add_metric([model, str(key)], value)
            yield counter
        yield from _families(GaugeMetricFamily, _GAUGES, services)
        if kept_in_files:
            yield from _families(CounterMetricFamily, _DISK_COUNTERS, kept_in_files)
            yield from _families(GaugeMetricFamily, _DISK_GAUGES, kept_in_files)
        yield from _about_ranks(services)
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=[_MODEL])
            for model, each in totals:
                family.add_metric([model], _buckets(histogram(each)), histogram(each).sum)
            yield family
        yield GaugeMetricFamily("eagle:ready", "1 while requests are taken", int(self._models.state == "ready"))


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    numbers: Sequence[tuple[str, str, Callable[[T], float]]],
    of: Sequence[tuple[str, T]],
) -> Iterator[Metric]:
    """Yield one metric family per number, with a sample per model."""
    for name, text, read in numbers:
        family = kind(name, text, labels=[_MODEL])
        for model, each in of:
            family.add_metric([model], float(read(each)))
        yield family


def _about_ranks(services: Sequence[tuple[str, Service]]) -> Iterator[Metric]:
    """Yield how long ranks have waited for messages, for models that run on several machines."""
    shared = [(name, each.rank_waits) for name, each in services if each.rank_waits]
    if not shared:
        return
    ranks = GaugeMetricFamily("eagle:ranks", "Processes that share the model", labels=[_MODEL])
    waits = CounterMetricFamily(
        "eagle:rank_wait_seconds", "Time in which a rank has waited for messages", labels=[_MODEL, "rank"]
    )
    for name, each in shared:
        ranks.add_metric([name], len(each))
        for rank, seconds in enumerate(each):
            waits.add_metric([name, str(rank)], seconds)
    yield ranks
    yield waits


def registry(models: Models) -> CollectorRegistry:
    """Return a registry for this server alone."""
    own = CollectorRegistry(auto_describe=False)
    own.register(ServerCollector(models))
    return own


class SpeculationSummary(Shape):
    """The answer of `/v1/spec_decode/metrics`. A step is a target forward of one request."""

    spec_decode_enabled: bool
    spec_decode_mode: str
    acceptance_rate_ema: float
    acceptance_rate_overall: float
    avg_tokens_per_step: float
    total_steps: int
    total_fallback_steps: int
    total_proposed: int
    total_accepted: int
    total_bonus_tokens: int
    current_k: int
    adaptive_k_current: int


def speculation_summary(totals: Totals, mode: str, most: int) -> SpeculationSummary:
    """Summarize speculation. most: the maximum draft tokens per round."""
    steps = totals.row_rounds
    return SpeculationSummary(
        spec_decode_enabled=mode != "none",
        spec_decode_mode=mode,
        acceptance_rate_ema=round(totals.acceptance_ema, 4),
        acceptance_rate_overall=round(totals.accepted / totals.drafted, 4) if totals.drafted else 0.0,
        avg_tokens_per_step=round(totals.emitted / steps, 4) if steps else 0.0,
        total_steps=steps,
        total_fallback_steps=steps - totals.drafts,
        total_proposed=totals.drafted,
        total_accepted=totals.accepted,
        total_bonus_tokens=totals.emitted - totals.accepted,
        current_k=most,
        adaptive_k_current=totals.depth,
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative counts of a histogram's buckets."""
    counts = list(histogram.buckets)
    return [(bound, sum(counts[: at + 1])) for at, bound in enumerate((*map(str, SECONDS), "+Inf"))]
