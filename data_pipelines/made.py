"""Conversations that a target makes up by itself: it writes the user's turns, and answers them.

The user's turns come as in Magpie (Xu et al. 2024, arXiv 2406.08464): the target is given its own chat template up to
the place where the user speaks.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, DataError, TargetError
from eagle_mlx.progress import counted
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.shards import Sample

from .chat import prompt_tokens, render
from .conversation import Conversation, Message
from .domains import DOMAINS, Domain
from .regenerate import seed_of
from .usable import loops_so_far, why_no_answer, why_no_question
from .user_place import UserPlace, find_user_place

A = TypeVar("A")


@dataclass(frozen=True)
class MakeConfig:
    """How conversations are made up. Raises ConfigError, when it is made, for what cannot be."""

    seed: int = 0
    domains: tuple[Domain, ...] = DOMAINS
    turns: tuple[float, ...] = (0.7, 0.2, 0.1)
    """The shares of conversations in which the user is to speak once, twice, …"""
    user_temperature: float = 1.0
    """Of the user's turns; Magpie's own scripts take 1."""
    user_top_p: float = 1.0
    user_tokens: int = 256
    """Tokens by which a user's turn must have ended."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Of the answers; each conversation gets one of them. Magpie's scripts answer at 0, SpecForge's at 0.8: what is
    served is both."""
    top_p: float = 1.0
    """Of the answers."""
    max_tokens: int = 512
    """Of one answer."""
    systems: tuple[str, ...] = ("",)
    """System prompts to answer under, of which each conversation gets one; empty for the template's own."""

    def __post_init__(self) -> None:
        for name in ("domains", "turns", "temperatures", "systems"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must name at least one")
        if min(self.turns) < 0 or not sum(self.turns) > 0:
            raise ConfigError(f"turns {self.turns}: these are shares, none below 0 and one above it")
        for temperature in self.temperatures:
            self.answer(temperature)
        self.question(UserPlace((), (), ()))

    def question(self, place: UserPlace) -> SamplingParams:
        """How a user's turn is drawn."""
        return SamplingParams(
            temperature=self.user_temperature,
            top_p=self.user_top_p,
            max_tokens=self.user_tokens,
            stop_token_ids=place.stop_token_ids,
            stop=place.stop,
        )

    def answer(self, temperature: float) -> SamplingParams:
        """How an answer is drawn."""
        return SamplingParams(temperature=temperature, top_p=self.top_p, max_tokens=self.max_tokens)


@dataclass
class MakeReport:
    """Counted over tries, of which each makes one conversation or says by what it failed."""

    tries: int = 0
    tokens: int = 0
    """Of the conversations that were kept, template included."""
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0
    """Answers that ended at `max_tokens`; their conversations end there."""
    shortened: int = 0
    """Conversations that were kept without the later turns that were planned, because one of those failed."""
    heldout: int = 0
    """Conversations on the held-out side."""
    endless: int = 0
    """User's turns that did not end in time."""
    markup: int = 0
    """Turns with special tokens in them."""
    short: int = 0
    """User's turns of hardly a word."""
    question_loops: int = 0
    no_user: int = 0
    """User's turns that an assistant would say."""
    silent: int = 0
    """Empty answers."""
    answer_loops: int = 0
    refusals: int = 0
    """Answers that refuse."""
    duplicates: int = 0
    """Conversations that begin with what another begins with."""
    late: int = 0
    """Tries that the end of the time stopped before anything of them could be kept."""

    def add(self, counts: tuple[int, ...]) -> None:
        """Add the fields of another report, in their order."""
        for own, count in zip(fields(self), counts, strict=True):
            setattr(self, own.name, getattr(self, own.name) + count)

    def counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, own.name) for own in fields(self))

    @property
    def failed(self) -> int:
        """Tries that gave no conversation."""
        return sum(getattr(self, name) for name in _FAILURES)

    def summary(self) -> str:
        """The counts in two lines."""
        return (
            f"{counted(self.tries - self.failed, 'conversation')} of {counted(self.tokens, 'token')}, "
            f"{counted(self.answers, 'answer')} of "
            f"{self.answer_tokens:,}; {self.heldout:,} on the held-out side, {counted(self.cut, 'answer')} cut, "
            f"{counted(self.shortened, 'conversation')} shorter than planned\n"
            f"{counted(self.tries, 'try')}, {self.failed:,} left out: {self.failures()}"
        )

    def failures(self) -> str:
        """What tries failed by, the most frequent first."""
        said = sorted(((getattr(self, name), text) for name, text in _FAILURES.items()), key=lambda each: -each[0])
        return ", ".join(f"{count:,} {text}" for count, text in said if count) or "none"


