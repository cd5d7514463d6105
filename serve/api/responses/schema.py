"""Requests and responses of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag

from ..answer import CachedTokens, Measured, ReasoningTokens
from ..conversation import BareTool, Extensions, OwnTool, as_bare_tool, one_of
from ..errors import Shape
from ..schema import Body, Many, Obfuscation, OpenAIRequest, supported

Ended = Literal["completed", "incomplete"]


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[TextPart, Tag("<input_text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    one_of(TextPart, RefusalPart),
    BeforeValidator(supported),
]


class GivenItem(Body):
    """The fields of all input items."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(GivenItem):
    type: Literal["message", None] = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[ContentPart]
    phase: str | None = None


class CallOutputItem(GivenItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Many[ContentPart]
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class CallItem(GivenItem):
    """The fields of both kinds of calls."""

    call_id: str
    name: str
    namespace: str | None = None
    caller: Any = None


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CallItem):
    """A call with free text as its input."""

    type: Literal["custom_tool_call"]
    input: str


class ThoughtText(Body):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(GivenItem):
    type: Literal["reasoning"]
    summary: Many[ThoughtText] = Field(default_factory=list)
    content: Many[ThoughtText] | None = None
    encrypted_content: str | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    one_of(MessageItem, FunctionCallItem, CallOutputItem, CustomCallItem, ReasoningItem),
]


class FunctionTool(OwnTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(OwnTool):
    """A tool with free text as its input; the model sees a function with that text as its only argument."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None


FlatTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    one_of(FunctionTool, CustomTool),
]


class NamespaceTool(Body):
    """Tools under a common name; Codex offers the tools of MCP servers this way."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[FlatTool]


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[BareTool, BeforeValidator(as_bare_tool), Tag("<>")],
    one_of(FunctionTool, CustomTool, NamespaceTool),
]


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Ignored: reasoning is returned in full, without a summary.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(Extensions, OpenAIRequest):
    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    """An upper bound: the context may leave fewer."""
    tools: Many[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: Obfuscation | None = None
    include: Many[Included] | None = None
    top_logprobs: Literal[0] | None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    # Ignored: these concern OpenAI's own servers.
    client_metadata: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


class InputTokensDetails(CachedTokens):
    cache_write_tokens: int


class ResponsesUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputThought(Shape):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(Shape):
    """The fields of all output items."""

    id: str
    status: Ended


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputThought]
    encrypted_content: str = ""


class OutputCall(OutputItem):
    """The fields of both kinds of calls."""

    call_id: str
    name: str
    namespace: str = ""


class OutputFunctionCall(OutputCall):
    type: Literal["function_call"]
    arguments: str


class OutputCustomCall(OutputCall):
    type: Literal["custom_tool_call"]
    input: str


class ResponseObject(Measured):
    """A response. It repeats the request's settings, with defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Ended
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


class InputItem(Shape):
    """An item from the client or an earlier response; its other fields depend on its type."""

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
