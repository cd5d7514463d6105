"""Drafts follow the requests' penalties and biases, as the target's logits do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.processors import Processors
from eagle_mlx.decoding.sampling import SamplingBatch, distribution
from eagle_mlx.decoding.verify import verify
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.drafting import Draws, draft_chain, draw_block
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from tests.eagle_mlx.test_losslessness import DRAWS, FEW, Array, block_states, follows, misses
from tests.fakes import tiny_target
from tests.full import FULL, diagonal, in_full

TARGET = tiny_target()
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 7, 8, 7, 8, 7], [100, 3]]
CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 1.0},
    {"logit_bias": {3: -100.0, 8: 1.5}},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.25, "presence_penalty": -0.5, "logit_bias": {5: 2.0}},
]
RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "acceptance": "rejection", "top_k": 20},
]


@pytest.mark.parametrize(("changes", "rule"), diagonal(CHANGES, RULES))
def test_a_target_that_drafts_for_itself_accepts_everything(changes: dict[str, Any], rule: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=24, **changes, **rule), SamplingParams(max_tokens=24, **rule)]
    engine = em.Engine(TARGET, em.DraftModelProposer(TARGET), policy=em.FixedPolicy(4))
    outputs = engine.generate(PROMPTS, [params[0], params[1], params[0]])
    assert all(output.drafted == output.accepted > 0 for output in outputs)


def states(params: SamplingParams, rows: int, prompt: list[int], tokens: list[int]) -> list[RequestState]:
    return [RequestState(Request(prompt, params, 0, 99, frozenset()), tokens=list(tokens)) for _ in range(rows)]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_draft_vocabulary_gets_the_changes_of_its_own_tokens(changes: dict[str, Any]) -> None:
    rng, vocab = np.random.default_rng(0), 12
    token_ids = mx.array([0, 3, 5, 7, 8, 11], mx.int32)
    rows = [*states(SamplingParams(**changes), 1, [3, 7], [5, 5]), *states(SamplingParams(), 1, [3], [7])]
    processors = Processors.of(rows, vocab)
    assert processors is not None
    logits = mx.array(rng.normal(scale=3, size=(2, 4, vocab)).astype(np.float32))
    drafts = mx.array([[8, 3, 8], [1, 2, 3]], mx.int32)
    wanted, _ = processors.apply(logits, Draft(drafts, mx.array([3, 3])))
    for step in range(4):
        drafted = [drafts[:, at : at + 1] for at in range(step)]
        now = slice(step, step + 1)
        assert mx.allclose(processors.change_draft(logits[:, now], drafted, None), wanted[:, now])
        changed = processors.change_draft(logits[:, now][..., token_ids], drafted, token_ids)
        assert mx.allclose(changed, wanted[:, now][..., token_ids])


# A toy target, a table of logits by the last token, whose texts are drawn many times at once.

VOCAB, LENGTH = 5, 3
PENALIZED = SamplingParams(temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.7, logit_bias={1: 1.0})
_RNG = np.random.default_rng(0)
TABLE = mx.array(_RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32))
SIMILAR = TABLE + mx.array(_RNG.normal(scale=0.5, size=TABLE.shape).astype(np.float32))


def law_of_texts(params: SamplingParams) -> Array:
    """Return the probability of every text of `LENGTH` tokens after token 0, from the penalties' definitions."""
    batch, law = SamplingBatch.of([replace(params, logit_bias={})], [0]), np.ones(VOCAB**LENGTH)
    for cell, text in enumerate(product(range(VOCAB), repeat=LENGTH)):
        for step, token in enumerate(text):
            written = list(text[:step])
            logits = np.array(TABLE[written[-1] if written else 0], np.float64)
            for other in {0, *written}:
                logits[other] *= 1 / params.repetition_penalty if logits[other] > 0 else params.repetition_penalty
            for other in written:
                logits[other] -= params.frequency_penalty
            for other, bias in params.logit_bias.items():
                logits[other] += bias
            law[cell] *= distribution(mx.array(logits.astype(np.float32))[None, None], batch)[0, 0, token].item()
    return law / law.sum()