_FAILURES = {
    "endless": "user turns without an end",
    "markup": "turns with special tokens",
    "short": "user turns too short",
    "question_loops": "user turns that loop",
    "no_user": "user turns that an assistant would say",
    "silent": "empty answers",
    "answer_loops": "answers that loop",
    "refusals": "refusals",
    "duplicates": "duplicates",
    "late": "stopped because the time was over",
}


class Made(NamedTuple):
    """What came of a try."""

    number: int
    conversation: Conversation | None
    """None where it failed."""
    domain: str
    key: int
    """A hash of what the user says first; tries that have it in common are duplicates."""
    report: MakeReport
    """Of this try alone."""
    sample: Sample | None = None
    """Its tokens with their hidden states, where the engine captures."""


@dataclass
class Attempt:
    """A conversation under way."""

    number: int
    domain: Domain
    turns: int
    """The user's turns that are planned."""
    system: str
    temperature: float
    opening: str
    """What the user's first turn begins with."""
    messages: list[Message] = field(default_factory=list)
    """Without a system prompt. The user's word is the last while it is answered."""
    kept: int = 0
    """Messages up to the last answer that is good."""
    report: MakeReport = field(default_factory=lambda: MakeReport(tries=1))
    sample: Sample | None = None
    """Of the conversation up to the last answer that is good."""

    @property
    def answering(self) -> bool:
        """Whether the next to speak is the assistant."""
        return bool(self.messages) and self.messages[-1].role == "user"

    @property
    def turn(self) -> int:
        """The user's turns that are complete with their answers."""
        return self.kept // 2

    @property
    def begun(self) -> str:
        """What the user's next turn begins with."""
        return "" if self.messages else self.opening

    def under(self, system: str) -> list[Message]:
        return [Message("system", system), *self.messages] if system else list(self.messages)

    def fail(self, why: str) -> None:
        """End the conversation before the turn that failed, or altogether where it is the first."""
        if self.kept:
            self.report.shortened += 1
        else:
            setattr(self.report, why, 1)

    def result(self) -> Made:
        said = self.messages[: self.kept]
        first = Conversation(tuple(self.messages[:1])).prompt_key() if self.messages else 0
        if not said:
            return Made(self.number, None, self.domain.name, first, self.report)
        messages = (Message("system", self.system), *said) if self.system else tuple(said)
        conversation = Conversation(messages, origin=f"self:{self.number}")
        self.report.heldout = int(conversation.is_held_out)
        return Made(self.number, conversation, self.domain.name, first, self.report, self.sample)


