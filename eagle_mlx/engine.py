"""The engine: requests in, rounds of speculative decoding, the target's own text out."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from tqdm import tqdm

from eagle_mlx.batch import Batch, Round
from eagle_mlx.cache import check_cacheable, may_pad
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.params import SamplingParams
from eagle_mlx.policy import Policy, ThroughputPolicy
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.row import Row, StopStrings, TokenLogprob
from eagle_mlx.streaming import TextStream
from eagle_mlx.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Raw text, token ids, or messages that go through the target's chat template."""


@dataclass(frozen=True)
class Output:
    """What became of one request."""

    text: str
    tokens: list[int]
    """With the stop token, or the one that completed a stop string, where one was emitted."""
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    rounds: int
    """Target forwards that emitted tokens."""
    drafted: int
    accepted: int
    """Draft tokens that were accepted and emitted."""
    drafted_by_position: list[int]
    """Rounds in which a draft token stood at each position."""
    accepted_by_position: list[int]
    """Rounds in which the draft token at each position was accepted."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of the tokens, where the request asked."""
    lossless: bool = True
    """False where the request chose `threshold` acceptance, by which drafts change the text."""

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per target forward, bonus tokens included."""
        return len(self.tokens) / self.rounds


@dataclass(frozen=True)
class Chunk:
    """What one round added to a streamed text."""

    text: str
    """Text that is certain: half a character waits for the rest, and so does what may become a stop string."""
    tokens: list[int]
    output: Output | None
    """The whole, with the last chunk."""


class Engine:
    """Decodes batches of requests with a target and, where one is given, a proposer.

    Without a proposer it decodes plainly. Whatever the proposer, policy and batch, greedy text and seeded text are
    the target's own, and sampled text follows the target's distribution, unless a request chose otherwise
    (`Output.lossless`).

    Raises TargetError or HeadError, when it is built, where the parts do not fit together.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        policy: Policy | None = None,
        max_batch: int = 8,
        prefill_chunk: int = 512,
    ):
        if max_batch < 1 or prefill_chunk < 1:
            raise ConfigError(f"max_batch ({max_batch}) and prefill_chunk ({prefill_chunk}) must be at least 1")
        check_cacheable(target.model, max_batch)
        self._may_pad = may_pad(target.model)
        if proposer is not None:
            proposer.bind(target)
        self.target, self.proposer = target, proposer
        self.policy: Policy = policy or ThroughputPolicy()
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._ahead: Round | None = None
        self._landed_at = 0.0
        self._added = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Decode all prompts to their ends; the outputs come in the order of the prompts.

        Raises PromptError for a prompt that is empty or longer than the target's context, or params that the target
        cannot serve, before anything is decoded.
        """
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one for each")
        rows = [self._row(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        self._waiting.extend(rows)
        unfinished = {row.index for row in rows}
        try:
            with tqdm(total=len(rows), desc="generate", unit="prompt", disable=not progress) as bar:
                while unfinished:
                    unfinished.difference_update(row.index for row in self.step())
                    bar.update(len(rows) - len(unfinished) - bar.n)
        finally:
            for row in rows:
                self._cancel(row)
        return [self._output(row) for row in rows]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Decode one prompt and yield what each round adds, in company with whatever else the engine decodes.

        Needs a tokenizer. A caller that stops listening frees the row. Raises PromptError as `generate` does.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise PromptError("this target has no tokenizer, so there is no text to stream; use generate")
        row = self._row(prompt, params or SamplingParams())
        self._waiting.append(row)
        text = TextStream(tokenizer, row.params.stop)
        try:
            output, seen = None, 0
            while output is None:
                if len(row.tokens) == seen:  # others may have stepped meanwhile
                    self.step()
                new, seen = row.tokens[seen:], len(row.tokens)
                output = self._output(row) if row.finish_reason else None
                yield Chunk(text.push(new) if output is None else text.finish(output.text), new, output)
        finally:
            self._cancel(row)

    def _cancel(self, row: Row) -> None:
        """Let a row go that nobody waits for; nothing happens to one that has finished."""
        if row.finish_reason:
            return
        row.finish_reason = "cancelled"
        if row in self._waiting:
            self._waiting.remove(row)
        elif self._batch is not None:
            self._release()

    def step(self) -> list[Row]:
        """One round for every row: admit, launch, land, release. Returns the rows that have finished."""
        self._admit()
        if self._batch is None:
            return []
        # A round that was launched ahead has run since the one before it landed.
        started = perf_counter() if self._ahead is None else self._landed_at
        current = self._ahead or self._batch.launch(self._depth())
        self._ahead = self._batch.launch(0) if current.depth == 0 and self._may_run_ahead() else None
        drafted, accepted = self._batch.land(current)
        self._landed_at = perf_counter()
        if self.proposer is not None:
            self.policy.observe(current.depth, drafted, accepted, self._landed_at - started)
        return self._release()

    def _admit(self) -> None:
        """Read the prompts of waiting requests and let their rows join, as far as there is room."""
        if self._ahead is not None:
            return  # its answer is for the rows that it was launched with
        free = self.max_batch - (len(self._batch.rows) if self._batch else 0)
        rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        for group in [rows] if self._may_pad and rows else [[row] for row in rows]:
            self._join(group)

    def _join(self, rows: list[Row]) -> None:
        joining = Batch(self.target, self.proposer, rows)
        joining.prefill(self.prefill_chunk)
        if self._batch is None:
            self._batch = joining
        else:
            self._batch.append(joining)

    def _depth(self) -> int:
        return self.policy.depth(len(self._batch.rows)) if self._batch and self.proposer else 0

    def _may_run_ahead(self) -> bool:
        """Whether the next round is sure to be plain and wanted, so that it can start before this one is read."""
        if self._batch is None or self._waiting or not self._batch.may_run_ahead or self._depth() > 0:
            return False
        return all(len(row.tokens) + 1 < row.limit for row in self._batch.rows)

    def _forget_ahead(self) -> None:
        """Undo a round that was launched for other rows than there are now."""
        if self._ahead is not None and self._batch is not None:
            self._batch.cancel(self._ahead)
        self._ahead = None

    def _release(self) -> list[Row]:
        assert self._batch is not None
        if any(row.finish_reason for row in self._batch.rows):
            self._forget_ahead()
        released = self._batch.release()
        if not self._batch.rows:
            self._batch = None
        return released

    def _row(self, prompt: Prompt, params: SamplingParams) -> Row:
        tokens = self._encode(prompt)
        context = self.target.context_length
        if not tokens:
            raise PromptError("a prompt is empty; give at least one token")
        if len(tokens) >= context:
            raise PromptError(
                f"a prompt of {len(tokens)} tokens does not fit the target's context of {context}; shorten it"
            )
        if not (0 <= min(tokens) and max(tokens) < self.target.vocab_size):
            raise PromptError(f"a prompt holds a token id outside the target's vocabulary of {self.target.vocab_size}")
        if max(params.logit_bias, default=0) >= self.target.vocab_size:
            raise PromptError(
                f"logit_bias names a token id outside the target's vocabulary of {self.target.vocab_size}"
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.target.eos_token_ids)
        limit = min(params.max_tokens, context - len(tokens))
        stops = self._stops(params)
        grammar = params.grammar() if params.grammar else None
        self._added += 1
        return Row(self._added, tokens, params, seed, limit, stop_ids, stops, grammar)

    def _stops(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self.target.tokenizer is None:
            raise PromptError("this target has no tokenizer; give stop_token_ids instead of stop")
        return StopStrings(params.stop, self.target.tokenizer)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return list(cast(Sequence[int], prompt))
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise PromptError("this target has no tokenizer; give prompts as lists of token ids")
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True))

    def _output(self, row: Row) -> Output:
        tokenizer, tokens = self.target.tokenizer, row.tokens
        shown = tokens[:-1] if tokens and tokens[-1] in row.stop_ids else tokens
        text = tokenizer.decode(shown) if tokenizer is not None else ""
        return Output(
            text=row.stops.cut(text) if row.stops else text,
            tokens=tokens,
            finish_reason=row.finish_reason or "length",
            prompt_tokens=len(row.prompt),
            rounds=row.rounds,
            drafted=sum(row.drafted_by_position),
            accepted=sum(row.accepted_by_position),
            drafted_by_position=row.drafted_by_position,
            accepted_by_position=row.accepted_by_position,
            logprobs=row.logprobs if row.params.wants_logprobs else None,
            lossless=row.params.lossless,
        )
