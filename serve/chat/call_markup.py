"""The bodies of tool calls with tags around functions and parameters: Qwen-XML, GLM, Kimi K3, DeepSeek's DSML, …

A parser reads the text between a call's tags. It returns calls only if they account for the whole text, and raises
`OpenBodyError` if the text is still inside a value, so that its end tag was part of that value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .tools import REACH, ToolOffer, Types, typed_value

Call = dict[str, Any]  # `name`, `arguments`, and perhaps `id`, which may be None
BodyParser = Callable[[str, ToolOffer, bool], tuple[list[Call], int]]
"""Maps a body, the offered functions, and whether no more text follows, to the calls and the length that they take.

If no more text follows, the last value or function may lack its own end tag. Raises any exception if there is no call.
"""
_LONGEST_NAME = 256  # characters of a function's name and the blanks around it


class OpenBodyError(ValueError):
    """The text ends inside a value."""


@dataclass(frozen=True)
class Markup:
    """A notation with tags around functions and parameters.

    A value ends at the last end tag before the next parameter or the end of the function.
    """

    function: str
    """A pattern with a group `name`, and perhaps `empty` if the tag also ends the function. Empty if a name has no tag.

    All repeats are bounded, so that a search takes linear time.
    """
    function_end: str
    parameter: str  # a pattern with a group `key`, and perhaps `kind`
    parameter_end: str
    restart: str  # a pattern of the text between two calls, which no value may contain: it would be another call
    has_lines: bool = False
    """Whether a line break after a parameter's tag, and one before its end tag, belong to the tags."""
    value: Callable[[str, str | None, Types], Any] = lambda text, kind, types: typed_value(text, types)
    """Maps a value's text, its `kind` and the types in the schema to the value."""
    unescape: Callable[[str], str] = str

    def parse(self, body: str, offer: ToolOffer, final: bool) -> tuple[list[Call], int]:
        return _MarkupReader(self, body, offer, final).calls(), len(body)


