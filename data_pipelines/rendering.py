"""Render conversations as tokens with the target's chat template, and a loss mask on the assistant's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import DataError
from eagle_mlx.progress import counted
from eagle_mlx.text import template_args

from .conversation import Conversation, Message

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys for a message's reasoning in data sets and templates."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue0f0\ue0f1"
"""Private-use characters that replace a message's content in order to locate it."""


class Rendered(NamedTuple):
    tokens: list[int]
    loss_mask: list[int]
    """1 on the tokens to learn: the assistant's text and the token that ends its turn."""


class Sample(NamedTuple):
    """A rendered conversation to learn from."""

    tokens: list[int]
    loss_mask: list[int]
    key: int
    """The conversation's `prompt_key`."""


class Unrendered(NamedTuple):
    """The parts of a conversation that a chat template silently drops."""

    parts: tuple[str, ...] = ()
    """Such as `tool calls`, `tool results`, `tools` or `reasoning`."""
    turns: frozenset[int] = frozenset()
    """Indices of assistant messages that render as nothing. They are not learned."""
    answers: int = 0
    """Number of assistant messages that render as something."""


@dataclass
class RenderReport:
    """Counts of rendered conversations, and of what the chat template drops from them."""

    conversations: int = 0
    """Conversations that are kept."""
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    """Conversations that `max_length` shortened."""
    dropped: int = 0
    """Conversations dropped because `max_length` cut off all of the assistant's tokens."""
    unusable: int = 0
    """Conversations dropped because they have no answer or the chat template refuses them."""
    parts: Counter[str] = field(default_factory=Counter)
    """Number of conversations by dropped part, such as `tool calls`."""
    empty: int = 0
    """Conversations without anything to learn, because every answer renders as nothing."""
    empty_turns: int = 0
    """Answers in the other conversations that render as nothing. They are not learned."""

    def add(self, lost: Unrendered) -> bool:
        """Count what the template drops from one conversation; return whether it has tokens to learn from."""
        self.parts.update(lost.parts)
        if lost.turns and not lost.answers:
            self.empty += 1
            return False
        self.empty_turns += len(lost.turns)
        return True

    def notes(self, target: str) -> list[str]:
        """Return one line for each part that a target's chat template drops."""
        lost = [
            f"the chat template of {target} does not render {part}: {counted(count, 'conversation')} affected"
            for part, count in sorted(self.parts.items())
        ]
        skipped = [f"{counted(self.empty, 'conversation')} skipped"] * bool(self.empty)
        skipped += [f"{counted(self.empty_turns, 'turn')} of other conversations not learned"] * bool(self.empty_turns)
        return [*lost, *([f"answers that render as nothing: {', '.join(skipped)}"] if skipped else [])]


class _Template(NamedTuple):
    """A chat template with the tools of one conversation."""

    tokenizer: TokenizerWrapper
    options: dict[str, Any]
    """The conversation's tools, if it has any."""
    origin: str

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, conversation: Conversation) -> _Template:
        if not tokenizer.has_chat_template:
            raise DataError(f"{conversation.origin}: the target has no chat template; use rows with `text`")
        options = {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}
        return cls(tokenizer, options, conversation.origin)

    def text(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.options
            )
        except Exception as e:  # templates may raise anything
            raise DataError(f"{self.origin}: the chat template refuses this conversation: {e}") from e
        return text

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def render_all(
    tokenizer: TokenizerWrapper, conversations: Iterable[Conversation], max_length: int, skip_bad: bool = False
) -> tuple[list[Sample], RenderReport]:
    """Render conversations; drop those without an answer in their first `max_length` tokens. The report counts them.

    Conversations are also dropped if every answer renders as nothing and, with `skip_bad`, if `render` refuses them.
    """
    kept: list[Sample] = []
    report = RenderReport()
    for conversation in conversations:
        try:
            whole, lost = _learned(tokenizer, conversation)
        except DataError:
            if not skip_bad:
                raise
            report.unusable += 1
            continue
        if not report.add(lost):
            continue
        rendered = Sample(whole.tokens[:max_length], whole.loss_mask[:max_length], conversation.prompt_key())
        report.cut += len(whole.tokens) > max_length
        if not any(rendered.loss_mask):
            report.dropped += 1
            continue
        kept.append(rendered)
        report.conversations += 1
        report.tokens += len(rendered.tokens)
        report.loss_tokens += sum(rendered.loss_mask)
    return kept, report


