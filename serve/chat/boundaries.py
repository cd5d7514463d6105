"""Where the prompts of other requests part from a chat's: behind the system prompt, and behind the last message.

A template may write a message otherwise once another follows it, and leave thoughts out. So it is asked: the chat is
written with another question, and with one more turn, and what stays the same is what they have in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

_KEPT = 32
"""Beginnings of chats whose tokens are remembered: system prompts, of which a server sees few."""

Render = Callable[[list[dict[str, Any]], Mapping[str, Any]], str]
"""Messages, and what else the template takes -> the chat's text."""


class Boundaries:
    """Finds them for one tokenizer. Any thread may use this."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tokens: OrderedDict[str, list[int]] = OrderedDict()

    def find(
        self,
        render: Render,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        prompt: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> tuple[int, ...]:
        """How many tokens of a prompt others may have in common with it, in order.

        messages, arguments: what the prompt was rendered of. encode: a text's tokens, with no special ones added.
        """
        text = render([dict(message) for message in messages], arguments)
        places = {_common(text, other) for other in _others(render, messages, arguments)}
        counts = {self._count(text, place, prompt, encode) for place in places if 0 < place < len(text)}
        return tuple(sorted(counts))

    def _count(self, text: str, place: int, prompt: Sequence[int], encode: Callable[[str], list[int]]) -> int:
        """Tokens of a prompt that lie before a place in its text; the shorter side is encoded."""
        if len(text) - place < place:
            tail = encode(text[place:])
            if tail and list(prompt[-len(tail) :]) == tail:
                return len(prompt) - len(tail)
        head = self._encoded(text[:place], encode)
        both = min(len(head), len(prompt))
        return next((at for at in range(both) if head[at] != prompt[at]), both)

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        with self._lock:
            if text in self._tokens:
                self._tokens.move_to_end(text)
                return self._tokens[text]
        tokens = encode(text)
        with self._lock:
            self._tokens[text] = tokens
            if len(self._tokens) > _KEPT:
                self._tokens.popitem(last=False)
        return tokens


def _others(render: Render, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[str]:
    """Texts of chats that may come: another question, the next turn, and this one before anybody answers."""
    chat = [dict(message) for message in messages]
    system = next((at for at, message in enumerate(chat) if message["role"] != "system"), len(chat))
    first = str(chat[system]["content"]).lstrip() if system < len(chat) else ""
    question = {"role": "user", "content": "!" if first.startswith("?") else "?"}
    answer = {"role": "assistant", "content": "!"}
    asked = [
        ([*chat[:system], question], arguments),
        ([*chat, answer, question], arguments),
        (chat, {**arguments, "add_generation_prompt": False}),
    ]
    texts = []
    for each, how in asked:
        try:
            texts.append(render(each, how))
        except Exception:  # a template is a program of its own: where it refuses such a chat, none will come
            continue
    return texts


def _common(a: str, b: str) -> int:
    """Letters that two texts begin with in common, by halves: to look at each would take longer than to encode them."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if a[same:middle] == b[same:middle] else (same, middle - 1)
    return same
