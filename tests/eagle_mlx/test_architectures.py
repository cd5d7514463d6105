"""The engine's text is mlx-lm's own for every architecture: row by row, in a batch whose rows join and leave."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import eagle_mlx as em
from eagle_mlx.cache.kinds import ONE_ROW
from eagle_mlx.sampling import SamplingBatch, gumbel, sample
from tests.architectures import CONFIGS, VOCAB, tiny_model
from tests.fakes import Oracle, randomize

MARGIN = 1e-3
"""Scores closer than this may fall either way between a verify of one token and one of several."""
LENGTHS = (3, 30, 11, 1, 18)
EMITTED = (14, 8, 18, 5, 12)
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in LENGTHS]
GREEDY = [em.SamplingParams(max_tokens=n) for n in EMITTED]
SEEDED = [em.SamplingParams(temperature=0.7, seed=n, max_tokens=n) for n in EMITTED]


@cache
def target(name: str) -> em.Target:
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    return em.Target(model, name=name)


def plain(name: str, prompt: list[int], params: em.SamplingParams) -> tuple[list[int], list[float]]:
    """mlx-lm's own decoding of one sequence, with the margin between the two best scores at each step."""
    batch = SamplingBatch.of([params], [params.seed or 0])
    margins: list[float] = []

    def choose(logprobs: mx.array) -> mx.array:
        at = mx.array([[len(prompt) + len(margins)]])
        noise = gumbel(batch, at, logprobs.shape[-1])
        scores = logprobs.astype(mx.float32)[None] + batch.temperature[:, None, None] * noise
        best = np.sort(np.array(scores).ravel())[-2:]
        margins.append(float(best[1] - best[0]))
        return sample(logprobs[None], batch, at)[0]

    steps = generate_step(mx.array(prompt), target(name).model, max_tokens=params.max_tokens, sampler=choose)
    return [int(token) for token, _ in steps], margins


def first_difference(got: list[int], want: list[int], margins: list[float]) -> str | None:
    """Where the texts part, unless two tokens were as good there."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            return None if margins[index] < MARGIN else f"token {index}: {a}, not {b} (margin {margins[index]:.4f})"
    return None


def decodings(name: str) -> Iterator[tuple[list[em.SamplingParams], int, int, int]]:
    rows = 1 if name in ONE_ROW else 3
    yield GREEDY, rows, 3, 512
    yield SEEDED, rows, 5, 16


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_text_is_mlx_lms_own(name: str) -> None:
    for params, rows, depth, chunk in decodings(name):
        plains = [plain(name, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        assert len({token for tokens, _ in plains for token in tokens}) > 5  # a text that could go wrong
        oracle = Oracle({tuple(p): text for p, (text, _) in zip(PROMPTS, plains, strict=True)}, wrong=0.3)
        engine = em.Engine(target(name), oracle, em.FixedPolicy(depth), max_batch=rows, prefill_chunk=chunk)
        outputs = engine.generate(PROMPTS, params)
        differences = [first_difference(o.tokens, *p) for o, p in zip(outputs, plains, strict=True)]
        assert differences == [None] * len(PROMPTS)
        assert sum(output.accepted for output in outputs) > 10
