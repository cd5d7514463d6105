"""Conversations whose answers are the target's own, which is what a draft head has to predict."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from time import monotonic
from typing import NamedTuple, NoReturn

from tqdm import tqdm

from eagle_mlx.decoding.loops import is_loop
from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.progress import progress_bar
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams

from .chat import prompt_tokens
from .conversation import Conversation, Message

_SHOW_SECONDS = 0.5
"""Between two updates of the shown speed."""


@dataclass
class RegenerateReport:
    """Counted while conversations are regenerated."""

    answers: int = 0
    tokens: int = 0
    cut: int = 0
    """Answers that ended at `max_tokens`; their conversations end there."""
    looping: int = 0
    """Answers left out because they loop; their conversations end before them."""
    too_long: int = 0
    """Turns whose prompt leaves no room in the target's context; their conversations end before them."""
    dropped: int = 0
    """Conversations of which nothing was left."""

    def add(self, counts: Sequence[int]) -> None:
        """Add the fields of another report, in their order."""
        for own, count in zip(fields(self), counts, strict=True):
            setattr(self, own.name, getattr(self, own.name) + count)

    def counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, own.name) for own in fields(self))


@dataclass(frozen=True)
class RegenerateConfig:
    """How answers are made. With a seed the answers are a function of it and of the conversation alone."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """A seed is mixed with each conversation and turn; without one, sampled answers differ from run to run."""
    systems: tuple[str, ...] = ()
    """System prompts, one of which, drawn by the seed, takes the place of a conversation's own; empty text for none."""
    least_distinct: float = 0.0
    """Answers whose share of distinct 4-grams is less are left out."""


class Numbered(NamedTuple):
    """A conversation with its position among those to be answered."""

    position: int
    conversation: Conversation
    repeat: int = 0
    """Conversations with the same prompt before it."""


class Regenerated(NamedTuple):
    """A conversation with the target's answers."""

    position: int
    conversation: Conversation | None
    """None where nothing was left."""
    report: RegenerateReport
    """Of this conversation alone."""


def regenerate(
    engine: Engine,
    conversations: Iterable[Conversation],
    params: SamplingParams | None = None,
    progress: bool = False,
    report: RegenerateReport | None = None,
    least_distinct: float = 0.0,
    systems: Sequence[str] = (),
) -> Iterator[Conversation]:
    """Yield the conversations, in order, with every assistant answer replaced by the target's own.

    `regenerate_all` in the order of the conversations; `report` counts what it says of each.
    """
    config = RegenerateConfig(params or SamplingParams(), tuple(systems), least_distinct)
    report = report if report is not None else RegenerateReport()
    total = len(conversations) if isinstance(conversations, (list, tuple)) else None
    finished: dict[int, Regenerated] = {}
    with bar(total, disable=not progress) as shown:
        following = 0
        for answered in regenerate_all(engine, numbered(conversations), config, shown):
            shown.update()
            finished[answered.position] = answered
            while (ready := finished.pop(following, None)) is not None:
                following += 1
                report.add(ready.report.counts())
                if ready.conversation is not None:
                    yield ready.conversation


def numbered(conversations: Iterable[Conversation]) -> Iterator[Numbered]:
    """The conversations with their positions; those with the same prompt are told apart, so that answers differ."""
    seen: Counter[int] = Counter()
    for position, conversation in enumerate(conversations):
        key = conversation.prompt_key()
        yield Numbered(position, conversation, seen[key])
        seen[key] += 1


def regenerate_all(
    engine: Engine,
    conversations: Iterable[Numbered],
    config: RegenerateConfig,
    shown: tqdm[NoReturn] | None = None,
) -> Iterator[Regenerated]:
    """Yield every conversation with the target's own answers, as soon as its last one is made.

    The answers of a conversation are made one after the other, each on top of the new answers before it; a
    conversation that ends without an answer gets one. An answer that calls tools stays as it is, since the replies
    depend on it; so does plain text. A conversation ends with an answer that `max_tokens` cut, before one that loops,
    and before a prompt that leaves no room in the context; what is left without any answer is dropped. The batch is
    kept full across conversations and turns. Raises DataError for a target without a chat template.
    """
    remaining = iter(conversations)
    running: dict[int, tuple[_Regeneration, RequestState]] = {}
    speed = Speed(shown)
    try:
        while True:
            while len(running) < 2 * engine.max_batch and (following := next(remaining, None)) is not None:
                regeneration = _Regeneration.of(following, config)
                if not _submit(engine, regeneration, config, running):
                    yield regeneration.result()
            if not running:
                return
            engine.step()
            for position, (regeneration, request) in list(running.items()):
                if request.finish_reason is None:
                    continue
                del running[position]
                speed.finished += len(request.tokens)
                _add_answer(engine, regeneration, request, config)
                if not _submit(engine, regeneration, config, running):
                    yield regeneration.result()
            speed.show(request for _, request in running.values())
    finally:
        for _, request in running.values():
            engine.cancel(request)


