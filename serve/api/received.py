"""HTTP requests whose bodies were read and validated, and threads to work on them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, Literal, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from eagle_mlx.errors import EagleError, TargetError

from .. import log, log_once
from ..chat.history import with_whole_pairs
from .encoding import Encoder
from .errors import ApiError, client_gone, shortened
from .limits import has_more_containers, read_body
from .model import Loaded, check
from .models import Models
from .schema import Body, ChoicesRequest
from .service import Service

T = TypeVar("T")
B = TypeVar("B", bound=Body)
C = TypeVar("C", bound=ChoicesRequest)
_UNUSUAL = re.compile(r"[^\w.\[\]-]", re.ASCII)
"""Characters of field names that a header or a log line may not take as they are."""
_AS_SENT = ("messages", "input", "prompt", "tokens")
_MOST_NAMED = 20  # ignored fields to name per request: a header has room for them
_NO_OBJECT = ("model_type", "model_attributes_type")  # error types whose messages name our classes
Owner = tuple[str, str]  # a client, and the namespace of its prefix cache


def models_of(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


def client_of(request: Request) -> str:
    """Return the client's address for fair scheduling; clients may share a key."""
    return request.client.host if request.client is not None else ""


def key_of(request: Request) -> str | None:
    """Return the hash of the request's API key; None if it has none."""
    key: str | None = getattr(request.state, "key", None)
    return key


