"""POST /v1/chat/completions: answers a conversation."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from eagle_mlx.request import Output
from eagle_mlx.text import TextStream

from ..chat import AnswerParser, Chat, Delta, FirstCall, ToolCall, ToolOffer, whole_calls
from .answer import Choices, Completed
from .encoding import Encoder
from .errors import ERRORS, EVENTS, ApiError, Shape, documented
from .flow import Owner, in_thread, owner_of, read_request, respond
from .logprobs import ChatLogprobs, chat_logprobs
from .model import Loaded, check_context, sampling
from .schema import ChatRequest, Message, refuse_last_media
from .service import Call
from .worker import RequestEvent

router = APIRouter()


class ChatChoice(Shape):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@router.post("/v1/chat/completions", responses=documented(ChatCompletion, *ERRORS, **EVENTS))
async def chat_completions(request: Request) -> Response:
    """Return the next message of a conversation, or several to choose from."""
    body, service = await read_request(request, ChatRequest)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
    return await respond(request, service, ChatAnswer(body), body, body.stream, body.answers)


class ChatAnswer(Choices):
    """The engine requests for a conversation, and how to parse their text."""

    prefix, kind, chunk_kind, nothing = "chatcmpl", "chat.completion", "chat.completion.chunk", {"delta": {}}
    body: ChatRequest
    offer: ToolOffer
    starts_in_reasoning: bool
    continued = False
    enforced = False
    """Whether a grammar enforces calls. With a schema for the answer, only the end tells that there is a call."""
    streams: list[DeltaStream]
    """For each request, its answer's parser."""

    def __init__(self, body: ChatRequest, at_most: int | None = None):
        """at_most: a bound on answer tokens if the body sets no limit; context and memory may allow fewer."""
        super().__init__(body)
        self._at_most = at_most

    async def prepare(self, request: Request, call: Call, loaded: Loaded) -> None:
        self.call, self.loaded, body = call, loaded, self.body
        forced = body.tool_choice not in (None, "none", "auto")
        strict = any(tool.function.strict for tool in body.tools or ())
        has_schema = forced or strict or body.response_format is not None
        await in_thread(request, loaded, lambda encode: self.encode(encode, owner_of(request)), has_schema)

    def encode(self, encode: Encoder, owner: Owner) -> None:
        """Render and encode the prompt, and check the request. Raises PromptError, ConfigError or ApiError."""
        body, loaded = self.body, self.loaded
        chat, prompt, offer = render_chat(body, loaded, encode)
        self.offer, self.starts_in_reasoning = offer, loaded.chat.starts_in_reasoning(prompt, chat)
        self.continued = chat.continued is not None
        if self.continued and not self.starts_in_reasoning and (offer.forced or body.has_schema):
            last = f"messages[{len(body.messages) - 1}]"
            said = "it cannot be continued with a schema or a forced call, which limit an answer from its beginning"
            raise ApiError(400, f"{last}: {said}", last)
        grammar = loaded.grammars.grammar(body.answer_format, offer, self.starts_in_reasoning, owner[1])
        self.enforced = grammar is not None and bool(offer.forced or not body.has_schema)
        top = (body.top_logprobs or 0) if body.logprobs else None
        # Masks cannot limit formats without a grammar to one call, so every format stops decoding after the first.
        is_single = offer.tools and not offer.several and not offer.forced
        only_call = (lambda: FirstCall(self.reader())) if is_single else None
        params = sampling(body, loaded, body.most_tokens, top, grammar, only_call)
        shared = chat.boundaries(prompt, encode) if loaded.engine.wants_boundaries else ()
        self.requests = [loaded.engine.prepare(prompt, each, shared, *owner, self._at_most) for each in params]
        self.streams = [DeltaStream(self) for _ in params]

    def reader(self) -> AnswerParser:
        format, offer = self.loaded.chat, self.offer
        return AnswerParser(format, offer.tools, self.starts_in_reasoning, offer.several, self.continued, self.enforced)

    def thought_tokens(self, index: int, output: Output) -> int:
        return self.streams[index].thought_tokens(output)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        stream = self.streams[index]
        deltas = stream.push(RequestEvent(0, [], [], output))
        calls = list(map(_call, whole_calls(delta.tool_call for delta in deltas)))
        content = "".join(delta.content for delta in deltas)
        text = content if content or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(self.loaded.texts, output.logprobs or ()) if self.body.logprobs else None
        reason = stream.finish_reason(output)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def open(self) -> str:
        begun = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return "".join(self.chunk(index, begun) for index in range(len(self.requests)))

    def extend(self, event: RequestEvent) -> str:
        index, deltas = event.index, self.streams[event.index].push(event)
        pieces = list(map(_piece, deltas))
        logprobs = chat_logprobs(self.loaded.texts, event.logprobs) if self.body.logprobs and event.logprobs else None
        if not pieces and event.tokens and (logprobs or self.per_token):  # the token's text is held back
            pieces = [_piece(Delta())]
        firsts = [self.chunk(index, piece, logprobs) for piece in pieces[:1]]
        return "".join([*firsts, *(self.chunk(index, piece) for piece in pieces[1:])])

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        return self.chunk(index, {"delta": {}}, finish=self.streams[index].finish_reason(output), **more)


