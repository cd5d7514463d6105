"""The modes that are compared, with one interface, and the turns that they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx_lm

from eagle_mlx import DraftModelProposer, HeadProposer, HybridProposer, NgramProposer, Output, SamplingParams
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hooks import without_hooks
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target, nbytes_of

from ..speculation import MemoryOptions, PolicyName, Speculation
from .options import NEEDS, USE_HEAD, ModeName

Decoding = Generator[int, None, list[Output]]
"""Yields the number of new tokens after every step; returns the output of each prompt."""


class Mode(ABC):
    name: ModeName
    batch = 1
    depth = 0
    nodes = 0  # tokens of a draft tree; 0 for chains
    policy: PolicyName = "fixed"
    weights = 0  # bytes of the weights of the models that this mode uses
    held = 0  # bytes that this mode keeps between its turns, without weights

    @abstractmethod
    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        """Decode token-id prompts to their ends. Outputs are in the order of the prompts."""

    def sync(self) -> None:
        """Wait for dispatched work that is no longer needed, so that it does not slow the next timing."""
        mx.synchronize()


Watch = Callable[[Mode, int], None]  # called before each turn and after each step, with the number of new tokens so far


@dataclass
class Timed:
    """A mode's decoding of some prompts, its time and memory so far, and its outputs."""

    mode: Mode
    decoding: Decoding
    watch: Watch
    seconds: float = 0.0
    tokens: int = 0
    peak: int = 0  # the most bytes that MLX used at a time for this mode, without what other modes hold
    is_done: bool = False
    outputs: list[Output] = field(default_factory=list)

    def run(self, goal: float) -> None:
        """Continue until `goal` tokens are generated, or to the end."""
        self.watch(self.mode, self.tokens)
        mx.clear_cache()  # start without another mode's buffers
        mx.reset_peak_memory()
        before, start = mx.get_active_memory(), perf_counter()
        try:
            while self.tokens < goal:
                self.tokens += next(self.decoding)
                self.watch(self.mode, self.tokens)
            self.mode.sync()  # wait for dispatched work, which counts toward this turn
            self.seconds += perf_counter() - start
        except StopIteration as end:
            self.seconds += perf_counter() - start
            self.mode.sync()
            self.outputs, self.is_done = end.value, True
        self.peak = max(self.peak, self.mode.weights + self.mode.held + mx.get_peak_memory() - before)
        self.mode.held = max(0, self.mode.held + mx.get_active_memory() - before)


def take_turns(
    jobs: Sequence[tuple[Mode, Sequence[list[int]]]],
    params: Sequence[SamplingParams],
    tokens: int = 0,
    watch: Watch = lambda mode, tokens: None,
) -> list[Timed]:
    """Decode every mode's prompts in turns of `tokens` new tokens per row; 0 for one turn until all prompts end."""
    timed = [Timed(mode, mode.decode(prompts, params), watch) for mode, prompts in jobs]
    step = tokens * min(len(params), max(mode.batch for mode, _ in jobs)) or inf
    goal, order = 0.0, list(timed)
    while not all(job.is_done for job in timed):
        goal += step
        for job in order:
            if not job.is_done:
                job.run(goal)
        order = order[1:] + order[:1]
    return timed


class MlxLmMode(Mode):
    """`mlx_lm.stream_generate`, one prompt after another, with a copy of the model that has no hooks.

    The copy shares the weights. Raises ConfigError for a model without a tokenizer.
    """

    def __init__(self, name: ModeName, target: Target, draft: Target | None = None, depth: int = 0):
        if target.tokenizer is None:
            raise ConfigError(f"mode {name} needs a target with a tokenizer")
        self.name, self.depth = name, depth
        self.weights = nbytes_of(target.model) + (nbytes_of(draft.model) if draft else 0)
        self._model, self._tokenizer = without_hooks(target.model), target.tokenizer
        self._stream = mx.new_stream(mx.default_device())
        self._drafts: dict[str, Any] = {}
        if draft is not None:
            self._drafts = {"draft_model": without_hooks(draft.model), "num_draft_tokens": depth}

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        outputs = []
        for prompt, own in zip(prompts, params, strict=True):
            more = {"max_tokens": own.max_tokens, "sampler": _sampler(own), "stream": self._stream, **self._drafts}
            steps = []
            for step in mlx_lm.stream_generate(self._model, self._tokenizer, prompt, **more):
                steps.append(step)
                yield 1
            # A round ends with a token that is not from the draft; the last one may be cut before it.
            rounds = sum(not step.from_draft for step in steps) + steps[-1].from_draft
            outputs.append(_output("".join(step.text for step in steps), [int(step.token) for step in steps], rounds))
        return outputs

    def sync(self) -> None:
        mx.synchronize(self._stream)


class MlxLmBatchMode(MlxLmMode):
    """`mlx_lm.batch_generate` of `batch` rows. It does not return end-of-text tokens, so texts are not compared."""

    def __init__(self, target: Target, batch: int):
        super().__init__("mlx-lm-batch", target)
        self.batch, self._end = batch, min(target.eos_token_ids, default=0)

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        limits = [own.max_tokens for own in params]
        more: dict[str, Any] = {"max_tokens": limits, "return_token_ids": True, "sampler": _sampler(params[0])}
        more |= {"prefill_batch_size": self.batch, "completion_batch_size": self.batch}
        generated = mlx_lm.batch_generate(self._model, self._tokenizer, list(map(list, prompts)), **more)
        assert generated.token_ids is not None
        yield sum(map(len, generated.token_ids))
        outputs = []
        for tokens, text, limit in zip(generated.token_ids, generated.texts, limits, strict=True):
            ended = [] if len(tokens) == limit else [self._end]
            outputs.append(_output(text, [*tokens, *ended], len(tokens) + len(ended)))
        return outputs

    def sync(self) -> None:
        mx.synchronize()