class _MarkupReader:
    """Reads one body. Each mark is visited once."""

    def __init__(self, markup: Markup, body: str, offer: ToolOffer, final: bool):
        self._markup, self._body = markup, body
        self._offer, self._final = offer, final
        parts = {"function": markup.function, "function_end": markup.function_end}
        parts |= {"parameter": markup.parameter, "parameter_end": markup.parameter_end}
        pattern = "|".join(f"(?P<_{kind}>{part or '(?!)'})" for kind, part in parts.items())
        self._marks = list(re.finditer(pattern, body))
        self._next = 0

    def calls(self) -> list[Call]:
        calls, place = list[Call](), 0
        while not calls or not self._is_blank(place, len(self._body)):
            name, place, ended = self._function(place)
            calls.append({"name": name, "arguments": {}})
            while not ended:
                ended, place = self._parameter(self._offer.functions.get(name, {}), calls[-1]["arguments"], place)
        return calls

    def _function(self, place: int) -> tuple[str, int, bool]:
        """Return a function's name, where it ends, and whether the function has no parameters."""
        mark = self._marks[self._next] if self._next < len(self._marks) else None
        is_empty = mark is None
        if not self._markup.function:
            end = mark.start() if mark else len(self._body)
            name, place = self._body[place:end].strip(), end
        elif mark is None or not mark["_function"] or not self._is_blank(place, mark.start()):
            raise ValueError("text before a call")
        else:
            self._next += 1
            name, place = self._markup.unescape(mark["name"].strip()), mark.end()
            is_empty = bool(mark.groupdict().get("empty"))
        if not self._offer.allows(name):
            raise ValueError("the function may not be called")
        return name, place, is_empty

    def _parameter(self, types: Mapping[str, Types], arguments: dict[str, Any], place: int) -> tuple[bool, int]:
        """Read a parameter or the function's end. Return whether the function has ended, and where."""
        if self._begins_function(place, self._next):
            return True, place
        if self._next == len(self._marks):
            if (self._markup.function_end and not self._final) or not self._is_blank(place, len(self._body)):
                raise OpenBodyError("the function has no end")
            return True, len(self._body)
        mark = self._marks[self._next]
        if not self._is_blank(place, mark.start()):
            raise ValueError("text between parameters")
        self._next += 1
        if mark["_function_end"]:
            return True, mark.end()
        if not mark["_parameter"]:
            raise ValueError("a tag without its beginning")
        key = self._key(mark)
        end, place = self._value_end(mark.end(), {*arguments, key}, types)
        text = self._body[mark.end() : end]
        if re.search(self._markup.restart, text):
            raise ValueError("a value contains the beginning of another call")
        if self._markup.has_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        if key is None:  # a block with all arguments
            arguments.update(**json.loads(text))
        else:
            kind = mark.groupdict().get("kind")
            arguments[key] = self._markup.value(text, kind, types.get(key, frozenset()))
        return False, place

    def _value_end(self, start: int, given: set[str | None], types: Mapping[str, Types]) -> tuple[int, int]:
        """Return where a value ends, and where the text goes on. `_next` becomes the next mark's index."""
        closed = None
        for index in range(self._next, len(self._marks)):
            self._next, mark, before = index, self._marks[index], self._marks[index - 1]
            follows = closed is before and self._is_blank(before.end(), mark.start())
            if mark["_parameter_end"]:
                closed = mark
            elif mark["_parameter"]:
                if follows and self._key(mark) in given:
                    raise ValueError("a parameter is given twice")
                if follows or (closed is before and self._begins_function(before.end(), index)):
                    return before.start(), before.end()
                if self._may_be_next(mark, start, closed is None, given, types):
                    return mark.start(), mark.start()
            elif mark["_function_end"] and self._ends_function(index):
                if follows:
                    return before.start(), before.end()
                if closed is None and self._final:
                    return mark.start(), mark.start()
        self._next = len(self._marks)
        if self._final or not self._markup.function_end:
            last = self._marks[-1]
            is_last = self._is_blank(last.end(), len(self._body)) or self._begins_function(last.end(), self._next)
            if closed is last and is_last:
                return last.start(), last.end()
            if closed is None and self._final and not self._markup.function_end:
                return len(self._body), len(self._body)
        raise OpenBodyError("a value has no end")

    def _may_be_next(
        self, mark: re.Match[str], start: int, is_open: bool, given: set[str | None], types: Mapping[str, Types]
    ) -> bool:
        """Return whether a parameter's tag in a value is the next parameter, whose predecessor has no end tag.

        Raises ValueError if it is neither that nor certainly text.
        """
        is_new = self._key(mark) not in given and (self._key(mark) in types or not types)
        begins_line = self._body[max(start, mark.start() - REACH) : mark.start()].rstrip(" \t").endswith("\n")
        if is_new and begins_line and is_open:
            return True
        if is_new or begins_line:
            raise ValueError("a parameter has no end")
        return False

    def _begins_function(self, place: int, index: int) -> bool:
        """Return whether the text before a mark is the name of a function, in a notation without tags for it."""
        if self._markup.function:
            return False
        end = self._marks[index].start() if index < len(self._marks) else len(self._body)
        return end - place < _LONGEST_NAME and self._body[place:end].strip() in self._offer.functions

    def _ends_function(self, index: int) -> bool:
        """Return whether a function's end tag is followed by another function or the end."""
        end = self._marks[index].end()
        if index + 1 == len(self._marks):
            return self._is_blank(end, len(self._body))
        after = self._marks[index + 1]
        return bool(after["_function"]) and self._is_blank(end, after.start())

    def _key(self, mark: re.Match[str]) -> str | None:
        key = mark["key"]
        return None if key is None else self._markup.unescape(key.strip())

    def _is_blank(self, start: int, end: int) -> bool:
        return not self._body[start:end].strip()


