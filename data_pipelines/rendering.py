"""Render conversations as tokens with the target's chat template, and a loss mask on the assistant's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from eagle_mlx.errors import DataError
from eagle_mlx.progress import counted
from eagle_mlx.text import template_args

from .conversation import Conversation
from .template import Messages, Point, RenderedChat, TokenPlaces, common_prefix, marked, strip

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_BEGUN = re.compile(r"[^\s>\]]+$")
"""The beginning of a word or tag."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
    """Such as `render tool calls` or `end answers with an end token`: what the template does not do."""
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
            f"the chat template of {target} does not {part}: {counted(count, 'conversation')} affected"
            for part, count in sorted(self.parts.items())
        ]
        skipped = [f"{counted(self.empty, 'conversation')} skipped"] * bool(self.empty)
        skipped += [f"{counted(self.empty_turns, 'turn')} of other conversations not learned"] * bool(self.empty_turns)
        return [*lost, *([f"answers that render as nothing: {', '.join(skipped)}"] if skipped else [])]


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


def check_answer(conversation: Conversation) -> None:
    """Raise DataError if a conversation has no answer to learn."""
    if conversation.text is None and not any(m.role == "assistant" for m in conversation.messages):
        raise DataError(
            f"{conversation.origin}: no assistant turn, so there is nothing to learn; remove the row, or let the "
            "target answer it with `eagle-data regenerate`"
        )


def _learned(tokenizer: TokenizerWrapper, conversation: Conversation) -> tuple[Rendered, Unrendered]:
    check_answer(conversation)
    return examine(tokenizer, conversation)


def examine(tokenizer: TokenizerWrapper, conversation: Conversation) -> tuple[Rendered, Unrendered]:
    """Render a whole conversation, even without an answer, and find what the template drops. Raises like `render`."""
    if conversation.text is not None:
        tokens = list(tokenizer.encode(conversation.text))
        return Rendered(tokens, [1] * len(tokens)), Unrendered()
    chat = RenderedChat.of(tokenizer, conversation)
    places, opaque = TokenPlaces.of(chat), {chat.marking.parts[part].message for part in chat.marking.opaque}
    turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    shown = opaque | {chat.marking.parts[point.part].message for point in chat.marking.points}
    silent = frozenset(turns) - shown
    spans, tagged = _answer_spans(chat, places.tokens, shown.intersection(turns))
    tokens, mask = places.tokens, _loss_mask(chat, spans, places)
    lost = _left_out(chat)
    if tagged:
        lost |= {f"mark {kind} for learning" for kind in _outside(chat, spans)}
    learned = {token for token, learn in zip(tokens, mask, strict=True) if learn}
    if learned and learned.isdisjoint(tokenizer.eos_token_ids):
        lost.add("end answers with an end token")
    return Rendered(tokens, mask), Unrendered(tuple(sorted(lost)), silent, len(turns) - len(silent))


def _left_out(chat: RenderedChat) -> set[str]:
    """Return what a template drops, such as `render tool calls`."""
    # Many templates drop earlier reasoning on purpose, so only the last counts, if no user message follows.
    user = max((at for at, m in enumerate(chat.messages) if m["role"] == "user"), default=0)
    last = max((part.message for part in chat.marking.parts if part.kind == "reasoning"), default=0)
    lost = set()
    for part in chat.marking.dropped:
        role = chat.messages[part.message]["role"]
        if role == "tool":
            lost.add("render tool results")
        elif role != "assistant":
            lost.add(f"render messages of role {role}")
        elif part.kind == "text" and part.message not in chat.marking.lost:
            lost.add("render text of answers with tool calls")
        elif part.kind == "tool calls" or (part.kind == "reasoning" and part.message == last >= user):
            lost.add(f"render {part.kind}")
    if chat.template.options:
        try:
            plain = chat.template._replace(options={}).text(chat.messages)
        except DataError:  # the template needs tools, so it reads them
            plain = ""
        lost |= {"render tools"} if plain == chat.text else set()
    return lost


def _outside(chat: RenderedChat, spans: Sequence[_Span]) -> set[str]:
    places = [
        (point.at, chat.marking.parts[point.part])
        for point in chat.marking.points
        if chat.messages[chat.marking.parts[point.part].message]["role"] == "assistant"
    ]
    return {part.kind for at, part in places if not any(span.start <= at <= span.end for span in spans)}


