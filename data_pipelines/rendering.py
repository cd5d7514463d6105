"""Render conversations as tokens with the target's chat template, and a loss mask on the assistant's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from eagle_mlx.errors import DataError, PromptError
from eagle_mlx.progress import counted
from eagle_mlx.text import common_prefix, template_args
from eagle_mlx.vision.images import ImageLimits
from eagle_mlx.vision.spans import ImageSpan, ImageTokens, filled, placed

from .conversation import Conversation
from .template import Messages, Point, RenderedChat, TokenPlaces, marked, strip

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from eagle_mlx.vision.tower import Vision

_BEGUN = re.compile(r"[^\s>\]]+$")
"""The beginning of a word or tag."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_START = Point(0, -1)


class Sample(NamedTuple):
    """A conversation as tokens."""

    tokens: list[int]
    loss_mask: list[int]
    """1 on the tokens to learn: the assistant's text and the token that ends its turn."""
    key: int = 0
    """Its `prompt_key`; 0 if it is unknown."""
    images: tuple[ImageSpan, ...] = ()

    def cut(self, length: int) -> Sample:
        """Return the first `length` tokens, or fewer: they end before an image that is not whole, or is last."""
        length = min(length, len(self.tokens))
        images = tuple(span for span in self.images if span.end < length - 1)
        length = min([length, *(span.start for span in self.images[len(images) :])])
        return Sample(self.tokens[:length], self.loss_mask[:length], self.key, images)


class Unrendered(NamedTuple):
    """The parts of a conversation that a chat template silently drops."""

    parts: tuple[str, ...] = ()
    """Such as `render tool calls` or `end answers with an end token`: what the template does not do."""
    turns: frozenset[int] = frozenset()
    """Indices of assistant messages that render as nothing. They are not learned."""
    answers: int = 0


@dataclass
class RenderReport:
    """Counts of rendered conversations, and of what the chat template drops from them."""

    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
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
        lines = [
            f"the chat template of {target} does not {part}: {counted(count, 'conversation')} affected"
            for part, count in sorted(self.parts.items())
        ]
        skipped = [f"{counted(self.empty, 'conversation')} skipped"] if self.empty else []
        if self.empty_turns:
            skipped.append(f"{counted(self.empty_turns, 'turn')} of other conversations not learned")
        return [*lines, f"answers that render as nothing: {', '.join(skipped)}"] if skipped else lines


def render_all(
    tokenizer: TokenizerWrapper,
    conversations: Iterable[Conversation],
    max_length: int,
    skip_bad: bool = False,
    vision: Vision | None = None,
) -> tuple[list[Sample], RenderReport]:
    """Render conversations; drop and count those without an answer in their first `max_length` tokens.

    With `skip_bad`, those that `examine` refuses and those without an answer are dropped too. `vision`: see `examine`.
    """
    kept: list[Sample] = []
    report = RenderReport()
    for conversation in conversations:
        try:
            check_answer(conversation)
            whole, lost = examine(tokenizer, conversation, vision)
        except (DataError, PromptError):
            if not skip_bad:
                raise
            report.unusable += 1
            continue
        if not report.add(lost):
            continue
        sample = whole.cut(max_length)._replace(key=conversation.prompt_key())
        report.cut += len(whole.tokens) > max_length
        if not any(sample.loss_mask):
            report.dropped += 1
            continue
        kept.append(sample)
        report.conversations += 1
        report.tokens += len(sample.tokens)
        report.loss_tokens += sum(sample.loss_mask)
    return kept, report


def check_answer(conversation: Conversation) -> None:
    """Raise DataError if a conversation has no answer to learn."""
    if conversation.text is None and not any(m.role == "assistant" for m in conversation.messages):
        raise DataError(
            f"{conversation.origin}: no assistant turn, so there is nothing to learn; skip such rows with "
            "--skip-bad, or let the target answer them with `eagle-data regenerate`"
        )


