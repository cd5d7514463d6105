"""The engine, which decodes requests in rounds of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import cast, overload

import mlx.core as mx

from eagle_mlx import memory
from eagle_mlx.cache import RaggedCache, check_cacheable
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.engine.admission import Admission
from eagle_mlx.engine.collector import Collector
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.groups import GROUPS, Groups, KVBudget, RoundReads, check_settings, size_of
from eagle_mlx.engine.prefix import PrefixCache
from eagle_mlx.engine.runner import Collect, Pause, Runner, Work
from eagle_mlx.engine.schedule import Schedule
from eagle_mlx.errors import ConfigError, PromptError, require
from eagle_mlx.plan import PREFILL_CHUNK, PREFILL_MS, RoundResult
from eagle_mlx.policy import Policy, ThroughputPolicy
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers import ProposerLike, as_proposer
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Chunk, Output, Prompt, is_prompt, make_request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter, SamplingParams
from eagle_mlx.target import Target, load_target
from eagle_mlx.text import TextStream
from eagle_mlx.vision.spans import ImagePrompt


@dataclass(frozen=True)
class EngineSnapshot:
    """An engine's requests and memory use between two steps."""

    groups: tuple[tuple[RequestState, ...], ...]  # the requests that decode, by group
    prefilling: tuple[RequestState, ...]
    waiting: tuple[RequestState, ...]
    kv_used: int  # upper bound of the KV bytes of decoding and prefilling requests now
    draft_kv_used: int  # the part of it for the caches of a head or draft model
    kv_bytes: int  # limit for these requests and the prefix cache together
    prefix_bytes: int

    @property
    def requests(self) -> list[RequestState]:
        return [*chain(*self.groups), *self.prefilling, *self.waiting]


def _bound(proposer: ProposerLike, target: Target) -> Proposer:
    """Return a proposer that is bound to the target. Raises early if the target has no hidden states for it."""
    bound = as_proposer(proposer)
    bound.bind(target)
    require(f"aux_layers of {type(bound).__name__}", bound.aux_layers, tuple | list, "a tuple of layers")
    target.forward(mx.zeros((1, 2), mx.int32), RaggedCache.of(target.model, 1), bound.aux_layers)  # evaluates nothing
    return bound


def _loaded(target: Target | str | Path) -> Target:
    """Return a target, loaded if it is a name. Raises ConfigError for anything else."""
    ways = "a folder or a hub id, em.load_target(name), or em.Target(model, tokenizer)"
    require("target", target, Target | str | Path, ways)
    return target if isinstance(target, Target) else load_target(target)


