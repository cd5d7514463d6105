"""The types of a tool's parameters, for parsers of calls that write arguments without quotes.

mlx-lm's parsers read only `type`. Tools made from Python types often have `$ref` or `anyOf` instead, such as
`anyOf: [{"type": "integer"}, {"type": "null"}]` for `int | None`; then 3 would become "3", or "3" would become 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
_DEEPEST = 16
"""Schemas nested deeper have no known type."""
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def with_types(parameters: Schema, null_is_read: bool) -> dict[str, Any]:
    """Return the schema of a tool's parameters with a `type` for each that can have only one.

    null_is_read: whether the parser reads a null whatever the type, so that a type may leave it out.
    """
    known: dict[str, frozenset[str]] = {}
    made, properties = {}, parameters.get("properties")
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        types = _types(schema, parameters, known, _DEEPEST) - ({"null"} if null_is_read else set())
        [only] = types if len(types) == 1 else [None]
        made[name] = {**schema, "type": only} if only else schema
    return {**parameters, "properties": made}


def _types(schema: Any, root: Schema, known: dict[str, frozenset[str]], depth: int) -> frozenset[str]:
    """Return the types that a schema allows; empty if they are unknown. `known` holds those behind references."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    ref, kind = schema.get("$ref"), schema.get("type")
    if isinstance(ref, str):
        if ref not in known:
            known[ref] = frozenset()  # a reference to itself
            known[ref] = _types(_found(root, ref), root, known, depth - 1)
        return known[ref]
    if isinstance(kind, str | list):
        return frozenset([kind] if isinstance(kind, str) else map(str, kind))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [_types(one, root, known, depth - 1) for one in schema[key]]
            return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(schema.get("allOf"), list):
        each = [_types(one, root, known, depth - 1) for one in schema["allOf"]]
        return next((types for types in each if types), frozenset())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset("null" if value is None else _NAMES[type(value)] for value in values)


def _found(root: Schema, ref: str) -> Any:
    """Return the part of a schema that `#/…` points to; None if there is none."""
    start, *steps = ref.split("/")
    node: Any = root if start == "#" else None
    for step in steps:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
