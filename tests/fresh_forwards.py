"""mlx-lm's own verdict on a text, from whole forwards of an unmodified model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from eagle_mlx.decoding.sampling import SamplingBatch, distribution, gumbel, sample
from eagle_mlx.hooks import Hook
from eagle_mlx.sampling_params import Grammar, SamplingParams
from tests.architectures import tiny_model
from tests.fakes import randomize

TOLERANCE = 1e-3
"""Scores this close, in standard deviations of a position's logits, count as tied.

In mlx-lm's own models, a forward of a whole text and forwards of its tokens differ by up to 2e-4 (gemma4).
"""


@dataclass(frozen=True)
class Fault:
    """A token that the target would not have drawn."""

    place: int
    token: int
    wanted: int
    behind: float
    """How far its score is below the best, in standard deviations of the logits."""

    def __str__(self) -> str:
        return f"token {self.place} is {self.token}, not {self.wanted} ({self.behind:.3g} behind)"


class Judge:
    """Judges texts by one forward over each, with mlx-lm's own model and caches."""

    def __init__(self, name: str, weights: int):
        """Create one of `tests.architectures`, with weights of this seed."""
        self.model = tiny_model(name)
        randomize(self.model, weights, 0.2)
        self._layers: dict[int, mx.array] = {}

    @property
    def has_windows(self) -> bool:
        caches = make_prompt_cache(self.model)
        return any(isinstance(part, RotatingKVCache) for cache in caches for part in getattr(cache, "caches", [cache]))

    @property
    def has_experts(self) -> bool:
        """Whether routers choose experts: if two are equally likely, rounding decides."""
        return any(isinstance(module, SwitchLinear) for module in self.model.modules())

    def logits(self, text: Sequence[int]) -> mx.array:
        """Return the logits [1, L, V] after each token."""
        logits: mx.array = self.model(mx.array([list(text)], mx.int32), cache=make_prompt_cache(self.model))
        return logits

    def texts(self, prompts: Sequence[Sequence[int]], sampling: SamplingBatch, count: int) -> list[list[int]]:
        """Return the next `count` tokens of prompts of equal length, decoded with mlx-lm's own cache."""
        caches, texts = make_prompt_cache(self.model), mx.array([list(prompt) for prompt in prompts], mx.int32)
        new = texts
        for _ in range(count):
            logits = self.model(new, cache=caches)[:, -1:]
            new = sample(logits, sampling, mx.full(logits.shape[:2], texts.shape[1], mx.int32))
            texts = mx.concatenate([texts, new], axis=1)
            mx.eval(texts)
        rows: list[list[int]] = texts.tolist()  # type: ignore[assignment]
        return rows

    def faults(self, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> tuple[list[Fault], int]:
        """Return the tokens that are not the target's, and the number of tokens tied with its own.

        Greedy and coupled tokens must equal plain decoding's, threshold tokens that or be likely enough; other tokens
        must be possible.
        """
        logits = self._behind(prompt, tokens)
        for process in params.logits_processors:
            seen = [[*prompt, *tokens[:place]] for place in range(len(tokens))]
            logits = mx.stack([process(text, logits[:, place]) for place, text in enumerate(seen)], axis=1)
        if params.grammar is not None:
            logits = mx.where(_masks(params.grammar(), tokens), logits, -mx.inf)
        sampling = SamplingBatch.of([params], [params.seed or 0])
        positions = mx.arange(len(prompt), len(prompt) + len(tokens), dtype=mx.int32)[None]
        wanted = np.array(sample(logits, sampling, positions))[0]
        noise = np.array(gumbel(sampling, positions, logits.shape[-1]))[0] * params.temperature
        values, chances = np.array(logits)[0], np.array(distribution(logits, sampling))[0]
        allowed, enough = chances > 0, params.threshold if params.rule == "threshold" else math.inf
        faults, excused = [], 0
        for place, token in enumerate(tokens):
            spread = float(values[place][np.isfinite(values[place])].std())
            floor = values[place][allowed[place]].min()
            if params.rule == "rejection":
                behind = (floor - values[place][token]) / spread
            elif token == wanted[place] or chances[place, token] * (1 + TOLERANCE) >= enough:
                continue
            else:
                scores = values[place] + (noise[place] if params.temperature else 0)
                behind = (scores[wanted[place]] - scores[token]) / spread
                if params.temperature:
                    behind = max(behind, (floor - values[place][token]) / spread)
            if not behind <= TOLERANCE:
                faults.append(Fault(place, token, int(wanted[place]), behind))
            elif params.rule != "rejection" or behind > 0:
                excused += 1
        return faults, excused

    def _behind(self, prompt: Sequence[int], tokens: Sequence[int]) -> mx.array:
        """Return the scores [1, L, V] float32 from which each token is drawn."""
        return self.logits([*prompt, *tokens][:-1])[:, len(prompt) - 1 :].astype(mx.float32)

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the target's log probability of each token."""
        logits = self._behind(prompt, tokens)
        chances = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return [float(chances[0, place, token].item()) for place, token in enumerate(tokens)]

    def hidden(self, text: Sequence[int], layers: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the concatenated outputs of some layers, [L, H * layers]."""
        for layer in layers:
            self._watch(layer)
        mx.eval(self.logits(text))
        return np.concatenate([np.array(self._layers[layer])[0] for layer in layers], axis=-1)

    def _watch(self, index: int) -> None:
        layer, seen = self.model.layers[index], self._layers
        if type(layer).__name__ == "Watched":
            return

        class Watched(type(layer)):  # type: ignore[misc]
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                out = super().__call__(*args, **kwargs)
                seen[index] = out[0] if isinstance(out, tuple) else out
                return out

        layer.__class__ = Watched


def _masks(grammar: Grammar, tokens: Sequence[int]) -> mx.array:
    """Return the tokens allowed at each position, [L, V] bool."""
    masks = []
    for token in tokens:
        masks.append(grammar.mask())
        grammar.advance(token)
    return mx.stack(masks)


@lru_cache(maxsize=1)
def judge(name: str, weights: int) -> Judge:
    """Return a judge, cached for repeated calls."""
    return Judge(name, weights)


def untouched(model: nn.Module) -> bool:
    """Return whether all of a model's classes are mlx-lm's or MLX's own."""
    own = (type(part).__module__.startswith(("mlx.", "mlx_lm.")) for part in model.modules())
    return all(own) and not any(isinstance(part, Hook) for part in model.modules())
