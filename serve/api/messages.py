"""Anthropic's Messages API: requests, their translation to chats, answers and their events, and token counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from eagle_mlx.request import Output

from ..chat import Delta
from ..chat.history import PARAGRAPH
from .answer import dumps, named_event, respond
from .chat import EncodedChat
from .conversation import BareTool, Names, OwnTool, PartsAnswer, PendingParts, Turns, arguments_of, counted, translated
from .errors import ERRORS, EVENTS, NO_THREADS, ApiError, documented
from .limits import Limits
from .media import Media, Pictures, paragraphs, with_retrieved_text
from .metrics import stats
from .received import models_of, receive
from .schema import BY_TYPE, Body, ChatExtensions, ChatRequest, Many, T
from .service import Call

router = APIRouter()
KNOWN_TOOLS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known_tools.yaml").read_bytes())
"""Description and parameters of the tools that have no schema in requests, by type."""


class Cached(Body):
    cache_control: Any = None  # ignored: the prefix cache finds shared prefixes without marks


class TextBlock(Cached):
    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    data: str  # encrypted, and so left out of the prompt


class ToolUseBlock(Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str | None = None
    caller: Any = None


class ToolReferenceBlock(Cached):
    """A tool that a search of the client's own has found. Its definition takes the place of the block."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = TextBlock | ToolReferenceBlock | Media


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[ResultPart, BY_TYPE, BeforeValidator(with_retrieved_text)]] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | Media,
    BY_TYPE,
    BeforeValidator(with_retrieved_text),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] | None = None


class ClientTool(OwnTool, Cached):
    type: Literal["custom", None] = None
    input_schema: dict[str, Any]
    eager_input_streaming: bool | None = None  # ignored, as is the next: tool input arrives in one piece
    input_examples: list[dict[str, Any]] | None = None


OfferedTool = Annotated[ClientTool | BareTool, BY_TYPE]


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ChatExtensions, Cached):
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[OfferedTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of `output_config.format`
    context_management: dict[str, Any] | None = None  # ignored, as are the next: for Anthropic's own servers
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None  # ignored, as are the rest
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: None = None
    thread: dict[str, Any] | None = None  # refused


_FIELDS = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    ".function": "",
}
_BLOCKS = {
    "user": (TextBlock, ToolResultBlock, Media),
    "system": (TextBlock,),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, Media),
}


