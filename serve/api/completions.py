"""POST /v1/completions: continues text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from eagle_mlx.errors import PromptError
from eagle_mlx.request import Output, TokenLogprob
from eagle_mlx.request_state import RequestState
from eagle_mlx.text import TextStream

from .answer import Choices, PendingChoices, respond
from .encoding import Encoder
from .errors import ERRORS, EVENTS, ApiError, documented
from .logprobs import CompletionLogprobs, score_prompt
from .model import Loaded, check_context, sampling
from .received import Received, receive_choices
from .schema import CompletionRequest
from .worker import RequestEvent

router = APIRouter()


@router.post("/v1/completions", responses=documented(*ERRORS, **EVENTS))
async def completions(request: Request) -> Response:
    """Return text that continues a prompt, or each of several."""
    received, service = await receive_choices(request, CompletionRequest)
    body = received.body
    if not body.prompts:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", "prompt")
    if len(body.prompts) > (most := service.settings.limits.prompts):
        raise ApiError(400, f"{len(body.prompts)} prompts in one request; send at most {most}", "prompt")
    if body.best_of not in (None, body.answers):
        raise ApiError(400, "best_of must equal n, because all answers are returned", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens can be 0 only with echo", "max_tokens")
    slots = len(body.prompts) * body.answers
    return await respond(received, service, lambda call: PendingCompletion(call, body), slots)


@dataclass
class _Prompt:
    text: str
    tokens: list[int]
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of all tokens but the first, if they are echoed."""


class PendingCompletion(PendingChoices):
    prefix, kind, chunk_kind, nothing = "cmpl", "text_completion", "text_completion", {"text": ""}
    body: CompletionRequest

    async def prepare(self, received: Received[Any], loaded: Loaded) -> CompletionAnswer:
        body, owner = self.body, received.owner

        def encoded(encode: Encoder) -> tuple[list[_Prompt], list[RequestState]]:
            prompts = [_encoded(given, body, loaded, encode) for given in body.prompts]
            grammar = loaded.grammars.grammar(body.answer_format, namespace=owner[1])
            choices = sampling(body, loaded, body.max_tokens, body.logprobs, grammar)
            pairs = [(prompt.tokens, params) for prompt in prompts for params in choices]
            return prompts, [loaded.engine.prepare(tokens, params, (), *owner) for tokens, params in pairs]

        prompts, requests = await received.in_thread(loaded, encoded, body.response_format is not None)
        if body.max_tokens == 0:  # only the echo is wanted
            for request in requests:
                request.finish("length")
        if body.echo and body.logprobs is not None:
            for prompt in prompts:
                pieces = score_prompt(loaded.target, prompt.tokens, body.logprobs)
                while piece := await self.call.service.worker.between_steps(partial(next, pieces, None)):
                    prompt.scores += piece
        return CompletionAnswer(self, loaded, prompts, requests)


def _encoded(given: str | list[int], body: CompletionRequest, loaded: Loaded, encode: Encoder) -> _Prompt:
    if isinstance(given, str):
        prompt = _Prompt(given, encode(given, True))
    elif max(given, default=0) >= (size := loaded.target.vocab_size):
        raise PromptError.at("prompt", f"contains a token id outside the model's vocabulary of {size}")
    else:
        prompt = _Prompt(loaded.tokenizer.decode(given), given)
    check_context(len(prompt.tokens), loaded, "prompt")
    return prompt


class CompletionAnswer(Choices):
    """Text that continues prompts: `n` choices for each, in their order."""

    def __init__(
        self, pending: PendingCompletion, loaded: Loaded, prompts: list[_Prompt], requests: list[RequestState]
    ):
        super().__init__(pending, requests)
        body = pending.body
        self._prompts = [prompt for prompt in prompts for _ in range(body.answers)]
        self._echoes, self._has_logprobs = bool(body.echo), body.logprobs is not None
        self._texts = [TextStream(loaded.tokenizer, body.stops) for _ in requests]
        self._lists = [CompletionLogprobs(loaded.texts) for _ in requests]
        self._tokenizer = loaded.tokenizer

    def _first_lists(self, index: int, scores: Sequence[TokenLogprob], texts: Sequence[str]) -> dict[str, Any] | None:
        """Return the first log probability lists of a choice: those of the prompt if it is echoed, then `scores`."""
        if not self._has_logprobs:
            return None
        if not self._echoes:
            return self._lists[index].take(scores, texts)
        prompt = self._prompts[index]
        texts = [*TextStream(self._tokenizer).by_token(prompt.tokens), *texts]
        return self._lists[index].take([*prompt.scores, *scores], texts, prompt.tokens[0])

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        texts = self.requests[index].texts
        if texts is None and self._has_logprobs:
            texts = self._texts[index].by_token(output.tokens)
        logprobs = self._first_lists(index, output.logprobs or (), texts or ())
        text = self._prompts[index].text + output.text if self._echoes else output.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def open(self) -> str:
        if not self._echoes:
            return ""
        echoes = ((index, prompt.text, self._first_lists(index, (), ())) for index, prompt in enumerate(self._prompts))
        return "".join(self.chunk(index, {"text": text}, lists) for index, text, lists in echoes)

    def extend(self, event: RequestEvent) -> str:
        stream, output, texts, lists = self._texts[event.index], event.output, event.texts, None
        if event.logprobs:
            texts = stream.by_token(event.tokens) if texts is None else texts
            lists = self._lists[event.index].take(event.logprobs, texts)
        text = stream.push(event.tokens, texts) if output is None else stream.finish(output.text)
        is_empty = not (text or lists or (self.pending.per_token and event.tokens))
        return "" if is_empty else self.chunk(event.index, {"text": text}, lists)

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        return self.chunk(index, {"text": ""}, finish=output.finish_reason, **more)
