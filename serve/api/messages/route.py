"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from ..chat import prepare_chat, read_prompt
from ..conversation import named_as
from ..errors import ApiError, ContextExceeded
from ..flow import body_of, client_of, in_thread, json_response, models_of, respond, unless_disconnected
from ..model import Loaded
from ..sampling import check
from ..service import Call
from ..shapes import ERRORS, EVENTS, documented
from ..stream import named_event
from .events import MessageAnswer
from .schema import CountTokensRequest, MessagesRequest
from .shapes import MessageObject, MessagesError, TokenCount
from .translate import FIELDS, chat_request, tool_places

router = APIRouter()


@router.post("/v1/messages", responses=documented(MessageObject, *ERRORS, error=MessagesError, **EVENTS))
async def messages(request: Request) -> Response:
    """The next message of a conversation, for clients of Anthropic's API."""
    body = await body_of(request, MessagesRequest)
    service = models_of(request).named(body.model)
    places = tool_places(body)
    chat = await models_of(request).pools.read(lambda: chat_request(body), request.state.size)
    with named_as(FIELDS, places):
        check(chat, service.settings.limits)

    async def prepare(_: Call, loaded: Loaded) -> MessageAnswer:
        try:
            with named_as(FIELDS, places):
                return MessageAnswer(body, await prepare_chat(request, loaded, chat, body.max_tokens))
        except ContextExceeded as e:  # in Anthropic's words, by which clients know that they must shorten it
            said = f"prompt is too long: {e.prompt} tokens > {e.context} maximum"
            raise ApiError(400, said, "messages", e.code) from e

    ping = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")
    return await respond(request, service, 1, prepare, bool(body.stream), ping, _error_event, chat.answer_seconds)


@router.post("/v1/messages/count_tokens", responses=documented(TokenCount, *ERRORS, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that a conversation makes."""
    body = await body_of(request, CountTokensRequest)
    service = models_of(request).named(body.model)
    chat = await models_of(request).pools.read(lambda: chat_request(body), request.state.size)

    async def count() -> int:
        loaded = await models_of(request).loaded(service)
        prompt = in_thread(request, loaded, lambda encode: read_prompt(chat, loaded, encode, must_fit=False))
        return len(await prompt)

    with service.encoding(client_of(request)), named_as(FIELDS, tool_places(body)):
        return json_response({"input_tokens": await unless_disconnected(request, count())})


def _error_event(error: ApiError) -> bytes:
    return named_event(error.messages_body).encode()
