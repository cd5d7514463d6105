"""A conversation in its target's chat template: the forms that it may take, and where the text has each part.

To find the parts of messages, the conversation is rendered again with marks around each part. Marks are noncharacters
of Unicode, which texts do not contain. They do not change what a template does with a part, if it reads no more than
its tags and white space: without the marks, the text is the same.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_mlx.errors import DataError

from .conversation import Conversation, Message

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = list[dict[str, Any]]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys for a message's reasoning in data sets and templates."""
_TAG = re.compile(r"(</?[^<>\s]{0,24}(?:think|channel)[^<>\s]{0,24}>|\[/?THINK\])", re.I)
"""Tags of reasoning in a content, at which templates split it."""
_ENDS = re.compile(r"</|<\|END|\[/|<channel\|", re.I)
"""How a tag begins that ends reasoning."""
_OPEN, _CLOSE, _ZERO = "\ufde0", "\ufde1", 0xFDD0
_MARK = re.compile("([\ufde0\ufde1])([\ufdd0-\ufddf]{4})")
"""The first or last character of a part, and its number in four digits of base 16."""
_MOST_PARTS = 16**4
"""The numbers that four digits can hold. Parts beyond it are not marked."""


class ChatTemplate(NamedTuple):
    """A chat template with the tools of one conversation."""

    tokenizer: TokenizerWrapper
    options: dict[str, Any]
    """The conversation's tools, if it has any."""
    origin: str
    shape: Callable[[Messages], Messages] = list
    """Changes the form of contents or arguments."""

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, conversation: Conversation) -> ChatTemplate:
        """Return the template for a conversation. Raises DataError if the target has none."""
        if not tokenizer.has_chat_template:
            raise DataError(f"{conversation.origin}: the target has no chat template; use rows with `text`")
        options = {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}
        return cls(tokenizer, options, conversation.origin)

    def text(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Render messages. Raises DataError if the template refuses them."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.shape(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.options
            )
        except Exception as e:  # templates may raise anything
            raise DataError(f"{self.origin}: the chat template refuses this conversation: {e}") from e
        return text

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class MessageString(NamedTuple):
    """A string of a message, of which every template renders all or nothing."""

    message: int
    kind: str
    """`text`, `reasoning` or `tool calls`."""


class Point(NamedTuple):
    """The first place in a text at which a part begins or ends."""

    at: int
    part: int


class Marking(NamedTuple):
    """Where a text has the parts of its messages."""

    parts: list[MessageString]
    points: list[Point]
    """In the text's order."""
    opaque: frozenset[int]
    """Parts that the template does more with than to copy them. They may be anywhere."""

    @classmethod
    def of(cls, render: Callable[[Messages], str], messages: Messages, text: str) -> Marking:
        """Find the messages' parts in the text that `render` makes from them."""

        def points(only: Collection[int]) -> list[Point] | None:
            try:
                plain, found = strip(render(marked(messages, only)[0]))
            except DataError:
                return None
            return found if plain == text else None

        parts = marked(messages, ())[1]
        everything = range(min(len(parts), _MOST_PARTS))
        result = points(everything)
        clear = everything if result is not None else [part for part in everything if points([part]) is not None]
        result = points(clear) if result is None else result
        seen = clear if result is not None else ()
        return cls(parts, result or [], frozenset(range(len(parts))).difference(seen))

    @property
    def dropped(self) -> list[MessageString]:
        """The parts that the template drops."""
        present = {point.part for point in self.points}
        return [part for number, part in enumerate(self.parts) if number not in present | self.opaque]

    @property
    def lost(self) -> frozenset[int]:
        """Messages that have parts, of which the template drops all."""
        present = {self.parts[number].message for number in {point.part for point in self.points} | self.opaque}
        return frozenset(part.message for part in self.parts) - present


def strip(text: str) -> tuple[str, list[Point]]:
    """Return a text without its marks, and the first place of each mark."""
    places: dict[str, Point] = {}
    for index, match in enumerate(_MARK.finditer(text)):
        number = int("".join(f"{ord(digit) - _ZERO:x}" for digit in match[2]), 16)
        places.setdefault(match[0], Point(match.start() - index * len(match[0]), number))
    return _MARK.sub("", text), list(places.values())


def mark(text: str, number: int) -> str:
    """Return a text with marks around it, inside its white space."""
    core, digits = text.strip(), "".join(chr(_ZERO + int(digit, 16)) for digit in f"{number:04x}")
    begin = text.index(core)
    return f"{text[:begin]}{_OPEN}{digits}{core}{_CLOSE}{digits}{text[begin + len(core) :]}"