def seed_of(seed: int, *parts: int | str) -> int:
    """63 bits made from a seed and what it is for, which no order of work changes."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2s(text.encode()).digest()[:8], "big") >> 1


def bar(total: int | None, done: int = 0, disable: bool = False) -> tqdm[NoReturn]:
    """The progress of a regeneration, of which some may have been done before."""
    return progress_bar(
        total=total, initial=done, desc="regenerate", unit="conversation", disable=disable, smoothing=0.02
    )


@dataclass
class _Regeneration:
    """A conversation under way: its messages so far, and those of the original that are still to come."""

    source: Numbered
    rest: list[Message]
    messages: list[Message] = field(default_factory=list)
    answered: bool = False
    over: bool = False
    """Whether no further answer is to be made."""
    report: RegenerateReport = field(default_factory=RegenerateReport)

    @classmethod
    def of(cls, source: Numbered, config: RegenerateConfig) -> _Regeneration:
        messages = list(source.conversation.messages)
        if messages and config.systems:
            key = source.conversation.prompt_key()
            system = config.systems[
                seed_of(config.params.seed or 0, key, source.repeat, "system") % len(config.systems)
            ]
            messages = [m for m in messages if m.role not in ("system", "developer")]
            messages = [Message("system", system), *messages] if system else messages
        return cls(source, messages)

    def advance(self) -> bool:
        """Move the original's messages over up to the next answer to make; False where there is none."""
        while self.rest and not self.over:
            message = self.rest[0]
            if message.role == "assistant" and self._asked and "tool_calls" not in message.extra:
                self.rest.pop(0)
                return True
            self.messages.append(self.rest.pop(0))
        return not self.over and self._asked and self.messages[-1].role != "assistant"

    @property
    def _asked(self) -> bool:
        """Whether anyone but the system has spoken: a greeting of the assistant's is no answer."""
        return any(m.role not in ("system", "developer", "assistant") for m in self.messages)

    @property
    def so_far(self) -> Conversation:
        return replace(self.source.conversation, messages=tuple(self.messages))

    def result(self) -> Regenerated:
        """What was said up to the last answer; nothing where none was made."""
        if self.source.conversation.text is not None:
            return Regenerated(self.source.position, self.source.conversation, self.report)
        while self.messages and self.messages[-1].role != "assistant":
            self.messages.pop()
        self.report.dropped = int(not self.answered)
        return Regenerated(self.source.position, self.so_far if self.answered else None, self.report)


def _submit(
    engine: Engine,
    regeneration: _Regeneration,
    config: RegenerateConfig,
    running: dict[int, tuple[_Regeneration, RequestState]],
) -> bool:
    """Have the conversation's next answer generated; False where there is none to generate."""
    if not regeneration.advance():
        return False
    tokenizer = engine.target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise DataError("the target has no chat template, so it cannot answer conversations")
    prompt = prompt_tokens(tokenizer, regeneration.so_far)
    if len(prompt) >= engine.target.context_length:
        regeneration.report.too_long += 1
        return False
    params = config.params
    if params.seed is not None:
        key = regeneration.source.conversation.prompt_key()
        params = replace(
            params, seed=seed_of(params.seed, key, regeneration.source.repeat, regeneration.report.answers)
        )
    request = engine.prepare(prompt, params)
    engine.submit(request)
    running[regeneration.source.position] = regeneration, request
    return True


def _add_answer(engine: Engine, regeneration: _Regeneration, request: RequestState, config: RegenerateConfig) -> None:
    """Put an answer that has been made into its conversation, which it may end."""
    output = engine.output(request)
    if output.finish_reason == "error":
        raise DataError(f"{regeneration.source.conversation.origin}: no answer could be made: {output.error}")
    if is_loop(output.tokens, config.least_distinct):
        regeneration.report.looping += 1
        regeneration.over = True
        return
    regeneration.messages.append(Message("assistant", output.text))
    regeneration.answered = True
    regeneration.report.answers += 1
    regeneration.report.tokens += len(output.tokens)
    if output.finish_reason == "length":
        regeneration.report.cut += 1
        regeneration.over = True


class Speed:
    """Shows tokens per second beside a progress bar, unfinished answers included."""

    def __init__(self, shown: tqdm[NoReturn] | None):
        self.shown = shown
        self.finished = 0
        self._started = self._last = monotonic()

    def show(self, running: Iterable[RequestState]) -> None:
        now = monotonic()
        if self.shown is None or self.shown.disable or now - self._last < _SHOW_SECONDS:
            return
        self._last = now
        tokens = self.finished + sum(len(request.tokens) for request in running)
        self.shown.set_postfix_str(f"{tokens / (now - self._started):,.0f} tokens/s")
