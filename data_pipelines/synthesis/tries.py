"""Have a target make up conversations: it writes the user turns, as in Magpie (Xu et al. 2024, arXiv 2406.08464).

It continues its own chat template at the place of a user turn. Without a chat template, it writes plain texts.
"""

from __future__ import annotations

import bisect
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError, TargetError
from eagle_mlx.hidden_states import Example
from eagle_mlx.progress import counted
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.text import is_loop

from ..conversation import Conversation, Message
from ..options import MakeConfig
from ..rendering import prompt_tokens, render
from ..template import common_prefix
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
    heldout: int = 0
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
            f"{counted(self.answers, 'answer')} of "
            f"{self.answer_tokens:,}; {self.heldout:,} held out, {counted(self.cut, 'answer')} cut, "
            f"{counted(self.shortened, 'conversation')} shorter than planned\n"
            f"{counted(self.tries, 'try')}, {self.failed:,} failed: {self.failures()}"
        )

    def failures(self) -> str:
        return ", ".join(f"{count:,} {why}" for count, why in sorted(self._reasons, reverse=True) if count) or "none"


class Try(Task):
    """A try to make up something, as a task of `run_tasks`. It depends only on the seed and its number."""

    domain: str
    answering = True
    """Whether the text being generated is an answer."""

    def __init__(self, engine: Engine, config: MakeConfig, number: int):
        self.engine = engine
        self.config = config
        self.number = number
        self.report = MakeReport(tries=1)
        self.example: Example | None = None
        """Tokens with their hidden states, if the engine captures them."""
        self.ended = False
        self._capture = engine.proposer if isinstance(engine.proposer, CapturingProposer) else None

    @abstractmethod
    def prompt(self) -> tuple[list[int], SamplingParams]:
        """Return the tokens before the next text, and its sampling parameters."""

    @abstractmethod
    def add(self, request: RequestState, output: Output, tokens: list[int]) -> bool:
        """Add a text with its tokens, without the end of turn; return whether another text follows."""

    @abstractmethod
    def result(self) -> tuple[Conversation | None, int]:
        """Return a pair: the conversation (None if the try failed), and a hash of its beginning to find duplicates."""

    def fail(self, why: str) -> None:
        """End the try; `why` is a field of `MakeReport`."""
        self.report = self.report.plus({why: 1})

    def submit(self) -> RequestState | None:
        if self.ended:
            return None
        prompt, params = self.prompt()
        if self._capture is not None and self.answering:
            self._capture.want(prompt)
        request = self.engine.prepare(prompt, params)
        self.engine.submit(request)
        return request

    def take(self, request: RequestState) -> None:
        output = self.engine.output(request)
        if output.finish_reason == "error":
            raise DataError(f"try {self.number}: the target could not write: {output.error}")
        tokens = output.tokens[:-1] if output.tokens[-1] in request.request.stop_ids else output.tokens
        self.ended = not self.add(request, output, tokens)

    def give_up(self, request: RequestState) -> bool:
        if not loops_so_far(request.tokens):
            return False
        self._end(request, "answer_loops" if self.answering else "question_loops")
        return True

    def stop(self, request: RequestState) -> None:
        self._end(request, "late")

    def _end(self, request: RequestState, why: str) -> None:
        if self._capture is not None and self.answering:
            self._capture.forget(request.prompt)
        self.fail(why)

    def answered(self, request: RequestState, output: Output, tokens: list[int], mask: list[int]) -> bool:
        """Count an answer and take its hidden states; return False if it is unusable. `mask` belongs to the prompt."""
        example = None
        if self._capture is not None:
            states = self._capture.take(request.prompt, request.tokens)
            if states is None:
                raise DataError(f"try {self.number}: some hidden states of its answer were not captured")
            mask = [*mask, *([1] * len(request.tokens))]
            example = replace(Example.of([*request.prompt, *request.tokens], mask), states=states)
        why = why_no_answer(output.text, tokens, self._special)
        if why is not None:
            self.fail(why)
            return False
        self.example = example
        counts = {"answers": 1, "answer_tokens": len(output.tokens), "cut": int(output.finish_reason == "length")}
        self.report = replace(self.report.plus(counts), tokens=output.prompt_tokens + len(output.tokens))
        return True

    @property
    def _special(self) -> frozenset[int]:
        assert self.engine.target.tokenizer is not None
        return frozenset(self.engine.target.tokenizer.all_special_ids)


