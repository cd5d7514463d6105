"""What is compared against: mlx-lm's own decoding, plain, batched and with a draft model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

from ..speculation import PolicyName
from .decoding import Continuation, Decoding

MLX_LM = "mlx-lm"
"""What the names of these modes begin with."""
STOCK: Final = "mlx-lm-stock"


@dataclass(frozen=True)
class StockModel:
    """A second copy of the target, as `mlx_lm.load` loads its folder: in the folder's own type, and not hooked."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    name: str

    @classmethod
    def load(cls, name: str | Path, adapter_path: str | None = None, trust_remote_code: bool = False) -> StockModel:
        """Load a folder or hub id that has been loaded as a target before."""
        folder = hub.resolve(name, code=trust_remote_code)
        settings = {"trust_remote_code": trust_remote_code}
        loaded = mlx_lm.load(str(folder), settings, adapter_path=adapter_path, trust_remote_code=trust_remote_code)
        return cls(loaded[0], loaded[1], str(name))

    @property
    def dtype(self) -> mx.Dtype:
        """The type of most of the weights that are not quantized."""
        leaves = cast(list[tuple[str, mx.array]], tree_flatten(self.model.parameters()))
        counts = Counter(x.dtype for _, x in leaves if mx.issubdtype(x.dtype, mx.floating))
        return counts.most_common(1)[0][0]


class MlxLmMode:
    """`mlx_lm.stream_generate`, one prompt after the other, over the target's own model object."""

    name: Literal["mlx-lm", "mlx-lm-draft", "mlx-lm-stock"] = "mlx-lm"
    batch = 1
    depth = 0
    nodes = 0
    policy: PolicyName = "fixed"

    def __init__(self, target: Target):
        if target.tokenizer is None:
            raise ConfigError(f"mode {self.name} needs a target with a tokenizer")
        self.model, self.dtype = target.name, target.dtype
        self._model, self._tokenizer = target.model, target.tokenizer
        self._stream = mx.new_stream(mx.default_device())
        self._extra: dict[str, Any] = {}

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        continuations = []
        for prompt, each in zip(prompts, params, strict=True):
            steps = []
            for step in self._steps(prompt, each):
                steps.append(step)
                yield 1
            rounds = sum(not step.from_draft for step in steps)
            text = "".join(step.text for step in steps)
            continuations.append(Continuation(tuple(int(step.token) for step in steps), text, max(1, rounds)))
        return continuations

    def sync(self) -> None:
        mx.synchronize(self._stream)

    def _steps(self, prompt: list[int], params: SamplingParams) -> Iterator[GenerationResponse]:
        _seed(params)
        return mlx_lm.stream_generate(
            self._model,
            self._tokenizer,
            prompt,
            max_tokens=params.max_tokens,
            sampler=_sampler(params),
            stream=self._stream,
            **self._extra,
        )


class MlxLmDraftMode(MlxLmMode):
    """The same with a draft model, which mlx-lm lets draft `depth` tokens a round."""

    name = "mlx-lm-draft"

    def __init__(self, target: Target, draft: Target, depth: int):
        super().__init__(target)
        self.depth = depth
        self._extra = {"draft_model": draft.model, "num_draft_tokens": depth}


class MlxLmStockMode(MlxLmMode):
    """The same over a second copy of the model, which stock mlx-lm has loaded from the target's folder."""

    name = STOCK

    def __init__(self, target: Target, stock: StockModel):
        super().__init__(target)
        self.model, self.dtype = f"{stock.name} by mlx_lm.load", stock.dtype
        self._model, self._tokenizer = stock.model, stock.tokenizer


class MlxLmBatchMode:
    """`mlx_lm.batch_generate`, which decodes `batch` rows side by side.

    It does not say with which token a row ended, so the texts are not compared; an end counts as one token.
    """

    name: Literal["mlx-lm-batch"] = "mlx-lm-batch"
    depth = 0
    nodes = 0
    policy: PolicyName = "fixed"

    def __init__(self, target: Target, batch: int):
        if target.tokenizer is None:
            raise ConfigError(f"mode {self.name} needs a target with a tokenizer")
        self.batch, self.model, self.dtype = batch, target.name, target.dtype
        self._model, self._tokenizer = target.model, target.tokenizer
        self._end = min(target.eos_token_ids, default=0)

    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        _seed(params[0])
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
        return [
            self._continuation(tokens, text, limit)
            for tokens, text, limit in zip(generated.token_ids, generated.texts, limits, strict=True)
        ]

    def _continuation(self, tokens: list[int], text: str, limit: int) -> Continuation:
        ended = () if len(tokens) == limit else (self._end,)
        return Continuation((*tokens, *ended), text, rounds=len(tokens) + len(ended))

    def sync(self) -> None:
        mx.synchronize()


def _sampler(params: SamplingParams) -> Callable[[mx.array], mx.array] | None:
    temperature = params.temperature
    return (lambda logprobs: mx.random.categorical(logprobs / temperature)) if temperature else None


def _seed(params: SamplingParams) -> None:
    if params.seed is not None:
        mx.random.seed(params.seed)
