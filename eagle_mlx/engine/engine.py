"""The engine: requests in, rounds of speculative decoding, the target's own text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from eagle_mlx import memory
from eagle_mlx.cache import RaggedCache, check_cacheable
from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.engine.admission import Admission
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.groups import Groups, RoundReads
from eagle_mlx.engine.kv_budget import GROUPS, KVBudget, check_memory, check_sizes, size_of
from eagle_mlx.engine.prefill import PREFILL_CHUNK, PREFILL_MS, Prefill
from eagle_mlx.engine.prefix import PrefixCache
from eagle_mlx.engine.round import Round
from eagle_mlx.engine.schedule import Schedule
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.plan import PLAIN, Context, Plan, RoundResult
from eagle_mlx.policy import Policy, ThroughputPolicy
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Chunk, Output, Prompt, make_request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import TextStream


@dataclass(frozen=True)
class Snapshot:
    """What an engine is busy with between two steps, and the bytes that it takes."""

    groups: tuple[tuple[RequestState, ...], ...]
    """The requests that decode, by group."""
    prefilling: tuple[RequestState, ...]
    """Those whose prompts are being read."""
    waiting: tuple[RequestState, ...]
    kv_used: int
    """Bytes of keys and values of those that decode or are being read, at most."""
    kv_reserved: int
    """Bytes that these may come to take."""
    kv_bytes: int
    """Bytes that they and the prefix cache may take together."""
    prefix_bytes: int
    """Bytes of the prefix cache."""

    @property
    def requests(self) -> list[RequestState]:
        """All that have not left yet, in the order of the fields."""
        return [*(request for group in self.groups for request in group), *self.prefilling, *self.waiting]


class Engine:
    """Decodes batches of requests with a target and, where one is given, a proposer.

    Without a proposer it decodes plainly. Whatever the proposer, policy and batch, greedy text and seeded text are
    the target's own, and sampled text follows the target's distribution, unless a request chose otherwise
    (`Output.lossless`).

    Rows of very different lengths decode in two groups that take turns, if that reads less (`grouping.py`).

    Every request waits, or decodes in a group, or has its prompt read. If a step raises, what it worked on may be half
    done. So all rows of its group, of those that it was changing, and whose prompts were being read end with an error
    in their `Output`; requests of the other group, and those that wait, continue. The engine remains usable, and the
    caller of `step`, `generate` or `stream` gets the exception.

    Raises TargetError or HeadError, when it is built, where the parts do not fit together.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        policy: Policy | None = None,
        max_batch: int = 8,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_bytes: int = 0,
        kv_bits: int | None = None,
        kv_bytes: int | None = None,
        groups: int = GROUPS,
        prefill_ms: float = PREFILL_MS,
    ):
        """`prefill_chunk`: positions of prompts that one forward reads, over all requests; those that decode wait.
        `prefill_ms`: milliseconds that they wait at most, if 128 positions take no longer.
        `prefix_cache_bytes`: what is kept of texts that were read, for prompts that begin like them.
        `kv_bytes`: what keys and values may take, that included; by default a share of the memory that is free.
        A request waits if its KV cache does not fit; `prepare` refuses one that never would.
        `groups`: 1 keeps all rows in one batch, for comparison; so does a proposer whose states are not `Movable`.
        `kv_bits`: 4 or 8 to quantize keys and values; the text is then what this engine says without a proposer.
        """
        check_sizes(max_batch, prefill_chunk, prefix_cache_bytes, prefill_ms)
        check_memory(kv_bits, kv_bytes, groups)
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
        self.prefixes = PrefixCache(prefix_cache_bytes, proposer) if prefix_cache_bytes else None
        self.wants_boundaries = self.prefixes is not None and not RaggedCache.of(target.model, 1).is_positional
        """Whether the boundaries of prompts serve for anything."""
        self.chains_only = why_no_trees(target, kv_bits) if self.policy.wants_trees else None
        """Why no trees are drafted though the policy asks for them; None where they are, or nobody asks."""
        share = memory.kv_bytes(target.free_memory, memory.machine_memory()) if kv_bytes is None else kv_bytes
        size = size_of(target, proposer, kv_bits)
        self.kv_budget = KVBudget(share, size, target.context_length, groups)
        self.admission = Admission(target, proposer, prefill_chunk, self.kv_budget, self.prefixes, kv_bits, prefill_ms)
        self.groups = Groups(RoundReads.of(target, proposer, size), self.kv_budget)
        self.schedule = Schedule(self.admission, self.groups, self._plan, drafts=proposer is not None)

    @property
    def pauses(self) -> int:
        """How often requests were paused so far."""
        return self.schedule.pauses

    @property
    def active(self) -> int:
        """Requests that decode."""
        return sum(request.finish_reason is None for request in self.groups.requests)

    @property
    def waiting(self) -> int:
        """Requests that do not decode yet."""
        return len(self.admission.waiting) + len(self.admission.prefilling)

    def snapshot(self) -> Snapshot:
        """Return what the engine is busy with. Any thread may ask; the engine may be a step farther by then."""
        return Snapshot(
            groups=tuple(map(tuple, self.groups.decoding)),
            prefilling=tuple(self.admission.prefilling),
            waiting=tuple(self.admission.waiting),
            kv_used=self.kv_budget.used([*self.groups.decoding, *self.admission.side_by_side]),
            kv_reserved=self.kv_budget.set_aside(self.admission.admitted),
            kv_bytes=self.kv_budget.nbytes,
            prefix_bytes=self.prefixes.nbytes if self.prefixes is not None else 0,
        )

    @property
    def idle(self) -> bool:
        return self.schedule.idle

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Decode all prompts to their ends; the outputs come in the order of the prompts.

        Raises PromptError for a prompt that is empty or too long, or params that the target cannot serve, before
        anything is decoded. If a step raises, these prompts are withdrawn. A prompt that ended in a step that somebody
        else called, and that raised, has an output with an `error`.
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
        """Decode one prompt alongside others and yield what each round adds. Raises what `generate` does.

        It needs a tokenizer. A caller that stops listening frees the request.
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

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        boundaries: Sequence[int] = (),
        client: str = "",
        namespace: str = "",
        limit: int | None = None,
    ) -> RequestState:
        """Return a request to be submitted. Any thread may call it. `client` and `namespace`: as in `Request`.

        `boundaries`: tokens of the prompt that later prompts may begin with, where the prefix cache keeps windows and
        states, which cannot be cut. `limit`: tokens of the answer, of which context and memory may leave fewer; params
        then name no number. Raises PromptError, also if its keys and values would never fit into `kv_bytes`.
        """
        request = make_request(self.target, prompt, params, boundaries, client, namespace)
        request = self.kv_budget.limited(request)
        if limit is not None:
            request = replace(request, limit=min(request.limit, limit))
        return RequestState.open(request, self.target.tokenizer)

    def submit(self, request: RequestState) -> None:
        """The row waits for its turn; its tokens grow with every step, until it has a finish reason."""
        self.admission.waiting.append(request)

    def output(self, request: RequestState) -> Output:
        """What has become of a request."""
        return request.output(self.target.tokenizer)

    def cancel(self, request: RequestState) -> None:
        """Let a row go that nobody waits for, unless it has finished.

        An observer or a logits processor may call it too: the row gets no more tokens, and leaves after the step.
        """
        if request.finish_reason is None:
            request.finish("cancelled")
            self.schedule.withdraw(request)

    def pause(self, request: RequestState) -> None:
        """Have a request that decodes wait once more, from the next step on; its text is the same when it resumes."""
        if self.groups.holding(request) is not None:
            self.admission.to_pause.append(request)

    def cut_off(self, request: RequestState, by: str, reason: str | None = None) -> None:
        """The same, but the row ends with what it has, or with an error where there is a `reason` (`Request.cut`)."""
        if request.finish_reason is None:
            request.cut(by, reason)
            self.schedule.withdraw(request)

    def before(self, request: RequestState) -> int | None:
        """How many waiting requests go before one, about; None where it does not wait. Any thread may ask."""
        return self.admission.waiting.before(request)

    def abandon(self, reason: str) -> None:
        """Fail every row there is, those that wait included, and begin anew."""
        self.schedule.abandon(reason)

    def step(self) -> list[RequestState]:
        """Read a chunk of prompts, if any wait, and decode a round of a group; return the requests that have finished.

        Errors: see `Engine`.
        """
        schedule = self.schedule
        with schedule.whole(*self.groups.in_turn()[:1]):
            ended, work = list[RequestState](), schedule.next(self.max_batch)
            if isinstance(work, Prefill):
                was_idle = not self.groups.batches
                ended = self._read(work)
                begun = was_idle and any(request.tokens for request in self.groups.requests)
                work = None if begun else schedule.next_round()  # first tokens are given out before a round
            if work is not None:
                ended += self._decode(work)
        self.admission.freed.after_step(is_last=self.idle)
        return [request for request in ended if request.finish_reason != "cancelled"]

    def _read(self, prefill: Prefill) -> list[RequestState]:
        seconds = self.schedule.read(prefill)
        joining = self.admission.has_read(prefill, seconds)
        if joining is None:
            return []
        joined = list(joining.requests)
        self._report_first_tokens(joined, seconds)
        self.schedule.join(joining)
        return [request for request in joined if request.finish_reason]

    def _decode(self, planned: Round) -> list[RequestState]:
        decoding = [request for request in planned.batch.requests if request.finish_reason is None]
        self.schedule.dispatch(planned, self.max_batch, measured=self.observer is not None)
        result = self.schedule.collect()
        if self.proposer is not None:
            self.policy.observe(result)
        if self.observer is not None:
            self.observer(result)
        for each in self.groups.batches:
            self.schedule.release(each)
        return [request for request in decoding if request.finish_reason]

    def _report_first_tokens(self, requests: Sequence[RequestState], seconds: float) -> None:
        """Show the observer the tokens that requests got with their prompts; it is no round for the policy."""
        taken = [len(request.tokens) - request.tokens_before for request in requests]
        if self.observer is not None and any(taken):
            nothing = [0] * len(requests)
            self.observer(RoundResult(PLAIN, nothing, nothing, taken, seconds))

    def _plan(self, batch: Batch, group: int) -> Plan:
        """Return what the next round of a group is to draft."""
        if self.proposer is None:
            return PLAIN
        can = batch.abilities
        if self.chains_only is not None or not self.policy.wants_trees:
            can = replace(can, trees=False)
        return batch.fitted(self.policy.plan(Context(len(batch.requests), can, group)))