class ConversationTry(Try):
    """A conversation in which a target with a chat template writes both sides."""

    def __init__(
        self, engine: Engine, config: MakeConfig, number: int, tokenizer: TokenizerWrapper, domains: tuple[Domain, ...]
    ):
        """Draw the settings from the try's number, and one of `domains`, which come from `steerable`."""
        super().__init__(engine, config, number)
        self._tokenizer = tokenizer
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
    def answering(self) -> bool:  # type: ignore[override]
        return bool(self.messages) and self.messages[-1].role == "user"

    def _under(self, system: str) -> tuple[Message, ...]:
        return (Message("system", system), *self.messages) if system else tuple(self.messages)

    def prompt(self) -> tuple[list[int], SamplingParams]:
        seed = seed_of(self.config.seed, self.number, "answer" if self.answering else "user", self.kept // 2)
        if self.answering:
            prompt = prompt_tokens(self._tokenizer, Conversation(self._under(self.system)))
            return prompt, replace(self.config.answer(self.temperature), seed=seed)
        place = find_user_place(self._tokenizer, self._under(self._steering), self.engine.target.name, self._opening)
        params = replace(self.config.question(), seed=seed, stop_token_ids=place.stop_token_ids, stop=place.stop)
        return list(place.tokens), params

    def add(self, request: RequestState, output: Output, tokens: list[int]) -> bool:
        follows = self._add_answer(request, output, tokens) if self.answering else self._add_question(output, tokens)
        return follows and self._fits()

    def fail(self, why: str) -> None:
        """End the conversation before the failed turn; fail if it is the first."""
        super().fail("shortened" if self.kept else why)

    def result(self) -> tuple[Conversation | None, int]:
        first = Conversation(tuple(self.messages[:1])).prompt_key() if self.messages else 0
        del self.messages[self.kept :]
        conversation = Conversation(self._under(self.system), origin=f"self:{self.number}")
        return conversation if self.kept else None, first

    def _add_question(self, output: Output, tokens: list[int]) -> bool:
        text = (self._opening + output.text).strip()
        why = why_no_question(text, tokens, output.finish_reason == "stop", self._special)
        if why is None and not output.text.strip():  # only the opening
            why = "short"
        if why is not None:
            self.fail(why)
            return False
        self.messages.append(Message("user", text))
        self._opening = ""
        return True

    def _add_answer(self, request: RequestState, output: Output, tokens: list[int]) -> bool:
        mask = self._mask(request.prompt) if self._capture is not None else []
        if not self.answered(request, output, tokens, mask):
            return False
        self.messages.append(Message("assistant", output.text))
        self.kept = len(self.messages)
        return output.finish_reason != "length" and self.kept // 2 < self.turns

    def _mask(self, prompt: list[int]) -> list[int]:
        if not self.kept:
            return [0] * len(prompt)
        rendered = render(self._tokenizer, Conversation(self._under(self.system)))
        same = common_prefix(rendered.tokens, prompt)
        return [*rendered.loss_mask[:same], *([0] * (len(prompt) - same))]

    def _fits(self) -> bool:
        room = self.config.max_tokens if self.answering else self.config.user_tokens
        used = self.report.tokens + (self.config.user_tokens if self.answering else 0)
        fits = used + room < self.engine.target.context_length or not self.kept
        if not fits:
            self.fail("shortened")
        return fits


class TextTry(Try):
    """A text from a target without a chat template, sampled like user turns: greedy texts would all be equal."""

    domain = "text"

    def __init__(self, engine: Engine, config: MakeConfig, number: int, begin: list[int]):
        """Create the try. begin: the tokens that the text begins with, from `beginning`."""
        super().__init__(engine, config, number)
        self._begin, self._text = begin, ""

    def prompt(self) -> tuple[list[int], SamplingParams]:
        seed = seed_of(self.config.seed, self.number, self.domain)
        return self._begin, replace(self.config.question(), max_tokens=self.config.max_tokens, seed=seed)

    def add(self, request: RequestState, output: Output, tokens: list[int]) -> bool:
        if self.answered(request, output, tokens, [0] * len(request.prompt)):
            self._text = output.text
        return False

    def result(self) -> tuple[Conversation | None, int]:
        conversation = Conversation(text=self._text, origin=f"self:{self.number}")
        return (conversation, conversation.prompt_key()) if self._text else (None, 0)


def tries(engine: Engine, config: MakeConfig) -> Callable[[int], Try]:
    """Return a function that creates the try with a given number, with hidden states if the engine captures them.

    Raises TargetError without a tokenizer, or if the chat template does not let the target write user turns.
    """
    target = engine.target
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer, so it cannot make up text")
    if tokenizer.has_chat_template:
        domains = steerable(tokenizer, config.domains, target.name)
        return lambda number: ConversationTry(engine, config, number, tokenizer, domains)
    begin = beginning(tokenizer, target.name)
    return lambda number: TextTry(engine, config, number, begin)


def beginning(tokenizer: TokenizerWrapper, name: str) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, else its BOS or EOS. Raises TargetError, with `name`."""
    before: list[int] = list(tokenizer.encode(""))
    while before and before[-1] == tokenizer.eos_token_id:  # some tokenizers also append EOS
        before.pop()
    marks = [int(token) for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    if before or marks:
        return before or marks[:1]
    raise TargetError(
        f"{name} has neither a chat template nor a token that begins or ends a text, so it cannot make up text; use "
        "data instead: texts or conversations as FILE.jsonl, or a data set on the hub (docs/data.md)"
    )


def _drawn(weights: Sequence[float], share: float) -> int:
    """Return the index at which `share` (0 to 1) of the total weight is reached."""
    sums = list(accumulate(weights))
    return min(bisect.bisect_right(sums, share * sums[-1]), len(sums) - 1)
