"""What clients get, as types: for the published schema alone, because answers are written without them."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Version(Shape):
    version: str


class Error(Shape):
    error: ErrorBody


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    reasoning_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Shape):
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
    """Only where an answer was cut off by what its request's time is bounded to."""


class Speculation(Shape):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Metrics(Shape):
    speculative_decoding: Speculation


class Answer(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: Timings
    metrics: Metrics


class CompletionLogprobs(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    service_tier: Literal["default"] = "default"
    """Only if the request names a tier."""


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Shape):
    """For clients that send `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(Shape):
    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Health(Shape):
    status: Literal["starting", "ready", "draining"]


class SpeculationSummary(Shape):
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


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Shape):
    prompt: str


ERRORS = (400, 401, 404, 413, 429, 500, 503, 504)
"""How a POST may end."""
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": _EVENT}}}
"""What an answer may be instead."""


def documented(
    answer: type[Shape] | UnionType, *errors: int, error: type[Shape] = Error, **more: Any
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its answer, and the errors that it may end in, in their shape."""
    return {200: {"model": answer, **more}, **{status: {"model": error} for status in errors}}
