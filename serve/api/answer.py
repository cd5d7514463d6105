"""What all answers share: their parts, usage, timings, speculation metrics, and streaming."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, starmap
from time import perf_counter
from typing import Any, Literal

from sse_starlette import ServerSentEvent

from eagle_mlx.request import Output, draft_runs
from eagle_mlx.request_state import RequestState

from .errors import ApiError, Shape
from .job import RequestEvent
from .model import Loaded
from .received import Received
from .schema import SERVICE_TIER, ChoicesRequest, EventFormat
from .service import Call
from .worker import TIME


class Usage(Shape):
    """Token usage in OpenAI's format, without the fields about a predicted output."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]


class Timings(Shape):
    """Timings under llama.cpp's names. The time to the first token includes the wait in the queue."""

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
    """Set only if the request's time limit cut the answer off."""


class SpeculationCounts(Shape):
    """Counts of speculative decoding. A step is a target forward of one request with draft tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_draft_failures: int
    """How often the proposer raised. After three times in a row, a request decodes plainly."""
    lossless: bool
    """False if `threshold` acceptance let drafts change the text."""


class Metrics(Shape):
    """Metrics under vLLM's names."""

    speculative_decoding: SpeculationCounts


class Measured(Shape):
    """Timings and metrics, summed over all answers to a request."""

    timings: Timings
    metrics: Metrics


class Completed(Measured):
    """The fields around the choices in answers of OpenAI's older routes."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    service_tier: Literal["default"] = "default"
    """Set only if the request names a tier."""


def failure(outputs: Sequence[Output]) -> ApiError | None:
    """Return the error of the first request that failed."""
    for output in outputs:
        if output.error is not None and output.cut_off == TIME:  # a retry would only add to the load
            return ApiError(504, output.error, code="timeout", headers={"x-should-retry": "false"})
        if output.error is not None:
            return ApiError(400 if output.refused else 500, output.error, code="generation_failed")
    return None


def stats(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
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


def _speculation(outputs: Sequence[Output]) -> SpeculationCounts:
    steps = sum(o.drafted_by_position[0] for o in outputs if o.drafted_by_position)
    drafted, accepted = sum(o.drafted for o in outputs), sum(o.accepted for o in outputs)
    histogram: Counter[int] = Counter()
    for output in outputs:
        at_least = [*output.drafted_by_position[:1], *output.accepted_by_position, 0]
        histogram.update({length: this - more for length, (this, more) in enumerate(pairwise(at_least)) if this > more})
    return SpeculationCounts(
        mean_acceptance_length=round(1 + accepted / steps, 4) if steps else 1.0,
        draft_acceptance_rate=round(accepted / drafted, 4) if drafted else 0.0,
        acceptance_histogram={str(length): count for length, count in sorted(histogram.items())},
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_draft_failures=sum(o.draft_failures for o in outputs),
        lossless=all(o.lossless for o in outputs),
    )


DONE = b"data: [DONE]\n\n"
PROGRESS_SECONDS = 1.0
"""Interval between comments that say what a request waits for; event readers ignore them."""
dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def named_event(fields: dict[str, Any]) -> str:
    """Return a server-sent event named after its type."""
    return f"event: {fields['type']}\ndata: {dumps(fields)}\n\n"


def one_by_one(event: RequestEvent) -> list[RequestEvent]:
    """Split the event of a step into events of a token each. The last has the output, if there is one."""
    last = max(0, len(event.tokens) - 1)
    return [
        RequestEvent(event.index, event.tokens[at:][:1], event.logprobs[at:][:1], event.output if at == last else None)
        for at in range(last + 1)
    ]


class PendingAnswer(ABC):
    """A request from its admission until its answer can begin, which may wait for the model."""

    stream_options: EventFormat | None = None

    def __init__(self, call: Call):
        self.call = call

    @abstractmethod
    async def prepare(self, received: Received[Any], loaded: Loaded) -> Answer:
        """Make the engine requests. Raises ApiError."""

    @abstractmethod
    def keep_alive(self) -> ServerSentEvent:
        """Return an event that says nothing, for clients that end a stream without events. Also used later."""

    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails, now or later."""
        return f"data: {dumps(error.body)}\n\n".encode() + DONE


