"""A model's chat format: its template, tools and reasoning tags, the prompts that it makes, and where prompts part.

Prompts of other requests part from a chat's after the system prompt and after the last message. A template may write a
message otherwise once another follows it, and leave reasoning out. So the chat is also rendered with another question
and with one more turn; what stays the same is what they share.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from eagle_mlx.errors import PromptError
from eagle_mlx.target import Target

from .messages import Message, read_messages, with_argument_texts, with_late_instructions_said
from .parser import ReasoningTags
from .tools import Tool, ToolCallTags, ToolOffer
from .volatile import Changes, Volatile, certain_text

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


_FROM_REQUESTS = {"add_generation_prompt"}
_RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - _FROM_REQUESTS
"""Arguments of the rendering itself: a request has its own fields for some, and no business with the others."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model wants its chats written, and how it tags its own thoughts and calls."""

    tokenizer: TokenizerWrapper | None
    thoughts: ReasoningTags
    calls: ToolCallTags | None
    """None where mlx-lm has no parser for the model's calls."""
    volatile: Volatile = field(default_factory=Volatile)
    """What is left out of system prompts."""
    _boundaries: Boundaries = field(default_factory=Boundaries, compare=False, repr=False)
    _changes: Changes = field(default_factory=Changes, compare=False, repr=False)

    @classmethod
    def of(cls, target: Target, volatile: Volatile | None = None) -> ChatFormat:
        """Read a target's tokenizer; one without a tokenizer has no chat format either, as `has_chat_template` says."""
        volatile = volatile or Volatile()
        tokenizer = target.tokenizer
        if tokenizer is None:
            return cls(None, ReasoningTags(), None, volatile)
        return cls(tokenizer, _reasoning_tags(tokenizer), _tool_call_tags(tokenizer), volatile)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.has_chat_template)

    @property
    def has_tool_calling(self) -> bool:
        return self.calls is not None

    @property
    def has_thinking(self) -> bool:
        return bool(self.thoughts.think_start)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        check_text: Callable[[str], None] = lambda _: None,
        encode: Callable[[str, bool], list[int]] | None = None,
    ) -> list[int]:
        """The token ids of a chat that the model is to answer.

        messages, tools, tool_choice: as in OpenAI's API; of calls' arguments both objects and JSON texts are read.
        template_kwargs: what else the template takes, such as `enable_thinking`; names that it does not know are of no
        effect, as in the template itself. check_text: called with the chat's text before it is encoded, to raise where
        that is too long. encode: what encodes the text in the tokenizer's place (the second argument, false, asks for
        no more special tokens than the template wrote), but where the tokenizer has ways of its own with chats. Raises
        PromptError, with the place, for what cannot be used, and where the template would leave tools or calls out.
        """
        said, offer = read_messages(messages), ToolOffer.of(tools, tool_choice)
        arguments = {"add_generation_prompt": True, **_check_kwargs(template_kwargs or {})}
        if not self.has_chat_template:
            raise PromptError("messages: this model has no chat template; give it text through /v1/completions")
        if offer.tools and self.calls is None:
            raise PromptError(
                "tools: mlx-lm has no parser for this model's tool calls; where one fits, name it as tool_parser_type "
                "in the model's tokenizer_config.json"
            )
        arguments["tools"] = [dict(tool) for tool in offer.tools] or None
        check_text(certain_text(said))  # before anything searches the text, or renders it
        try:
            read, text = self._rendered(self.volatile.left_out(said), arguments)
        except Exception as e:  # a template is a program of its own, and raises what it wants
            raise PromptError(f"messages: the model's chat template refuses them: {e}") from e
        check_text(text)
        self._check_nothing_left_out(read, arguments, text)
        assert self.tokenizer is not None
        if encode is not None and _encodes_the_text(self.tokenizer):
            return encode(text, False)
        return list(self.tokenizer.apply_chat_template(read, tokenize=True, **arguments))

    def boundaries(
        self,
        prompt: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        encode: Callable[[str, bool], list[int]] | None = None,
    ) -> tuple[int, ...]:
        """How many tokens of a prompt that `prompt` made of the same later ones may begin with.

        None where the tokens of a chat are not those of its text.
        """
        tokenizer = self.tokenizer
        if tokenizer is None or not _encodes_the_text(tokenizer):
            return ()
        arguments = {"add_generation_prompt": True, **_check_kwargs(template_kwargs or {})}
        arguments["tools"] = [dict(tool) for tool in ToolOffer.of(tools, tool_choice).tools] or None
        read, _ = self._rendered(self._read(messages), arguments)

        def encoded(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False)) if encode is None else encode(text, False)

        return self._boundaries.find(self._render, read, arguments, prompt, encoded)

    def changed(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str | None:
        """What is to be said of a chat that goes on as an earlier one but for one part (`Changes`)."""
        return self._changes.note(self._read(messages), tools)

    def _read(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return self.volatile.left_out(read_messages(messages))

    def _rendered(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], str]:
        """The text, and the messages in the form that gave it.

        Some templates join the arguments of calls to text, and some refuse instructions behind the first turn.
        """
        try:
            return messages, self._render(messages, arguments)
        except TypeError:
            messages = with_argument_texts(messages)
            return messages, self._render(messages, arguments)
        except Exception:  # a template is a program of its own, and raises what it wants
            said = with_late_instructions_said(messages)
            if said == messages:
                raise
            return self._rendered(said, arguments)

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    def _check_nothing_left_out(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any], text: str) -> None:
        """Templates do not say what they ignore: what can be left out without a difference is ignored."""
        if arguments["tools"] and self._same(messages, {**arguments, "tools": None}, text):
            raise PromptError("tools: this model's chat template ignores tools, so the model would not know of them")
        calling = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
        if calling is None:
            return
        silent = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
        if self._same(silent, arguments, text):
            raise PromptError(f"messages[{calling}].tool_calls: this model's chat template ignores tool calls")

    def _same(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any], text: str) -> bool:
        try:
            return self._render(messages, arguments) == text
        except Exception:  # without what is left out there is no such prompt
            return False

    def starts_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends in an open thought, so that the answer continues with it."""
        start = self.thoughts.think_start
        if self.tokenizer is None or not start:
            return False
        end: str = self.tokenizer.decode(list(prompt[-len(start) - 8 :]))
        return end.rstrip().endswith(start)


def _encodes_the_text(tokenizer: TokenizerWrapper) -> bool:
    """Whether a chat's tokens are those of its text; some tokenizers, as Mistral's own, find them in another way."""
    kind = type(tokenizer._tokenizer)
    ways = ("__call__", "encode", "apply_chat_template")
    return all(getattr(kind, name) is getattr(PreTrainedTokenizerBase, name) for name in ways)


def _check_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise PromptError("chat_template_kwargs: must be an object")
    if reserved := sorted(kwargs.keys() & _RESERVED):
        raise PromptError(f"chat_template_kwargs: {reserved[0]!r} cannot be set by a request")
    if not isinstance(kwargs.get("add_generation_prompt", True), bool):
        raise PromptError("chat_template_kwargs: add_generation_prompt must be true or false")
    return dict(kwargs)


def _tool_call_tags(tokenizer: TokenizerWrapper) -> ToolCallTags | None:
    if not tokenizer.has_tool_calling:
        return None
    parser = tokenizer.tool_parser
    name = str(getattr(parser, "__module__", "")).rsplit(".", 1)[-1]
    return ToolCallTags(tokenizer.tool_call_start, tokenizer.tool_call_end or "", parser, name)


def _reasoning_tags(tokenizer: TokenizerWrapper) -> ReasoningTags:
    """The think tags, the tags that only give an answer its shape, and a template's own states."""
    names = {"normal": "content"}
    edges: dict[str, list[tuple[str, str]]] = {}
    if tokenizer.has_thinking:
        edges["reasoning"] = [(tokenizer.think_end, "content")]
    edges["content"] = [(tag, "content") for tag in tokenizer.structural_markers]
    for state, leads in tokenizer.response_transitions.items():
        known = edges.setdefault(names.get(state, state), [])
        known += [(tag, names.get(to, to)) for tag, to in leads if to != "tool"]
    return ReasoningTags(
        tokenizer.think_start or "",
        tokenizer.think_end or "",
        edges,
        names.get(i := tokenizer.response_initial_state or "", i),
    )
