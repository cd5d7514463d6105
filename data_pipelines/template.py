"""A conversation in its target's chat template: the forms that it may take, and where the text has each part.

To find the parts of messages, the conversation is rendered again with marks around each part: noncharacters of Unicode,
which texts do not contain. If a template reads no more of a part than its tags and white space, the text is the same
without the marks.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_mlx.errors import DataError
from eagle_mlx.text import common_prefix

from .conversation import Conversation, Message

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = list[dict[str, Any]]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys for a message's reasoning in data sets and templates."""
_TAG = re.compile(r"(</?[^<>\s]{0,24}(?:think|channel)[^<>\s]{0,24}>|\[/?THINK\])", re.I)
"""Tags of reasoning in a content, at which templates split it."""
_ENDS = re.compile(r"</|<\|END|\[/|<channel\|", re.I)
"""The beginning of a tag that ends reasoning."""
_CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)", re.S)
"""The name and the text of a message in gpt-oss's format (openai/harmony). Headers of calls have further tags."""
_OPEN, _CLOSE, _ZERO = "\ufde0", "\ufde1", 0xFDD0
_MARK = re.compile("([\ufde0\ufde1])([\ufdd0-\ufddf]{4})")
"""The first or last character of a part, and its number in four digits of base 16."""
_MOST_PARTS = 16**4
"""The numbers that four digits can hold. Parts beyond it are not marked."""


class ChatTemplate(NamedTuple):
    """A chat template with the tools of one conversation."""

    tokenizer: TokenizerWrapper
    options: dict[str, Any]
    origin: str
    shape: Callable[[Messages], Messages] = list

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, conversation: Conversation) -> ChatTemplate:
        """Return the template for a conversation. Raises DataError if the target has none."""
        if not tokenizer.has_chat_template:
            raise DataError(f"{conversation.origin}: no chat template: give --chat-template, or rows with `text`")
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
    role: str
    kind: str
    """`text`, `reasoning` or `tool calls`."""


class Point(NamedTuple):
    """The first place in a text at which a part begins or ends."""

    at: int
    part: int


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
        parts.append(MessageString(message, messages[message]["role"], kind))
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
    """A conversation in the form that its template takes, rendered, and where the text has each part."""

    template: ChatTemplate
    messages: Messages
    text: str
    parts: list[MessageString]
    points: list[Point]
    """In the text's order."""
    opaque: frozenset[int]
    """Parts that the template does not just copy. They may be anywhere."""

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, conversation: Conversation, prompt: bool = False) -> RenderedChat:
        """Render a conversation, or the `prompt` for an answer, in the first form in which the fewest messages vanish.

        Raises DataError if the template refuses all forms: contents as lists of parts, arguments of calls as JSON.
        """
        template = ChatTemplate.of(tokenizer, conversation)
        messages = list(map(_as_dict, conversation.messages))
        chats: list[RenderedChat] = []
        errors: list[DataError] = []
        shapes: tuple[Callable[[Messages], Messages], ...] = (list, _typed_contents, _argument_texts)
        for shape, form in product(shapes, _forms(messages)):
            try:
                chats.append(cls._marked(template._replace(shape=shape), form, prompt))
            except DataError as e:
                errors.append(e)
                continue
            if not chats[-1].vanished:
                return chats[-1]
        if not chats:
            raise errors[0]
        return min(chats, key=lambda chat: chat.vanished)

    @classmethod
    def _marked(cls, template: ChatTemplate, messages: Messages, prompt: bool) -> RenderedChat:
        text = template.text(messages, prompt)

        def points(only: Collection[int]) -> list[Point] | None:
            try:
                plain, places = strip(template.text(marked(messages, only)[0], prompt))
            except DataError:
                return None
            return places if plain == text else None

        parts = marked(messages, ())[1]
        clear: Sequence[int] = range(min(len(parts), _MOST_PARTS))
        result = points(clear)
        if result is None:
            clear = [part for part in clear if points([part]) is not None]
            result = points(clear)
        opaque = frozenset(range(len(parts))).difference(() if result is None else clear)
        return cls(template, messages, text, parts, result or [], opaque)

    @property
    def _present(self) -> frozenset[int]:
        return self.opaque.union(point.part for point in self.points)

    @property
    def dropped(self) -> list[MessageString]:
        present = self._present
        return [part for number, part in enumerate(self.parts) if number not in present]

    @property
    def shown(self) -> set[int]:
        """Messages of which the template renders a part."""
        return {self.parts[number].message for number in self._present}

    @property
    def vanished(self) -> int:
        """Number of messages, except the assistant's, whose text the template drops."""
        return len({part.message for part in self.parts if part.role != "assistant"} - self.shown)


class TokenPlaces(NamedTuple):
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


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a message with its reasoning under each name that templates read."""
    given = message.as_dict()
    thoughts = [given[key] for key in REASONING if key in given]
    return {**dict.fromkeys(REASONING, thoughts[0]), **given} if thoughts else given


def _forms(messages: Messages) -> list[Messages]:
    """Return the messages, then without roles that a template may not take: developer, a late system, any system."""
    as_system = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    late = [{**m, "role": "user"} if m["role"] == "system" and at else m for at, m in enumerate(as_system)]
    forms = [messages, as_system, late, _system_in_user(late)]
    return [messages, *(form for before, form in pairwise(forms) if form != before)]


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
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _argument_texts(messages: Messages) -> Messages:
    def text(call: Any) -> Any:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": text(call["function"])}
        arguments = call.get("arguments")
        return call if isinstance(arguments, str) else {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}

    return [{**m, "tool_calls": list(map(text, m["tool_calls"]))} if m.get("tool_calls") else m for m in messages]


def answer_message(tokenizer: TokenizerWrapper, prompt: Conversation, text: str) -> Message:
    """Return the assistant's message that the template writes as a target's answer to a prompt.

    Most answers are contents, also with whole thoughts, since templates split them. But a thought that was cut before
    its end is reasoning, and gpt-oss's channels are parts of a message.
    """
    plain = Message("assistant", text)
    if parts := _CHANNEL.findall(text):
        thoughts = "".join(part for name, part in parts if name == "analysis")
        content = "".join(part for name, part in parts if name != "analysis")
        other = Message("assistant", content, {"thinking": thoughts} if thoughts else {})
        return plain if _writes(tokenizer, prompt, plain, text) else other
    if tokenizer.has_thinking and tokenizer.think_end not in text:
        thought = text.strip().removeprefix(tokenizer.think_start).strip("\n")
        cut = Message("assistant", "", {"reasoning_content": thought})
        return cut if _writes(tokenizer, prompt, cut, text) else plain
    return plain


def _writes(tokenizer: TokenizerWrapper, prompt: Conversation, message: Message, text: str) -> bool:
    answered = replace(prompt, messages=(*prompt.messages, message))
    try:
        before, whole = RenderedChat.of(tokenizer, prompt, prompt=True), RenderedChat.of(tokenizer, answered)
    except DataError:
        return False
    return whole.text.startswith(before.text + text)
