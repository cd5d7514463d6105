"""POST /v1/chat/completions: answers a conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.text import TextStream
from eagle_mlx.vision.spans import ImagePrompt, placed

from ..chat import AnswerParser, Chat, Delta, Encode, ToolCall, ToolOffer, whole_calls, with_budget
from ..chat.families import templates
from .answer import Choices, PendingChoices, respond
from .encoding import Encoder
from .errors import ERRORS, EVENTS, ApiError, documented
from .logprobs import chat_logprobs
from .model import Loaded, check_context, sampling
from .received import Owner, Received, receive_choices
from .schema import ChatRequest
from .worker import RequestEvent

router = APIRouter()
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # maps efforts that few templates name to low or high


@router.post("/v1/chat/completions", responses=documented(*ERRORS, **EVENTS))
async def chat_completions(request: Request) -> Response:
    """Return the next message of a conversation, or several to choose from."""
    received, service = await receive_choices(request, ChatRequest)
    body = received.body
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
    return await respond(received, service, lambda call: PendingChat(call, body), body.answers)


@dataclass(frozen=True)
class EncodedChat:
    """The engine requests for a conversation, and how to parse their text."""

    body: ChatRequest
    loaded: Loaded
    requests: Sequence[RequestState]
    reader: Callable[[], AnswerParser]


async def encoded(received: Received[Any], loaded: Loaded, body: ChatRequest) -> EncodedChat:
    """Render and encode a prompt in a thread. Raises ApiError."""
    forced = body.tool_choice not in (None, "none", "auto")
    strict = any(tool.function.strict for tool in body.tools or ())
    has_schema = forced or strict or body.response_format is not None
    return await received.in_thread(
        loaded, lambda encode: encode_chat(body, loaded, encode, received.owner), has_schema
    )


def encode_chat(body: ChatRequest, loaded: Loaded, encode: Encoder, owner: Owner) -> EncodedChat:
    """Render and encode a prompt, and check the request. Raises PromptError, ConfigError or ApiError."""
    chat, prompt, offer, whole = render_chat(body, loaded, encode)
    starts_in_reasoning, continued = loaded.chat.starts_in_reasoning(prompt.tokens, chat), chat.continued is not None
    if continued and not starts_in_reasoning and (offer.forced or body.has_schema):
        last = f"messages[{len(body.messages) - 1}]"
        reason = "it cannot be continued with a schema or a forced call, which limit an answer from its beginning"
        raise ApiError(400, f"{last}: {reason}", last)
    grammar = loaded.grammars.grammar(body.answer_format, offer, starts_in_reasoning, owner[1])
    # Whether a grammar enforces calls. With a schema for the answer, only the end tells that there is a call.
    enforced = grammar is not None and bool(offer.forced or not body.has_schema)

    def reader() -> AnswerParser:
        return AnswerParser(loaded.chat, offer, starts_in_reasoning, continued, enforced)

    top = (body.top_logprobs or 0) if body.logprobs else None
    # Masks cannot limit formats without a grammar to one call, so every format stops decoding after the first.
    is_single = offer.tools and not offer.several and not offer.forced
    only_call = (lambda: reader().ends_with) if is_single else None
    most = loaded.thinking_budget if body.most_thought is None else body.most_thought
    grammar = with_budget(loaded.chat, loaded.target.vocab_size, most, starts_in_reasoning, grammar)
    params = sampling(body, loaded, body.most_tokens, top, grammar, only_call)
    shared = chat.boundaries(prompt.tokens, whole) if loaded.engine.wants_boundaries else ()
    conversation = opening(body) if loaded.learner is not None else ""
    requests = [loaded.engine.prepare(prompt, choice, shared, *owner, conversation) for choice in params]
    return EncodedChat(body, loaded, requests, reader)


def opening(body: ChatRequest) -> str:
    """Return the messages up to the user's first one, with their images, which all turns of a conversation have."""
    messages, pictures = body.plain_messages()
    count = next((at for at, message in enumerate(messages, 1) if message["role"] == "user"), len(messages))
    return pictures.in_place("\n".join(f"{turn['role']}: {turn.get('content', '')}" for turn in messages[:count]))


class PendingChat(PendingChoices):
    prefix, kind, chunk_kind, nothing = "chatcmpl", "chat.completion", "chat.completion.chunk", {"delta": {}}
    body: ChatRequest

    async def prepare(self, received: Received[Any], loaded: Loaded) -> ChatAnswer:
        return ChatAnswer(self, await encoded(received, loaded, self.body))


