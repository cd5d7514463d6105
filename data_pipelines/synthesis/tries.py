"""Have a target make up conversations: it writes the user turns, as in Magpie (Xu et al. 2024, arXiv 2406.08464).

It continues its own chat template at the place of a user turn.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import TargetError
from eagle_mlx.progress import counted
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.text import is_loop

from ..conversation import Conversation, Message
from ..options import MakeConfig
from ..rendering import prompt_tokens
from ..template import answer_message
from . import Domain, find_user_place, steerable
from .loop import LOOK, Counts, Task, seed_of

A = TypeVar("A")
OWN = "own"
LEAST_WORDS = 3
_APOSTROPHE = "['\u2019]"
_IM = f"i{_APOSTROPHE}m"
_EXCUSE = rf"({_IM}|i am) sorry,? but|i apologi[sz]e|as an ai\b|{_IM} (just )?an ai\b"
_UNABLE = rf"(({_IM}|i am) )?sorry,|i (can{_APOSTROPHE}t|cannot|can not|am unable|am not able|won{_APOSTROPHE}t)\b"
_REFUSES = re.compile(rf"({_EXCUSE}|{_UNABLE}|{_IM} (unable|not able)\b)", re.IGNORECASE)
_NO_USER = re.compile(
    rf"({_EXCUSE}|sure[,!.]|certainly[,!.]|of course[,!.]|absolutely[,!.]|here (is|are) (a|an|the|some|your)\b"
    r"|here's (a|an|the)\b|i'd be happy to|i'm happy to|hello! how can i|how can i (help|assist) you"
    r"|thank you for (asking|your question))",
    re.IGNORECASE,
)
"""Does not match refusals, since users may say what they cannot do."""


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a text loops as a whole, or in any block of `LOOK` tokens."""
    return is_loop(tokens) or loops_so_far(tokens)


def loops_so_far(tokens: Sequence[int]) -> bool:
    """Return whether any complete block of `LOOK` tokens loops; this works on unfinished texts."""
    starts = range(0, len(tokens) - LOOK + 1, LOOK)
    return any(is_loop(tokens[start : start + LOOK]) for start in starts)


def why_no_question(text: str, tokens: Sequence[int], ended: bool, special: Collection[int]) -> str | None:
    """Return the first reason why a user turn is unusable, as a field of `MakeReport`, or None.

    `tokens` excludes the end of turn, `ended` tells whether there was one, and users do not write `special` tokens.
    """
    faults = {
        "endless": not ended,
        "markup": any(token in special for token in tokens),
        "short": len(text.split()) < LEAST_WORDS,
        "question_loops": loops(tokens),
        "no_user": _NO_USER.match(text),
    }
    return next((why for why, fault in faults.items() if fault), None)


def why_no_answer(text: str, tokens: Sequence[int], special: Collection[int]) -> str | None:
    """Return why an answer is unusable, as a field of `MakeReport`, or None. `tokens` excludes the end of turn."""
    faults = {
        "markup": any(token in special for token in tokens),
        "silent": not text.strip(),
        "answer_loops": loops(tokens),
        "refusals": _REFUSES.match(text),
    }
    return next((why for why, fault in faults.items() if fault), None)


def _failure(why: str) -> Any:
    return field(default=0, metadata={"why": why})


@dataclass(frozen=True)
class MakeReport(Counts):
    """Counts of tries. Each try gives one conversation or one failure."""

    tries: int = 0
    tokens: int = 0
    """Tokens of the kept conversations, including the template."""
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0
    """Answers cut at `max_tokens`; their conversations end there."""
    shortened: int = 0
    """Conversations kept without later planned turns, because one of those failed."""
    endless: int = _failure("user turns without an end")
    markup: int = _failure("turns with special tokens")
    short: int = _failure(f"user turns of fewer than {LEAST_WORDS} words")
    question_loops: int = _failure("user turns that loop")
    no_user: int = _failure("user turns that sound like an assistant")
    silent: int = _failure("empty answers")
    answer_loops: int = _failure("answers that loop")
    refusals: int = _failure("refusals")
    duplicates: int = _failure("duplicates")
    late: int = _failure("stopped because time was up")

    @property
    def _reasons(self) -> list[tuple[int, str]]:
        return [(getattr(self, count.name), count.metadata["why"]) for count in fields(self) if count.metadata]

    @property
    def failed(self) -> int:
        return sum(count for count, _ in self._reasons)

    def summary(self) -> str:
        return (
            f"{counted(self.tries - self.failed, 'conversation')} of {counted(self.tokens, 'token')}, "
            f"{counted(self.answers, 'answer')} of {self.answer_tokens:,}; {counted(self.cut, 'answer')} cut, "
            f"{counted(self.shortened, 'conversation')} shorter than planned\n"
            f"{counted(self.tries, 'try')}, {self.failed:,} failed: {self.failures()}"
        )

    def failures(self) -> str:
        return ", ".join(f"{count:,} {why}" for count, why in sorted(self._reasons, reverse=True) if count) or "none"


