"""POST /admin/load and /admin/unload: a model into memory, and out of it, for whoever runs the server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from .errors import ApiError
from .flow import body_of, json_response, models_of, unless_disconnected
from .schema import AdminRequest
from .service import Service
from .shapes import Model, documented
from .status import described

router = APIRouter(prefix="/admin")
_ERRORS = (400, 401, 403, 404, 413, 500, 503)


@router.post("/load", responses=documented(Model, *_ERRORS))
async def load(request: Request) -> Response:
    """Load a model, and wait until it is there."""
    service = await _asked(request)
    await unless_disconnected(request, models_of(request).loaded(service))
    return json_response(described(service))


@router.post("/unload", responses=documented(Model, *_ERRORS, 409))
async def unload(request: Request) -> Response:
    """Give a model's memory back. The next request for it loads it again."""
    service = await _asked(request)
    await models_of(request).unload(service)
    return json_response(described(service))


async def _asked(request: Request) -> Service:
    """The model that is meant. Raises ApiError 403 where anybody could ask: without a key, only this machine may."""
    settings = models_of(request).settings
    if settings.api_key is None and not settings.is_local:
        said = "without an API key models are loaded and unloaded only where the server listens at a loopback address"
        raise ApiError(403, f"{said}; start it with EAGLE_API_KEY", code="api_key_needed")
    body = await body_of(request, AdminRequest)
    return models_of(request).named(body.model)
