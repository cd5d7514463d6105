"""POST /tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .encoder import Encode
from .errors import ApiError
from .flow import body_of, client_of, in_thread, json_response, models_of, unless_disconnected
from .model import Loaded
from .schema import DetokenizeRequest, TokenizeRequest
from .service import Service
from .shapes import ERRORS, Text, Tokens, documented

router = APIRouter()


@router.post("/tokenize", responses=documented(Tokens, *ERRORS))
async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of a conversation as the model would read it."""
    body = await body_of(request, TokenizeRequest)
    service = models_of(request).named(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt, a text, or messages", "prompt")
    return await _respond(request, service, lambda loaded, encode: _tokens(body, loaded, encode))


def _tokens(body: TokenizeRequest, loaded: Loaded, encode: Encode) -> dict[str, Any]:
    tokens = _encode(body, loaded, encode)
    return {
        "count": len(tokens),
        "max_model_len": loaded.target.context_length,
        "tokens": tokens,
        "token_strs": [loaded.texts[token][0] for token in tokens] if body.return_token_strs else None,
    }


def _encode(body: TokenizeRequest, loaded: Loaded, encode: Encode) -> list[int]:
    if body.messages is not None:
        return loaded.chat.prompt([message.plain() for message in body.messages], encode=encode)
    assert body.prompt is not None
    return encode(body.prompt, body.add_special_tokens is not False)


@router.post("/detokenize", responses=documented(Text, *ERRORS))
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    body = await body_of(request, DetokenizeRequest)
    service = models_of(request).named(body.model)
    return await _respond(request, service, lambda loaded, _: _text(body, loaded))


def _text(body: DetokenizeRequest, loaded: Loaded) -> dict[str, Any]:
    if max(body.tokens, default=0) >= loaded.target.vocab_size:
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {loaded.target.vocab_size}", "tokens")
    return {"prompt": loaded.tokenizer.decode(body.tokens)}


async def _respond(request: Request, service: Service, work: Callable[[Loaded, Encode], dict[str, Any]]) -> Response:
    """Do the work in a slot of the queue, and encode its result in the same thread; both may be long."""

    async def answer() -> Response:
        loaded = await models_of(request).loaded(service)
        return await in_thread(request, loaded, lambda encode: json_response(work(loaded, encode)))

    with service.encoding(client_of(request)):
        return await unless_disconnected(request, answer())
