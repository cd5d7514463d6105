"""Requests, items and tools of OpenAI's Responses API, and their translation to Chat Completions requests."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from ..chat import ToolCall
from ..chat.history import with_whole_pairs
from .conversation import BareTool, Names, OwnTool, Turns, translated
from .errors import ApiError
from .limits import Limits
from .media import Media, Pictures, paragraphs, without_data
from .schema import BY_TYPE, Body, ChatExtensions, ChatRequest, EventFormat, Many, OpenAIRequest


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
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(GivenItem):
    type: Literal["message", None] = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[ContentPart] | None  # only the model's may be null
    phase: str | None = None


class CallOutputItem(GivenItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Many[ContentPart] | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class CallItem(GivenItem):
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
    summary: Many[ThoughtText] | None = None
    content: Many[ThoughtText] | None = None
    encrypted_content: str | None = None


class ItemReference(Body):
    """An item of a stored response, as Vercel's AI SDK sends back the answers that it got."""

    type: Literal["item_reference"]
    id: str


_Known = MessageItem | FunctionCallItem | CallOutputItem | CustomCallItem | ReasoningItem
Item = Annotated[_Known | Media, BY_TYPE, BeforeValidator(without_data)]
InputItem = Annotated[_Known | ItemReference | Media, BY_TYPE, BeforeValidator(without_data)]


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Ignored: reasoning is returned in full, without a summary.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    max_tokens: int | None = Field(None, ge=0)  # as in OpenRouter's API; OpenAI's has no such field


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


