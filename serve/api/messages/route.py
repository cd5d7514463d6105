"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from ..chat import prepare_chat, read_prompt
from ..conversation import named_as
from ..errors import ApiError, ContextExceeded
from ..flow import body_of, client_of, in_thread, json_response, respond, service_of, unless_disconnected
from ..sampling import check
from ..service import Call
from ..shapes import ERRORS, EVENTS, documented
from .events import MessageAnswer
from .schema import CountTokensRequest, MessagesRequest
from .shapes import MessageObject, MessagesError, TokenCount
from .translate import FIELDS, chat_request, tool_places

router = APIRouter()


@router.post("/v1/messages", responses=documented(MessageObject, *ERRORS, error=MessagesError, **EVENTS))
async def messages(request: Request) -> Response:
    """The next message of a conversation, for clients of Anthropic's API."""
    service = service_of(request)
    service.loaded()
    body = await body_of(request, MessagesRequest)
    loaded = service.loaded(body.model)
    places = tool_places(body)
    chat = await service.pools.read(lambda: chat_request(body), request.state.size)
    with named_as(FIELDS, places):
        check(chat, service.settings.limits)

    async def prepare(_: Call) -> MessageAnswer:
        try:
            with named_as(FIELDS, places):
                return MessageAnswer(body, await prepare_chat(request, loaded, chat, body.max_tokens))
        except ContextExceeded as e:  # in Anthropic's words, by which clients know that they must shorten it
            said = f"prompt is too long: {e.prompt} tokens > {e.context} maximum"
            raise ApiError(400, said, "messages", e.code) from e

    ping = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")
    return await respond(request, 1, prepare, bool(body.stream), ping)


@router.post("/v1/messages/count_tokens", responses=documented(TokenCount, *ERRORS, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that a conversation makes."""
    service = service_of(request)
    service.loaded()
    body = await body_of(request, CountTokensRequest)
    loaded = service.loaded(body.model)
    chat = await service.pools.read(lambda: chat_request(body), request.state.size)
    with service.encoding(client_of(request)), named_as(FIELDS, tool_places(body)):
        counting = in_thread(request, loaded, lambda encode: read_prompt(chat, loaded, encode, must_fit=False))
        return json_response({"input_tokens": len(await unless_disconnected(request, counting))})
