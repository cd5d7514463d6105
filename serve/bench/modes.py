"""The modes that are compared, with one interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx_lm

from eagle_mlx import DraftModelProposer, HeadProposer, HybridProposer, NgramProposer, Output, SamplingParams, hub
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hooks import without_hooks
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target, arrays_of, nbytes_of

from ..memory_options import MemoryOptions
from ..speculation import PolicyName, Speculation
from .decoding import Decoding, Mode
from .options import NEEDS, STOCK, USE_HEAD, ModeName


class StockModel:
    """A second copy of the target as `mlx_lm.load` loads it: in its folder's own type and without hooks."""

    def __init__(self, name: str | Path, adapter_path: str | None = None, trust_remote_code: bool = False):
        folder = hub.resolve(name, code=trust_remote_code)
        settings = {"trust_remote_code": trust_remote_code}
        loaded = mlx_lm.load(str(folder), settings, adapter_path=adapter_path, trust_remote_code=trust_remote_code)
        self.model, self.tokenizer, self.name = loaded[0], loaded[1], f"{name} by mlx_lm.load"
        counts = Counter(
            x.dtype for x in arrays_of(self.model.parameters()).values() if mx.issubdtype(x.dtype, mx.floating)
        )
        self.dtype = counts.most_common(1)[0][0]


class _MlxLm(Mode):
    """Base of mlx-lm's modes, with a copy of the model that has no hooks but shares the weights.

    Raises ConfigError for a model without a tokenizer.
    """

    def __init__(self, name: ModeName, target: Target | StockModel):
        if target.tokenizer is None:
            raise ConfigError(f"mode {name} needs a target with a tokenizer")
        self.name, self.model, self.dtype = name, target.name, target.dtype
        self._model, self._tokenizer = without_hooks(target.model), target.tokenizer
        self.weights = nbytes_of(target.model)


class MlxLmMode(_MlxLm):
    """`mlx_lm.stream_generate`, one prompt after another, by the target's weights or a stock model."""

    def __init__(self, target: Target | StockModel, draft: Target | None = None, depth: int = 0):
        super().__init__(STOCK if isinstance(target, StockModel) else "mlx-lm-draft" if draft else "mlx-lm", target)
        self.depth = depth
        self.weights += nbytes_of(draft.model) if draft else 0
        self._stream = mx.new_stream(mx.default_device())
        self._extra: dict[str, Any] = {}
        if draft is not None:
            self._extra = {"draft_model": without_hooks(draft.model), "num_draft_tokens": depth}

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        outputs = []
        for prompt, each in zip(prompts, params, strict=True):
            steps = []
            for step in mlx_lm.stream_generate(
                self._model,
                self._tokenizer,
                prompt,
                max_tokens=each.max_tokens,
                sampler=_sampler(each),
                stream=self._stream,
                **self._extra,
            ):
                steps.append(step)
                yield 1
            rounds = max(1, sum(not step.from_draft for step in steps))
            outputs.append(_output("".join(step.text for step in steps), [int(step.token) for step in steps], rounds))
        return outputs

    def sync(self) -> None:
        mx.synchronize(self._stream)


class MlxLmBatchMode(_MlxLm):
    """`mlx_lm.batch_generate` of `batch` rows. It does not return end-of-text tokens, so texts are not compared."""

    def __init__(self, target: Target, batch: int):
        super().__init__("mlx-lm-batch", target)
        self.batch, self._end = batch, min(target.eos_token_ids, default=0)

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        limits = [each.max_tokens for each in params]
        generated = mlx_lm.batch_generate(
            self._model,
            self._tokenizer,
            [list(prompt) for prompt in prompts],
            max_tokens=limits,
            return_token_ids=True,
            prefill_batch_size=self.batch,
            completion_batch_size=self.batch,
            sampler=_sampler(params[0]),
        )
        assert generated.token_ids is not None
        yield sum(map(len, generated.token_ids))
        outputs = []
        for tokens, text, limit in zip(generated.token_ids, generated.texts, limits, strict=True):
            ended = [] if len(tokens) == limit else [self._end]
            outputs.append(_output(text, [*tokens, *ended], len(tokens) + len(ended)))
        return outputs


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
    prior: bool = False
    """Whether policies begin with the target's cost curve."""
    stock: StockModel | None = None

    def new_proposer(self, name: ModeName) -> Proposer | None:
        """Return what drafts in a mode; None for plain. A hybrid prefers the head to the draft model.

        Raises ConfigError if the mode's model is missing.
        """
        if name in ("plain", "ngram"):
            return NgramProposer() if name == "ngram" else None
        if name in USE_HEAD and self.head is not None:
            model: HeadProposer | DraftModelProposer = HeadProposer(self.head)
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
        self.name, self.batch, self.depth, self.nodes, self.policy = name, batch, depth, nodes, policy
        self.model, self.dtype = target.name, target.dtype
        speculation = Speculation(num_tokens=depth, tree_nodes=nodes, policy=policy, keep=models.prior)
        self._excluded = 0.0
        """Seconds of other modes' turns, which the clock leaves out."""
        self.engine = speculation.engine(
            target, models.new_proposer(name), models.memory, max_batch=batch, clock=self.clock
        )
        proposer = self.engine.proposer
        self.weights = nbytes_of(target.model) + (proposer.nbytes if proposer is not None else 0)
        if self.engine.chains_only is not None:
            raise ConfigError(
                f"trees cannot be drafted for {target.name}: {self.engine.chains_only}; leave out --nodes"
            )

    def clock(self) -> float:
        """Return the seconds of this mode's turns."""
        return perf_counter() - self._excluded

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        engine = self.engine
        requests = [engine.prepare(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
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
        modes.append(MlxLmMode(target))
    if "mlx-lm-draft" in names:
        if models.draft is None:
            raise missing("mlx-lm-draft")
        modes += [MlxLmMode(target, models.draft, depth) for depth in depths]
    if STOCK in names:
        if models.stock is None:
            raise ConfigError(f"mode {STOCK} needs the target as mlx-lm loads it; set `stock` of Models")
        modes.append(MlxLmMode(models.stock))
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
