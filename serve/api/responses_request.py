"""Requests and items of OpenAI's Responses API, and their translation to Chat Completions requests."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..chat.history import PARAGRAPH
from .conversation import EFFORTS, ChatExtensions, Turns, translated
from .limits import Limits
from .responses_tools import AllowedChoices, ChosenTool, Functions, ResponsesTool, chosen, flat_name
from .schema import BY_TYPE, Body, ChatRequest, EventFormat, Many, Media, OpenAIRequest, refuse_last_media, without_data

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


ContentPart = Annotated[TextPart | RefusalPart | Media, BY_TYPE, BeforeValidator(without_data)]


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
    arguments: str | dict[str, Any] | None = None


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


Item = Annotated[MessageItem | FunctionCallItem | CallOutputItem | CustomCallItem | ReasoningItem, BY_TYPE]


class OutputMessage(MessageItem):
    id: str
    status: Ended
    type: Literal["message"]


class OutputReasoning(ReasoningItem):
    id: str
    status: Ended
    summary: list[Any]
    content: list[ThoughtText]


class OutputFunctionCall(FunctionCallItem):
    id: str
    status: Ended
    arguments: str


class OutputCustomCall(CustomCallItem):
    id: str
    status: Ended


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


class ResponsesRequest(ChatExtensions, OpenAIRequest):
    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    """An upper bound: the context may leave fewer."""
    tools: Many[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoices | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: EventFormat | None = None
    include: Many[Included] | None = None
    top_logprobs: Literal[0] | None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    # Ignored: these concern OpenAI's own servers.
    client_metadata: dict[str, Any] | None = None


_SEALED = "thought:"
"""Prefix of `encrypted_content`, which holds the reasoning in plain base64: the client may read it."""


def input_items(body: ResponsesRequest) -> list[Item]:
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_request(body: ResponsesRequest, items: Sequence[Item], functions: Functions, limits: Limits) -> ChatRequest:
    """Return the chat of these items. It leaves out max_output_tokens, which is only a bound. Raises ApiError."""
    asked: dict[str, Any] = {
        "messages": _messages(body.instructions, items, len(items) - len(input_items(body))),
        "tools": functions.functions or None,
        "tool_choice": chosen(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "verbosity": body.text.verbosity if body.text is not None else None,
        **body.model_dump(include={"temperature", "top_p", "top_k"}),
        "continue_final_message": _is_partial(items[-1]),
        **body.extensions(),
    }
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort == "none":
        asked["chat_template_kwargs"] = {"enable_thinking": False} | (body.chat_template_kwargs or {})
    elif effort is not None:
        asked["reasoning_effort"] = EFFORTS.get(effort, effort)
    return translated(asked, functions.names, limits)


def _is_partial(item: Item) -> bool:
    """Return whether an item is an answer, or a thought, that was cut off."""
    is_answer = isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant")
    return is_answer and item.status in ("in_progress", "incomplete")


def sealed(thought: str) -> str:
    """Encode reasoning for clients that send back only encrypted content, such as Codex."""
    return _SEALED + b64encode(thought.encode()).decode()


def _unsealed(text: str | None) -> str:
    """Decode reasoning; empty if another server encrypted it."""
    if not text or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


def _messages(instructions: str | None, items: Sequence[Item], kept: int) -> list[dict[str, Any]]:
    """Return the messages of a chat. kept: how many items come from the previous response."""
    conversation = Turns()
    if isinstance(last := items[-1], MessageItem) and last.role == "user":
        refuse_last_media(last.content, f"input[{len(items) - kept - 1}].content")
    if instructions:
        conversation.say("system", instructions)
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            conversation.say(role, _text(item.content))
        elif isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
            conversation.think(thought or _unsealed(item.encrypted_content))
        elif isinstance(item, CallOutputItem):
            conversation.result(item.call_id, _text(item.output), f"input[{index - kept}].call_id")
        elif isinstance(item, CustomCallItem):
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
            conversation.call(item.call_id, flat_name(item.name, item.namespace), arguments)
        elif isinstance(item, FunctionCallItem):
            conversation.call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
    return conversation.messages


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return PARAGRAPH.join(map(_text_of_part, content))


def _text_of_part(part: ContentPart) -> str:
    if isinstance(part, Media):
        return part.note
    return part.text if isinstance(part, TextPart) else part.refusal


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` for Chat Completions, which nests the schema's fields."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        return form.model_dump(by_alias=True, include={"type", "schema_"}, exclude_none=True)
    schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def listed(item: Item, place: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it. place: the last part of its id if the client gave none."""
    fields = item.model_dump(exclude_none=True)
    kind = fields.setdefault("type", "message")
    if kind == "message" and isinstance(fields["content"], str):
        part = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": fields["content"]}]
    for part in fields["content"] if kind == "message" else ():
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    return {"id": f"{ID_PREFIXES[kind]}_{place}", "status": "completed", **fields}