class Answer(ABC):
    """The answer to engine requests, whole or as a stream."""

    def __init__(self, pending: PendingAnswer, requests: Sequence[RequestState]):
        self.pending, self.call, self.requests = pending, pending.call, requests
        options = pending.stream_options
        self.per_token = self.call.service.settings.stream_per_token
        """Whether a stream has an event for each token, as the request or else the server says."""
        if options is not None and options.per_token is not None:
            self.per_token = options.per_token

    @abstractmethod
    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the complete answer after all requests have ended."""

    @abstractmethod
    def open(self) -> str:
        """Return the events before the first token."""

    @abstractmethod
    def write(self, event: RequestEvent) -> str:
        """Return the events of a step of one request."""

    @abstractmethod
    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        """Return the last events of one request. more: timings and metrics, if all requests have ended."""

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        """Return what follows all answers."""
        return b""

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer. Raises ApiError if a request failed."""
        outputs: dict[int, Output] = {}
        while len(outputs) < len(self.requests):
            outputs |= {event.index: event.output for event in await self.call.events() if event.output is not None}
        ordered = [outputs[index] for index in range(len(outputs))]
        if error := failure(ordered):
            self.call.failed = True
            raise error
        return self.response(ordered)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events; those that are ready together are sent together."""
        if opening := self.open():
            yield opening.encode()
        comment: str | None = None
        while not self.call.begun.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.call.begun.wait(), PROGRESS_SECONDS)
                break
            if (now := self.call.waits_for()) not in (None, comment):
                yield f": {now}\n\n".encode()
            comment = now
        outputs: dict[int, Output] = {}
        while len(outputs) < len(self.requests):
            text = ""
            for event in await self.call.events():
                if event.output is not None and (error := failure([event.output])):
                    self.call.failed = True
                    yield text.encode() + self.pending.fail(error)
                    return
                text += "".join(map(self.write, one_by_one(event) if self.per_token else [event]))
                if event.output is not None:
                    outputs[event.index] = event.output
                    is_last = len(outputs) == len(self.requests)
                    more = stats(self.call, list(outputs.values())) if is_last else {}
                    text += self.close(event.index, event.output, more)
            if text:
                yield text.encode()
        if last := self.end_stream([outputs[index] for index in range(len(outputs))]):
            yield last


class PendingChoices(PendingAnswer):
    """A request of OpenAI's older routes, whose answers are choices."""

    prefix: str
    """The beginning of an answer's id."""
    kind: str
    """The field `object` of a body, and below of a chunk."""
    chunk_kind: str
    nothing: Mapping[str, Any]
    """The fields of a choice in a chunk without text."""

    def __init__(self, call: Call, body: ChoicesRequest):
        super().__init__(call)
        self.body, self.stream_options = body, body.stream_options

    def keep_alive(self) -> ServerSentEvent:
        choice = {"index": 0, **self.nothing, "logprobs": None, "finish_reason": None}
        return ServerSentEvent(dumps(self.chunk([choice])), sep="\n")

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.body.usage_wanted else {}
        return self.whole(self.chunk_kind, choices, **usage | more)

    def whole(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a body or a chunk, with the fields that all of them have."""
        service = self.call.service
        named = {"id": f"{self.prefix}-{self.call.id}", "object": kind, "created": self.call.created}
        tier = {"service_tier": SERVICE_TIER} if self.body.service_tier is not None else {}
        named |= {"model": service.name, "system_fingerprint": service.fingerprint, **tier}
        return {**named, "choices": choices, **more}


class Choices(Answer):
    """An answer of OpenAI's older routes: choices, as one body or in chunks."""

    def __init__(self, pending: PendingChoices, requests: Sequence[RequestState]):
        super().__init__(pending, requests)
        self.form = pending
        self._written: Counter[int] = Counter()
        self._drafted: Counter[int] = Counter()
        """Accepted draft tokens of each choice that no chunk has reported yet."""

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return a complete choice."""

    def thought_tokens(self, index: int, output: Output) -> int:
        """Count the tokens of a complete choice's reasoning."""
        return 0

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return self.form.whole(self.form.kind, choices, usage=self._usage(outputs), **stats(self.call, outputs))

    def write(self, event: RequestEvent) -> str:
        """Return the events of a step. If requested, accepted draft tokens and the target's own get separate chunks."""
        if not self.form.body.drafts_wanted:
            return self.extend(event)
        start, text = self._written[event.index], ""
        self._written[event.index] += len(event.tokens)
        for part, drafted in draft_runs(self.requests[event.index].from_draft[start : self._written[event.index]]):
            tokens = event.tokens[part]
            self._drafted[event.index] += drafted * len(tokens)
            output = event.output if part.stop == len(event.tokens) else None
            text += self.extend(RequestEvent(event.index, tokens, event.logprobs[part], output))
        return text

    @abstractmethod
    def extend(self, event: RequestEvent) -> str:
        """Return the chunks of a step, or of a part of it."""

    def chunk(self, index: int, piece: dict[str, Any], logprobs: Any = None, finish: Any = None, **more: Any) -> str:
        """Return a chunk of a choice. piece: the choice's own field. more: further fields of the chunk."""
        if self.form.body.drafts_wanted:
            more = {"draft_n_accepted": self._drafted.pop(index, 0), **more}
        return self._chunk([{"index": index, **piece, "logprobs": logprobs, "finish_reason": finish}], **more)

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        if not self.form.body.usage_wanted:
            return DONE
        return self._chunk([], usage=self._usage(outputs), **stats(self.call, outputs)).encode() + DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {dumps(self.form.chunk(choices, **more))}\n\n"

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Count tokens. If a prompt has several answers, its tokens count once."""
        firsts = outputs[:: self.form.body.answers]
        prompt, completion = sum(o.prompt_tokens for o in firsts), sum(len(o.tokens) for o in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(starmap(self.thought_tokens, enumerate(outputs)))},
        }