class Try(Task):
    """A try to make up a conversation, as a task of `run_tasks`. It depends only on the seed and its number."""

    def __init__(
        self, engine: Engine, config: MakeConfig, number: int, tokenizer: TokenizerWrapper, domains: tuple[Domain, ...]
    ):
        """Draw the settings from the try's number, and one of `domains`, which come from `steerable`."""
        self.config = config
        self.number = number
        self.origin = f"try {number}"
        self._target = engine.target
        self.report = MakeReport(tries=1)
        self.ended = False
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        domain = domains[_drawn([d.weight for d in domains], self._share("domain"))]
        self.domain, self._steering = domain.name, domain.system
        self.turns = 1 + _drawn(config.turns, self._share("turns"))
        self.system = self._chosen("system", config.systems)
        self.temperature = self._chosen("temperature", config.temperatures)
        self._opening = self._chosen("opening", domain.openings)
        """The given beginning of the next user turn."""
        self.messages: list[Message] = []
        """Messages without a system prompt. While an answer is generated, the last is the user's."""
        if number % 2 == 0 and number // 2 < len(config.questions):
            self.domain, self._opening = OWN, ""
            self.system, question = config.questions[number // 2]
            self._steering = self.system
            self.messages = [Message("user", question)]
        self.kept = 0
        """Number of messages up to the last usable answer."""

    def _share(self, purpose: str) -> float:
        return seed_of(self.config.seed, self.number, purpose) / (1 << 63)

    def _chosen(self, purpose: str, choices: tuple[A, ...]) -> A:
        return choices[int(self._share(purpose) * len(choices))]

    @property
    def answering(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def _under(self, system: str) -> tuple[Message, ...]:
        return (Message("system", system), *self.messages) if system else tuple(self.messages)

    def next(self) -> tuple[list[int], SamplingParams] | None:
        if self.ended:
            return None
        seed = seed_of(self.config.seed, self.number, "answer" if self.answering else "user", self.kept // 2)
        if self.answering:
            prompt = prompt_tokens(self._tokenizer, Conversation(self._under(self.system)))
            return prompt, replace(self.config.answer(self.temperature), seed=seed)
        place = find_user_place(self._tokenizer, self._under(self._steering), self._target.name, self._opening)
        params = replace(self.config.question(), seed=seed, stop_token_ids=place.stop_token_ids, stop=place.stop)
        return list(place.tokens), params

    def take(self, request: RequestState, output: Output) -> None:
        tokens = output.tokens[:-1] if output.tokens[-1] in request.request.stop_ids else output.tokens
        follows = self._add_answer(output, tokens) if self.answering else self._add_question(output, tokens)
        self.ended = not (follows and self._fits())

    def give_up(self, tokens: Sequence[int]) -> bool:
        if not loops_so_far(tokens):
            return False
        self._fail("answer_loops" if self.answering else "question_loops")
        return True

    def stop(self) -> None:
        self._fail("late")

    def _fail(self, why: str) -> None:
        """End the conversation before the failed turn; fail if it is the first. `why` is a field of `MakeReport`."""
        self.report = self.report.plus({"shortened" if self.kept else why: 1})

    def result(self) -> tuple[Conversation | None, int]:
        """Return a pair: the conversation (None if the try failed), and a hash of its beginning to find duplicates."""
        first = Conversation(tuple(self.messages[:1])).prompt_key() if self.messages else 0
        del self.messages[self.kept :]
        conversation = Conversation(self._under(self.system), origin=f"self:{self.number}")
        return conversation if self.kept else None, first

    def _add_question(self, output: Output, tokens: list[int]) -> bool:
        """Add a user turn with its tokens, without the end of turn; return whether an answer follows."""
        text = (self._opening + output.text).strip()
        why = why_no_question(text, tokens, output.finish_reason == "stop", self._special)
        if why is None and not output.text.strip():  # only the opening
            why = "short"
        if why is not None:
            self._fail(why)
            return False
        self.messages.append(Message("user", text))
        self._opening = ""
        return True

    def _add_answer(self, output: Output, tokens: list[int]) -> bool:
        """Add an answer, as `_add_question` does; return whether a question follows."""
        message = answer_message(self._tokenizer, Conversation(self._under(self.system)), output.text)
        shown = [message.content, *map(str, message.extra.values())]
        if shown != [output.text]:  # without the tags of the message's parts
            tokens = self._tokenizer.encode("\n".join(shown), add_special_tokens=False)
        why = why_no_answer(output.text, tokens, self._special)
        if why is not None:
            self._fail(why)
            return False
        counts = {"answers": 1, "answer_tokens": len(output.tokens), "cut": int(output.finish_reason == "length")}
        self.report = replace(self.report.plus(counts), tokens=output.prompt_tokens + len(output.tokens))
        self.messages.append(message)
        self.kept = len(self.messages)
        return output.finish_reason != "length" and self.kept // 2 < self.turns

    def _fits(self) -> bool:
        room = self.config.max_tokens if self.answering else self.config.user_tokens
        used = self.report.tokens + (self.config.user_tokens if self.answering else 0)
        fits = used + room < self._target.context_length or not self.kept
        if not fits:
            self._fail("shortened")
        return fits


def tries(engine: Engine, config: MakeConfig) -> Callable[[int], Try]:
    """Return a function that creates the try with a given number.

    Raises TargetError without a tokenizer, or if the chat template does not let the target write user turns.
    """
    target = engine.target
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer, so it cannot make up conversations")
    domains = steerable(tokenizer, config.domains, target.name)
    return lambda number: Try(engine, config, number, tokenizer, domains)


def _drawn(weights: Sequence[float], share: float) -> int:
    """Return the index at which `share` (0 to 1) of the total weight is reached."""
    sums = list(accumulate(weights))
    return min(bisect.bisect_right(sums, share * sums[-1]), len(sums) - 1)
