"""POST /v1/responses, and reading and deleting stored responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answer import named_event
from ..chat import prepare_chat
from ..conversation import named_as
from ..errors import ERRORS, EVENTS, ApiError, documented
from ..flow import body_of, json_response, models_of, respond
from ..model import Loaded, check
from ..service import Call
from .answer import ResponseAnswer, ResponseMemory
from .schema import DeletedResponse, InputItemList, ResponseObject, ResponsesRequest
from .translate import FIELDS, Functions, chat_request, input_items

router = APIRouter()
_MOST_ITEMS = 100
"""Maximum items per page, as in OpenAI's API."""


def memory_of(request: Request) -> ResponseMemory:
    memory: ResponseMemory = request.app.state.responses
    return memory


@router.post("/v1/responses", responses=documented(ResponseObject, *ERRORS, **EVENTS))
async def responses(request: Request) -> Response:
    """Return the next turn of a conversation, for clients of OpenAI's newer API."""
    memory = memory_of(request)
    body = await body_of(request, ResponsesRequest)
    service = models_of(request).named(body.model)
    before = memory.get(body.previous_response_id, "previous_response_id") if body.previous_response_id else None
    items = [*(before.items if before is not None else ()), *input_items(body)]
    nbytes = request.state.size + (before.nbytes if before is not None else 0)
    functions = Functions.of(body)
    chat = chat_request(body, items, functions)
    with named_as(FIELDS, functions.places):
        check(chat, service.settings.limits)

    async def prepare(_: Call, loaded: Loaded) -> ResponseAnswer:
        with named_as(FIELDS, functions.places):
            answer = await prepare_chat(request, loaded, chat, body.max_output_tokens)
        return ResponseAnswer(body, answer, functions, items, nbytes, memory)

    return await respond(
        request, service, 1, prepare, bool(body.stream), error_event=_error_event, answer_seconds=chat.answer_seconds
    )


def _error_event(error: ApiError) -> bytes:
    """Return an error as OpenAI's `error` event."""
    fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return named_event({**fields, "sequence_number": 0}).encode()


@router.get("/v1/responses/{id}", responses=documented(ResponseObject, 400, 401, 404))
async def response(request: Request, id: str) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream: a finished response cannot be streamed; leave out stream", "stream")
    return json_response(memory_of(request).get(id).response)


@router.get("/v1/responses/{id}/input_items", responses=documented(InputItemList, 400, 401, 404))
async def input_items_of(request: Request, id: str) -> Response:
    """Return the conversation that a response answers, in pages."""
    items = memory_of(request).get(id).input_items()
    return json_response(_page(items, request.query_params))


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list by `order`, `after` and `limit`. Raises ApiError 400 that names the parameter."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order: must be asc or desc", "order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST_ITEMS):
        raise ApiError(400, f"limit: must be an integer from 1 to {_MOST_ITEMS}", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"after: there is no item with the id {after[:100]!r}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > len(page)}


@router.delete("/v1/responses/{id}", responses=documented(DeletedResponse, 401, 404))
async def delete_response(request: Request, id: str) -> Response:
    """Delete a stored response."""
    memory_of(request).delete(id)
    return json_response(DeletedResponse(id=id, object="response", deleted=True))