class Engine:
    """Decodes batches of requests with a target and an optional proposer.

    With any proposer, policy and batch, greedy and seeded text is the target's own, and sampled text follows the
    target's distribution, unless a request chose otherwise (`Output.lossless`).

    Every request is waiting, in prefill, or decoding in a group (`groups.py`). If a part of a step raises, the requests
    that it touched end with an error in their `Output`: those of one prefill, or of the groups that it changed. All
    others continue. The engine remains usable, and the caller of `step`, `generate` or `stream` gets the exception.

    The constructor raises TargetError or HeadError if the parts do not fit together.
    """

    def __init__(
        self,
        target: Target | str | Path,
        proposer: ProposerLike | None = None,
        *,
        policy: Policy | None = None,
        max_batch: int = 8,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 0,
        kv_bits: int | None = None,
        kv_bytes: int | None = None,
        groups: int = GROUPS,
        prefill_ms: float = PREFILL_MS,
        exact: bool = False,
        drafter: Drafter | None = None,
        observer: Callable[[RoundResult], None] | None = None,
        prefix_files: DiskTier | None = None,
        collector: Collector | None = None,
        clock: Callable[[], float] = perf_counter,
    ):
        """`target`: a folder or hub id is loaded as by `load_target`. `proposer`: a head is wrapped in a HeadProposer.
        `prefill_chunk`: maximum prompt positions per forward, over all requests.
        `prefill_ms`: maximum milliseconds that a chunk delays decoding requests, unless 128 positions take longer.
        `kv_bytes`: limit for KV caches and prefix cache together; by default a share of the free memory.
        `groups`: 1 keeps all rows in one batch, for comparison. A proposer that is not `movable` does too.
        `kv_bits`: 4 or 8 to quantize the KV cache. The text then equals this engine's text without a proposer.
        `exact`: plain rounds read two positions, like drafts. Metal reads one position with other kernels, which round
        differently; the text then equals that of an exact engine without a proposer.
        `drafter`: what drafts for requests that do not say; None: whichever is faster.
        `observer`: called with the result of every round. `clock`: times rounds, in seconds.
        `prefix_files`: save cached prefixes to files and find them there, if there is a prefix cache.
        `collector`: collects texts with the hidden states that the proposer's head reads, to learn from them.
        """
        self.max_batch, self.observer = max_batch, observer
        self.drafter = SamplingParams(drafter=drafter).drafter  # raises ConfigError for an unknown one
        """You may change these three between steps."""
        self._check_changeable()
        target = _loaded(target)
        check_settings(prefill_chunk, prefix_cache_bytes, kv_bytes, prefill_ms, kv_bits, groups)
        require("clock", clock, Callable, "a callable that returns seconds")
        check_cacheable(target.model, max_batch, kv_bits)
        proposer = None if proposer is None else _bound(proposer, target)
        self.target, self.proposer = target, proposer
        self.prefill_chunk, self.kv_bits = prefill_chunk, kv_bits
        self.exact, self.collector = exact, collector
        share = memory.kv_bytes(target.free_memory, memory.machine_memory()) if kv_bytes is None else kv_bytes
        size = size_of(target, proposer, kv_bits)
        self._draft_size = proposer.cache_size() if proposer is not None else CacheSize()
        splits = groups if proposer is None or proposer.movable else 1
        budget = self.kv_budget = KVBudget(share, size, target.context_length, splits)
        prefixes = PrefixCache(prefix_cache_bytes, proposer, budget.spare, prefix_files) if prefix_cache_bytes else None
        self.prefixes = prefixes
        positional = RaggedCache.of(target.model, 1).is_positional and (proposer is None or proposer.is_positional)
        self.wants_boundaries = self.prefixes is not None and not positional
        """Whether `prepare` has a use for boundaries."""
        self.admission = Admission(target, proposer, prefill_chunk, budget, prefixes, kv_bits, prefill_ms, collector)
        self.groups = Groups(RoundReads.of(target, proposer, size), budget)
        self.runner = Runner(self.admission, self.groups, exact, clock)
        self._in_step = False
        self.use_policy(ThroughputPolicy() if policy is None else policy)

    def _check_changeable(self) -> None:
        require("max_batch", self.max_batch, int, "an integer of at least 1", 1, 1 << 20)
        require("observer", self.observer, Callable | None, "a callable, or None")

    def use_policy(self, policy: Policy) -> None:
        """Plan the next rounds with a new policy. Call this between steps. The text does not change."""
        if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("plan", "observe", "wants_trees")):
            raise ConfigError(f"policy needs plan, observe and wants_trees, as em.FixedPolicy(3), not {policy!r:.80}")
        self.policy = policy
        self.chains_only = why_no_trees(self.target, self.kv_bits) if policy.wants_trees else None
        """Why trees are not drafted although the policy wants them; None if they are, or if it does not."""
        trees = policy.wants_trees and self.chains_only is None
        self.schedule = Schedule(self.admission, self.groups, self.runner, policy, trees)

    @property
    def pauses(self) -> int:
        return self.runner.pauses

    @property
    def draft_failures(self) -> int:
        return self.runner.draft_failures

    @property
    def active(self) -> int:
        return sum(request.finish_reason is None for request in self.groups.requests)

    @property
    def waiting(self) -> int:
        """The number of requests that do not decode yet."""
        return len(self.admission.waiting) + len(self.admission.prefilling)

    def snapshot(self) -> EngineSnapshot:
        """Return the current requests and memory use. Thread-safe, but may lag a step behind."""
        groups = [*self.groups.decoding, *self.admission.side_by_side]
        return EngineSnapshot(
            groups=tuple(map(tuple, self.groups.decoding)),
            prefilling=tuple(self.admission.prefilling),
            waiting=tuple(self.admission.waiting),
            kv_used=self.kv_budget.used(groups),
            draft_kv_used=self.kv_budget.used(groups, self._draft_size),
            kv_bytes=self.kv_budget.nbytes,
            prefix_bytes=self.prefixes.nbytes if self.prefixes is not None else 0,
        )

    @property
    def idle(self) -> bool:
        return not self.groups.batches and not self.waiting

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompts: Prompt, params: SamplingParams | None = None, progress: bool = False
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> Output | list[Output]:
        """Decode one prompt and return its output, or decode a list of prompts and return theirs in the same order.

        Raises PromptError before decoding anything if a prompt is empty or too long, or if the target does not support
        the params. If a step raises, these prompts are withdrawn.
        """
        is_one = is_prompt(prompts)
        prompts = cast(Sequence[Prompt], [prompts] if is_one else prompts)
        params = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(params)} SamplingParams; give one, or one per prompt")
        requests = list(map(self.prepare, prompts, params))
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
        outputs = [self.output(request) for request in requests]
        return outputs[0] if is_one else outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, boundaries: Sequence[int] = ()
    ) -> Generator[Chunk, None, None]:
        """Decode one prompt alongside others and yield what each round adds. Raises the same errors as `generate`. The
        target needs a tokenizer. Closing the iterator cancels the request. `boundaries`: as for `prepare`."""
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise PromptError("this target has no tokenizer, so there is no text to stream; use generate")
        request = self.prepare(prompt, params or SamplingParams(), boundaries)
        self.submit(request)
        text = TextStream(tokenizer, request.params.stop)
        try:
            output, seen = None, 0
            while output is None:
                if len(request.tokens) == seen and not request.finish_reason:  # another caller may have stepped
                    self.step()
                new, marks = request.tokens[seen:], bytes(request.from_draft[seen:])
                texts, seen = request.texts and request.texts[seen:], len(request.tokens)
                output = self.output(request) if request.finish_reason else None
                yield Chunk(text.push(new, texts) if output is None else text.finish(output.text), new, marks, output)
        finally:
            self.cancel(request)

    def prepare(
        self,
        prompt: Prompt | ImagePrompt,
        params: SamplingParams,
        boundaries: Sequence[int] = (),
        client: str = "",
        namespace: str = "",
        conversation: str = "",
    ) -> RequestState:
        """Return a request for `submit`. Thread-safe. `client`, `namespace` and `conversation`: see `Request`.

        `boundaries`: lengths of prompt prefixes that later prompts may share, for models whose windows or states cannot
        be cut. Context and memory may allow fewer tokens than `params.max_tokens`. Raises PromptError as `generate`
        does, and if the prompt can never fit into `kv_bytes`.
        """
        names = {"client": client, "namespace": namespace, "conversation": conversation}
        request = make_request(self.target, prompt, params, boundaries, **names)
        return RequestState(self.kv_budget.limited(request), self.target.tokenizer)

    def submit(self, request: RequestState) -> None:
        """Queue a request. Steps then extend its tokens until it has a finish reason."""
        self.admission.waiting.append(request)

    def output(self, request: RequestState) -> Output:
        return request.output(self.target.tokenizer)

    def cancel(self, request: RequestState) -> None:
        """Cancel a request unless it has finished. During a step, it gets no more tokens and leaves afterward."""
        if request.finish_reason is None:
            request.finish("cancelled")
            self._withdraw(request)

    def pause(self, request: RequestState) -> None:
        """Pause a decoding request at the next step. Its text does not change."""
        if self.groups.holding(request) is not None:
            self.admission.to_pause.append(request)

    def cut_off(self, request: RequestState, by: str, reason: str | None = None) -> None:
        """End a request with the tokens so far, or with an error if there is a `reason` (`RequestState.cut`)."""
        if request.finish_reason is None:
            request.cut(by, reason)
            self._withdraw(request)

    def _withdraw(self, request: RequestState) -> None:
        """Remove a request that has ended; during a step, only at its end."""
        self.admission.remove_ended()
        self.groups.change()
        batch = self.groups.holding(request)
        if batch is not None and not self._in_step:
            self._do(Pause((), [batch]))

    def abandon(self, reason: str) -> None:
        """Fail all requests, including waiting ones. The engine can then be used again."""
        self.runner.fail(self.snapshot().requests, reason)

    def step(self) -> list[RequestState]:
        """Read a chunk of prompts, if any wait, and decode a round of a group. Return the requests that finished.

        Raises ConfigError if another thread is in a step, or if `max_batch` or `observer` became invalid.
        """
        if self._in_step:
            raise ConfigError("another thread decodes with this engine: let one call it, or one after another")
        observes = self.observer is None or callable(self.observer)
        if not (observes and type(self.max_batch) is int and self.max_batch > 0):
            self._check_changeable()
        work, ended = None, list[RequestState]()
        try:
            self._in_step = True
            while (work := self.schedule.next(work, self.max_batch, self.drafter)) is not None:
                ended += self._do(work)
        finally:
            self._in_step = False
        self.admission.freed.after_step(is_last=self.idle)
        return ended

    def _do(self, work: Work) -> list[RequestState]:
        """Do some work, and return the requests that ended. If it raises, all that it touches end with an error."""
        touches = work.touches
        running = [request for request in touches if request.finish_reason is None]
        try:
            result = self.runner.do(work, measured=self.observer is not None)
            if isinstance(work, Collect) and result is not None:
                batch = work.round.batch
                if batch.proposer is not None or any(params.grammar for params in batch.params):  # it plans for these
                    self.policy.observe(result)
                if self.observer is not None:
                    self.observer(result)
        except BaseException as e:  # a KeyboardInterrupt leaves work incomplete too
            self.runner.fail(touches, e)
            raise
        finally:
            for request in touches:
                if request.leaves:
                    request.forget_images()
        return [request for request in running if request.finish_reason not in (None, "cancelled")]
