"""The engine: requests in, rounds of speculative decoding, the target's own text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from eagle_mlx import memory
from eagle_mlx.cache import RaggedCache, check_cacheable
from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.kv_budget import KVBudget, size_of
from eagle_mlx.engine.output import Chunk, Output
from eagle_mlx.engine.pipeline import Pipeline
from eagle_mlx.engine.prefill import PREFILL_CHUNK
from eagle_mlx.engine.prefix import PrefixCache
from eagle_mlx.engine.scheduler import Scheduler
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.plan import PLAIN, Plan, RoundResult
from eagle_mlx.policy import Policy, ThroughputPolicy
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Prompt, Request, make_request
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import TextStream


class Engine:
    """Decodes batches of requests with a target and, where one is given, a proposer.

    Without a proposer it decodes plainly. Whatever the proposer, policy and batch, greedy text and seeded text are
    the target's own, and sampled text follows the target's distribution, unless a request chose otherwise
    (`Output.lossless`).

    Every request is either waiting or the business of the step that is under way. Where a step raises (a proposer or
    an observer did, or memory ran out), what it worked on may be half done. So all rows that were decoding or whose
    prompts were being read end with an error, which is in their `Output`; requests that only wait go on waiting. The
    engine can be used on, and whoever called `step`, `generate` or `stream` gets the exception.

    Raises TargetError or HeadError, when it is built, where the parts do not fit together.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        policy: Policy | None = None,
        max_batch: int = 8,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 0,
        kv_bits: int | None = None,
        kv_bytes: int | None = None,
    ):
        """`prefill_chunk`: positions of prompts, over all requests, that the target reads in one forward. Those that
        decode wait for it.

        `prefix_cache_bytes`: what the pasts of ended requests may hold, for prompts that begin like them.

        `kv_bytes`: what keys and values may take, those pasts included; by default four fifths of the memory that is
        free. A request that would not fit beside others waits; `prepare` refuses one that never would.

        `kv_bits`: 4 or 8 to quantise the keys and values of full attention. That is another model, a little: the text
        is then what this engine says without a proposer.
        """
        if max_batch < 1 or prefill_chunk < 1 or prefix_cache_bytes < 0:
            raise ConfigError(
                f"max_batch ({max_batch}) and prefill_chunk ({prefill_chunk}) must be at least 1, prefix_cache_bytes "
                f"({prefix_cache_bytes}) at least 0"
            )
        if kv_bits not in (None, 4, 8):
            raise ConfigError(f"kv_bits must be 4, 8 or None; got {kv_bits!r}")
        if kv_bytes is not None and kv_bytes < 1:
            raise ConfigError(f"kv_bytes must be at least 1, or None for a share of the free memory; got {kv_bytes}")
        check_cacheable(target.model, max_batch, kv_bits)
        if proposer is not None:
            proposer.bind(target)
            # Nothing of this is computed: hidden states that are not to be had are refused before the first prompt.
            target.forward(mx.zeros((1, 2), mx.int32), RaggedCache.of(target.model, 1), proposer.aux_layers)
        self.target, self.proposer = target, proposer
        self.policy: Policy = policy or ThroughputPolicy()
        self.max_batch, self.prefill_chunk, self.kv_bits = max_batch, prefill_chunk, kv_bits
        self.observer: Callable[[RoundResult], None] | None = None
        """Told of every round after it."""
        self.on_first_round: Callable[[int], None] | None = None
        """Told, before the first round is planned, how many tokens of context its rows have, in the mean."""
        self.context = 0
        """Tokens of context of the rows that were decoded last, in the mean, as they were when some joined."""
        self.prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self.chains_only = self._why_chains(kv_bits)
        """Why no trees are drafted though the policy asks for them; None where they are, or nobody asks."""
        share = memory.kv_bytes(memory.free_memory()) if kv_bytes is None else kv_bytes
        self.kv_budget = KVBudget(share, size_of(target, proposer, kv_bits), target.context_length)
        self._scheduler = Scheduler(target, proposer, prefill_chunk, self.prefixes, kv_bits, self.kv_budget)
        self._pipeline = Pipeline()
        self._batch: Batch | None = None
        self._working = False
        """Whether a step is under way, or a request is being let go."""

    def _why_chains(self, kv_bits: int | None) -> str | None:
        return why_no_trees(self.target, kv_bits) if self.policy.wants_trees else None

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds by which rounds are timed."""
        return self._pipeline.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self._pipeline.clock = clock

    @property
    def active(self) -> int:
        """Requests that decode."""
        return sum(request.finish_reason is None for request in self._batch.requests) if self._batch is not None else 0

    @property
    def waiting(self) -> int:
        """Requests that do not decode yet."""
        return len(self._scheduler.waiting) + len(self._scheduler.prefilling)

    @property
    def kv_used(self) -> int:
        """Bytes of keys and values of those that decode, or whose prompts are being read, at most."""
        return self.kv_budget.used(self._scheduler.admitted)

    @property
    def idle(self) -> bool:
        return self._batch is None and self._scheduler.idle

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Decode all prompts to their ends; the outputs come in the order of the prompts.

        Raises PromptError for a prompt that is empty or longer than the target's context, or params that the target
        cannot serve, before anything is decoded. Where a step raises, that exception, and these prompts are withdrawn.
        A prompt that ended in a step that somebody else called, and that raised, has an output with an `error`.
        """
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one, or one for each")
        requests = [self.prepare(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for request in requests:
            self.submit(request)
        try:
            with progress_bar(total=len(requests), desc="generate", unit="prompt", disable=not progress) as bar:
                while not all(request.finish_reason for request in requests):
                    self.step()
                    bar.update(sum(request.finish_reason is not None for request in requests) - bar.n)
        finally:
            for request in requests:
                self.cancel(request)
        return [self.output(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Decode one prompt and yield what each round adds, in company with whatever else the engine decodes.

        Needs a tokenizer. A caller that stops listening frees the request. Raises what `generate` does.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise PromptError("this target has no tokenizer, so there is no text to stream; use generate")
        request = self.prepare(prompt, params or SamplingParams())
        self.submit(request)
        text = TextStream(tokenizer, request.params.stop)
        try:
            output, seen = None, 0
            while output is None:
                if len(request.tokens) == seen and not request.finish_reason:  # others may have stepped meanwhile
                    self.step()
                new, seen = request.tokens[seen:], len(request.tokens)
                output = self.output(request) if request.finish_reason else None
                yield Chunk(text.push(new) if output is None else text.finish(output.text), new, output)
        finally:
            self.cancel(request)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A request as a row to be submitted. Changes nothing here; any thread may call it.

        Raises PromptError, also for one whose keys and values would never fit into `kv_bytes`.
        """
        request = make_request(self.target, prompt, params)
        self.kv_budget.check(request)
        return request

    def submit(self, request: Request) -> None:
        """The row waits for its turn; its tokens grow with every step, until it has a finish reason."""
        self._scheduler.waiting.append(request)

    def output(self, request: Request) -> Output:
        """What has become of a request."""
        return Output.of(request, self.target.tokenizer)

    def cancel(self, request: Request) -> None:
        """Let a row go that nobody waits for; nothing happens to one that has finished.

        An observer or a logits processor may call it too: the row gets no more tokens, and leaves at the end of the
        step that is under way.
        """
        if request.finish_reason:
            return
        request.finish_reason = "cancelled"
        self._scheduler.withdraw(request)
        if not self._working and self._batch is not None and request in self._batch.requests:
            with self._whole():
                self._pipeline.cancel(self._batch)
                self._release(self._batch)

    def abandon(self, reason: str) -> None:
        """Fail every row there is, those that wait included, and begin anew."""
        for request in self._scheduler.waiting:
            request.fail(reason)
        self._scheduler.waiting.clear()
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        """Fail the rows that decode or whose prompts are being read, and forget what was known of them."""
        for request in [*self._scheduler.prefilling, *(self._batch.requests if self._batch is not None else ())]:
            request.fail(reason)
        self._scheduler.stop_prefill()
        self._pipeline.reset()
        self._batch = None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Work that is done whole or not at all: where it raises, no request is left that is half done."""
        self._working = True
        try:
            yield
        except BaseException as e:  # an interrupt from the keyboard leaves as much behind as an error does
            self._fail(f"the engine failed: {type(e).__name__}: {e}")
            raise
        finally:
            self._working = False

    def step(self) -> list[Request]:
        """One round for every request that decodes. Returns the requests that have finished.

        Raises what anything in it raises; the requests that it worked on have then ended, with `error` (see `Engine`).
        """
        with self._whole():
            ended = [request for request in self._step() if request.finish_reason != "cancelled"]
        self._scheduler.freed.after_step(is_last=self.idle)
        return ended

    def _step(self) -> list[Request]:
        first = self._batch is None
        ended = [request for request in self._admit() if request.finish_reason]
        batch = self._batch
        if batch is None or (first and any(request.tokens for request in batch.requests)):
            return ended  # first tokens are given out before a round is waited for
        if not self._pipeline.busy and not batch.may_decode():
            return ended
        decoding = [request for request in batch.requests if request.finish_reason is None]
        self._dispatch(batch)
        result = self._pipeline.collect(batch)
        self._observe(result)
        self._release(batch)
        return ended + [request for request in decoding if request.finish_reason]

    def _admit(self) -> list[Request]:
        """Read a chunk of the prompts of those who wait; the requests that join, because theirs have been read."""
        if self._pipeline.busy or not self._scheduler.wants_in(self._places):
            return []  # a round that is under way is for the requests that it was dispatched with
        self._pipeline.lap()
        joining = self._scheduler.prefill(self._places)
        seconds = self._pipeline.lap()
        if joining is None:
            return []
        self._report_first_tokens(joining.requests, seconds)
        joined = list(joining.requests)
        if self._batch is None:
            self._batch = joining
            self._pipeline.reset()
        else:
            self._batch.append(joining)
        self._look_at_context(self._batch)
        self._scheduler.joined()
        self._release(self._batch)
        return joined

    def _look_at_context(self, batch: Batch) -> None:
        lengths = [len(request.prompt) + len(request.tokens) for request in batch.requests]
        self.context = sum(lengths) // len(lengths)
        if self.on_first_round is not None:
            self.on_first_round(self.context)
            self.on_first_round = None

    def _report_first_tokens(self, requests: Sequence[Request], seconds: float) -> None:
        """Show the observer the tokens that requests got with their prompts; it is no round for the policy."""
        taken = [len(request.tokens) for request in requests]
        if self.observer is not None and any(taken):
            nothing = [0] * len(requests)
            self.observer(RoundResult(PLAIN, nothing, nothing, taken, seconds))

    def _dispatch(self, batch: Batch) -> None:
        """Have a round under way, and another behind it where that is sure to be plain and wanted."""
        if not self._pipeline.busy:
            self._pipeline.dispatch(batch, self._plan(batch), measured=self.observer is not None)
        steady = self._pipeline.is_plain if self.proposer is None else self._pipeline.is_steady
        if steady and batch.may_run_ahead and not self._scheduler.wants_in(self._places) and self._plan(batch) == PLAIN:
            self._pipeline.dispatch(batch, PLAIN)

    def _plan(self, batch: Batch) -> Plan:
        """What the next round is to draft."""
        if self.proposer is None:
            return PLAIN
        can = batch.abilities
        if self.chains_only is not None or not self.policy.wants_trees:
            can = replace(can, trees=False)
        return self.policy.plan(len(batch.requests), can).cut(batch.most_drafts)

    @property
    def _places(self) -> int:
        """Requests that could join."""
        return self.max_batch - (len(self._batch.requests) if self._batch is not None else 0)

    def _observe(self, result: RoundResult) -> None:
        if self.proposer is not None:
            self.policy.observe(result)
        if self.observer is not None:
            self.observer(result)

    def _release(self, batch: Batch) -> None:
        """Let the requests leave that have ended.

        While others wait for a round that was dispatched ahead, they stay for it: one row's share of a round is lost
        instead of the whole round.
        """
        ended = [request.finish_reason is not None for request in batch.requests]
        if not any(ended):
            return
        if self._pipeline.busy:
            if not all(ended) and not (self.prefixes is not None and batch.cache.recurrent):
                return
            self._pipeline.cancel(batch)  # nobody waits for it, or a state would go past the text that is to be kept
        self._remember(batch)
        batch.release()
        if not batch.requests:
            self._batch = None

    def _remember(self, batch: Batch) -> None:
        """Keep the pasts of requests that are about to leave."""
        if self.prefixes is None:
            return
        for index, request in enumerate(batch.requests):
            past = batch.past(index) if request.finish_reason else None
            if past is not None:
                self.prefixes.keep([*request.prompt, *request.tokens], past)