def all_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens of a conversation, with or without an answer. Raises DataError as `render` does."""
    if conversation.text is not None:
        return list(tokenizer.encode(conversation.text))
    chat = RenderedChat.of(tokenizer, conversation)
    return chat.template.encode(chat.text)


def prompt_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens up to the assistant's next answer, without trailing answers. Raises like `render`."""
    messages = list(conversation.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    chat = RenderedChat.of(tokenizer, replace(conversation, messages=tuple(messages)), prompt=True)
    return chat.template.encode(chat.text)


class _Span(NamedTuple):
    """Characters of the assistant."""

    start: int
    last: int
    """The end of its last part."""
    end: int
    limit: int
    """Where the next part of a message begins. An end token before it belongs to the span."""
    turn: int | None = None
    """The message, if the span was not found by the template's tags."""


def _answer_spans(chat: RenderedChat, tokens: list[int], turns: Collection[int]) -> tuple[list[_Span], bool]:
    """Return the spans of the messages `turns`, and whether the template's `{% generation %}` tags mark them.

    Raises DataError if a message has no span.
    """
    spans = _tagged_spans(chat, tokens)
    if spans is not None:
        return spans, True
    found = [_span(chat, run) for run in _runs(chat)]
    missing = set(turns).difference(span.turn for span in found if span.turn is not None)
    if missing:
        raise DataError(
            f"{chat.template.origin}: message {min(missing) + 1} cannot be found in the rendered conversation, so "
            "there is no loss mask for it; use a template with {% generation %} tags, or split the conversation so "
            "that each part ends with one answer"
        )
    return found, False


def _loss_mask(chat: RenderedChat, spans: Sequence[_Span], places: TokenPlaces) -> list[int]:
    """Return the loss mask [L].

    A span ends with the first end token after its last part, even if other text of the template is between them.
    """
    ends, mask = frozenset(chat.template.tokenizer.eos_token_ids), [0] * len(places.tokens)
    for span in spans:
        start, last, limit = places.before(span.start)[0], sum(places.before(span.last)), places.before(span.limit)[0]
        stop = next((at + 1 for at in range(last, limit) if places.tokens[at] in ends), None)
        stop = _stop_without_token(chat, span, places) if stop is None else stop
        mask[start:stop] = [1] * (stop - start)
    return mask


class _Run(NamedTuple):
    """Parts of one message that follow each other in the text."""

    turn: int
    points: list[Point]
    before: Point | None
    """The last point of another message."""
    after: Point | None


def _runs(chat: RenderedChat) -> Iterator[_Run]:
    parts = chat.marking.parts
    groups = [list(points) for _, points in groupby(chat.marking.points, lambda point: parts[point.part].message)]
    for index, points in enumerate(groups):
        turn = parts[points[0].part].message
        if chat.messages[turn]["role"] == "assistant":
            before = groups[index - 1][-1] if index else None
            after = groups[index + 1][0] if index + 1 < len(groups) else None
            yield _Run(turn, points, before, after)


def _span(chat: RenderedChat, run: _Run) -> _Span:
    """Return the run's span, from the end of its prompt to the end of its last part."""
    low, start = run.before.at if run.before else 0, run.points[0].at
    gap, prompt = chat.text[low:start], _end_of_prompt(chat, run)
    if prompt is not None and gap.startswith(prompt):
        begin = low + len(prompt)
    else:  # the history is written differently from the prompt
        header = _header(chat, run)
        lengths = [] if prompt is None else [_agreement(prompt, gap)]
        lengths += [] if header is None or not gap.startswith(header) else [len(header)]
        begin = low + max(lengths) if lengths else start
    return _Span(begin, run.points[-1].at, run.points[-1].at, run.after.at if run.after else len(chat.text), run.turn)


def _end_of_prompt(chat: RenderedChat, run: _Run) -> str | None:
    """Return the text after the last part before the run, in the prompt that asks for the run. None if unknown."""
    before = None if run.before is None else run.before.part
    last = run.turn if before is None else max(run.turn, chat.marking.parts[before].message + 1)
    rendered = _rendered(chat, chat.messages[:last], prompt=True)
    if rendered is None or (rendered[1][-1].part if rendered[1] else None) != before:
        return None
    return rendered[0][rendered[1][-1].at if rendered[1] else 0 :]


def _header(chat: RenderedChat, run: _Run) -> str | None:
    """Return the text between the part before the run and the run's content, if it had no reasoning or calls."""
    message = chat.messages[run.turn]
    bare = {key: message[key] for key in ("role", "name") if key in message} | {"content": "."}
    rendered = _rendered(chat, [*chat.messages[: run.turn], bare, *chat.messages[run.turn + 1 :]])
    if rendered is None:
        return None
    text, points = rendered
    number = sum(part.message < run.turn for part in chat.marking.parts)
    at = next((at for at, point in enumerate(points) if point.part == number), None)
    if at is None:
        return None
    before = points[at - 1] if at else None
    same = (before.part if before else None) == (run.before.part if run.before else None)
    return text[before.at if before else 0 : points[at].at] if same else None


def _rendered(chat: RenderedChat, messages: Messages, prompt: bool = False) -> tuple[str, list[Point]] | None:
    """Return the text and points of other messages; None if the template refuses them."""
    clear = [number for number in range(len(chat.marking.parts)) if number not in chat.marking.opaque]
    try:
        return strip(chat.template.text(marked(messages, clear)[0], prompt))
    except DataError:  # many templates refuse a truncated conversation
        return None


def _agreement(first: str, second: str) -> int:
    """Return the length of the common prefix without the beginning of a word or tag that differs."""
    same = common_prefix(first, second)
    differ = same < min(len(first), len(second))
    return len(_BEGUN.sub("", first[:same])) if differ else same


def _stop_without_token(chat: RenderedChat, span: _Span, places: TokenPlaces) -> int:
    """Return where a span without a token of the model's end ends.

    That is after the special token that also ends the user's messages, as in gpt-oss, or after what the template writes
    if the message is the last. If this is the next message's header, the span ends before its special token.
    """
    tokens, last = places.tokens, sum(places.before(span.end))
    special = frozenset(chat.template.tokenizer.get_added_vocab().values())
    users = [p.at for p in chat.marking.points if chat.messages[chat.marking.parts[p.part].message]["role"] == "user"]
    after = sum(places.before(users[-1])) if users else len(tokens)
    if tokens[last : last + 1] == tokens[after : after + 1] and special.intersection(tokens[last : last + 1]):
        return last + 1
    rendered = None if span.turn is None else _rendered(chat, chat.messages[: span.turn + 1])
    if rendered is None or not rendered[1]:
        return last
    tail, rest = rendered[0][rendered[1][-1].at :].rstrip(), chat.text[span.end : span.limit]
    stop, within = places.before(span.end + _agreement(tail, rest))
    if rest.startswith(tail):
        return stop + within
    return next((at for at in range(last, stop) if tokens[at] in special), max(stop, last))


def _tagged_spans(chat: RenderedChat, tokens: list[int]) -> list[_Span] | None:
    """Return the spans of the `{% generation %}` tags, or None if there are none or they mark nothing."""
    tokenizer, shape = chat.template.tokenizer, chat.template.shape
    source = tokenizer.chat_template
    if not isinstance(source, str) or not _GENERATION_TAG.search(source) or not tokenizer.is_fast:
        return None
    # mlx-lm's wrapper forces return_dict=False, and then transformers returns no mask.
    encoded = tokenizer._tokenizer.apply_chat_template(
        shape(chat.messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **{"enable_thinking": tokenizer.has_thinking, **template_args(tokenizer), **chat.template.options},
    )
    if encoded["input_ids"] != tokens or not any(encoded["assistant_masks"]):
        return None
    edges = [0, *encoded["assistant_masks"], 0]
    starts = [i for i in range(len(tokens)) if edges[i + 1] and not edges[i]]
    offsets = encoded["offset_mapping"]
    pairs = [(offsets[i][0], offsets[edges.index(0, i + 1) - 2][1]) for i in starts]
    points = [point.at for point in chat.marking.points]
    limits = sorted({*points, *(start for start, _ in pairs)})
    spans = []
    for start, end in pairs:
        within = [at for at in points if start <= at <= end]
        limit = next((at for at in limits if at > end), len(chat.text))
        if within or chat.marking.opaque:
            spans.append(_Span(start, max(within, default=end), end, limit))
    return spans
