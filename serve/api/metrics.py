"""Metrics by model, as Prometheus and as JSON, and those of each answer.

`vllm:spec_decode_*` are the names that dashboards know; the server's own names begin with `eagle:`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict

from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.request import Output
from eagle_mlx.target import nbytes_of

from ..learning.learner import Learner
from .model import Loaded
from .models import Models
from .service import SECONDS, Call, Histogram, Service, Totals

T = TypeVar("T")
_MODEL = "model_name"  # the label of a model's name, as in vLLM
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_Numbers = tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Callable[[T], float]], ...]
_TOTALS: _Numbers[Totals] = (
    (_COUNTER, "vllm:spec_decode_num_drafts", "Rounds of a request with draft tokens", lambda t: t.drafts),
    (_COUNTER, "vllm:spec_decode_num_draft_tokens", "Draft tokens", lambda t: t.drafted),
    (_COUNTER, "vllm:spec_decode_num_accepted_tokens", "Accepted and emitted draft tokens", lambda t: t.accepted),
    (_COUNTER, "eagle:forced_tokens", "Accepted tokens that a grammar forced, or between such", lambda t: t.forced),
    (_COUNTER, "eagle:rounds", "Target forwards", lambda t: t.rounds),
    (_COUNTER, "eagle:plain_rounds", "Target forwards without draft tokens", lambda t: t.plain_rounds),
    (_COUNTER, "eagle:row_rounds", "Target forwards, counted once per request in them", lambda t: t.row_rounds),
    (_COUNTER, "eagle:generation_tokens", "Emitted tokens", lambda t: t.emitted),
    (_COUNTER, "eagle:verify_seconds", "Time of rounds without drafting", lambda t: t.verify_seconds),
    (_COUNTER, "eagle:draft_seconds", "Time of drafting", lambda t: t.draft_seconds),
    (_COUNTER, "eagle:prompt_tokens", "Prompt tokens of requests that have ended", lambda t: t.prompt_tokens),
    (_COUNTER, "eagle:cached_prompt_tokens", "Prompt tokens from the prefix cache", lambda t: t.cached_tokens),
    (_GAUGE, "eagle:depth", "Draft depth of the policy in the last round", lambda t: t.depth),
)
_SERVICE: _Numbers[Service] = (
    (_GAUGE, "eagle:rows", "Requests that are decoding", lambda s: s.running),
    (_GAUGE, "eagle:rows_max", "Requests that can decode at once", lambda s: s.source.max_batch),
    (_GAUGE, "eagle:queue", "Requests in the queue", lambda s: s.waiting),
    (_GAUGE, "eagle:loaded", "1 while the model is in memory", lambda s: s.loaded is not None),
    (_GAUGE, "eagle:ranks", "Processes that share the model", lambda s: s.ranks),
)
_LOADED: _Numbers[Loaded] = (
    (_COUNTER, "vllm:num_preemptions", "Pauses of requests", lambda x: x.engine.pauses),
    (_COUNTER, "eagle:draft_failures", "Rounds in which the proposer raised", lambda x: x.engine.draft_failures),
    (_GAUGE, "eagle:kv_bytes", "KV caches of requests, at most", lambda x: x.engine.snapshot().kv_used),
    (_GAUGE, "eagle:draft_kv_bytes", "Part of it for drafting", lambda x: x.engine.snapshot().draft_kv_used),
    (_GAUGE, "eagle:prefix_cache_bytes", "Prefix cache", lambda x: x.engine.snapshot().prefix_bytes),
    (_GAUGE, "eagle:memory_bytes", "Remembered texts", lambda x: x.memory.nbytes if x.memory else 0),
    (_GAUGE, "eagle:kv_bytes_max", "Limit of both together", lambda x: x.engine.snapshot().kv_bytes),
    (_GAUGE, "eagle:target_weight_bytes", "Target", lambda x: nbytes_of(x.target.model)),
    (_GAUGE, "eagle:draft_weight_bytes", "Head or draft model", lambda x: getattr(x.engine.proposer, "nbytes", 0)),
)
_BY_LABEL: tuple[tuple[str, str, str, Callable[[Totals], dict[Any, int]]], ...] = (
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position in the draft",
        "position",
        lambda t: dict(enumerate(list(t.accepted_by_position))),
    ),
    ("eagle:rounds_by_depth", "Rounds by draft depth", "depth", lambda t: t.rounds_by_depth.copy()),
    ("eagle:requests", "Requests by outcome", "outcome", lambda t: dict(t.requests)),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Totals], Histogram]], ...] = (
    ("eagle:time_to_first_token_seconds", "From a request's arrival", lambda t: t.first_token),
    ("eagle:request_seconds", "From a request's arrival to its end", lambda t: t.whole),
)
_ABOUT_CACHE = re.compile("cached_prompt|prefix_")
"""Metrics that could reveal to a client whether a text was in the prefix cache."""
_DISK: _Numbers[DiskTier] = (
    (_COUNTER, "eagle:prefix_disk_hits", "Prompts that were continued from files", lambda d: d.hits),
    (_COUNTER, "eagle:prefix_disk_tokens", "Prompt tokens from files", lambda d: d.tokens),
    (_COUNTER, "eagle:prefix_disk_read_bytes", "Bytes read from files", lambda d: d.bytes_read),
    (_COUNTER, "eagle:prefix_disk_written_bytes", "Bytes written to files", lambda d: d.bytes_written),
    (_COUNTER, "eagle:prefix_disk_passed_over", "Damaged files", lambda d: d.passed_over),
    (_COUNTER, "eagle:prefix_disk_left_out", "Texts not written because the writer was behind", lambda d: d.left_out),
    (_GAUGE, "eagle:prefix_disk_bytes", "Files of this model", lambda d: d.nbytes),
    (_GAUGE, "eagle:prefix_disk_bytes_max", "Limit of the files of all models", lambda d: d.limit),
)


_LEARNER: _Numbers[Learner] = (
    (_COUNTER, "eagle:learn_texts", "Texts collected to learn from", lambda x: x.collector.collected),
    (_COUNTER, "eagle:learn_redacted", "Texts left out because they match", lambda x: x.collector.left_out),
    (_COUNTER, "eagle:learn_steps", "Training steps", lambda x: x.steps),
    (_GAUGE, "eagle:learn_disk_bytes", "Collected texts on disk", lambda x: x.texts.disk_bytes),
    (_GAUGE, "eagle:learn_version", "Version of the head that serves, 0 for the first", lambda x: x.versions.serving),
)


class ServerCollector(Collector):
    def __init__(self, models: Models):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for metric in self._all():
            if self._models.settings.cache_report or not _ABOUT_CACHE.search(metric.name):
                yield metric

    def _all(self) -> Iterator[Metric]:
        services = self._models.services
        totals = {name: service.totals for name, service in services.items()}
        loaded = {name: service.worker.loaded for name, service in services.items()}
        present = {name: x for name, x in loaded.items() if x is not None}
        yield from _families(_TOTALS, totals)
        yield from _families(_SERVICE, services)
        yield from _families(_LOADED, loaded)
        yield from _families(_DISK, {name: x.disk for name, x in present.items() if x.disk is not None})
        learning = {name: x.learner for name, x in present.items() if x.learner is not None}
        yield from _families(_LEARNER, learning)
        taus = GaugeMetricFamily("eagle:learn_tau", "τ of a version, as judged last", labels=[_MODEL, "version"])
        for name, learner in learning.items():
            for version, tau in learner.versions.taus.items():
                taus.add_metric([name, str(version)], tau)
        if learning:
            yield taus
        for name, text, label, counts in _BY_LABEL:
            counter = CounterMetricFamily(name, text, labels=[_MODEL, label])
            for model, total in totals.items():
                for key, count in counts(total).items():
                    counter.add_metric([model, str(key)], count)
            yield counter
        bounds = (*map(str, SECONDS), "+Inf")
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=[_MODEL])
            for model, times in ((model, histogram(total)) for model, total in totals.items()):
                so_far: list[float] = list(accumulate(times.buckets))
                family.add_metric([model], [*zip(bounds, so_far, strict=True)], times.sum)
            yield family
        yield GaugeMetricFamily("eagle:ready", "1 while requests are accepted", int(self._models.state == "ready"))


def _families(numbers: _Numbers[T], owners: Mapping[str, T | None]) -> Iterator[Metric]:
    """Yield each metric of the owners by model, 0 for None; nothing without owners."""
    for kind, name, text, read in numbers if owners else ():
        family = kind(name, text, labels=[_MODEL])
        for model, owner in owners.items():
            family.add_metric([model], 0.0 if owner is None else float(read(owner)))
        yield family


class SpeculationSummary(BaseModel):
    """The answer of `/v1/spec_decode/metrics`. A step is a target forward of one request."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    spec_decode_enabled: bool
    """Whether anything drafts for requests that do not choose."""
    spec_decode_mode: str
    """The first mode that drafts for them; `none` without one."""
    spec_decode_drafters: list[str]
    """All modes that draft for requests that do not choose; the first is `spec_decode_mode`."""
    spec_decode_modes: list[str]
    """The values that a request may choose for `spec_decode`."""
    spec_policy: str
    """The policy: `throughput`, `acceptance-ema` or `fixed`."""
    acceptance_rate_ema: float | None
    """The share of draft tokens that the policy expects to be accepted: the moving average of `acceptance-ema`, the
    estimate of `throughput` for its latest way to draft, and null for `fixed`, which estimates none."""
    acceptance_rate_overall: float
    """Accepted over drafted tokens since the start."""
    avg_tokens_per_step: float
    """τ: tokens per step, including bonus tokens."""
    total_steps: int
    """Steps with and without drafts."""
    total_fallback_steps: int
    """Steps without drafts."""
    total_proposed: int
    """Draft tokens."""
    total_accepted: int
    """Draft tokens that were accepted and emitted."""
    total_bonus_tokens: int
    """Tokens that the target added after drafts that were accepted whole."""
    current_k: int
    """The most draft tokens per step, as set; 0 if nothing drafts."""
    adaptive_k_current: int
    """The draft tokens per step of the policy's latest plan; 0 if nothing drafts."""


