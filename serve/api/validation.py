"""Reading request bodies: validation, unknown fields, and errors that name a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from .errors import ApiError, shortened
from .schema import Body

B = TypeVar("B", bound=Body)
_NO_OBJECT = ("model_type", "model_attributes_type")
"""Error types whose messages name our classes."""


def read(kind: type[B], body: bytes, strict: bool = False) -> tuple[B, list[str]]:
    """Parse and validate a body. Return it, and the unknown fields that were ignored, of each list only the first.

    strict: whether to refuse them. Raises ApiError 400 that names the field.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {e}") from e
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = _unpacked(fields)
    strange = sorted(fields.keys() - kind.model_fields.keys())
    if strange and strict:
        raise ApiError(400, f"{_short(strange[0])} is not a known field", _short(strange[0]), "unknown_parameter")
    fields = {name: value for name, value in fields.items() if name in kind.model_fields}
    try:
        return kind.model_validate(fields, extra="forbid"), strange
    except ValidationError as e:
        details = e.errors(include_url=False, include_context=False, include_input=False)
    inner = [_path(error["loc"], fields, False) for error in details if error["type"] == "extra_forbidden"]
    if strict or not inner:
        raise _explained(details, fields)
    return validated(kind, fields, "ignore"), strange + inner


def _unpacked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with those of `extra_body`, which OpenAI's client unpacks before it sends a request."""
    if (extra := fields.pop("extra_body", None)) is None:
        return fields
    if not isinstance(extra, dict):
        raise ApiError(400, "extra_body: input should be an object", "extra_body")
    if twice := sorted(name for name in extra.keys() & fields.keys() if extra[name] != fields[name]):
        name = _short(twice[0])
        raise ApiError(400, f"extra_body.{name} differs from {name}; send one of them", f"extra_body.{name}")
    return fields | extra


def validated(kind: type[B], fields: dict[str, Any], unknown: Literal["forbid", "ignore"] = "forbid") -> B:
    """Validate fields. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate(fields, extra=unknown)
    except ValidationError as e:
        raise _explained(e.errors(include_url=False, include_context=False, include_input=False), fields) from e


def _explained(details: list[ErrorDetails], fields: dict[str, Any]) -> ApiError:
    """Report the first invalid field; of several ways to parse it, the one that got furthest."""
    about = max((d for d in details if d["loc"][:1] == details[0]["loc"][:1]), key=_progress)
    kind, path = about["type"], _short(_path(about["loc"], fields, about["type"] == "missing"))
    if kind == "none_required":
        return ApiError(400, f"{path} is not supported by this server", path, "unsupported_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"{path} is not a known field", path, "unknown_parameter")
    said = "input should be an object" if kind in _NO_OBJECT else about["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}: {said[:1].lower()}{said[1:]}", path)


def _path(steps: Sequence[int | str], value: Any, is_missing: bool) -> str:
    """Return a path as OpenAI writes it, such as `messages[0].content`, without pydantic's names of types.

    is_missing: whether the last step is a field that the value lacks.
    """
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


def _short(name: str) -> str:
    return shortened(name, 100)
