"""What the server says of itself: its model, its health, its numbers."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from starlette.responses import PlainTextResponse, Response

from .errors import ApiError
from .flow import json_response, models_of
from .metrics import speculation_json
from .service import Service
from .shapes import (
    AnthropicModel,
    AnthropicModelList,
    Health,
    Model,
    ModelList,
    SpeculationSummary,
    Version,
    documented,
)

router = APIRouter()


@router.get("/health", responses={**documented(Health), 503: {"model": Health}})
async def health(request: Request) -> Response:
    """Whether requests are taken: 200 when ready, 503 while starting or draining.

    A model that is loaded when it is asked for keeps nobody waiting here.
    """
    state = models_of(request).state
    return json_response({"status": state}, 200 if state == "ready" else 503)


@router.get("/version", responses=documented(Version, 401))
async def version() -> Response:
    """The server's version."""
    return json_response({"version": metadata.version("eagle-mlx")})


@router.get("/v1/models", responses=documented(ModelList | AnthropicModelList, 401))
async def models(request: Request) -> Response:
    """The models that are served, loaded or not."""
    services = list(models_of(request).services.values())
    if "anthropic-version" in request.headers:
        data = [described_to_anthropic(each) for each in services]
        return json_response({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})
    return json_response({"object": "list", "data": [described(each) for each in services]})


@router.get("/v1/models/{model:path}", responses=documented(Model | AnthropicModel, 401, 404))
async def model(request: Request, model: str) -> Response:
    """A model, by its name."""
    service = models_of(request).known(model)
    is_anthropic = "anthropic-version" in request.headers
    return json_response(described_to_anthropic(service) if is_anthropic else described(service))


def described(service: Service) -> dict[str, Any]:
    """A model as clients see it. What is known of it only when it is loaded is None until then."""
    loaded = service.loaded
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "eagle-mlx",
        "max_model_len": loaded.target.context_length if loaded else None,
        "state": "failed" if service.state == "loaded" and loaded is None else service.state,
    }


def described_to_anthropic(service: Service) -> dict[str, Any]:
    """Describe a model as Anthropic's API does."""
    loaded = service.loaded
    context = loaded.target.context_length if loaded else None
    return {
        "type": "model",
        "id": service.name,
        "display_name": service.name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All numbers, for Prometheus."""
    return Response(generate_latest(request.app.state.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/spec_decode/metrics", responses=documented(SpeculationSummary, 400, 401, 404, 409, 503))
async def spec_decode_metrics(request: Request, model: str | None = None) -> Response:
    """What speculation has done so far, for the model of this name."""
    service = models_of(request).named(model)
    loaded = service.loaded
    if loaded is None:
        said = f"model {service.name!r} is not loaded; ask when it is, or /metrics"
        raise ApiError(409, said, "model", "model_not_loaded")
    return json_response(speculation_json(service.totals, loaded.mode, loaded.most_drafts))
