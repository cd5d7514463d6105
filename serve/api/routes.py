"""The small routes: models, health, metrics, tokens, administration, and the web page."""

from __future__ import annotations

import re
from base64 import b64encode
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from pydantic import Field
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from .. import log
from ..speculation import Mode, PolicyName
from .answer import respond_encoded
from .chat import render_chat
from .encoding import Encoder
from .errors import ERRORS, ApiError, documented
from .metrics import SpeculationSummary, speculation_summary
from .model import Loaded
from .received import models_of, receive, unless_disconnected
from .schema import Body, ChatMessage, ChatRequest, Id, Many, Tool
from .service import Service

router = APIRouter()


class AdminRequest(Body):
    """The model to load or unload."""

    model: str


class SpeculationRequest(AdminRequest):
    """A loaded model's drafting from the next round on. Fields that are not given stay as they are."""

    spec_decode: Mode | Literal["auto"] | None = None
    """A mode as in a request; `auto` uses everything that is loaded, as the policy allows."""
    num_speculative_tokens: int | None = Field(None, ge=1, le=256)
    spec_policy: PolicyName | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    tools: Many[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Many[Id]


A = TypeVar("A", bound=AdminRequest)


@router.get("/health", responses=documented(503))
async def health(request: Request) -> Response:
    """Return 200 when ready, 503 while starting, stuck or draining. Loading on demand does not change it.

    With `--idle-unload-minutes`, `unloaded` has the models that the next request loads again.
    """
    models = models_of(request)
    health: dict[str, Any] = {"status": models.state}
    if models.settings.idle_unload_minutes:
        health["unloaded"] = [name for name, service in models.services.items() if service.state == "unloaded"]
    return JSONResponse(health, 200 if health["status"] == "ready" else 503)


@router.get("/version", responses=documented(401))
async def version() -> Response:
    """Return the server's version."""
    return JSONResponse({"version": metadata.version("eagle-mlx")})


@router.get("/v1/models", responses=documented(401))
async def models(request: Request) -> Response:
    """Return the models of this server, loaded or not."""
    services = models_of(request).services
    if "anthropic-version" in request.headers:
        names, data = list(services), list(map(described_to_anthropic, services.values()))
        return JSONResponse({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return JSONResponse({"object": "list", "data": list(map(described, services.values()))})


@router.get("/v1/models/{model:path}", responses=documented(401, 404))
async def model(request: Request, model: str) -> Response:
    """Return a model by its name."""
    service = models_of(request).known(model)
    describe = described_to_anthropic if "anthropic-version" in request.headers else described
    return JSONResponse(describe(service))


def described(service: Service) -> dict[str, Any]:
    """Describe a model for clients. Fields that need a loaded model are None until it is loaded."""
    loaded = service.loaded
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "eagle-mlx",
        "max_model_len": loaded.context if loaded else None,
        "state": "failed" if service.state == "loaded" and loaded is None else service.state,
    }


def described_to_anthropic(service: Service) -> dict[str, Any]:
    context = service.loaded.context if service.loaded else None
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
    """Return all metrics, for Prometheus."""
    return Response(generate_latest(request.app.state.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/spec_decode/metrics", responses=documented(400, 401, 404, 409, 503, model=SpeculationSummary))
async def spec_decode_metrics(request: Request, model: str | None = None) -> Response:
    """Return the speculation metrics of a model."""
    service = models_of(request).named(model)
    return JSONResponse(speculation_summary(service.totals, _loaded(service)).model_dump())


def _loaded(service: Service) -> Loaded:
    if service.loaded is None:
        message = f"model {service.name!r} is not loaded; send it a request first"
        raise ApiError(409, message, "model", "model_not_loaded")
    return service.loaded


def _hash(html: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
HEADERS = {
    # Allow the page's own script and style, requests to this server, and nothing else.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    f"script-src {_hash(PAGE, 'script')}; style-src {_hash(PAGE, 'style')}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Return the web page, which sends requests only to this server."""
    return HTMLResponse(PAGE, headers=HEADERS)


_ERRORS = (400, 401, 403, 404, 413, 500, 503)


@router.post("/admin/load", responses=documented(*_ERRORS))
async def load(request: Request) -> Response:
    """Load a model, and wait until it is ready."""
    service, _ = await _admitted(request, AdminRequest)
    await unless_disconnected(request, models_of(request).loaded(service))
    return JSONResponse(described(service))


@router.post("/admin/unload", responses=documented(*_ERRORS, 409))
async def unload(request: Request) -> Response:
    """Unload a model and free its memory. The next request for it loads it again."""
    service, _ = await _admitted(request, AdminRequest)
    await models_of(request).unload(service)
    return JSONResponse(described(service))


@router.post("/admin/speculation", responses=documented(*_ERRORS, 409, model=SpeculationSummary))
async def change_speculation(request: Request) -> Response:
    """Change what drafts by default, how much, and the policy, from the next round on. Text does not change."""
    service, body = await _admitted(request, SpeculationRequest)
    loaded = _loaded(service)
    mode, most, policy = body.spec_decode, body.num_speculative_tokens, body.spec_policy
    await service.worker.between_steps(lambda: loaded.change_speculation(mode, most, policy))
    now = speculation_summary(service.totals, loaded)
    drafters = " and ".join(now.spec_decode_drafters) or "nothing"
    log.info("model %s: %s drafts, up to %d tokens, policy %s", service.name, drafters, now.current_k, now.spec_policy)
    return JSONResponse(now.model_dump())


async def _admitted(request: Request, kind: type[A]) -> tuple[Service, A]:
    """Return the model and the body. Raises ApiError 403 for clients that are not the administrator."""
    settings = models_of(request).settings
    if settings.api_key is None and not settings.is_local:
        message = "other machines can reach this server, so /admin needs a key; start it with EAGLE_API_KEY"
        raise ApiError(403, message, code="api_key_needed")
    if settings.api_key is not None and not request.state.is_admin:
        raise ApiError(403, "/admin needs the first key of EAGLE_API_KEY or --api-key", code="admin_key_needed")
    body = (await receive(request, kind)).body
    return models_of(request).named(body.model), body


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings() -> None:
    """Raise ApiError 501."""
    remedy = "run another server for embeddings, such as llama.cpp's `llama-server --embedding`"
    raise ApiError(501, f"this server has no embedding model; {remedy}", code="embeddings_not_supported")


@router.post("/tokenize", responses=documented(*ERRORS))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a conversation as the model reads it."""
    received = await receive(request, TokenizeRequest)
    body = received.body
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")

    def work(loaded: Loaded, encode: Encoder) -> dict[str, Any]:
        if body.messages is not None:
            fields = ("messages", "tools", "chat_template_kwargs")
            chat = ChatRequest.model_validate({name: getattr(body, name) for name in fields})
            tokens = render_chat(chat, loaded, encode, must_fit=False).prompt.tokens
        else:
            tokens = encode(body.prompt or "", body.add_special_tokens is not False)
        texts = [loaded.texts[token][0] for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": loaded.context, "tokens": tokens, "token_strs": texts}

    return await respond_encoded(received, work)


@router.post("/detokenize", responses=documented(*ERRORS))
async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    received = await receive(request, DetokenizeRequest)
    body = received.body

    def work(loaded: Loaded, _: Encoder) -> dict[str, Any]:
        if max(body.tokens, default=0) >= loaded.target.vocab_size:
            raise ApiError(400, f"tokens contains an id outside the vocabulary of {loaded.target.vocab_size}", "tokens")
        return {"prompt": loaded.tokenizer.decode(body.tokens)}

    return await respond_encoded(received, work)