def marked(messages: Messages, only: Collection[int]) -> tuple[Messages, list[MessageString]]:
    """Return messages with marks around the parts with the given numbers, and all parts."""
    parts: list[MessageString] = []

    def part(text: str, message: int, kind: str) -> str:
        if not text.strip():
            return text
        parts.append(MessageString(message, kind))
        return mark(text, len(parts) - 1) if len(parts) - 1 in only else text

    def content(text: str, message: int, split: bool) -> str:
        pieces = _TAG.split(text) if split else [text]
        ends = [bool(_ENDS.match(tag)) for tag in pieces[1::2]] + [False]
        for at, end in enumerate(ends):
            pieces[2 * at] = part(pieces[2 * at], message, "reasoning" if end else "text")
        return "".join(pieces)

    def leaves(value: Any, message: int) -> Any:
        if isinstance(value, str):
            return part(value, message, "tool calls")
        if isinstance(value, Mapping):
            return {key: leaves(item, message) for key, item in value.items()}
        return [leaves(item, message) for item in value] if isinstance(value, list) else value

    def call(value: Mapping[str, Any], message: int) -> dict[str, Any]:
        own = {key: leaves(value[key], message) for key in ("name", "arguments") if key in value}
        inner = value.get("function")
        return {**value, **own, **({"function": call(inner, message)} if isinstance(inner, Mapping) else {})}

    def changed(message: dict[str, Any], at: int) -> Iterator[tuple[str, Any]]:
        thoughts: dict[str, str] = {}
        for key, value in message.items():
            if key == "content":
                yield key, content(value, at, message["role"] == "assistant")
            elif key in REASONING and isinstance(value, str):  # the same text under several keys is one part
                thoughts[value] = thoughts.get(value) or part(value, at, "reasoning")
                yield key, thoughts[value]
            elif key == "tool_calls" and value:
                yield key, [call(item, at) for item in value]
            else:
                yield key, value

    return [dict(changed(message, at)) for at, message in enumerate(messages)], parts


class RenderedChat(NamedTuple):
    """A conversation in the form that its template takes, rendered."""

    template: ChatTemplate
    messages: Messages
    text: str
    marking: Marking
    """Where the text has the parts of the messages."""

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, conversation: Conversation, prompt: bool = False) -> RenderedChat:
        """Render a conversation in the first form in which the fewest messages vanish.

        With `prompt`, the assistant is to answer. Raises DataError if the template refuses all forms.
        """
        template = ChatTemplate.of(tokenizer, conversation)
        messages = list(map(_as_dict, conversation.messages))
        chats: list[RenderedChat] = []
        errors: list[DataError] = []
        for shape in (list, _typed_contents, _argument_texts):
            for form in _forms(messages):
                try:
                    chats.append(cls._rendered(template._replace(shape=shape), form, prompt))
                except DataError as e:
                    errors.append(e)
                    continue
                if not chats[-1].vanished:
                    return chats[-1]
        if not chats:
            raise errors[0]
        return min(chats, key=lambda chat: chat.vanished)

    @classmethod
    def _rendered(cls, template: ChatTemplate, messages: Messages, prompt: bool) -> RenderedChat:
        text = template.text(messages, prompt)
        return cls(template, messages, text, Marking.of(lambda changed: template.text(changed, prompt), messages, text))

    @property
    def vanished(self) -> int:
        """Number of messages, except the assistant's, whose text the template drops."""
        return sum(self.messages[number]["role"] != "assistant" for number in self.marking.lost)


@dataclass(frozen=True)
class TokenPlaces:
    """The tokens of a text, and their places in it."""

    chat: RenderedChat
    tokens: list[int]
    offsets: Sequence[tuple[int, int]] | None
    """First and last character of each token; None if the tokenizer does not tell."""

    @classmethod
    def of(cls, chat: RenderedChat) -> TokenPlaces:
        tokens, tokenizer = chat.template.encode(chat.text), chat.template.tokenizer
        if not tokenizer.is_fast:
            return cls(chat, tokens, None)
        encoded = tokenizer._tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return cls(chat, tokens, encoded["offset_mapping"] if encoded["input_ids"] == tokens else None)

    def before(self, at: int) -> tuple[int, bool]:
        """Return how many tokens end before or at a place in the text, and whether the place is within the next one."""
        if self.offsets is not None:
            count = bisect_right(self.offsets, at, key=itemgetter(1))
            return count, count < len(self.offsets) and self.offsets[count][0] < at
        before = self.chat.template.encode(self.chat.text[:at])
        count = common_prefix(before, self.tokens)
        return count, count < len(before)


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a message with its reasoning under each name that templates read."""
    given = message.as_dict()
    thoughts = [given[key] for key in REASONING if key in given]
    return {**dict.fromkeys(REASONING, thoughts[0]), **given} if thoughts else given


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, then without roles that a template may not take: developer, a late system, any system."""
    yield messages
    last = messages
    for change in (_developer_as_system, _late_system_as_user, _system_in_user):
        changed = change(last)
        if changed != last:
            yield changed
        last = changed


def _developer_as_system(messages: Messages) -> Messages:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _late_system_as_user(messages: Messages) -> Messages:
    return [{**m, "role": "user"} if m["role"] == "system" and at else m for at, m in enumerate(messages)]


def _system_in_user(messages: Messages) -> Messages:
    """Return messages without system messages; messages of the user that follow each other are joined."""
    joined: Messages = []
    for message in messages:
        message = {**message, "role": "user"} if message["role"] == "system" else message
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _typed_contents(messages: Messages) -> Messages:
    """Return messages with contents as lists of parts, for templates that read nothing else."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _argument_texts(messages: Messages) -> Messages:
    """Return messages with call arguments as JSON, for templates that cannot take objects."""

    def text(call: Any) -> Any:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": text(call["function"])}
        arguments = call.get("arguments")
        return call if isinstance(arguments, str) else {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}

    return [{**m, "tool_calls": list(map(text, m["tool_calls"]))} if m.get("tool_calls") else m for m in messages]