def chat_request(body: CountTokensRequest, limits: Limits) -> ChatRequest:
    """Return the chat. Raises ApiError that names the field."""
    turns, chat = _turns(body), {**body.extensions(), **_tools(body)}
    is_call = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")  # it continues no text
    chat.setdefault("continue_final_message", body.messages[-1].role == "assistant" and not is_call)
    if body.thinking is not None:
        chat.setdefault("chat_template_kwargs", {}).setdefault("enable_thinking", body.thinking.type != "disabled")
        chat["thinking_budget"] = body.thinking.budget_tokens
    chat["reasoning_effort"] = (output := body.output_config or OutputConfig()).effort
    if (wanted := output.format or body.output_format) is not None:
        form = {"name": "answer", "schema": wanted.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    if isinstance(body, MessagesRequest):
        chat |= body.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"}) | {"stop": body.stop_sequences}
    return translated(turns, chat, names_of(body), limits).without_tools(_deferred(body))


def names_of(body: CountTokensRequest) -> Names:
    return Names("messages", _FIELDS, [index for index, tool in enumerate(body.tools or ()) if not _is_hosted(tool)])


def _is_hosted(tool: ClientTool | BareTool) -> bool:
    """Return whether Anthropic runs the tool, or only its models know the schema."""
    return isinstance(tool, BareTool) and tool.type not in KNOWN_TOOLS


def _deferred(body: CountTokensRequest) -> set[str]:
    """Return the tools that the model sees only once its client's search finds them."""
    tools = body.tools or []
    if any(tool.type.startswith("tool_search_tool") for tool in tools if isinstance(tool, BareTool)):
        return set()  # the search of Anthropic's servers, which would find them, is missing here
    return {tool.name for tool in tools if isinstance(tool, ClientTool) and tool.defer_loading}


def _turns(body: CountTokensRequest) -> Turns:
    last = body.messages[-1]
    is_own = last.role == "user" and not any(isinstance(block, ToolResultBlock) for block in _blocks(last.content))
    conversation = Turns(Pictures(last.content if is_own else None, f"messages[{len(body.messages) - 1}].content"))
    if text := PARAGRAPH.join(block.text for block in _blocks(body.system)):
        conversation.say("system", text)
    functions = {str(tool.name): _function(tool)["function"] for tool in body.tools or () if not _is_hosted(tool)}
    for index, turn in enumerate(body.messages):
        _add(conversation, turn, f"messages[{index}].content", functions)
    return conversation


def _blocks(content: str | list[T] | None) -> list[T | TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else [*(content or [])]


def _add(conversation: Turns, turn: Turn, where: str, functions: dict[str, Any]) -> None:
    if turn.role == "assistant":
        conversation.say("assistant", "")  # its blocks may hold nothing for the prompt
    elif turn.content in (None, []):
        raise ApiError(400, f"{where}: must be text, or a list of blocks", where)
    for index, block in enumerate(_blocks(turn.content)):
        place = f"{where}[{index}]"
        if not isinstance(block, _BLOCKS[turn.role]):
            problem = f"a block of type {block.type} is not allowed in a message of role {turn.role}"
            raise ApiError(400, f"{place}: {problem}", place)
        if isinstance(block, TextBlock | Media):
            conversation.say(turn.role, _text(block, conversation, place, functions))
        elif isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.call(block.id, block.name, block.input)
        elif isinstance(block, ToolResultBlock):
            blocks = enumerate(_blocks(block.content))
            parts = (_text(part, conversation, f"{place}.content[{at}]", functions) for at, part in blocks)
            result = ("Error: " if block.is_error else "") + paragraphs(parts)
            conversation.result(block.tool_use_id, result, f"{place}.tool_use_id")


def _text(block: ResultPart, conversation: Turns, where: str, functions: dict[str, Any]) -> str:
    if isinstance(block, ToolReferenceBlock):
        return _definition(block.tool_name, functions)
    return block.text if isinstance(block, TextBlock) else conversation.pictures.text(block, where)


def _definition(name: str, functions: dict[str, Any]) -> str:
    """Return a tool's definition, as Claude Code announces it, once: a long prompt needs a long request."""
    if (function := functions.get(name)) is None:
        return f"[the tool {name} is {'described above' if name in functions else 'not offered'}]"
    functions[name] = None
    about = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return f"<functions>\n<function>{dumps(about)}</function>\n</functions>"


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    """Return the tool fields of the chat. Tools that Anthropic runs are dropped if there are others."""
    given, choice = body.tools or [], body.tool_choice
    offered = [tool for tool in given if not _is_hosted(tool)]
    if given and not offered and isinstance(given[0], BareTool):
        raise given[0].refusal("Anthropic")
    fields: dict[str, Any] = {"tools": [_function(tool) for tool in offered] or None}
    if choice is None:
        return fields
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: must name the tool", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    fields["tool_choice"] = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
    return fields | {"parallel_tool_calls": not choice.disable_parallel_tool_use}


def _function(tool: ClientTool | BareTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "strict": tool.strict or None}
    if isinstance(tool, BareTool):
        function |= KNOWN_TOOLS[tool.type]
    else:
        function |= {"description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


_EMPTY = {"input": {}, "text": "", "thinking": "", "signature": ""}  # the fields of a block that events fill in


class PendingMessage(PendingParts):
    def __init__(self, call: Call, body: MessagesRequest, chat: ChatRequest):
        super().__init__(call, chat, names_of(body))
        self.body = body

    def answer(self, chat: EncodedChat) -> MessageAnswer:
        return MessageAnswer(self, chat)

    def keep_alive(self) -> ServerSentEvent:
        return ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")

    def fail(self, error: ApiError) -> bytes:
        return named_event(error.messages_body).encode()


class MessageAnswer(PartsAnswer):
    def __init__(self, pending: PendingMessage, chat: EncodedChat):
        super().__init__(pending, chat)
        self._body, thinking = pending.body, pending.body.thinking
        self._hides_thoughts = thinking is not None and thinking.display == "omitted"
        self._signature = f"sig_{self.call.id}"
        """The signature of a thinking block. Clients require one to send the block back; it proves nothing."""

    def ended(self, output: Output) -> dict[str, Any]:
        content = [self._block(part) for part in self.parts]
        return self._message(content, self._usage(output)) | self._reason(output) | stats(self.call, [output])

    def open(self) -> str:
        """Return the first events. Cached tokens are not known yet; the last event has the final counts."""
        message = self._message([], self._usage(None))
        return named_event({"type": "message_start", "message": message}) + self.pending.keep_alive().encode().decode()

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        delta = {"type": "message_delta", "delta": self._reason(output), "usage": self._usage(output), **more}
        return self.end("completed") + named_event(delta) + named_event({"type": "message_stop"})

    def start(self) -> str:
        block = {key: _EMPTY.get(key, value) for key, value in self._block(self.parts[-1]).items()}
        return named_event({"type": "content_block_start", "index": len(self.parts) - 1, "content_block": block})

    def extend(self, more: Delta) -> str:
        if more.tool_call is not None:
            return self._delta("input_json_delta", "partial_json", more.tool_call.arguments)
        if not more.reasoning:
            return self._delta("text_delta", "text", more.content)
        return "" if self._hides_thoughts else self._delta("thinking_delta", "thinking", more.reasoning)

    def end(self, status: str) -> str:
        if not self.parts:
            return ""
        signed = self._delta("signature_delta", "signature", self._signature) if self.parts[-1].reasoning else ""
        return signed + named_event({"type": "content_block_stop", "index": len(self.parts) - 1})

    def _delta(self, kind: str, name: str, text: str) -> str:
        delta = {"type": kind, name: text}
        return named_event({"type": "content_block_delta", "index": len(self.parts) - 1, "delta": delta})

    def _block(self, part: Delta) -> dict[str, Any]:
        if (call := part.tool_call) is not None:
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}
        if not part.reasoning:
            return {"type": "text", "text": part.content}
        thinking = "" if self._hides_thoughts else part.reasoning
        return {"type": "thinking", "thinking": thinking, "signature": self._signature}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        named = {"id": f"msg_{self.call.id}", "type": "message", "role": "assistant", "model": self.call.service.name}
        return named | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _usage(self, output: Output | None) -> dict[str, Any]:
        """Count tokens, before the answer begins only those of the prompt."""
        cached, thoughts = (output.cached_tokens, self._deltas.thought_tokens(output)) if output else (0, 0)
        return {
            "input_tokens": len(self.requests[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(output.tokens) if output else 0,
            "output_tokens_details": {"thinking_tokens": thoughts},
            "service_tier": "standard",
        }

    def _reason(self, output: Output) -> dict[str, Any]:
        reason = self._deltas.finish_reason(output)
        stop_reason = "stop_sequence" if output.stop else "end_turn"
        if reason == "tool_calls":
            stop_reason = "tool_use"
        elif reason == "length":
            is_full = len(output.tokens) < self._body.max_tokens and output.cut_off is None
            stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        return {"stop_reason": stop_reason, "stop_sequence": output.stop if stop_reason == "stop_sequence" else None}


@router.post("/v1/messages", responses=documented(*ERRORS, **EVENTS))
async def messages(request: Request) -> Response:
    """Return the next message of a conversation, for clients of Anthropic's API."""
    received = await receive(request, MessagesRequest)
    body = received.body
    service = models_of(request).named(body.model)
    if body.thread is not None:
        raise ApiError(400, "thread: this server keeps no conversations; send all messages", "thread", NO_THREADS)
    chat = await received.in_turn(lambda: chat_request(body, service.settings.limits))
    return await respond(received, service, lambda call: PendingMessage(call, body, chat))


@router.post("/v1/messages/count_tokens", responses=documented(*ERRORS))
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    received = await receive(request, CountTokensRequest)
    chat = await received.in_turn(lambda: chat_request(received.body, models_of(request).settings.limits))
    return await counted(received, chat, names_of(received.body))
