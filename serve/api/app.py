"""The application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from . import admin, chat, completions, embeddings, metrics, page, status, tokenize
from .errors import add_handlers
from .guard import ForwardedFor, FramingGuard, HostGuard, KeyGuard
from .limits import Threads
from .messages.route import router as messages
from .middleware import RequestForms
from .models import Models
from .openapi import add_schema
from .responses.memory import ResponseMemory
from .responses.route import router as responses

ROUTERS = (
    chat.router,
    completions.router,
    responses,
    messages,
    embeddings.router,
    status.router,
    tokenize.router,
    page.router,
    admin.router,
)


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
