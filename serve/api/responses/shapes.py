"""What clients of the Responses API get, as types for the published schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from ..shapes import Metrics, Shape, Timings

ItemStatus = Literal["completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class OutputThought(Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Shape):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputThought]
    encrypted_content: str = ""
    status: ItemStatus


class OutputFunctionCall(Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: str
    status: ItemStatus


class OutputCustomCall(Shape):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    input: str
    status: ItemStatus


class InputTokensDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponsesUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseObject(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None] | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponsesUsage
    timings: Timings
    metrics: Metrics


class InputItem(Shape):
    """An item as the client sent it, or an earlier response gave it; its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    status: str


class InputItemList(Shape):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
