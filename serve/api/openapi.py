"""The published schema: FastAPI's, with the bodies that the routes read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from .messages.schema import CountTokensRequest, MessagesRequest
from .responses.schema import ResponsesRequest
from .schema import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def add_schema(app: FastAPI, model: str) -> None:
    """Let the app's schema tell what its POST routes take, for the model of this name."""
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
            components[kind.__name__]["properties"]["model"] = {"enum": [model, None], "default": None}
        for path, kind in _BODIES.items():
            content = {"application/json": {"schema": named[(kind, "validation")]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
