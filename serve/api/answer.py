"""What all answers have: their parts, usage, timings, and what speculation did for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

from eagle_mlx.request import Output

from ..chat import Delta, ToolCall
from .errors import ApiError, Shape
from .service import Call
from .worker import TIME


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    reasoning_tokens: int


class Usage(Shape):
    """OpenAI's counts.

    OpenAI's `accepted_prediction_tokens` count a prediction that the client sends. They are not draft tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Shape):
    """Under llama.cpp's names. The time until the first token includes the wait in the queue."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    cut_off: Literal["time"] = "time"
    """Only if an answer was cut off because the request's time was over."""


class Speculation(Shape):
    """A step is a target forward of one request in which something was drafted."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Metrics(Shape):
    """Under vLLM's names."""

    speculative_decoding: Speculation


class Measured(Shape):
    """What this server tells of all answers to a request together."""

    timings: Timings
    metrics: Metrics


class Completed(Measured):
    """What answers of OpenAI's older routes have around their choices."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


def failure(outputs: Sequence[Output]) -> ApiError | None:
    """The error of the first request that ended with one."""
    failed = next((output for output in outputs if output.error is not None), None)
    if failed is None:
        return None
    if failed.cut_off == TIME:  # to ask again would only add to what keeps the server busy
        return ApiError(504, str(failed.error), code="timeout", headers={"x-should-retry": "false"})
    return ApiError(400 if failed.refused else 500, str(failed.error), code="generation_failed")


def usage(outputs: Sequence[Output], answers: int, thought_tokens: int = 0) -> dict[str, Any]:
    """Count tokens; of several answers to a prompt, the first counts the prompt."""
    firsts = outputs[::answers]
    prompt, completion = sum(o.prompt_tokens for o in firsts), sum(len(o.tokens) for o in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(o.cached_tokens for o in firsts)),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought_tokens),
    ).plain()


def stats(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return `timings` and `metrics`."""
    metrics = Metrics(speculative_decoding=_speculation(outputs))
    return Measured(timings=_timings(call, outputs), metrics=metrics).plain()


def _timings(call: Call, outputs: Sequence[Output]) -> Timings:
    now = perf_counter()
    first = call.first_token or now
    cached = sum(o.cached_tokens for o in outputs)
    read, tokens = sum(o.prompt_tokens for o in outputs) - cached, sum(len(o.tokens) for o in outputs)
    prompt_s, predicted_s = first - call.arrived, now - first
    timings = Timings(
        cache_n=cached,
        prompt_n=read,
        prompt_ms=round(1000 * prompt_s, 3),
        prompt_per_second=round(read / prompt_s, 3) if prompt_s > 0 else 0.0,
        predicted_n=tokens,
        predicted_ms=round(1000 * predicted_s, 3),
        predicted_per_second=round(tokens / predicted_s, 3) if predicted_s > 0 else 0.0,
        draft_n=sum(o.drafted for o in outputs),
        draft_n_accepted=sum(o.accepted for o in outputs),
    )
    if any(o.cut_off is not None for o in outputs):
        timings.cut_off = "time"
    return timings


def _speculation(outputs: Sequence[Output]) -> Speculation:
    steps = sum(o.drafted_by_position[0] for o in outputs if o.drafted_by_position)
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    histogram: Counter[int] = Counter()
    for output in outputs:
        at_least = [*output.drafted_by_position[:1], *output.accepted_by_position, 0]
        histogram.update({length: this - more for length, (this, more) in enumerate(pairwise(at_least)) if this > more})
    return Speculation(
        mean_acceptance_length=round(1 + accepted / steps, 4) if steps else 1.0,
        draft_acceptance_rate=round(accepted / drafted, 4) if drafted else 0.0,
        acceptance_histogram={str(length): count for length, count in sorted(histogram.items())},
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
    )


Kind = Literal["text", "reasoning", "call"]


@dataclass
class Part:
    kind: Kind
    text: str = ""
    call: ToolCall | None = None

    def continues_with(self, other: Part) -> bool:
        """Whether another is more of the same part. Every call is one by itself."""
        return self.kind == other.kind != "call"


def part_of(delta: Delta) -> Part:
    if delta.tool_call is not None:
        return Part("call", call=delta.tool_call)
    return Part("reasoning", delta.reasoning) if delta.reasoning else Part("text", delta.content)


def parts_of(deltas: Iterable[Delta]) -> list[Part]:
    """The whole parts that deltas make up."""
    parts: list[Part] = []
    for part in map(part_of, deltas):
        if parts and parts[-1].continues_with(part):
            parts[-1].text += part.text
        else:
            parts.append(part)
    return parts