def render(tokenizer: TokenizerWrapper, conversation: Conversation) -> Rendered:
    """Return the tokens and the loss mask of one conversation.

    Plain text is learned from end to end. In messages, the assistant's part is learned: between the template's `{%
    generation %}` tags, or found by rendering the conversation up to each answer. Answers that render as nothing are
    not learned. Raises DataError with the conversation's origin if there is no such part, or if the template refuses
    the conversation.
    """
    return _learned(tokenizer, conversation)[0]


def _learned(tokenizer: TokenizerWrapper, conversation: Conversation) -> tuple[Rendered, Unrendered]:
    """Examine a conversation that must have something to learn."""
    if conversation.text is None and not any(m.role == "assistant" for m in conversation.messages):
        raise DataError(
            f"{conversation.origin}: no assistant turn, so there is nothing to learn; remove the row, or let the "
            "target answer it with `eagle-data regenerate`"
        )
    return examine(tokenizer, conversation)


def examine(tokenizer: TokenizerWrapper, conversation: Conversation) -> tuple[Rendered, Unrendered]:
    """Render a whole conversation, even without an answer, and find what the template drops. Raises like `render`."""
    if conversation.text is not None:
        tokens = list(tokenizer.encode(conversation.text))
        return Rendered(tokens, [1] * len(tokens)), Unrendered()
    template, messages = _Template.of(tokenizer, conversation), _dicts(conversation.messages)
    text = template.text(messages)
    tokens, lost = template.encode(text), _left_out(template, messages, text)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    spans = _tagged_spans(template, messages, text, tokens)
    if spans is None:
        learned = [turn for turn in turns if turn not in lost.turns]
        spans = _found_spans(template, messages, learned, text, tokens)
    elif len(spans) == len(turns):  # otherwise, empty answers have no span.
        spans = [span for span, turn in zip(spans, turns, strict=True) if turn not in lost.turns]
    return Rendered(tokens, _mask(tokens, spans, frozenset(tokenizer.eos_token_ids))), lost


def _left_out(template: _Template, messages: Messages, text: str) -> Unrendered:
    """Find what a template ignores: removing such a part does not change the text."""

    def same(others: Messages, using: _Template = template) -> bool:
        try:
            return using.text(others) == text
        except DataError:  # the template may need the part, so it does read it
            return False

    def without(keys: Collection[str], start: int = 0) -> Messages:
        return [
            {key: value for key, value in m.items() if at < start or key not in keys} for at, m in enumerate(messages)
        ]

    def silent(turn: int) -> bool:
        message = messages[turn]
        if message["role"] != "assistant" or message["content"].split("</think>")[-1].strip():
            return False
        bare = {key: message[key] for key in ("role", "name") if key in message} | {"content": ""}
        return message == bare or same([*messages[:turn], bare, *messages[turn + 1 :]])

    # Many templates drop reasoning before the last user message on purpose, so only later reasoning counts.
    recent = max((at for at, m in enumerate(messages) if m["role"] == "user"), default=0)
    results = [{**m, "content": _MARK} if m["role"] == "tool" and m["content"] else m for m in messages]
    parts = {
        "reasoning": any(k in m for m in messages[recent:] for k in _REASONING) and same(without(_REASONING, recent)),
        "tool calls": any("tool_calls" in m for m in messages) and same(without(("tool_calls",))),
        "tool results": results != messages and same(results),
        "tools": bool(template.options) and same(messages, template._replace(options={})),
    }
    empty = frozenset(filter(silent, range(len(messages))))
    answers = sum(m["role"] == "assistant" for m in messages) - len(empty)
    return Unrendered(tuple(part for part, lost in parts.items() if lost), empty, answers)


