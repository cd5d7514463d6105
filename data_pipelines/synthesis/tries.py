"""Have a target make up conversations: it writes the user turns and answers them.

User turns are generated as in Magpie (Xu et al. 2024, arXiv 2406.08464): the target continues its own chat template
at the place of a user turn. A target without a chat template writes plain texts.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError, TargetError
from eagle_mlx.hidden_states import Example
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams

from ..conversation import Conversation, Message
from ..options import MakeConfig
from ..rendering import prompt_tokens, render
from ..template import common_prefix
from .loop import Task, seed_of
from .report import MakeReport, loops_so_far, why_no_answer, why_no_question
from .user_turns import Domain, find_user_place, steerable

A = TypeVar("A")
OWN = "own"
"""The domain of conversations that begin with a given question."""


class Try(Task):
    """A try to make up something, as a task of `run_tasks`. It depends only on the seed and its number."""

    domain: str
    answering = True
    """Whether the text being generated is an answer."""

    def __init__(self, engine: Engine, config: MakeConfig, number: int):
        self.engine, self.config, self.number = engine, config, number
        self.report = MakeReport(tries=1)
        self.example: Example | None = None
        """Tokens with their hidden states, if the engine captures them."""
        self.ended = False
        self._capture = engine.proposer if isinstance(engine.proposer, CapturingProposer) else None

    @abstractmethod
    def prompt(self) -> tuple[list[int], SamplingParams]:
        """Return the tokens before the next text, and its sampling parameters."""

    @abstractmethod
    def add(self, request: RequestState, output: Output, said: list[int]) -> bool:
        """Add a text with the tokens `said`, without the end of turn; return whether another text follows."""

    @abstractmethod
    def result(self) -> tuple[Conversation | None, int]:
        """Return a pair: the conversation (None if the try failed), and a hash of its beginning to find duplicates."""

    def fail(self, why: str) -> None:
        """End the try; `why` is a field of `MakeReport`."""
        setattr(self.report, why, 1)

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
        said = output.tokens[:-1] if output.tokens[-1] in request.request.stop_ids else output.tokens
        self.ended = not self.add(request, output, said)

    def give_up(self, request: RequestState) -> bool:
        if not loops_so_far(request.tokens):
            return False
        self._forget(request)
        self.fail("answer_loops" if self.answering else "question_loops")
        return True

    def stop(self, request: RequestState) -> None:
        self._forget(request)
        self.fail("late")

    def answered(self, request: RequestState, output: Output, said: list[int], mask: list[int]) -> bool:
        """Count an answer and take its hidden states; return False if it is unusable. `mask` belongs to the prompt."""
        example = None
        if self._capture is not None:
            states = self._capture.take(request.prompt, request.tokens)
            if states is None:
                raise DataError(f"try {self.number}: some hidden states of its answer were not captured")
            mask = [*mask, *([1] * len(request.tokens))]
            example = replace(Example.of([*request.prompt, *request.tokens], mask), states=states)
        why = why_no_answer(output.text, said, self._special)
        if why is not None:
            self.fail(why)
            return False
        self.example = example
        self.report.answers += 1
        self.report.answer_tokens += len(output.tokens)
        self.report.cut += output.finish_reason == "length"
        self.report.tokens = output.prompt_tokens + len(output.tokens)
        return True

    def _forget(self, request: RequestState) -> None:
        if self._capture is not None and self.answering:
            self._capture.forget(request.prompt)

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

        def share(what: str) -> float:
            return seed_of(config.seed, number, what) / (1 << 63)

        def one_of(what: str, choices: tuple[A, ...]) -> A:
            return choices[int(share(what) * len(choices))]

        domain = domains[_drawn([d.weight for d in domains], share("domain"))]
        self.domain, self._steering = domain.name, domain.system
        self.turns = 1 + _drawn(config.turns, share("turns"))
        """Number of planned user turns."""
        self.system = one_of("system", config.systems)
        self.temperature = one_of("temperature", config.temperatures)
        self._opening = one_of("opening", domain.openings)
        """The given beginning of the next user turn."""
        self.messages: list[Message] = []
        """Messages without a system prompt. While an answer is generated, the last is the user's."""
        if number % 2 == 0 and number // 2 < len(config.questions):
            self.system, question = config.questions[number // 2]
            self.domain, self._steering, self._opening = OWN, self.system, ""
            self.messages = [Message("user", question)]
        self.kept = 0
        """Number of messages up to the last usable answer."""

    @property
    def answering(self) -> bool:  # type: ignore[override]
        """Whether the next turn is the assistant's."""
        return bool(self.messages) and self.messages[-1].role == "user"

    def under(self, system: str) -> list[Message]:
        return [Message("system", system), *self.messages] if system else list(self.messages)

    def prompt(self) -> tuple[list[int], SamplingParams]:
        turn = self.kept // 2
        seed = seed_of(self.config.seed, self.number, "answer" if self.answering else "user", turn)
        if self.answering:
            prompt = prompt_tokens(self._tokenizer, Conversation(tuple(self.under(self.system))))
            return prompt, replace(self.config.answer(self.temperature), seed=seed)
        place = find_user_place(self._tokenizer, self.under(self._steering), self.engine.target.name, self._opening)
        params = replace(self.config.question(), seed=seed, stop_token_ids=place.stop_token_ids, stop=place.stop)
        return list(place.tokens), params

    def add(self, request: RequestState, output: Output, said: list[int]) -> bool:
        follows = self._add_answer(request, output, said) if self.answering else self._add_question(output, said)
        return follows and self._fits()

    def fail(self, why: str) -> None:
        """End the conversation before the failed turn; fail if it is the first."""
        if self.kept:
            self.report.shortened += 1
        else:
            super().fail(why)

    def result(self) -> tuple[Conversation | None, int]:
        first = Conversation(tuple(self.messages[:1])).prompt_key() if self.messages else 0
        said = self.messages[: self.kept]
        if not said:
            return None, first
        messages = (Message("system", self.system), *said) if self.system else tuple(said)
        return Conversation(messages, origin=f"self:{self.number}"), first

    def _add_question(self, output: Output, said: list[int]) -> bool:
        text = (self._opening + output.text).strip()
        why = why_no_question(text, said, output.finish_reason == "stop", self._special)
        if why is None and not output.text.strip():  # only the opening
            why = "short"
        if why is not None:
            self.fail(why)
            return False
        self.messages.append(Message("user", text))
        self._opening = ""
        return True

    def _add_answer(self, request: RequestState, output: Output, said: list[int]) -> bool:
        mask = self._mask(request.prompt) if self._capture is not None else []
        if not self.answered(request, output, said, mask):
            return False
        self.messages.append(Message("assistant", output.text))
        self.kept = len(self.messages)
        return output.finish_reason != "length" and self.kept // 2 < self.turns

    def _mask(self, prompt: list[int]) -> list[int]:
        if not self.kept:
            return [0] * len(prompt)
        rendered = render(self._tokenizer, Conversation(tuple(self.under(self.system))))
        same = common_prefix(rendered.tokens, prompt)
        return [*rendered.loss_mask[:same], *([0] * (len(prompt) - same))]

    def _fits(self) -> bool:
        room = self.config.max_tokens if self.answering else self.config.user_tokens
        used = self.report.tokens + (self.config.user_tokens if self.answering else 0)
        fits = used + room < self.engine.target.context_length or not self.kept
        if not fits:
            self.fail("")
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

    def add(self, request: RequestState, output: Output, said: list[int]) -> bool:
        if self.answered(request, output, said, [0] * len(request.prompt)):
            self._text = output.text
        return False

    def result(self) -> tuple[Conversation | None, int]:
        conversation = Conversation(text=self._text, origin=f"self:{self.number}")
        return (conversation, conversation.prompt_key()) if self._text else (None, 0)


def tries(engine: Engine, config: MakeConfig) -> Callable[[int], Try]:
    """Return a function that creates the try with a given number.

    Tries have hidden states if the proposer is a CapturingProposer of the target's last layer. Raises TargetError if
    the chat template does not let the target write user turns, or if there is no tokenizer.
    """
    target = engine.target
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer, so it cannot make up text")
    if not tokenizer.has_chat_template:
        begin = beginning(tokenizer, target.name)
        return lambda number: TextTry(engine, config, number, begin)
    domains = steerable(tokenizer, config.domains, target.name)
    return lambda number: ConversationTry(engine, config, number, tokenizer, domains)


def beginning(tokenizer: TokenizerWrapper, name: str) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, else its BOS or EOS. Raises TargetError, with `name`."""
    before: list[int] = list(tokenizer.encode(""))
    while before and before[-1] == tokenizer.eos_token_id:  # some tokenizers also append EOS
        before.pop()
    if before:
        return before
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    raise TargetError(
        f"{name} has neither a chat template nor a token that begins or ends a text, so it cannot make up text; use "
        "data instead: texts or conversations as FILE.jsonl, or a data set on the hub (docs/data.md)"
    )


def _drawn(weights: tuple[float, ...] | list[float], share: float) -> int:
    """Return the index at which `share` (0 to 1) of the total weight is reached."""
    sums = list(accumulate(weights))
    return min(bisect.bisect_right(sums, share * sums[-1]), len(sums) - 1)