def examine(
    tokenizer: TokenizerWrapper, conversation: Conversation, vision: Vision | None = None
) -> tuple[Sample, Unrendered]:
    """Return the tokens and the loss mask of a conversation, even without an answer, and what the template drops.

    Plain text is learned from end to end. In messages, the assistant's part is learned: between the template's `{%
    generation %}` tags, or found by rendering the conversation up to each answer. `vision`: the target's, which reads
    the images; their tokens are not learned. Raises DataError with the conversation's origin if an answer cannot be
    found, if the template refuses the conversation, or if an image cannot be read, PromptError if it drops an image.
    """
    if conversation.text is not None:
        tokens = list(tokenizer.encode(conversation.text))
        return Sample(tokens, [1] * len(tokens)), Unrendered()
    shown, images = _with_images(conversation, vision)
    chat = RenderedChat.of(tokenizer, shown)
    places = TokenPlaces.of(chat)
    turns = {turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"}
    silent = turns - chat.shown
    lost = _left_out(chat)
    spans = _tagged_spans(chat, places.tokens)
    if spans is None:
        spans = _found_spans(chat, turns - silent)
    else:
        lost |= {f"mark {kind} for learning" for kind in _outside(chat, spans)}
    rendered = Sample(places.tokens, _loss_mask(chat, spans, places))
    if images:
        rendered = _filled(rendered, "".join(message.content for message in conversation.messages), images)
    learned = {token for token, learn in zip(rendered.tokens, rendered.loss_mask, strict=True) if learn}
    if learned and learned.isdisjoint(tokenizer.eos_token_ids):
        lost.add("end answers with an end token")
    return rendered, Unrendered(tuple(sorted(lost)), frozenset(silent), len(turns - silent))


def _with_images(conversation: Conversation, vision: Vision | None) -> tuple[Conversation, list[ImageTokens]]:
    """Return a conversation with its images' texts (`spans.expanded`), and the images. Raises DataError."""
    if vision is None or not conversation.images:
        conversation.check_text()
        return conversation, []
    try:
        images = vision.read_all(conversation.images, ImageLimits())
    except PromptError as e:
        raise DataError(f"{conversation.origin}: {e}") from e
    messages = (replace(m, content=vision.expanded(m.content, images)) for m in conversation.messages)
    return replace(conversation, messages=tuple(messages)), images


def _filled(rendered: Sample, marks: str, images: Sequence[ImageTokens]) -> Sample:
    """Return a conversation with all tokens of its images. Raises PromptError if they are not all there."""
    tokens, mask = filled(marks, rendered.tokens, images), list(rendered.loss_mask)
    for span in (spans := placed(marks, tokens, images)):
        mask[span.start : span.start + 1] = [0] * len(span.image.tokens)
    return Sample(tokens, mask, images=spans)


def _left_out(chat: RenderedChat) -> set[str]:
    """Return what a template drops, such as `render tool calls`."""
    # Many templates drop earlier reasoning on purpose, so only the last counts, if no user message follows.
    user = max((at for at, m in enumerate(chat.messages) if m["role"] == "user"), default=0)
    last = max((part.message for part in chat.parts if part.kind == "reasoning"), default=0)
    lost, shown = set(), chat.shown
    for part in chat.dropped:
        if part.role == "tool":
            lost.add("render tool results")
        elif part.role != "assistant":
            lost.add(f"render messages of role {part.role}")
        elif part.kind == "text" and part.message in shown:
            lost.add("render text of answers with tool calls")
        elif part.kind == "tool calls" or (part.kind == "reasoning" and part.message == last >= user):
            lost.add(f"render {part.kind}")
    if chat.template.options:
        try:
            plain = chat.template._replace(options={}).text(chat.messages)
        except DataError:  # the template needs tools, so it reads them
            plain = ""
        if plain == chat.text:
            lost.add("render tools")
    return lost


def all_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens of a conversation, with or without an answer. Raises like `examine`."""
    if conversation.text is not None:
        return list(tokenizer.encode(conversation.text))
    conversation.check_text()
    chat = RenderedChat.of(tokenizer, conversation)
    return chat.template.encode(chat.text)


def prompt_tokens(tokenizer: TokenizerWrapper, conversation: Conversation) -> list[int]:
    """Return the tokens up to the assistant's next answer, without trailing answers. Raises like `examine`."""
    conversation.check_text()
    messages = list(conversation.messages)
    while messages and messages[-1].role == "assistant":
        messages.pop()
    chat = RenderedChat.of(tokenizer, replace(conversation, messages=tuple(messages)), prompt=True)
    return chat.template.encode(chat.text)


class _Span(NamedTuple):
    """Characters of the assistant."""

    start: int
    last: int
    end: int
    limit: int
    """The beginning of a message's next part. An end token before it belongs to the span."""
    turn: int | None = None
    """The message, if the span was not found by the template's tags."""


def _outside(chat: RenderedChat, spans: Sequence[_Span]) -> set[str]:
    parts = [(point.at, chat.parts[point.part]) for point in chat.points]
    return {
        part.kind
        for at, part in parts
        if part.role == "assistant" and not any(span.start <= at <= span.end for span in spans)
    }


def _found_spans(chat: RenderedChat, turns: Collection[int]) -> list[_Span]:
    """Return the spans of messages without `{% generation %}` tags. Raises DataError if one of `turns` has none."""
    spans = [_from_prompt(chat, *run) for run in _runs(chat)]
    if missing := set(turns).difference(span.turn for span in spans if span.turn is not None):
        raise DataError(
            f"{chat.template.origin}: message {min(missing) + 1} cannot be found in the rendered conversation, so "
            "there is no loss mask for it; use a template with {% generation %} tags, or split the conversation so "
            "that each part ends with one answer"
        )
    return spans


def _loss_mask(chat: RenderedChat, spans: Sequence[_Span], places: TokenPlaces) -> list[int]:
    """Return the loss mask [L]. A span ends with the first end token after its last part, even if text is between."""
    ends, mask = frozenset(chat.template.tokenizer.eos_token_ids), [0] * len(places.tokens)
    for span in spans:
        start, last, limit = places.before(span.start)[0], sum(places.before(span.last)), places.before(span.limit)[0]
        stop = next((at + 1 for at in range(last, limit) if places.tokens[at] in ends), None)
        stop = _stop_without_token(chat, span, places) if stop is None else stop
        mask[start:stop] = [1] * (stop - start)
    return mask


def _runs(chat: RenderedChat) -> Iterator[tuple[int, _Span, Point]]:
    """Yield the parts of each of the assistant's messages that follow each other: message, span, and point before."""
    parts, points = chat.parts, chat.points
    begin = 0
    for turn, group in groupby(points, lambda point: parts[point.part].message):
        run = list(group)
        end = begin + len(run)
        if chat.messages[turn]["role"] == "assistant":
            limit = points[end].at if end < len(points) else len(chat.text)
            before = points[begin - 1] if begin else _START
            yield turn, _Span(run[0].at, run[-1].at, run[-1].at, limit, turn), before
        begin = end


def _from_prompt(chat: RenderedChat, turn: int, span: _Span, before: Point) -> _Span:
    """Return the span from the end of its prompt on."""
    gap, prompt = chat.text[before.at : span.start], _end_of_prompt(chat, turn, before)
    lengths = [] if prompt is None else [_agreement(prompt, gap)]
    if prompt is None or not gap.startswith(prompt):  # the history is written differently from the prompt
        header = _header(chat, turn, before)
        lengths += [] if header is None or not gap.startswith(header) else [len(header)]
    return span._replace(start=before.at + max(lengths, default=len(gap)))


def _end_of_prompt(chat: RenderedChat, turn: int, before: Point) -> str | None:
    """Return the text after the part `before`, in the prompt that asks for the turn. None if unknown."""
    last = turn if before is _START else max(turn, chat.parts[before.part].message + 1)
    text, points = _rendered(chat, chat.messages[:last], prompt=True)
    return text[points[-1].at :] if points and points[-1].part == before.part else None


def _header(chat: RenderedChat, turn: int, before: Point) -> str | None:
    """Return the text between the part `before` and the turn's content, if it had no reasoning or calls."""
    message = chat.messages[turn]
    bare = {key: message[key] for key in ("role", "name") if key in message} | {"content": "."}
    text, points = _rendered(chat, [*chat.messages[:turn], bare, *chat.messages[turn + 1 :]])
    number = sum(part.message < turn for part in chat.parts)
    for last, point in pairwise(points):
        if point.part == number:
            return text[last.at : point.at] if last.part == before.part else None
    return None


def _rendered(chat: RenderedChat, messages: Messages, prompt: bool = False) -> tuple[str, list[Point]]:
    """Return the text and points of other messages, from the text's start; no points if the template refuses them."""
    clear = [number for number in range(len(chat.parts)) if number not in chat.opaque]
    try:
        text, points = strip(chat.template.text(marked(messages, clear)[0], prompt))
    except DataError:  # many templates refuse a truncated conversation
        return "", []
    return text, [_START, *points]


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
    users = [point.at for point in chat.points if chat.parts[point.part].role == "user"]
    after = sum(places.before(users[-1])) if users else len(tokens)
    if tokens[last : last + 1] == tokens[after : after + 1] and special.intersection(tokens[last : last + 1]):
        return last + 1
    text, points = ("", []) if span.turn is None else _rendered(chat, chat.messages[: span.turn + 1])
    if len(points) < 2:
        return last
    tail, rest = text[points[-1].at :].rstrip(), chat.text[span.end : span.limit]
    stop, within = places.before(span.end + _agreement(tail, rest))
    if rest.startswith(tail):
        return stop + within
    return next((at for at in range(last, stop) if tokens[at] in special), max(stop, last))


def _tagged_spans(chat: RenderedChat, tokens: list[int]) -> list[_Span] | None:
    """Return the spans of the `{% generation %}` tags, or None if there are none or they mark nothing."""
    tokenizer = chat.template.tokenizer
    source = tokenizer.chat_template
    if not isinstance(source, str) or not _GENERATION_TAG.search(source) or not tokenizer.is_fast:
        return None
    # mlx-lm's wrapper forces return_dict=False, and then transformers returns no mask.
    encoded = tokenizer._tokenizer.apply_chat_template(
        chat.template.shape(chat.messages),
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
    points = [point.at for point in chat.points]
    limits = sorted({*points, *(start for start, _ in pairs)})
    spans = []
    for start, end in pairs:
        within = [at for at in points if start <= at <= end]
        limit = next((at for at in limits if at > end), len(chat.text))
        if within or chat.opaque:
            spans.append(_Span(start, max(within, default=end), end, limit))
    return spans
