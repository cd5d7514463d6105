"""POST /v1/completions: continues text or token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from eagle_mlx.errors import PromptError
from eagle_mlx.request import Output, TokenLogprob
from eagle_mlx.text import TextStream

from .answer import Choices, Completed
from .encoding import Encoder
from .errors import ERRORS, EVENTS, ApiError, Shape, documented
from .flow import Owner, in_thread, owner_of, read_request, respond
from .logprobs import CompletionLogprobs, LogprobLists, score_prompt
from .model import Loaded, check_context, sampling
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
    if not body.prompts:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", "prompt")
    if len(body.prompts) > (most := service.settings.limits.prompts):
        raise ApiError(400, f"{len(body.prompts)} prompts in one request; send at most {most}", "prompt")
    if body.best_of not in (None, body.answers):
        raise ApiError(400, "best_of must equal n, because all answers are returned", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens can be 0 only with echo", "max_tokens")
    slots = len(body.prompts) * body.answers
    return await respond(request, service, CompletionAnswer(body), body, body.stream, slots)


@dataclass
class _Prompt:
    text: str
    tokens: list[int]
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of all tokens but the first, if they are echoed."""


class CompletionAnswer(Choices):
    """The engine requests of a completion, grouped by prompt."""

    prefix, kind, chunk_kind, nothing = "cmpl", "text_completion", "text_completion", {"text": ""}
    body: CompletionRequest
    prompts: list[_Prompt]

    async def prepare(self, request: Request, call: Call, loaded: Loaded) -> None:
        self.call, self.loaded, body = call, loaded, self.body
        has_schema = body.response_format is not None
        await in_thread(request, loaded, lambda encode: self._encode(encode, owner_of(request)), has_schema)
        if body.echo and body.logprobs is not None:
            for prompt in self.prompts:
                scores = score_prompt(loaded.target, prompt.tokens, body.logprobs)
                prompt.scores = await call.service.worker.score(scores)

    def _encode(self, encode: Encoder, owner: Owner) -> None:
        """Encode and check the prompts. Raises PromptError or ApiError."""
        body, loaded = self.body, self.loaded
        self.prompts = [self._prompt(given, encode) for given in body.prompts]
        grammar = loaded.grammars.grammar(body.answer_format, namespace=owner[1])
        params = sampling(body, loaded, body.max_tokens, body.logprobs, grammar)
        for prompt in self.prompts:
            self.requests += [loaded.engine.prepare(prompt.tokens, each, (), *owner) for each in params]
        if body.max_tokens == 0:  # only the echo is wanted
            for engine_request in self.requests:
                engine_request.finish("length")

    def _prompt(self, given: str | list[int], encode: Encoder) -> _Prompt:
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

    def open(self) -> str:
        self._texts = [TextStream(self.loaded.tokenizer, self.body.stops) for _ in self.requests]
        self._lists: list[CompletionLogprobs] = []
        opening = ""
        for index in range(len(self.requests)):
            first = None
            if self.body.logprobs is not None:
                lists, first = self.lists(index)
                self._lists.append(lists)
            if self.body.echo:
                opening += self.chunk(index, {"text": self.prompt(index).text}, first)
        return opening

    def extend(self, event: RequestEvent) -> str:
        stream, output = self._texts[event.index], event.output
        text = stream.push(event.tokens) if output is None else stream.finish(output.text)
        lists = self._lists[event.index].take(event.logprobs) if event.logprobs else None
        return (
            self.chunk(event.index, {"text": text}, lists) if text or lists or (self.per_token and event.tokens) else ""
        )

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        return self.chunk(index, {"text": ""}, finish=output.finish_reason, **more)
