"""The application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from . import chat, completions, embeddings, metrics, page, status, tokenize
from .errors import add_handlers
from .guard import FramingGuard, HostGuard, KeyGuard
from .messages.route import router as messages
from .openapi import add_schema
from .pools import Threads
from .responses.memory import ResponseMemory
from .responses.route import router as responses
from .service import Service, Settings
from .worker import Worker

ROUTERS = (
    chat.router,
    completions.router,
    responses,
    messages,
    embeddings.router,
    status.router,
    tokenize.router,
    page.router,
)


def create_app(settings: Settings, worker: Worker) -> FastAPI:
    """An application whose start also starts the worker; it takes requests once that has loaded the model."""
    service = Service(settings, worker)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Threads(thread_name_prefix="request"))
        worker.observer = service.totals.observe
        worker.start(loop)
        yield
        service.pools.close()
        worker.stop()  # not in a thread of the pool: work that hangs may hold all of them
        if worker.loaded is not None:
            if worker.loaded.prior is not None:
                worker.loaded.prior.save()
            worker.loaded.grammars.end()
            worker.loaded.encoder.end()

    app = FastAPI(title="eagle-serve", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.state.responses = ResponseMemory(settings.limits.responses, settings.limits.response_bytes)
    app.state.registry = metrics.registry(service)
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, key=settings.api_key)
    if settings.origins:  # outside of the guard: browsers ask first without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )
    if settings.hosts is not None:
        app.add_middleware(HostGuard, allowed=settings.hosts)
    app.add_middleware(FramingGuard)
    add_schema(app, settings.name)
    return app
