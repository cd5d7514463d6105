"""A request with a seed gets the same text at any depth, in any batch, with any proposer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.sampling_params import Drafter
from tests.eagle_mlx.heads import BLOCKS, IN_BLOCKS, PROPOSERS
from tests.fakes import generate, tiny_head, tiny_target
from tests.full import diagonal, in_full, in_turn
from tests.grammars import END, Steps

TARGET = tiny_target()
RNG = np.random.default_rng(1)
COUNT = in_full(20, 6)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, int(RNG.integers(1, 40)))] for _ in range(COUNT)]
LENGTH = in_full(20, 14)


def params_of(index: int) -> em.SamplingParams:
    """Return different parameters for every request."""
    return em.SamplingParams(
        max_tokens=LENGTH - index % 7,
        seed=index,
        temperature=(1.0, 0.7, 1.3)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        top_k=(0, 20)[index % 4 == 3],
        repetition_penalty=(1.0, 1.2)[index % 5 == 4],
        frequency_penalty=(0.0, 0.5)[index % 6 == 5],
    )


PARAMS = [params_of(index) for index in range(COUNT)]


@cache
def expected() -> list[list[int]]:
    """Return each request's text alone, without drafts."""
    plain = em.Engine(TARGET, max_batch=1)
    return [plain.generate([p], sampling)[0].tokens for p, sampling in zip(PROMPTS, PARAMS, strict=True)]


DRAFTS: dict[str, Callable[[em.Target], Any]] = {
    **PROPOSERS,
    "narrow head": lambda t: em.HeadProposer(tiny_head(t, draft_vocab=40)),
    "dspark, rnn, and n-grams": lambda t: em.HybridProposer(em.HeadProposer(BLOCKS["dspark, rnn"](t))),
    "another model": lambda t: em.DraftModelProposer(tiny_target(seed=3, layers=1)),
    "draft model, n-grams": lambda t: em.HybridProposer(em.DraftModelProposer(t), em.NgramProposer()),
}


CHOICES: list[tuple[Drafter | None, ...]] = [(None, "ngrams", "model", "none"), (None,), ("model", "ngrams")]
"""What requests choose to draft, in turns."""


@pytest.mark.parametrize(
    ("proposer", "depth", "batch", "pauses", "chosen", "exact"),
    diagonal(DRAFTS, [0, 1, 3, 5, 2], [1, 4, 8], [0.0, 0.2], CHOICES, [True, False, False, True]),
)
def test_the_same_tokens_every_time(
    proposer: str, depth: int, batch: int, pauses: float, chosen: tuple[Drafter | None, ...], exact: bool
) -> None:
    engine = em.Engine(
        TARGET,
        DRAFTS[proposer](TARGET),
        policy=em.FixedPolicy(depth),
        max_batch=batch,
        prefix_cache_bytes=1 << 20 if pauses and batch > 1 else 0,
        exact=exact,
    )
    params = [replace(sampling, drafter=chosen[index % len(chosen)]) for index, sampling in enumerate(PARAMS)]
    outputs = generate(engine, PROMPTS, params, pauses)
    assert (engine.pauses > 0) == (pauses > 0)
    assert [output.tokens for output in outputs] == expected()
    if proposer == "draft model" and depth:
        assert sum(o.accepted for o in outputs) > 0.9 * sum(o.drafted for o in outputs)


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_threshold_texts_are_the_same_in_any_batch(kind: str) -> None:
    """They depend on the drafts, but not on other rows."""
    count = in_full(COUNT, 4)
    params = [replace(sampling, acceptance="threshold", threshold=0.02) for sampling in PARAMS[:count]]
    head = em.HeadProposer(IN_BLOCKS[kind](TARGET))
    texts = []
    for batch in (1, 4):
        outputs = em.Engine(TARGET, head, policy=em.FixedPolicy(3), max_batch=batch).generate(PROMPTS[:count], params)
        texts.append([output.tokens for output in outputs])
        assert sum(output.accepted for output in outputs) > 0
    assert texts[0] == texts[1] != expected()[:count]


@cache
def mask_behind(last: int | None) -> mx.array:
    return mx.array([last is None or 1 <= (token - last) % 128 <= 9 for token in range(128)])


class WideSteps(Steps):
    vocab = 128

    def mask(self) -> mx.array:
        return mask_behind(self.taken[-1] if self.taken else None)


@cache
def expected_of_grammars() -> list[list[int]]:
    plain = em.Engine(TARGET, max_batch=1)
    return [plain.generate([p], sampling)[0].tokens for p, sampling in zip(PROMPTS, GUIDED, strict=True)]


GUIDED = [replace(sampling, grammar=WideSteps, stop_token_ids=(END,)) for sampling in PARAMS]


@pytest.mark.parametrize(("proposer", "depth", "exact"), diagonal(in_turn(DRAFTS), [3, 5], [False, True]))
def test_the_same_tokens_with_a_grammar(proposer: str, depth: int, exact: bool) -> None:
    engine = em.Engine(TARGET, DRAFTS[proposer](TARGET), policy=em.FixedPolicy(depth), max_batch=4, exact=exact)
    assert [output.tokens for output in engine.generate(PROMPTS, GUIDED)] == expected_of_grammars()


def test_another_seed_gives_another_text() -> None:
    other = [em.SamplingParams(max_tokens=LENGTH, seed=100 + index, temperature=1.0) for index in range(COUNT)]
    assert not any(a.tokens == b for a, b in zip(em.Engine(TARGET).generate(PROMPTS, other), expected(), strict=True))
