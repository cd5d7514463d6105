"""Conversations whose answers are the target's own, which is what a draft head has to predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

from tqdm import tqdm

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.loops import is_loop
from eagle_mlx.params import SamplingParams

from .conversation import Conversation, Message


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


@dataclass
class _Draft:
    """A conversation on its way: what has been said so far, and what of the original is still to come."""

    origin: str
    rest: list[Message]
    said: list[Message] = field(default_factory=list)
    answered: bool = False

    def advance(self) -> bool:
        """Move the original's messages over up to the next answer to make; False where there is none."""
        while self.rest:
            message = self.rest[0]
            if message.role == "assistant" and self._asked and "tool_calls" not in message.extra:
                self.rest.pop(0)
                return True
            self.said.append(self.rest.pop(0))
        return self._asked and self.said[-1].role != "assistant"

    @property
    def _asked(self) -> bool:
        """Whether anyone but the system has spoken: a greeting of the assistant's is no answer."""
        return any(m.role not in ("system", "developer", "assistant") for m in self.said)

    def result(self) -> Conversation | None:
        """What was said up to the last answer; None where none was made."""
        while self.said and self.said[-1].role != "assistant":
            self.said.pop()
        return Conversation(tuple(self.said), origin=self.origin) if self.answered else None


def regenerate(
    engine: Engine,
    conversations: Iterable[Conversation],
    params: SamplingParams | None = None,
    progress: bool = False,
    report: RegenerateReport | None = None,
    least_distinct: float = 0.0,
) -> Iterator[Conversation]:
    """Yield the conversations, in order, with every assistant answer replaced by the target's own.

    The answers of a conversation are made one after the other, each on top of the new answers before it; a
    conversation that ends without an answer gets one. An answer that calls tools stays as it is, since the replies
    depend on it; so does plain text. A conversation ends with an answer that `params.max_tokens` cut, before one whose
    share of distinct 4-grams is less than `least_distinct`, and before a prompt that leaves no room in the context;
    what is left without any answer is dropped. `report` counts all that.
    Raises DataError for a target without a chat template.
    """
    params, report = params or SamplingParams(), report or RegenerateReport()
    remaining = iter(conversations)
    total = len(conversations) if isinstance(conversations, (list, tuple)) else None
    with tqdm(total=total, desc="regenerate", unit="conversation", disable=not progress) as bar:
        while window := list(islice(remaining, 8 * engine.max_batch)):
            drafts = [_Draft(c.origin, list(c.messages)) for c in window]
            _answer(engine, drafts, params, least_distinct, report, bar)
            for conversation, draft in zip(window, drafts, strict=True):
                bar.update()
                if conversation.text is not None:
                    yield conversation
                elif (result := draft.result()) is not None:
                    yield result
                else:
                    report.dropped += 1


def _answer(
    engine: Engine,
    drafts: list[_Draft],
    params: SamplingParams,
    least_distinct: float,
    report: RegenerateReport,
    bar: tqdm[NoReturn],
) -> None:
    """Make the answers of all drafts, turn by turn, each turn of all of them as one batch of requests."""
    while drafts := [d for d in drafts if d.advance()]:
        prompts = [(draft, _prompt(engine, draft)) for draft in drafts]
        fitting = [(draft, tokens) for draft, tokens in prompts if len(tokens) < engine.target.context_length]
        report.too_long += len(prompts) - len(fitting)
        drafts = []
        for (draft, _), output in zip(fitting, engine.generate([tokens for _, tokens in fitting], params), strict=True):
            if is_loop(output.tokens, least_distinct):
                report.looping += 1
                continue
            drafts.append(draft)
            draft.said.append(Message("assistant", output.text))
            draft.answered = True
            report.answers, report.tokens = report.answers + 1, report.tokens + len(output.tokens)
            if output.finish_reason == "length":
                report.cut += 1
                draft.rest.clear()
        bar.set_postfix_str(f"{report.tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tokens/s")


def _prompt(engine: Engine, draft: _Draft) -> list[int]:
    tokenizer = engine.target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise DataError("the target has no chat template, so it cannot answer conversations")
    try:
        messages = [m.as_dict() for m in draft.said]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True))
    except Exception as e:  # whatever a template raises
        raise DataError(f"{draft.origin}: the chat template refuses this conversation: {e}") from e