def _by_kind(text: str, kind: str | None, types: Types) -> Any:
    """Return a value that names its type: `true` or `string` for strings, else JSON."""
    if kind in ("true", "string"):
        return text
    return typed_value(text, types) if kind is None else _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_cdata(text: str, kind: str | None, types: Types) -> Any:
    bare = text.strip()
    if bare.startswith("<![CDATA["):
        if not bare.endswith("]]>"):
            raise OpenBodyError("the block has no end")
        text = bare[len("<![CDATA[") : -len("]]>")]
    return typed_value(text, types)


SPACE = r"\s{0,64}"
_NAME = r"""["']?(?P<name>[^"'<>\n]{1,128})["']?"""
_KEY = r"""["']?(?P<key>[^"'<>\n]{1,256})["']?"""
QWEN_XML = Markup(
    r"<function=(?P<name>[^<>\n]{1,128})>",
    "</function>",
    r"<parameter=(?P<key>[^<>\n]{1,256})>",
    "</parameter>",
    f"</tool_call>{SPACE}<tool_call>",
    has_lines=True,
)


def _invokes(prefix: str, section: str, **more: Any) -> Markup:
    """Return a notation of `<invoke name=…>` and `<parameter name=…>`. prefix: what the names of tags begin with."""
    function, parameter = f"<{prefix}invoke name={_NAME}>", f"<{prefix}parameter name={_KEY}>"
    again = f"</{section}>{SPACE}<{section}>"
    return Markup(function, f"</{prefix}invoke>", parameter, f"</{prefix}parameter>", again, **more)


MINIMAX = _invokes("", "minimax:tool_call")
MUSE = _invokes("atem:", "atem:function_calls", value=lambda text, kind, types: _json_or_text(text))
MINICPM = Markup(
    f"<function name={_NAME}>",
    "</function>",
    f"<param name={_KEY}>",
    "</param>",
    f"</function>{SPACE}<function name=",
    value=_with_cdata,
)
DSML_BAR = "\uff5cDSML\uff5c"
DSML = Markup(
    f'<{DSML_BAR} ?invoke name="(?P<name>[^"\\n]{{1,128}})"(?P<empty>/)?>',
    f"</{DSML_BAR} ?invoke>",
    f'<{DSML_BAR} ?parameter name="(?P<key>[^"\\n]{{1,256}})"(?: string="(?P<kind>true|false)")?>',
    f"</{DSML_BAR} ?parameter>",
    f"</{DSML_BAR} ?(?:function_|tool_)?calls>{SPACE}<{DSML_BAR} ?(?:function_|tool_)?calls>",
    value=_by_kind,
)
KIMI_K3 = Markup(
    r'<\|open\|>call tool="(?P<name>[^"\n]{1,128})"[^<>\n]{0,64}<\|sep\|>',
    r"<\|close\|>call<\|sep\|>",
    r'<\|open\|>(?:argument key="(?P<key>[^"\n]{1,256})"(?: type="(?P<kind>\w{1,32})")?|json[^<>\n]{0,64})<\|sep\|>',
    r"<\|close\|>(?:argument|json)<\|sep\|>",
    rf"<\|close\|>tools<\|sep\|>{SPACE}<\|open\|>tools<\|sep\|>",
    value=_by_kind,
    unescape=lambda text: text.replace("&quot;", '"').replace("&amp;", "&"),
)


def glm_markup(prefix: str = "") -> Markup:
    """Return GLM's notation: a name, then keys and values in tags. prefix: what the names of tags begin with."""
    return Markup(
        "",
        "",
        f"<{prefix}arg_key>(?P<key>[^<>\\n]{{1,256}})</{prefix}arg_key>{SPACE}<{prefix}arg_value>",
        f"</{prefix}arg_value>",
        f"</{prefix}tool_call>{SPACE}<{prefix}tool_call>",
    )
