"""The types of a tool's parameters, and values of these types for calls that write arguments without quotes.

Tools made from Python types often have `$ref` or `anyOf`, such as `anyOf: [{"type": "integer"}, {"type": "null"}]` for
`int | None`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Schema = Mapping[str, Any]
Types = frozenset[str]
"""The JSON types that a schema allows; empty if they are unknown."""
Offer = Mapping[str, Mapping[str, Types]]
"""For each offered function, its parameters and their types."""
_DEEPEST = 16
"""Schemas nested deeper have no known type."""
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "dict": "object", "list": "array"},
}
"""Names of types that tools have although JSON Schema does not."""
_INTEGER = re.compile(r"-?\d{1,4000}(?:\.0{1,40})?")
"""Python refuses to read integers of more than 4,300 digits."""
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def offered_types(tools: Sequence[Mapping[str, Any]]) -> Offer:
    """Return the parameters of each tool and their types."""
    return {tool["function"]["name"]: _parameter_types(tool["function"].get("parameters") or {}) for tool in tools}


def typed_value(text: str, types: Types) -> Any:
    """Return the value that an argument's text stands for. A text of none of these types stays text.

    Integers are exact. A text is null, an object or an array only if a string is not what the schema allows for it. If
    the types are unknown, objects and arrays are read, and other texts stay text.
    """
    bare = text.strip()
    if bare in _CONSTANTS and ("null" if _CONSTANTS[bare] is None else "boolean") in types - {"string"}:
        return _CONSTANTS[bare]
    if "string" in types:
        return text
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return int(bare.partition(".")[0])
    readable = types & {"number", "object", "array"} if types else {"object", "array"}
    value = _structure(bare) if readable else None
    return value if isinstance(value, float | dict | list) and _NAMES[type(value)] in readable else text


def _structure(text: str) -> Any:
    """Read JSON, or a Python literal of a list or dictionary; None if it is neither."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, strict=False, parse_constant=refuse_constant)
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False)) if text[:1] in ("[", "{") else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parameter_types(parameters: Schema) -> dict[str, Types]:
    seen: dict[str, Types] = {}
    properties = parameters.get("properties")
    items = properties.items() if isinstance(properties, Mapping) else ()
    return {name: _types(schema, parameters, seen, _DEEPEST) for name, schema in items}


def _types(schema: Any, root: Schema, seen: dict[str, Types], depth: int) -> Types:
    """Return the types that a schema allows. `seen` holds those of references."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    ref, kind = schema.get("$ref"), schema.get("type")
    if isinstance(ref, str):
        if ref not in seen:
            seen[ref] = frozenset()  # a reference to itself
            seen[ref] = _types(_resolved(root, ref), root, seen, depth - 1)
        return seen[ref]
    if isinstance(kind, str | list):
        names = [kind] if isinstance(kind, str) else map(str, kind)
        return frozenset(_ALIASES.get(name, name) for name in names)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [_types(option, root, seen, depth - 1) for option in schema[key]]
            return frozenset().union(*options) if all(options) else frozenset()
    if isinstance(schema.get("allOf"), list):
        options = [_types(option, root, seen, depth - 1) for option in schema["allOf"]]
        return next((types for types in options if types), frozenset())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset("null" if value is None else _NAMES[type(value)] for value in values)


def _resolved(root: Schema, ref: str) -> Any:
    """Return the part of a schema that `#/…` points to; None if there is none."""
    start, *steps = ref.split("/")
    node: Any = root if start == "#" else None
    for step in steps:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