class DeltaStream:
    """Parses an answer into deltas as its events arrive."""

    def __init__(self, answer: ChatAnswer):
        self._loaded, self._reader = answer.loaded, answer.reader()
        self._text = TextStream(answer.loaded.tokenizer, answer.body.stops)
        self._has_calls = False
        self._has_answer = False
        """Whether a part was not reasoning."""
        self._thoughts: list[str] = []

    def push(self, event: RequestEvent) -> list[Delta]:
        output = event.output
        if output is None:
            deltas = self._reader.push(self._text.push(event.tokens))
        else:
            deltas = self._reader.push(self._text.finish(output.text))
            deltas += self._reader.finish(output.finish_reason == "stop" and not output.stop)
        self._has_calls |= any(delta.tool_call is not None for delta in deltas)
        self._has_answer |= not all(delta.reasoning for delta in deltas)
        self._thoughts += [delta.reasoning for delta in deltas]
        return deltas

    def thought_tokens(self, output: Output) -> int:
        """Count the tokens of the answer's reasoning, including its end tag, once the answer has ended."""
        tokens, thoughts = output.tokens, "".join(self._thoughts)
        if not thoughts or not self._has_answer:
            return len(tokens) if thoughts else 0
        tokenizer, end = self._loaded.tokenizer, self._loaded.chat.thoughts.think_end
        tag = tokenizer.encode(end, add_special_tokens=False) if end else []
        ends = (at + len(tag) for at in range(len(tokens)) if tag and tokens[at : at + len(tag)] == tag)
        # Without an end tag, the reasoning ends at the end of its text.
        return next(ends, None) or len(tokenizer.encode(thoughts, add_special_tokens=False))

    @property
    def is_cut(self) -> bool:
        """Whether the last call was cut off, once the answer has ended."""
        return self._reader.has_open_call

    def finish_reason(self, output: Output) -> str:
        """Return `tool_calls` only if the client can run them."""
        may_run = self._has_calls and not self.is_cut and output.finish_reason == "stop"
        return "tool_calls" if may_run else output.finish_reason


def render_chat(
    body: ChatRequest, loaded: Loaded, encode: Encoder, must_fit: bool = True
) -> tuple[Chat, list[int], ToolOffer]:
    """Return the rendered conversation, its tokens, and the tools it offers.

    must_fit: whether to refuse a prompt that exceeds the context. Raises PromptError, ConfigError or ApiError.
    """
    chosen = body.tool_choice
    offer = ToolOffer.of(
        [tool.model_dump(exclude={"cache_control"}, exclude_none=True) for tool in body.tools or ()],
        chosen if chosen is None or isinstance(chosen, str) else chosen.model_dump(),
        body.parallel_tool_calls is not False,
    )
    arguments = dict(body.chat_template_kwargs or {})
    for wish in ("reasoning_effort", "verbosity", "add_generation_prompt"):
        if (given := getattr(body, wish)) is not None:
            arguments.setdefault(wish, given)

    if body.messages[-1].role == "user":
        refuse_last_media(body.messages[-1].content, f"messages[{len(body.messages) - 1}].content")
    messages = [message.plain() for message in body.messages]
    chat = loaded.chat.chat(messages, offer.tools, arguments, bool(body.continue_final_message), encode.check)
    tokens = chat.tokens(encode)
    if must_fit:
        check_context(len(tokens), body.most_tokens, loaded, "messages")
    return chat, tokens, offer


def _call(call: ToolCall) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _piece(delta: Delta) -> dict[str, Any]:
    if (call := delta.tool_call) is not None:
        return {"delta": {"tool_calls": [{"index": call.index, **_call(call)}]}}
    return {"delta": {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}}