class ChatAnswer(Choices):
    """A message of the model, or several to choose from."""

    def __init__(self, pending: PendingChat, chat: EncodedChat):
        super().__init__(pending, chat.requests)
        self._texts = chat.loaded.texts if chat.body.logprobs else None
        self._streams = [DeltaStream(chat) for _ in chat.requests]

    def thought_tokens(self, index: int, output: Output) -> int:
        return self._streams[index].thought_tokens(output)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        stream = self._streams[index]
        deltas = stream.push(RequestEvent(0, (), output=output))
        calls = list(map(_call, whole_calls(delta.tool_call for delta in deltas)))
        content = "".join(delta.content for delta in deltas)
        text = content if content or not calls else None
        reasoning = "".join(delta.reasoning for delta in deltas)
        message = {"role": "assistant", "content": text, "refusal": None}
        optional: dict[str, Any] = {"reasoning_content": reasoning, "tool_calls": calls}
        message = message | {name: value for name, value in optional.items() if value}
        logprobs = chat_logprobs(self._texts, output.logprobs or ()) if self._texts is not None else None
        reason = stream.finish_reason(output)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def open(self) -> str:
        begun = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return "".join(self.chunk(index, begun) for index in range(len(self.requests)))

    def extend(self, event: RequestEvent) -> str:
        index, deltas = event.index, self._streams[event.index].push(event)
        pieces = list(map(_piece, deltas))
        logprobs = chat_logprobs(self._texts, event.logprobs) if self._texts is not None and event.logprobs else None
        if not pieces and event.tokens and (logprobs or self.pending.per_token):  # the token's text is held back
            pieces = [_piece(Delta())]
        return "".join(self.chunk(index, piece, None if at else logprobs) for at, piece in enumerate(pieces))

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        return self.chunk(index, {"delta": {}}, finish=self._streams[index].finish_reason(output), **more)


class DeltaStream:
    """Parses an answer into deltas as its events arrive."""

    def __init__(self, chat: EncodedChat):
        self._loaded = chat.loaded
        self._text = TextStream(chat.loaded.tokenizer, chat.body.stops)
        self.reader = chat.reader()
        self._has_calls = False
        self._reasoning = list[str]()
        self._only_reasons = True

    def push(self, event: RequestEvent) -> list[Delta]:
        output = event.output
        if output is None:
            deltas = self.reader.push(self._text.push(event.tokens, event.texts))
        else:
            deltas = self.reader.push(self._text.finish(output.text))
            deltas += self.reader.finish(output.finish_reason == "stop" and not output.stop)
        self._has_calls |= any(delta.tool_call is not None for delta in deltas)
        self._reasoning += [delta.reasoning for delta in deltas]
        self._only_reasons &= all(delta.reasoning for delta in deltas)
        return deltas

    def thought_tokens(self, output: Output) -> int:
        """Count the tokens of the reasoning, including its end tag, once the whole answer was pushed."""
        if not (thoughts := "".join(self._reasoning)):
            return 0
        tokens, tokenizer = output.tokens, self._loaded.tokenizer
        if self._only_reasons:
            return len(tokens)
        end = self._loaded.chat.thoughts.think_end
        tag = tokenizer.encode(end, add_special_tokens=False) if end else []
        ends = (at + len(tag) for at in range(len(tokens)) if tag and tokens[at : at + len(tag)] == tag)
        # Without an end tag, the reasoning ends at the end of its text, whose tokens may be others than the model's.
        return next(ends, None) or min(len(tokens), len(tokenizer.encode(thoughts, add_special_tokens=False)))

    def finish_reason(self, output: Output) -> str:
        """Return `tool_calls` only if the client can run them."""
        may_run = self._has_calls and not self.reader.has_open_call and output.finish_reason == "stop"
        return "tool_calls" if may_run else output.finish_reason


class ChatPrompt(NamedTuple):
    """A rendered conversation, its tokens, the tools it offers, and what encodes parts of its text."""

    chat: Chat
    prompt: ImagePrompt
    offer: ToolOffer
    encode: Encode


def render_chat(body: ChatRequest, loaded: Loaded, encode: Encoder, must_fit: bool = True) -> ChatPrompt:
    """Return the rendered conversation, with its images if the model reads them. Raises PromptError or ApiError.

    must_fit: whether to refuse a prompt that exceeds the context.
    """
    tools = [tool.model_dump(exclude={"cache_control"}, exclude_none=True) for tool in body.tools or ()]
    chosen = body.model_dump(include={"tool_choice"})["tool_choice"]
    offer = ToolOffer.of(tools, chosen, body.parallel_tool_calls is not False)
    wishes = body.model_dump(include={"reasoning_effort", "verbosity", "add_generation_prompt"}, exclude_none=True)
    if (effort := body.reasoning_effort) == "none":
        wishes["enable_thinking"] = False
    elif effort in _EFFORTS and not re.search(f"[\"']{effort}[\"']", templates(loaded.tokenizer)):
        wishes["reasoning_effort"] = _EFFORTS[effort]
    arguments = wishes | (body.chat_template_kwargs or {})
    messages, pictures = body.plain_messages()
    messages, images = pictures.read(messages, vision := loaded.target.vision, loaded.image_limits, encode.check)
    seen = list(filter(body.is_seen, offer.tools))
    chat = loaded.chat.chat(messages, seen, arguments, bool(body.continue_final_message))
    whole: Encode = encode
    if images and vision is not None:
        whole = lambda text, special: vision.encode(text, images, lambda part: encode(part, special))  # noqa: E731
    tokens = chat.tokens(whole)
    if must_fit:
        check_context(len(tokens), loaded, "messages")
    spans = placed(chat.text, tokens, images) if images else ()
    return ChatPrompt(chat, ImagePrompt(tokens, spans), offer, whole)


def _call(call: ToolCall) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _piece(delta: Delta) -> dict[str, Any]:
    if (call := delta.tool_call) is not None:
        return {"delta": {"tool_calls": [{"index": call.index, **_call(call)}]}}
    return {"delta": {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}}