class ConversationWriter:
    """Has a target with a chat template write both sides of conversations.

    Raises TargetError where it cannot speak as its user.
    """

    def __init__(self, engine: Engine, config: MakeConfig, tokenizer: TokenizerWrapper):
        self.engine, self.config, self.tokenizer = engine, config, tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self.capture = engine.proposer if isinstance(engine.proposer, CapturingProposer) else None
        self.domains = steerable(tokenizer, config.domains, engine.target.name)

    def open(self, number: int) -> Attempt:
        """A try as its number and the seed have it."""

        def share(what: str) -> float:
            return seed_of(self.config.seed, number, what) / (1 << 63)

        def one_of(what: str, choices: tuple[A, ...]) -> A:
            return choices[int(share(what) * len(choices))]

        domain = self.domains[_drawn([d.weight for d in self.domains], share("domain"))]
        return Attempt(
            number,
            domain,
            1 + _drawn(self.config.turns, share("turns")),
            one_of("system", self.config.systems),
            one_of("temperature", self.config.temperatures),
            one_of("opening", domain.openings),
        )

    def submit(self, attempt: Attempt) -> RequestState:
        """Have the next turn written."""
        seed = seed_of(self.config.seed, attempt.number, "answer" if attempt.answering else "user", attempt.turn)
        if attempt.answering:
            prompt = prompt_tokens(self.tokenizer, Conversation(tuple(attempt.under(attempt.system))))
            params = self.config.answer(attempt.temperature)
            if self.capture is not None:
                self.capture.want(prompt)
        else:
            place = self._place(attempt)
            prompt, params = list(place.tokens), self.config.question(place)
        request = self.engine.prepare(prompt, replace(params, seed=seed))
        self.engine.submit(request)
        return request

    def take(self, attempt: Attempt, request: RequestState) -> bool:
        """Put a turn that has been written into its conversation; whether another one follows."""
        output = self.engine.output(request)
        if output.finish_reason == "error":
            raise DataError(f"try {attempt.number}: nothing could be written: {output.error}")
        said = output.tokens[:-1] if output.tokens[-1] in request.request.stop_ids else output.tokens
        take = self._answered if attempt.answering else self._asked
        follows = take(attempt, request, output, said)
        return follows and self._fits(attempt)

    def give_up(self, attempt: Attempt, request: RequestState) -> bool:
        """Whether the turn under way cannot be used any more; then its conversation ends."""
        if not loops_so_far(request.tokens):
            return False
        if self.capture is not None and attempt.answering:
            self.capture.forget(request.prompt)
        attempt.fail("answer_loops" if attempt.answering else "question_loops")
        return True

    def stop(self, attempt: Attempt, request: RequestState) -> None:
        """End a conversation because the time is over; turns with complete answers are kept."""
        if self.capture is not None and attempt.answering:
            self.capture.forget(request.prompt)
        attempt.fail("late")

    def _sample(self, attempt: Attempt, request: RequestState) -> Sample | None:
        """The conversation's tokens with the states of the forwards that read and wrote them."""
        if self.capture is None:
            return None
        mask = [*self._earlier(attempt, request.prompt), *([1] * len(request.tokens))]
        return captured(self.engine, self.capture, request, mask, attempt.number)

    def _earlier(self, attempt: Attempt, prompt: list[int]) -> list[int]:
        """The loss mask of a prompt: 1 on the answers in it."""
        if not attempt.kept:
            return [0] * len(prompt)
        rendered = render(self.tokenizer, Conversation(tuple(attempt.under(attempt.system))))
        same = next((i for i, (a, b) in enumerate(zip(rendered.tokens, prompt, strict=False)) if a != b), None)
        mask = rendered.loss_mask[: min(len(prompt), len(rendered.tokens)) if same is None else same]
        return [*mask, *([0] * (len(prompt) - len(mask)))]

    def _asked(self, attempt: Attempt, request: RequestState, output: Output, said: list[int]) -> bool:
        text = (attempt.begun + output.text).strip()
        why = why_no_question(text, said, output.finish_reason == "stop", self._special)
        if why is None and not output.text.strip():  # an opening alone
            why = "short"
        if why is not None:
            attempt.fail(why)
            return False
        attempt.messages.append(Message("user", text))
        return True

    def _answered(self, attempt: Attempt, request: RequestState, output: Output, said: list[int]) -> bool:
        sample, why = self._sample(attempt, request), why_no_answer(output.text, said, self._special)
        if why is not None:
            attempt.fail(why)
            return False
        attempt.sample = sample
        report, is_cut = attempt.report, output.finish_reason == "length"
        attempt.messages.append(Message("assistant", output.text))
        attempt.kept = len(attempt.messages)
        report.answers += 1
        report.answer_tokens += len(output.tokens)
        report.cut += is_cut
        report.tokens = output.prompt_tokens + len(output.tokens)
        return not is_cut and attempt.turn < attempt.turns

    def _fits(self, attempt: Attempt) -> bool:
        """Whether the next turn has room in the target's context."""
        room = self.config.max_tokens if attempt.answering else self.config.user_tokens
        used = attempt.report.tokens + (self.config.user_tokens if attempt.answering else 0)
        fits = used + room < self.engine.target.context_length or not attempt.kept
        if not fits:
            attempt.fail("")
        return fits

    def _place(self, attempt: Attempt) -> UserPlace:
        said = attempt.under(attempt.domain.system)
        return find_user_place(self.tokenizer, said, self.engine.target.name, attempt.begun)


def captured(engine: Engine, capture: CapturingProposer, request: RequestState, mask: list[int], number: int) -> Sample:
    """A try's tokens, with the loss mask of as many, and the states of the forwards that read and wrote them.

    Raises DataError where states are missing.
    """
    states = capture.take(request.prompt, request.tokens)
    if states is None:
        raise DataError(f"try {number}: the hidden states of its answer were not captured whole")
    # Nothing read the last token, and no loss reads its state: see `train.step.batch_plan`.
    states = np.pad(states, ((0, 1), (0, 0)))
    split = engine.target.hidden_size * (len(capture.layers) - 1)
    tokens = np.array([*request.prompt, *request.tokens], np.int32)
    return Sample(tokens, np.array(mask, np.uint8), states[:, :split].copy(), states[:, split:].copy())


def steerable(tokenizer: TokenizerWrapper, domains: tuple[Domain, ...], name: str) -> tuple[Domain, ...]:
    """The domains that the template lets something steer: their system prompt, or else their openings alone.

    Those that have neither need none. Raises TargetError, as `find_user_place` does, where there are no such domains.
    """
    usable: list[Domain] = []
    refused: TargetError | None = None
    for domain in domains:
        ways = (domain, replace(domain, system="")) if any(domain.openings) else (domain,)
        for way in ways:
            try:
                find_user_place(tokenizer, way.messages, name)
            except TargetError as e:
                refused = e
                continue
            usable.append(way)
            break
    if not usable and refused is not None:
        raise refused
    return tuple(usable)


def _drawn(weights: tuple[float, ...] | list[float], share: float) -> int:
    """The index at which a share, 0 to 1, of all weights is reached."""
    sums = list(accumulate(weights))
    return min(bisect.bisect_right(sums, share * sums[-1]), len(sums) - 1)
