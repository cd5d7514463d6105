"""Each model's notation of tool calls, as pure functions: calls in JSON, in Python and in Gemma's notation.

`call_markup.py` says what a parser returns and raises.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import call_markup as markup
from .call_markup import SPACE, BodyParser, Call, OpenBodyError
from .tools import DECODER, ToolOffer


def json_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position of a text, and where it ends. Raises OpenBodyError inside a string."""
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError as e:
        if e.msg.startswith("Unterminated string"):
            raise OpenBodyError("the text ends in a string") from e
        raise


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def parse_json(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
    """Parse one or more JSON objects, each a call, or a list of them."""
    calls: list[Call] = []
    at = skip_space(body, 0)
    while at < len(body) or not calls:
        value, at = json_value(body, at)
        calls += [json_call(call) for call in (value if isinstance(value, list) else [value])]
        at = skip_space(body, at)
    return calls, at


def json_call(call: dict[str, Any]) -> Call:
    """Return the call that an object describes. Raises ValueError if other keys would be lost."""
    if isinstance(inner := call.get("function"), dict):
        call = {key: value for key, value in call.items() if key != "function"} | inner
    names, values = call.keys() & {"name", "function"}, call.keys() & {"arguments", "parameters"}
    if len(names) != 1 or len(values) > 1 or call.keys() - names - values - {"id", "index", "type"}:
        raise ValueError("the keys are not those of a call")
    own_id = call["id"] if isinstance(call.get("id"), str) else None
    return {"id": own_id, "name": call[names.pop()], "arguments": call[values.pop()] if values else None}


_KIMI_HEADER = re.compile(
    rf"(?:<\|tool_call_begin\|>)?{SPACE}(?P<id>(?:functions\.)?(?P<name>[^\s<>:]{{1,128}}):\d{{1,9}}){SPACE}"
    r"<\|tool_call_argument_begin\|>"
)
_KIMI_CALL_END = "<|tool_call_end|>"


def parse_kimi_k2(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
    """Parse calls of Kimi K2. A section may be empty; text between its calls is no content."""
    calls, at = list[Call](), 0
    while header := _KIMI_HEADER.search(body, at):
        arguments, at = json_value(body, skip_space(body, header.end()))
        calls.append({"id": header["id"], "name": header["name"], "arguments": arguments})
        at = skip_space(body, at)
        if at < len(body) and not body.startswith(_KIMI_CALL_END, at):
            raise ValueError("text after the arguments")
    if not calls and body.strip():
        raise ValueError("a section without calls")
    if body.find("<|tool_call_", at + len(_KIMI_CALL_END) if calls else 0) >= 0:
        raise ValueError("a tag outside of a call")
    return calls, len(body)


_MISTRAL_HEADER = re.compile(
    rf"{SPACE}(?P<name>[^\s\[\]]{{1,128}}){SPACE}(?:\[CALL_ID\](?P<id>[^\s\[\]]{{1,64}}))?{SPACE}\[ARGS\]{SPACE}"
)


def parse_mistral(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
    """Parse `name[ARGS]{…}`, perhaps with an id, or a list of calls in JSON."""
    if header := _MISTRAL_HEADER.match(body):
        arguments, end = json_value(body, header.end())
        return [{"id": header["id"], "name": header["name"], "arguments": arguments}], end
    value, end = json_value(body, skip_space(body, 0))
    if not isinstance(value, list) or not value:
        raise ValueError("not a list of calls")
    return [json_call(call) for call in value], end


def deepseek_tag(name: str) -> str:
    return f"<\uff5ctool▁{name}\uff5c>"


def _headed(header: str, end: str = r"\s*", value: Callable[[str, int], tuple[Any, int]] = json_value) -> BodyParser:
    """Return the parser of calls that consist of a header with the name, arguments, and an end. These are patterns."""
    begins, ends = re.compile(header), re.compile(end)

    def parse(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
        calls, at = list[Call](), 0
        while at < len(body) or not calls:
            if (match := begins.match(body, at)) is None:
                raise ValueError("text between calls")
            arguments, at = value(body, skip_space(body, match.end()))
            calls.append({"name": match["name"].strip(), "arguments": arguments})
            if (match := ends.match(body, at)) is None:
                raise ValueError("text after the arguments")
            at = match.end()
        return calls, at

    return parse


# A name, perhaps a channel and a content type, and JSON arguments, which may be missing.
parse_harmony = _headed(
    r"(?P<name>[\w.-]{1,128})[^{<]{0,32}(?:<\|[^{]{0,200}?)?<\|message\|>",
    r"\s*\Z",
    lambda text, at: json_value(text, at) if at < len(text) else ({}, at),
)
# V3 and R1 write `function<sep>name` and a block of JSON, V3.1 writes `name<sep>JSON`.
parse_deepseek = _headed(
    rf"{SPACE}{deepseek_tag('call▁begin')}(?P<v3>function{deepseek_tag('sep')})?(?P<name>[^\n<>]{{1,128}})"
    rf"(?(v3)\n```json\n|{deepseek_tag('sep')})",
    rf"{SPACE}(?:```)?{SPACE}(?:{deepseek_tag('call▁end')}|\Z){SPACE}",
)


_LITERALS = {"true": True, "false": False, "null": None}


class _Literals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def parse_python(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
    """Parse a call, or a list of calls, in JSON or Python."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return parse_json(body, offer, final)
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except SyntaxError as e:
        raise OpenBodyError("perhaps the text ends in a string") from e
    return [_python_call(call) for call in (tree.elts if isinstance(tree, ast.List) else [tree])], len(body)


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    values = {keyword.arg: ast.literal_eval(_Literals().visit(keyword.value)) for keyword in call.keywords}
    if None in values or len(values) < len(call.keywords):
        raise ValueError("`**` in a call, or an argument given twice")
    return {"name": ast.unparse(call.func), "arguments": values}


_GEMMA_KEY = re.compile(r"(?P<key>[^:{}\[\],<>]{1,256}):")
_GEMMA_SCALAR = re.compile(r"[^,{}\[\]]{0,512}")
_DEEPEST = 64
"""Levels of nested values in Gemma's notation, so that a text of brackets ends before Python's recursion limit."""


def parse_gemma(quote: str) -> BodyParser:
    """Return the parser of Gemma's notation: `call:name{key:value,…}` with its own quotes around strings."""
    return _headed(rf"{SPACE}call:(?P<name>[^\s{{}}<>]{{1,128}})(?=\{{)", value=partial(_gemma_value, quote=quote))


def _gemma_value(text: str, at: int, quote: str, depth: int = _DEEPEST) -> tuple[Any, int]:
    if not depth:
        raise ValueError("nested too deep")
    at = skip_space(text, at)
    if text.startswith(quote, at):
        start = at + len(quote)
        if (end := text.find(quote, start)) < 0:
            raise OpenBodyError("the text ends in a string")
        return text[start:end], end + len(quote)
    if text.startswith('"', at):
        return json_value(text, at)
    if text[at] in "{[":
        return _gemma_items(text, at, quote, depth)
    match = _GEMMA_SCALAR.match(text, at)
    assert match is not None
    if not match[0].strip() or quote in match[0]:
        raise ValueError("no value")
    try:
        return DECODER.decode(match[0]), match.end()
    except ValueError:
        return match[0].strip(), match.end()


def _gemma_items(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    closer, values, items = {"{": "}", "[": "]"}[text[at]], dict[str, Any](), list[Any]()
    at = skip_space(text, at + 1)
    while not text.startswith(closer, at):
        if values or items:
            if text[at] != ",":
                raise ValueError("no comma between values")
            at = skip_space(text, at + 1)
        if closer == "]":
            value, at = _gemma_value(text, at, quote, depth - 1)
            items.append(value)
        else:
            key, at = _gemma_key(text, at, quote)
            if key in values:
                raise ValueError("a key is given twice")
            values[key], at = _gemma_value(text, at, quote, depth - 1)
        at = skip_space(text, at)
    return (items if closer == "]" else values), at + 1


def _gemma_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith((quote, '"'), at):
        key, at = _gemma_value(text, at, quote, 1)
        at = skip_space(text, at)
        if text[at] != ":":
            raise ValueError("no value for a key")
        return key, at + 1
    if (match := _GEMMA_KEY.match(text, at)) is None:
        raise ValueError("no key")
    return match["key"].strip(), match.end()


def _json_or(parse_tags: BodyParser) -> BodyParser:
    """Return a parser for models that sometimes write JSON instead."""

    def parse(body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
        return (parse_json if body.lstrip()[:1] in ("{", "[") else parse_tags)(body, offer, final)

    return parse


@dataclass(frozen=True)
class Notation:
    """A notation of calls between their tags."""

    parse: BodyParser
    lead: str  # a pattern that every body's beginning matches; `NAMES` stands for functions' names
    tails: tuple[str, ...] = ()  # Texts of which one ends a call's body. Empty if only the parser can tell.
    has_section: bool = False  # whether the tags hold a section of calls, each of which ends with one of `tails`


_JSON_LEAD = r"\s{0,9}[\[{]"
_GLM_LEAD = r"\s{0,9}(?:NAMES|[\[{])"
_INVOKE_LEAD = r"\s{0,9}<%sinvoke name=[\"']?NAMES"
NOTATIONS: Mapping[str, Notation] = {
    "deepseek": Notation(
        parse_deepseek,
        rf"\s{{0,9}}{deepseek_tag('call▁begin')}(?:function{deepseek_tag('sep')})?NAMES",
        (deepseek_tag("call▁end"),),
        has_section=True,
    ),
    "dsml": Notation(
        markup.DSML.parse,
        _INVOKE_LEAD % f"{markup.DSML_BAR} ?",
        (f"</{markup.DSML_BAR}invoke>", f"</{markup.DSML_BAR} invoke>", "/>"),
        has_section=True,
    ),
    "function_gemma": Notation(parse_gemma("<escape>"), r"\s{0,9}call:NAMES", ("}",)),
    "gemma4": Notation(parse_gemma('<|"|>'), r"\s{0,9}call:NAMES", ("}",)),
    "gemma": Notation(parse_python, ""),
    "glm47": Notation(_json_or(markup.glm_markup().parse), _GLM_LEAD),
    "harmony": Notation(parse_harmony, "NAMES"),
    "json_tools": Notation(parse_json, _JSON_LEAD),
    "kimi_k2": Notation(
        parse_kimi_k2,
        r"[^<]{0,256}<\|tool_call(?:_begin\|>\s{0,9}(?:functions\.)?NAMES|s_section_end)",
        ("<|tool_call_end|>",),
        has_section=True,
    ),
    "kimi_k3": Notation(
        markup.KIMI_K3.parse, r'\s{0,9}<\|open\|>call tool="NAMES', ("<|close|>call<|sep|>",), has_section=True
    ),
    "laguna": Notation(_json_or(markup.glm_markup().parse), _GLM_LEAD),
    "llama": Notation(parse_python, ""),
    "longcat": Notation(_json_or(markup.glm_markup("longcat_").parse), _GLM_LEAD),
    "minicpm5": Notation(markup.MINICPM.parse, r"<function name=[\"']?NAMES", ("</function>",)),
    "minimax_m2": Notation(markup.MINIMAX.parse, _INVOKE_LEAD % "", ("</invoke>",), has_section=True),
    "mistral": Notation(parse_mistral, _GLM_LEAD),
    "muse_spark": Notation(markup.MUSE.parse, _INVOKE_LEAD % "atem:", ("</atem:invoke>",), has_section=True),
    "pythonic": Notation(parse_python, r"\s{0,9}(?:\[\s{0,9}\{|\{|\[?\s{0,9}NAMES\()", (")", "]", "}")),
    "qwen3_coder": Notation(markup.QWEN_XML.parse, r"\s{0,9}<function=NAMES", ("</function>",)),
}
"""For each parser."""