def all_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens of a conversation, with or without an answer. Raises DataError as `render` does."""
    if conversation.text is not None:
        return list(tokenizer.encode(conversation.text))
    template = _Template.of(tokenizer, conversation)
    return template.encode(template.text(_dicts(conversation.messages)))


def prompt_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens up to the assistant's next answer, without trailing answers. Raises like `render`."""
    template, messages = _Template.of(tokenizer, conversation), list(conversation.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    return template.encode(template.text(_dicts(messages), add_generation_prompt=True))


def _dicts(messages: Iterable[Message]) -> Messages:
    return [m.as_dict() for m in messages]


def _mask(tokens: Sequence[int], spans: Iterable[Span], ends: frozenset[int]) -> list[int]:
    """Return the loss mask. A turn ends with the first end token in its span or directly after it."""
    mask = [0] * len(tokens)
    for start, end in spans:
        stop = next((i + 1 for i in range(start, min(end + 1, len(tokens))) if tokens[i] in ends), end)
        mask[start:stop] = [1] * (stop - start)
    return mask


def _tagged_spans(template: _Template, messages: Messages, text: str, tokens: list[int]) -> list[Span] | None:
    """Return token spans from the `{% generation %}` tags, or None if there are none or they mark nothing."""
    tokenizer = template.tokenizer
    source = tokenizer.chat_template
    if not isinstance(source, str) or not _GENERATION_TAG.search(source) or not tokenizer.is_fast:
        return None
    # mlx-lm's wrapper forces return_dict=False, and then transformers returns no mask.
    encoded = tokenizer._tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **{"enable_thinking": tokenizer.has_thinking, **template_args(tokenizer), **template.options},
    )
    if encoded["input_ids"] != tokens or not any(encoded["assistant_masks"]):
        return None
    edges = [0, *encoded["assistant_masks"], 0]
    starts = [i for i in range(len(tokens)) if edges[i + 1] and not edges[i]]
    offsets = [*encoded["offset_mapping"], (len(text), len(text))]
    return [(i, _whole_characters(offsets, edges.index(0, i + 1) - 1)) for i in starts]


def _whole_characters(offsets: Sequence[Span], end: int) -> int:
    """Move a span's end past tokens that share its last character; transformers marks only the first of them."""
    while offsets[end][0] < offsets[end - 1][1]:
        end += 1
    return end


def _found_spans(
    template: _Template, messages: Messages, turns: Sequence[int], text: str, tokens: list[int]
) -> list[Span]:
    """Return the token spans of the messages `turns`. Raises DataError if one cannot be found."""
    spans = []
    for turn in turns:
        span = _by_prefix(template, messages, turn, text) or _by_substitution(template, messages, turn, text)
        if span is None:
            raise DataError(
                f"{template.origin}: message {turn + 1} cannot be found in the rendered conversation, so there is no "
                "loss mask for it; use a template with {% generation %} tags, or split the conversation so that each "
                "part ends with one answer"
            )
        start, through = common_prefix(template.encode(text[: span[0]]), tokens), template.encode(text[: span[1]])
        end = common_prefix(through, tokens)
        spans.append((start, end + (end < len(through))))  # the answer may end within a token
    return spans


def _by_prefix(template: _Template, messages: Messages, turn: int, text: str) -> Span | None:
    """Return the answer's characters: the text through the answer minus the prompt. None if they are not prefixes."""
    try:
        prompt = template.text(messages[:turn], add_generation_prompt=True)
        through = template.text(messages[: turn + 1])
    except DataError:  # many templates refuse a truncated conversation
        return None
    start, end = len(prompt), len(through.rstrip())
    answer = messages[turn]["content"].split("</think>")[-1].strip()
    found = text.startswith(through) and through.startswith(prompt) and start < end and answer in text[start:end]
    return (start, end) if found else None


def _by_substitution(template: _Template, messages: Messages, turn: int, text: str) -> Span | None:
    """Return the answer's characters, found by rendering the conversation with a mark in place of the answer.

    Some templates render a turn differently once later turns follow. The mark also replaces reasoning and tool calls,
    if the text around it stays the same.
    """
    message = messages[turn]
    bare = {key: value for key, value in message.items() if key in ("role", "name")}
    for kept in (bare, message):
        marked = [*messages[:turn], {**kept, "content": _MARK}, *messages[turn + 1 :]]
        try:
            before, mark, after = template.text(marked).partition(_MARK)
        except Exception:  # templates may raise anything
            continue
        end = len(text) - len(after)
        if mark and len(before) <= end and text.startswith(before) and text.endswith(after):
            return len(before), end
    return None


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
