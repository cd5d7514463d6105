"""The published schema: FastAPI's, with the bodies that the routes read by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from .messages.schema import CountTokensRequest, MessagesRequest
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
