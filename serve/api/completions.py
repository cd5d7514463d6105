"""POST /v1/completions: continues text or token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from json.encoder import encode_basestring as quote
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from eagle_mlx.errors import PromptError
from eagle_mlx.request import Output, TokenLogprob
from eagle_mlx.text import TextStream

from .answer import Choices, Completed, dumps
from .errors import ERRORS, EVENTS, ApiError, Shape, documented
from .flow import Owner, in_thread, owner_of, read_request, respond
from .logprobs import CompletionLogprobs, LogprobLists, score_prompt
from .model import Encode, Loaded, check_context, sampling
from .schema import CompletionRequest
from .service import Call
from .worker import RequestEvent

router = APIRouter()


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: Literal["stop", "length"]


class Completion(Completed):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@router.post("/v1/completions", responses=documented(Completion, *ERRORS, **EVENTS))
async def completions(request: Request) -> Response:
    """Return text that continues a prompt, or each of several."""
    body, service = await read_request(request, CompletionRequest)
    service.settings.limits.check_prompts(len(body.prompts))
    if body.best_of not in (None, body.answers):
        raise ApiError(400, "best_of must equal n, because all answers are returned", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens can be 0 only with echo", "max_tokens")

    async def prepare(call: Call, loaded: Loaded) -> CompletionAnswer:
        answer = CompletionAnswer(call, body, loaded)
        owner, has_schema = owner_of(request), body.response_format is not None
        await in_thread(request, loaded, lambda encode: answer.prepare(encode, owner), has_schema)
        if body.echo and body.logprobs is not None:
            for prompt in answer.prompts:
                scores = score_prompt(loaded.target, prompt.tokens, body.logprobs)
                prompt.scores = await call.service.worker.score(scores)
        return answer

    slots = len(body.prompts) * body.answers
    return await respond(request, service, slots, prepare, bool(body.stream), answer_seconds=body.answer_seconds)


@dataclass
class _Prompt:
    text: str
    tokens: list[int]
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of all tokens but the first, if they are echoed."""


class CompletionAnswer(Choices):
    """The engine requests of a completion, grouped by prompt."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest
    prompts: list[_Prompt]

    def prepare(self, encode: Encode, owner: Owner) -> None:
        """Encode and check the prompts. Raises PromptError or ApiError."""
        body, loaded = self.body, self.loaded
        self.prompts = [self._prompt(given, encode) for given in body.prompts]
        grammar = loaded.grammars.grammar(body.answer_format)
        params = sampling(body, loaded, body.max_tokens, body.logprobs, grammar)
        for prompt in self.prompts:
            self.requests += [loaded.engine.prepare(prompt.tokens, each, **owner) for each in params]
        if body.max_tokens == 0:  # only the echo is wanted
            for engine_request in self.requests:
                engine_request.finish("length")

    def _prompt(self, given: str | list[int], encode: Encode) -> _Prompt:
        body, loaded = self.body, self.loaded
        if isinstance(given, str):
            prompt = _Prompt(given, encode(given, True))
        elif max(given, default=0) >= (size := loaded.target.vocab_size):
            raise PromptError(f"prompt: contains a token id outside the model's vocabulary of {size}")
        else:
            prompt = _Prompt(loaded.tokenizer.decode(given), given)
        check_context(len(prompt.tokens), body.max_tokens, loaded, "prompt")
        return prompt

    def prompt(self, index: int) -> _Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.body.answers]

    def lists(self, index: int) -> tuple[CompletionLogprobs, dict[str, Any]]:
        """Return the writer of a choice's log probabilities, and the lists of the prompt if it is echoed."""
        prompt = self.prompt(index)
        lists = CompletionLogprobs(self.loaded.texts, self.loaded.tokenizer)
        return lists, lists.take(prompt.scores, prompt.tokens[0]) if self.body.echo else lists.take(())

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            lists, first = self.lists(index)
            logprobs = {name: first[name] + more for name, more in lists.take(output.logprobs or ()).items()}
        text = self.prompt(index).text + output.text if self.body.echo else output.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def writer(self, index: int) -> _Writer:
        return _Writer(self, index)


class _Writer:
    def __init__(self, answer: CompletionAnswer, index: int):
        self._answer, self._index = answer, index
        self._text = TextStream(answer.loaded.tokenizer, answer.body.stops)
        self._lists: CompletionLogprobs | None = None
        self._echoed: dict[str, Any] | None = None
        if answer.body.logprobs is not None:
            self._lists, self._echoed = answer.lists(index)

    def open(self) -> str:
        if not self._answer.body.echo:
            return ""
        return self._chunk(self._answer.prompt(self._index).text, self._echoed)

    def write(self, event: RequestEvent) -> str:
        text = self._text.push(event.tokens) if event.output is None else self._text.finish(event.output.text)
        lists = self._lists.take(event.logprobs) if self._lists is not None and event.logprobs else None
        return self._chunk(text, lists) if text or lists else ""

    def close(self, output: Output, more: str) -> str:
        return self._answer.chunk(self._index, '"text":""', finish=f'"{output.finish_reason}"', more=more)

    def _chunk(self, text: str, lists: dict[str, Any] | None) -> str:
        return self._answer.chunk(self._index, f'"text":{quote(text)}', "null" if lists is None else dumps(lists))