def draft_of(kind: str, last: mx.array, batch: SamplingBatch, position: mx.array) -> Draft:
    def chain(draws: Draws) -> list[mx.array]:
        return draws.chain(2, lambda token: SIMILAR[last[:, None] if token is None else token])

    def block(draws: Draws) -> list[mx.array]:
        head, blocks = block_states(kind, VOCAB)
        return draw_block(head, blocks[last], last[:, None], 2, draws)

    draw, ready = chain if kind == "chain" else block, mx.ones(last.shape, mx.int32)
    return draft_chain(Plan(2), draw, ready, batch, position, VOCAB)


@pytest.mark.parametrize("kind", ["chain", "dspark", "peagle"])
def test_a_token_that_is_never_written_is_never_drafted(kind: str) -> None:
    params = SamplingParams(temperature=1.0, logit_bias={3: -100.0})
    processors = Processors.of(states(params, FEW, [0], []), VOCAB)
    assert processors is not None
    plain, last = SamplingBatch.of([params] * FEW, range(FEW)), mx.zeros((FEW,), mx.int32)
    drafted = [
        draft_of(kind, last, replace(plain, changes=changes), last).tokens
        for changes in (None, processors.change_draft)
    ]
    assert [mx.any(tokens == 3).item() for tokens in drafted] == [True, False]


def texts_of(kind: str, params: SamplingParams, rows: int, unchanged_q: bool = False) -> Array:
    """Decode texts [rows, LENGTH] in rounds of two drafts. `unchanged_q`: report q without the changes."""
    processors = Processors.of(states(params, rows, [0], []), VOCAB)
    assert processors is not None
    plain = SamplingBatch.of([params] * rows, range(rows))
    batch = replace(plain, changes=processors.change_draft)
    last = position = written = mx.zeros((rows,), mx.int32)
    text, steps = mx.zeros((rows, LENGTH + 3), mx.int32), mx.arange(3, dtype=mx.int32)
    while (np.array(written) < LENGTH).any():
        draft = draft_of(kind, last, batch, position)
        q = draft_of(kind, last, plain, position).probs if unchanged_q else draft.probs
        read = mx.concatenate([last[:, None], draft.tokens], axis=1)
        logits, _ = processors.apply(TABLE[read], draft)
        verdict = verify(logits, draft.tokens, draft.lengths, q, batch, position[:, None] + steps)
        processors.commit(verdict)
        text = mx.put_along_axis(text, written[:, None] + steps, verdict.tokens, axis=1)
        last = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
        position = position + verdict.accepted + 1
        written = mx.minimum(written + verdict.accepted + 1, LENGTH)
        mx.eval(last, position, written, text)
    return np.array(text[:, :LENGTH])


@pytest.mark.parametrize(
    ("kind", "acceptance"),
    [
        *(("chain", "rejection"), ("dspark", "rejection"), ("peagle", "coupled")),
        *in_full([("chain", "coupled"), ("dflash2", "rejection"), ("peagle", "rejection")], []),
    ],
)
def test_penalized_texts_follow_the_target(kind: str, acceptance: Any) -> None:
    params = replace(PENALIZED, acceptance=acceptance)
    texts, law = texts_of(kind, params, in_full(DRAWS, 2 * FEW)), law_of_texts(params)
    assert not misses(texts, law, VOCAB)
    if FULL:
        assert follows(texts, law, VOCAB)


@pytest.mark.parametrize("kind", ["chain", *in_full(["dspark"], [])])
def test_a_q_without_the_penalties_misses_the_bar(kind: str) -> None:
    params = replace(PENALIZED, acceptance="rejection")
    assert misses(texts_of(kind, params, FEW, unchanged_q=True), law_of_texts(params), VOCAB)
