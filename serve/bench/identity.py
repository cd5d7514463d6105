"""Whether two ways of decoding gave the same tokens, and whether rounding explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.sampling import SamplingBatch, gumbel
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

# Above the rounding of a forward, far below what separates tokens. In float32 with OpenBLAS the logits of one token
# and of eight differ by up to 3e-5; the 16-bit types are given two steps of logits between 8 and 16.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.016, mx.bfloat16: 0.125}


@dataclass(frozen=True)
class Identity:
    """How the continuations of one mode compare with the reference's, prompt by prompt."""

    identical: int = 0
    excused: int = 0
    """Different. At the first difference, both tokens are within the tolerance of the target's best."""
    different: int = 0

    @property
    def holds(self) -> bool:
        return self.different == 0


class Typed(Protocol):
    """A target, or a mode of decoding."""

    @property
    def dtype(self) -> mx.Dtype: ...


def tolerance_for(model: Typed) -> float:
    """Return how close two logits must be for rounding in the model's type to decide between them."""
    return TOLERANCES.get(model.dtype, 1e-3)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two continuations differ, the end of one included; None where they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    target: Target,
    prompts: Sequence[list[int]],
    reference: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    tolerance: float,
) -> Identity:
    """Count the continuations that equal the reference's, that differ by rounding, and that differ."""
    identical = excused = 0
    for prompt, expected, actual, each in zip(prompts, reference, tokens, params, strict=True):
        at = first_difference(expected, actual)
        if at is None:
            identical += 1
        elif at < min(len(expected), len(actual)):
            candidates = {expected[at], actual[at]}
            excused += _is_near_tie(target, [*prompt, *expected[:at]], candidates, each, tolerance)
    return Identity(identical, excused, len(prompts) - identical - excused)


def _is_near_tie(
    target: Target, tokens: list[int], candidates: set[int], params: SamplingParams, tolerance: float
) -> bool:
    """Whether both candidates' scores are within the tolerance of the target's best next token.

    Sampled tokens are the argmax of logits + temperature x noise, so those are the scores that must be close.
    """
    scores = target.forward(mx.array([tokens], mx.int32)).logits[:, -1:].astype(mx.float32)
    if params.rule != "greedy":
        batch = SamplingBatch.of([params], [params.seed or 0])
        position = mx.array([[len(tokens)]], mx.int32)
        scores = scores + params.temperature * gumbel(batch, position, scores.shape[-1])
    by_token = np.array(scores[0, 0])
    return all(by_token.max() - by_token[candidate] < tolerance for candidate in candidates)
