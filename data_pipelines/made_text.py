"""Plain texts that a target without a chat template makes up: what it says from the beginning of a text on."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError, TargetError
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.shards import Sample

from .conversation import Conversation
from .made import Made, MakeConfig, MakeReport, captured
from .regenerate import seed_of
from .usable import loops_so_far, why_no_answer

_DOMAIN = "text"
"""What stands in the place of a conversation's domain."""


@dataclass
class TextAttempt:
    """A text under way."""

    number: int
    report: MakeReport = field(default_factory=lambda: MakeReport(tries=1))
    text: str | None = None
    """None where nothing came of it."""
    sample: Sample | None = None

    def result(self) -> Made:
        if self.text is None:
            return Made(self.number, None, _DOMAIN, 0, self.report)
        conversation = Conversation(text=self.text, origin=f"self:{self.number}")
        self.report.heldout = int(conversation.is_held_out)
        return Made(self.number, conversation, _DOMAIN, conversation.prompt_key(), self.report, self.sample)


class TextWriter:
    """Has a target write texts from their beginning on, drawn as a user's turns are.

    So they are texts of the target's own, as varied as it has them: at temperature 0 all would be one. Raises
    TargetError where nothing says how a text begins.
    """

    def __init__(self, engine: Engine, config: MakeConfig, tokenizer: TokenizerWrapper):
        self.engine, self.config = engine, config
        self._begin = beginning(tokenizer, engine.target.name)
        self._special = frozenset(tokenizer.all_special_ids)
        self._capture = engine.proposer if isinstance(engine.proposer, CapturingProposer) else None

    def open(self, number: int) -> TextAttempt:
        """A try as its number and the seed have it."""
        return TextAttempt(number)

    def submit(self, attempt: TextAttempt) -> RequestState:
        """Have the text written."""
        params = SamplingParams(
            temperature=self.config.user_temperature,
            top_p=self.config.user_top_p,
            max_tokens=self.config.max_tokens,
            seed=seed_of(self.config.seed, attempt.number, _DOMAIN),
        )
        if self._capture is not None:
            self._capture.want(self._begin)
        request = self.engine.prepare(self._begin, params)
        self.engine.submit(request)
        return request

    def give_up(self, attempt: TextAttempt, request: RequestState) -> bool:
        """Whether the text under way cannot be used any more."""
        if not loops_so_far(request.tokens):
            return False
        if self._capture is not None:
            self._capture.forget(request.prompt)
        attempt.report.answer_loops = 1
        return True

    def stop(self, attempt: TextAttempt, request: RequestState) -> None:
        """Drop a text because the time is over."""
        if self._capture is not None:
            self._capture.forget(request.prompt)
        attempt.report.late = 1

    def take(self, attempt: TextAttempt, request: RequestState) -> bool:
        """Keep the text where it is worth learning from; nothing follows it."""
        output = self.engine.output(request)
        if output.finish_reason == "error":
            raise DataError(f"try {attempt.number}: nothing could be written: {output.error}")
        if self._capture is not None:
            mask = [*([0] * len(request.prompt)), *([1] * len(request.tokens))]
            attempt.sample = captured(self.engine, self._capture, request, mask, attempt.number)
        said = output.tokens[:-1] if output.tokens[-1] in request.request.stop_ids else output.tokens
        why = why_no_answer(output.text, said, self._special)
        report = attempt.report
        if why is not None:
            setattr(report, why, 1)
            return False
        attempt.text = output.text
        report.answers, report.answer_tokens = 1, len(output.tokens)
        report.cut = int(output.finish_reason == "length")
        report.tokens = output.prompt_tokens + len(output.tokens)
        return False


def beginning(tokenizer: TokenizerWrapper, name: str) -> list[int]:
    """The tokens that a text begins with; `name` is the target's, for the error message.

    They are those that the tokenizer puts in front of every text; where it puts none, its token for the beginning of a
    text; where it has none, the one for the end, which stands between the texts that such models were trained on.
    Raises TargetError where it has neither.
    """
    before: list[int] = list(tokenizer.encode(""))
    while before and before[-1] == tokenizer.eos_token_id:  # some put the end behind every text as well
        before.pop()
    if before:
        return before
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    raise TargetError(
        f"{name} has neither a chat template nor a token that begins or ends a text, so it can make up nothing; give "
        "it data to learn from: texts or conversations as FILE.jsonl, or a data set of the hub (docs/data.md)"
    )