def speculation_summary(totals: Totals, loaded: Loaded) -> SpeculationSummary:
    steps, drafters, acceptance = totals.row_rounds, loaded.drafters, loaded.engine.policy.acceptance
    return SpeculationSummary(
        spec_decode_enabled=bool(drafters),
        spec_decode_mode=next(iter(drafters), "none"),
        spec_decode_drafters=list(drafters),
        spec_decode_modes=list(loaded.modes),
        spec_policy=loaded.speculation.policy,
        acceptance_rate_ema=acceptance if acceptance is None else round(acceptance, 4),
        acceptance_rate_overall=round(totals.accepted / totals.drafted, 4) if totals.drafted else 0.0,
        avg_tokens_per_step=round(totals.emitted / steps, 4) if steps else 0.0,
        total_steps=steps,
        total_fallback_steps=steps - totals.drafts,
        total_proposed=totals.drafted,
        total_accepted=totals.accepted,
        total_bonus_tokens=totals.bonus,
        current_k=loaded.most_drafts if drafters else 0,
        adaptive_k_current=loaded.engine.runner.depth if drafters else 0,
    )


def stats(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the fields that describe an answer: timings, and metrics under vLLM's names, over all its outputs."""
    return {"timings": _timings(call, outputs), "metrics": {"speculative_decoding": _speculation(outputs)}}


def _timings(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return timings under llama.cpp's names. The time to the first token includes the wait in the queue."""
    now = perf_counter()
    first = call.first_token or now
    cached = sum(o.cached_tokens for o in outputs)
    read, tokens = sum(o.prompt_tokens for o in outputs) - cached, sum(len(o.tokens) for o in outputs)
    prompt_s, predicted_s = first - call.arrived, now - first
    cut_off = {"cut_off": "time"} if any(o.cut_off is not None for o in outputs) else {}
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": round(1000 * prompt_s, 3),
        "prompt_per_second": round(read / prompt_s, 3) if prompt_s > 0 else 0.0,
        "predicted_n": tokens,
        "predicted_ms": round(1000 * predicted_s, 3),
        "predicted_per_second": round(tokens / predicted_s, 3) if predicted_s > 0 else 0.0,
        "draft_n": sum(o.drafted for o in outputs),
        "draft_n_accepted": sum(o.accepted for o in outputs),
        **cut_off,
    }


def _speculation(outputs: Sequence[Output]) -> dict[str, Any]:
    """Count steps, target forwards of one request with draft tokens. Forced tokens are not draft tokens."""
    steps = sum(o.drafted_by_position[0] for o in outputs if o.drafted_by_position)
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    histogram: Counter[int] = Counter()
    for output in outputs:
        at_least = [*output.drafted_by_position[:1], *output.accepted_by_position, 0]
        histogram.update({length: this - more for length, (this, more) in enumerate(pairwise(at_least)) if this > more})
    return {
        "mean_acceptance_length": round(1 + accepted / steps, 4) if steps else 1.0,
        "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "acceptance_histogram": {str(length): count for length, count in sorted(histogram.items())},
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_forced_tokens": sum(o.forced for o in outputs),
        "num_draft_failures": sum(o.draft_failures for o in outputs),
        "lossless": all(o.lossless for o in outputs),
    }