def _output(text: str, tokens: list[int], rounds: int) -> Output:
    return Output(text, tokens, "", 0, rounds, 0, 0, [], [])


def _sampler(params: SamplingParams) -> Callable[[mx.array], mx.array] | None:
    """Seed MLX's random numbers, and return mlx-lm's sampler; None if greedy."""
    if params.seed is not None:
        mx.random.seed(params.seed)
    temperature = params.temperature
    return (lambda logprobs: mx.random.categorical(logprobs / temperature)) if temperature else None


DRAFTING: tuple[ModeName, ...] = ("ngram", "draft", "eagle", "hybrid")


def missing(name: ModeName) -> ConfigError:
    return ConfigError(f"mode {name} needs {' or '.join(NEEDS[name])}; give it, or leave {name} out of --modes")


@dataclass(frozen=True)
class BenchModels:
    """The models to measure: a target, and the heads and models that draft for it."""

    target: Target
    head: DraftHead | None = None
    draft: Target | None = None
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    prior: bool = False  # whether policies begin with the target's cost curve
    window: tuple[int | None, int | None] = (None, None)
    """The head's draft window and sink; None for those of its training."""

    def new_proposer(self, name: ModeName) -> Proposer | None:
        """Return what drafts in a mode; None for plain. A hybrid prefers the head to the draft model.

        Raises ConfigError if the mode's model is missing.
        """
        if name in ("plain", "ngram"):
            return NgramProposer() if name == "ngram" else None
        if name in USE_HEAD and self.head is not None:
            model: HeadProposer | DraftModelProposer = HeadProposer(self.head, *self.window)
        elif name in ("draft", "hybrid") and self.draft is not None:
            model = DraftModelProposer(self.draft)
        else:
            raise missing(name)
        return HybridProposer(model) if name == "hybrid" else model


class EngineMode(Mode):
    """The engine, plain or with a proposer. It drafts `depth` tokens per round, or fewer if the policy adapts."""

    def __init__(
        self,
        name: ModeName,
        models: BenchModels,
        batch: int,
        depth: int = 0,
        policy: PolicyName = "fixed",
        nodes: int = 0,
    ):
        target = models.target
        self.name, self.policy = name, policy
        self.batch, self.depth = batch, depth
        self.nodes = nodes
        speculation = Speculation(num_tokens=depth, tree_nodes=nodes, policy=policy, keep=models.prior)
        self._excluded = 0.0  # seconds of other modes' turns, which the clock leaves out
        more = {"max_batch": batch, "clock": self.clock}
        self.engine = speculation.engine(target, models.new_proposer(name), models.memory, **more)
        proposer = self.engine.proposer
        self.weights = nbytes_of(target.model) + (proposer.nbytes if proposer is not None else 0)
        if (reason := self.engine.chains_only) is not None:
            raise ConfigError(f"trees cannot be drafted for {target.name}: {reason}; leave out --nodes")

    def clock(self) -> float:
        return perf_counter() - self._excluded

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        engine = self.engine
        requests = [engine.prepare(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for request in requests:
            engine.submit(request)
        given = 0
        try:
            while not all(request.finish_reason for request in requests):
                engine.step()
                now = sum(len(request.tokens) for request in requests)
                left = perf_counter()
                yield now - given
                self._excluded += perf_counter() - left
                given = now
        finally:
            for request in requests:
                engine.cancel(request)
        return list(map(engine.output, requests))

    def sync(self) -> None:
        start = perf_counter()
        mx.synchronize()
        self._excluded -= perf_counter() - start  # time spent waiting here is for its own rounds


def build_modes(
    models: BenchModels,
    names: Sequence[ModeName],
    batches: Sequence[int],
    depths: Sequence[int],
    policies: Sequence[PolicyName] = ("fixed",),
    nodes: Sequence[int] = (0,),
) -> list[Mode]:
    """Return a mode for each combination of name, batch size, depth, policy and tree size (0 nodes: a chain).

    Raises ConfigError if a mode's model is missing, HeadError or TargetError if it does not fit the target.
    """
    target, modes = models.target, list[Mode]()
    if "mlx-lm" in names:
        modes.append(MlxLmMode("mlx-lm", target))
    if "mlx-lm-draft" in names:
        if models.draft is None:
            raise missing("mlx-lm-draft")
        modes += [MlxLmMode("mlx-lm-draft", target, models.draft, depth) for depth in depths]
    for batch in batches:
        if "mlx-lm-batch" in names and batch > 1:
            modes.append(MlxLmBatchMode(target, batch))
        if "plain" in names:
            modes.append(EngineMode("plain", models, batch))
        modes += [
            EngineMode(name, models, batch, depth, policy, size)
            for depth in depths
            for size in nodes
            if size == 0 or size > depth
            for name in DRAFTING
            if name in names
            for policy in policies
        ]
    return modes
