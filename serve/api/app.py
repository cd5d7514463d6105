"""The application: routes, what stands before them, and the schema that it publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema

from . import chat, completions, metrics, routes
from .errors import add_handlers
from .guard import ForwardedFor, FramingGuard, HostGuard, KeyGuard, RequestForms
from .limits import Threads
from .messages.answer import router as messages
from .messages.schema import CountTokensRequest, MessagesRequest
from .models import Models
from .responses.answer import ResponseMemory
from .responses.route import router as responses
from .responses.schema import ResponsesRequest
from .schema import AdminRequest, Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/admin/load": AdminRequest,
    "/admin/unload": AdminRequest,
}

_LINKS: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "/v1/responses": {
        "read": ("/v1/responses/{id}", "get", {"parameters": {"id": "$response.body#/id"}}),
        "forget": ("/v1/responses/{id}", "delete", {"parameters": {"id": "$response.body#/id"}}),
        "go on": (
            "/v1/responses",
            "post",
            {"requestBody": {"input": "Go on.", "previous_response_id": "$response.body#/id"}},
        ),
    },
}
"""What can be done with an answer of a POST route: path, method, and what to send there."""


def add_schema(app: FastAPI, models: Sequence[str]) -> None:
    """Let the app's schema tell what its POST routes take, for models of these names; the only one may be left out."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = without_bodies()
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        named, shared = models_json_schema(
            [(kind, "validation") for kind in _BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        components |= shared["$defs"]
        for kind in _BODIES.values():
            body = components[kind.__name__]
            if len(models) == 1 and not kind.model_fields["model"].is_required():
                body["properties"]["model"] = {"enum": [*models, None], "default": None}
            else:
                body["properties"]["model"] = {"enum": list(models)}
                body["required"] = sorted({*body.get("required", ()), "model"})
        for path, kind in _BODIES.items():
            content = {"application/json": {"schema": named[(kind, "validation")]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        for path, links in _LINKS.items():
            schema["paths"][path]["post"]["responses"]["200"]["links"] = {
                name: {"operationId": schema["paths"][to][method]["operationId"], **sent}
                for name, (to, method, sent) in links.items()
            }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


ROUTERS = (chat.router, completions.router, responses, messages, routes.router)


def create_app(models: Models) -> FastAPI:
    """An application that serves these models; its start also starts their threads."""
    settings = models.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(Threads(thread_name_prefix="request"))
        models.start()
        yield
        models.stop()

    app = FastAPI(title="eagle-serve", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.models = models
    app.state.responses = ResponseMemory(settings.limits.responses, settings.limits.response_bytes)
    app.state.registry = metrics.registry(models)
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, keys=settings.api_key.split())
    if settings.origins:  # outside of the guard: browsers ask first without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )
    if settings.hosts is not None:
        app.add_middleware(HostGuard, allowed=settings.hosts)
    app.add_middleware(FramingGuard)
    if settings.forwarded_allow_ips:
        app.add_middleware(ForwardedFor, trusted=settings.forwarded_allow_ips)
    app.add_middleware(RequestForms)  # the outermost: the guards read the path and the host
    add_schema(app, list(models.services))
    return app