@dataclass(frozen=True)
class Received(Generic[B]):
    http: Request
    body: B
    is_long: bool
    """Whether it, or the stored conversation that it continues, would hold up others. Its work waits for its turn."""

    @property
    def owner(self) -> Owner:
        """Its client, and a prefix cache for its key and `cache_salt`. Requests without either share one."""
        key, salt = key_of(self.http), getattr(self.body, "cache_salt", None)
        return client_of(self.http), "" if key is None and salt is None else json.dumps([key, salt])

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` at once if the request is short, else in a thread. Raises what `work` raises, and ApiError 499."""
        return await _in_turn(self.http, self.is_long, work)

    async def in_thread(self, loaded: Loaded, work: Callable[[Encoder], T], has_schema: bool = False) -> T:
        """Run `work` in a thread, until this is canceled, with a function that encodes texts. Raises ApiError."""
        cancelled = Event()

        def check() -> None:
            if cancelled.is_set():
                raise client_gone()

        def run() -> T:
            return work(Encoder(loaded.tokenizer, check))

        try:
            return await models_of(self.http).pools.encode(run, client_of(self.http), self.is_long, has_schema)
        except TargetError as e:  # the first image loads files of the model
            log.error("%s", e)
            raise ApiError(500, "the model's files cannot be read; see the server's log") from e
        except EagleError as e:
            raise ApiError(400, str(e), e.field) from e
        finally:
            cancelled.set()


async def receive(request: Request, kind: type[B]) -> Received[B]:
    """Read, parse and validate the body. Raises ApiError."""
    models = models_of(request)
    models.check_open()  # a server that takes no requests does not read bodies
    limits = models.settings.limits
    content = await read_body(request, limits)

    def parse() -> tuple[B, list[str]]:
        if has_more_containers(content, limits.containers):
            message = f"the body has more than {limits.containers} objects and lists; send fewer messages or tools"
            raise ApiError(413, message, code="request_too_large")
        return read(kind, content, models.settings.strict_fields)

    is_long = len(content) >= limits.long_bytes or has_more_containers(content, limits.long_containers)
    body, ignored = await _in_turn(request, is_long, parse)
    if ignored:
        names = ", ".join(_UNUSUAL.sub("?", shortened(name)) for name in ignored[:_MOST_NAMED])
        request.state.ignored_fields = names  # for the header that `guard.RequestGuard` adds
        log_once(f"{request.url.path}: ignored unknown fields: {names}; --strict-fields refuses them")
    return Received(request, body, is_long)


async def _in_turn(request: Request, is_long: bool, work: Callable[[], T]) -> T:
    if not is_long:
        return work()
    return await unless_disconnected(request, models_of(request).pools.parse(work, client_of(request)))


async def receive_choices(request: Request, kind: type[C]) -> tuple[Received[C], Service]:
    """Return a validated request and the service of its model. Raises ApiError."""
    received = await receive(request, kind)
    service = models_of(request).named(received.body.model)
    check(received.body, service.settings.limits)
    return received, service


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ApiError 499 if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def read(kind: type[B], body: bytes, strict: bool = False) -> tuple[B, list[str]]:
    """Parse and validate a body. Return it, and the unknown fields that were ignored, of each list only the first.

    strict: whether to refuse them. Raises ApiError 400 that names the field.
    """
    try:
        fields: dict[str, Any] = _with_integers(_unpacked(_parsed(body)))
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {e}") from e
    try:
        return kind.model_validate(fields), []
    except ValidationError as e:
        details = _details(e)
    unknown = [_path(error["loc"], fields) for error in details if error["type"] == "extra_forbidden"]
    if strict or not unknown:
        raise _explained(details, fields)
    return validated(kind, fields, "ignore"), sorted(unknown)


def _parsed(body: bytes) -> Any:
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError:
        if (text := body.decode()) == (whole := with_whole_pairs(text)):
            raise
        fields = from_json(whole, allow_inf_nan=False)
    json.dumps(fields, ensure_ascii=False, allow_nan=False)  # a number may be infinite as a float, such as 1e999
    return fields


def _unpacked(fields: Any) -> dict[str, Any]:
    """Return the fields with those of `extra_body`, which OpenAI's client unpacks before it sends a request."""
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    if (extra := fields.pop("extra_body", None)) is None:
        return fields
    if not isinstance(extra, dict):
        raise ApiError(400, "extra_body: input should be an object", "extra_body")
    if twice := sorted(name for name in extra.keys() & fields.keys() if extra[name] != fields[name]):
        name = shortened(twice[0])
        raise ApiError(400, f"extra_body.{name} differs from {name}; send one of them", f"extra_body.{name}")
    return fields | extra


def _with_integers(value: Any) -> Any:
    """Return a value with whole numbers as integers, as JSON Schema understands them: some clients write 40.0.
    Conversations stay as they are, because calls' arguments are the model's own text, and so do lists of tokens."""
    if isinstance(value, dict):
        return {name: x if name in _AS_SENT else _with_integers(x) for name, x in value.items()}
    if isinstance(value, list):
        return list(map(_with_integers, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def validated(kind: type[B], fields: dict[str, Any], unknown: Literal["ignore"] | None = None) -> B:
    """Validate fields. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate(fields, extra=unknown)
    except ValidationError as e:
        raise _explained(_details(e), fields) from e


def _details(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def _explained(details: list[ErrorDetails], fields: dict[str, Any]) -> ApiError:
    """Report the first invalid field; of several ways to parse it, the one that got furthest."""
    about = max((d for d in details if d["loc"][:1] == details[0]["loc"][:1]), key=_progress)
    kind, path = about["type"], shortened(_path(about["loc"], fields, about["type"] == "missing"))
    if kind == "none_required":
        return ApiError(400, f"{path} is not supported by this server", path, "unsupported_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"{path} is not a known field", path, "unknown_parameter")
    problem = "input should be an object" if kind in _NO_OBJECT else about["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}: {problem[:1].lower()}{problem[1:]}", path)


def _path(steps: Sequence[int | str], value: Any, is_missing: bool = False) -> str:
    """Return a path as OpenAI writes it, such as `messages[0].content`. is_missing: whether the last field is."""
    path = ""
    for at, step in enumerate(steps):
        if isinstance(step, int):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or (is_missing and at == len(steps) - 1)):
            path, value = f"{path}.{step}", value.get(step)
    return path.removeprefix(".")


def _progress(detail: ErrorDetails) -> tuple[int, int, bool]:
    """Rank an error by how far parsing got: depth in the value, then list index, then whether the type matched."""
    last = detail["loc"][-1]
    depth = sum(not str(step).startswith("<") for step in detail["loc"])  # the others are tags of `ByType`
    return depth, last if isinstance(last, int) else 0, not detail["type"].endswith("_type")