class FunctionTool(OwnTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(OwnTool):
    """A tool with free text as its input; the model sees a function with that text as its only argument."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None


FlatTool = FunctionTool | CustomTool


class NamespaceTool(Body):
    """Tools under a common name; Codex offers the tools of MCP servers this way."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[Annotated[FlatTool, BY_TYPE]]


ResponsesTool = Annotated[FunctionTool | CustomTool | NamespaceTool | BareTool, BY_TYPE]


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def function(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": _flat_name(self.name, self.namespace)}}


class AllowedChoices(Body):
    """The tools that may be called. Those that OpenAI runs are ignored."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[Annotated[ChosenTool | BareTool, BY_TYPE]]


class ResponsesRequest(ChatExtensions, OpenAIRequest):
    input: str | Many[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Many[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoices | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: EventFormat | None = None
    include: Many[Included] | None = None
    top_logprobs: Literal[0] | None = None
    conversation: None = None
    prompt: None = None
    # Ignored: these concern OpenAI's own servers.
    max_tool_calls: int | None = None
    client_metadata: dict[str, Any] | None = None


_FIELDS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    ".function": "",
}


def _choice(choice: str | ChosenTool | AllowedChoices | None) -> str | dict[str, Any] | None:
    """Return `tool_choice` for Chat Completions."""
    if isinstance(choice, ChosenTool):
        return choice.function
    if not isinstance(choice, AllowedChoices):
        return choice
    tools = [tool.function for tool in choice.tools if isinstance(tool, ChosenTool)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


_CALLS = {"function": "function_call", "custom": "custom_tool_call"}
_TEXT = {"properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
"""The parameters of a function that replaces a tool with text input."""


class Functions:
    """The functions that a model sees."""

    def __init__(self, tools: Sequence[ResponsesTool] = ()):
        """Leave out tools that OpenAI runs. Raises ApiError if that leaves none."""
        self.functions: list[dict[str, Any]] = []
        self.calls: dict[str, dict[str, Any]] = {}
        """For each function, the item of a call of its tool, without the input."""
        self.names = Names("input", _FIELDS, [])
        for at, tool in enumerate(tools):
            if isinstance(tool, NamespaceTool):
                for inner in tool.tools:
                    self._add(at, inner, tool.name)
            elif not isinstance(tool, BareTool):
                self._add(at, tool, None)
        if tools and isinstance(hosted := tools[0], BareTool) and not self.functions:
            raise hosted.refusal("OpenAI")

    def _add(self, place: int, tool: FlatTool, namespace: str | None) -> None:
        name = _flat_name(tool.name, namespace)
        parameters = tool.parameters if isinstance(tool, FunctionTool) else {"type": "object", **_TEXT}
        function: dict[str, Any] = {"name": name, "description": _description(tool), "parameters": parameters}
        if isinstance(tool, FunctionTool) and tool.strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        self.names.tools.append(place)
        self.calls[name] = {"type": _CALLS[tool.type], "name": tool.name}
        if namespace is not None:
            self.calls[name]["namespace"] = namespace

    def takes_text(self, call: ToolCall) -> bool:
        """Return whether a call's input is text, which is not the JSON that the model writes."""
        return call.name in self.calls and self.calls[call.name]["type"] == _CALLS["custom"]

    def called(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call, without its id and status."""
        item = self.calls.get(call.name, {"type": "function_call", "name": call.name})
        text = {"input": _text_of(call.arguments)} if self.takes_text(call) else {"arguments": call.arguments}
        return {"call_id": call.id, **item, **text}


def _flat_name(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") or name.startswith("__") else f"{namespace}__{name}"


def _text_of(arguments: str) -> str:
    """Return the text of a call of such a function, perhaps cut off, or all of `arguments` if a model wrote others."""
    try:
        values = from_json(with_whole_pairs(arguments), allow_partial="trailing-strings")
    except ValueError:  # JSON text, but not for every reader
        return arguments
    text = values.get("input") if values else ""
    return text if isinstance(text, str) else arguments


def _description(tool: FlatTool) -> str | None:
    """Return a tool's description, with the grammar of its input, which is not enforced here."""
    form: dict[str, Any] = (tool.format or {}) if isinstance(tool, CustomTool) else {}
    if not isinstance(definition := form.get("definition"), str):
        return tool.description
    grammar = f"The input follows this grammar ({form.get('syntax', 'lark')}):\n{definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


_SEALED = "thought:"  # prefix of `encrypted_content`, which holds the reasoning in plain base64: the client may read it


def input_items(body: ResponsesRequest) -> list[Item | ItemReference]:
    """Return the new items. Raises ApiError if there is no conversation."""
    if body.input in (None, []) and not body.previous_response_id:
        raise ApiError(400, "input: text or a list of items is required without previous_response_id", "input")
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []


def chat_request(body: ResponsesRequest, items: Sequence[Item], functions: Functions, limits: Limits) -> ChatRequest:
    """Return the chat of these items. Raises ApiError."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    fields: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "tools": functions.functions or None,
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": None if effort == "none" else effort,
        "thinking_budget": body.reasoning and body.reasoning.max_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "verbosity": body.text.verbosity if body.text is not None else None,
        **body.model_dump(include={"temperature", "top_p", "top_k"}),
        "continue_final_message": _is_partial(items[-1]),
        **body.extensions(),
    }
    if effort == "none":
        fields["chat_template_kwargs"] = {"enable_thinking": False} | (body.chat_template_kwargs or {})
    turns = _turns(body.instructions, items, len(items) - len(input_items(body)))
    return translated(turns, fields, functions.names, limits)


def _is_partial(item: Item) -> bool:
    """Return whether an item is an answer, or a thought, that was cut off."""
    if not isinstance(item, ReasoningItem | MessageItem) or item.status not in ("in_progress", "incomplete"):
        return False
    return isinstance(item, ReasoningItem) or item.role == "assistant"


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


def _turns(instructions: str | None, items: Sequence[Item], kept: int) -> Turns:
    """Return the turns of a chat. kept: how many items come from the previous response."""
    before = next((item for item in reversed(items) if getattr(item, "role", "") != "user"), None)
    is_own = before is not items[-1] and not isinstance(before, CallOutputItem)  # so it is a message of the user
    question = getattr(items[-1], "content", None) if is_own else None
    conversation = Turns(Pictures(question, f"input[{len(items) - kept - 1}].content"))
    if instructions:
        conversation.say("system", instructions)
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            if item.content is None and role != "assistant":
                place = f"input[{index - kept}].content"
                raise ApiError(400, f"{place}: must be text, or a list of parts", place)
            conversation.say(role, _text(item.content, conversation, f"input[{index - kept}].content"))
        elif isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary or ())
            conversation.think(thought or _unsealed(item.encrypted_content))
        elif isinstance(item, CallOutputItem):
            output = _text(item.output, conversation, f"input[{index - kept}].output")
            conversation.result(item.call_id, output, f"input[{index - kept}].call_id")
        elif isinstance(item, Media):
            conversation.say("assistant", item.note)
        else:
            arguments = {"input": item.input} if isinstance(item, CustomCallItem) else item.arguments
            conversation.call(item.call_id, _flat_name(item.name, item.namespace), arguments)
    return conversation


def _text(content: str | Sequence[ContentPart] | None, conversation: Turns, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = enumerate(content or ())
    return paragraphs(_text_of_part(part, conversation, f"{where}[{index}]") for index, part in parts)


def _text_of_part(part: ContentPart, conversation: Turns, where: str) -> str:
    if isinstance(part, Media):
        return conversation.pictures.text(part, where)
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
