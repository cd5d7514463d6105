"""Paused and resumed requests: the same text, and rows shared fairly between clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch, distribution
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter
from tests.eagle_mlx.heads import PROPOSERS
from tests.eagle_mlx.test_losslessness import misses
from tests.fakes import generate, steps_of, tiny_head, tiny_target
from tests.full import diagonal, in_full, in_turn, some
from tests.grammars import END, Steps

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 60, 17, 40, 2, 33)]
OPEN = em.SamplingParams(max_tokens=1 << 30, ignore_eos=True)
"""No limit: such a row ends at the end of the context."""
COUNT = 12


class WideSteps(Steps):
    vocab = 128


def halve_repeats(tokens: list[int], logits: mx.array) -> mx.array:
    repeated = mx.array([token in tokens[-8:] for token in range(logits.shape[-1])])
    return mx.where(repeated, logits / 2, logits)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "callable": {"logits_processors": (halve_repeats,)},
    "grammar": {"grammar": WideSteps, "stop_token_ids": (END,)},
    "seeded grammar": {"grammar": WideSteps, "stop_token_ids": (END,), "temperature": 0.9, "seed": 5},
    "logprobs": {"top_logprobs": 2},
}
PARAMS = [em.SamplingParams(max_tokens=COUNT, **kind) for kind in KINDS.values()]
ASKED = [PROMPTS[index % len(PROMPTS)] for index in range(len(KINDS))]
ALONE = [em.Engine(TARGET).generate([prompt], p)[0] for prompt, p in zip(ASKED, PARAMS, strict=True)]

DRAFTS = {**PROPOSERS, "draft model": lambda _: em.DraftModelProposer(tiny_target(seed=3, layers=1))}
"""Ways to draft. The draft model is not the target, so some of its drafts are rejected."""


@settings(max_examples=some(10), deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([*DRAFTS]),
    st.sampled_from([0.1, 0.4]),
    st.integers(1, 7),
    st.sampled_from([0, 1 << 20]),
    st.sampled_from([16, 2048]),
)
def test_pauses_at_any_round_do_not_change_answers(
    seed: int, drafts: str, pauses: float, rows: int, kept: int, chunk: int
) -> None:
    engine = em.Engine(
        TARGET,
        DRAFTS[drafts](TARGET),
        policy=em.FixedPolicy(3),
        max_batch=rows,
        prefill_chunk=chunk,
        prefix_cache_bytes=kept,
    )
    outputs = generate(engine, ASKED, PARAMS, pauses, seed)
    assert engine.pauses > 0
    for name, output, alone in zip(KINDS, outputs, ALONE, strict=True):
        assert (name, output.tokens) == (name, alone.tokens)
        assert (output.finish_reason, output.prompt_tokens) == (alone.finish_reason, alone.prompt_tokens)
    wanted, logprobs = ALONE[-1].logprobs, outputs[-1].logprobs
    assert wanted
    assert logprobs
    assert [token.token for token in logprobs] == [token.token for token in wanted]
    assert [token.logprob for token in logprobs] == pytest.approx([token.logprob for token in wanted], abs=1e-3)


def test_positions_read_again_after_a_pause_are_not_counted_as_cached() -> None:
    engine = em.Engine(TARGET, max_batch=2, prefix_cache_bytes=1 << 22)
    params = replace(OPEN, max_tokens=12)
    first = generate(engine, [PROMPTS[1]], [params], 1.0)[0]
    assert engine.pauses > 2
    assert first.cached_tokens == 0
    again = generate(engine, [PROMPTS[1]], [params], 1.0)[0]
    assert again.cached_tokens == len(PROMPTS[1]) - 2
    assert again.tokens == first.tokens


@pytest.mark.parametrize("chosen", in_turn([[None, "ngrams", "model", "none"], [None]]))
def test_texts_without_a_seed_follow_the_target_despite_pauses(chosen: list[Drafter | None]) -> None:
    """Compared with an exact enumeration of two tokens. Rows of a batch choose what drafts, in turns."""
    target, draws = tiny_target(vocab=16, seed=4, layers=2), in_full(6000, 600)
    sampled = em.SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True)
    prompt, batch = [3, 7, 9, 3, 7], SamplingBatch.of([sampled], [0])

    def law_of(texts: list[list[int]]) -> Any:
        logits = target.forward(mx.array(texts), None).logits[:, -1:]
        return np.array(distribution(logits, batch), np.float64)[:, 0]

    first = law_of([prompt])[0]
    law = (first[:, None] * law_of([[*prompt, token] for token in range(16)])).ravel()
    drafter = em.HybridProposer(em.HeadProposer(tiny_head(target)), em.NgramProposer())
    engine = em.Engine(target, drafter, policy=em.FixedPolicy(2), max_batch=64)
    params = [replace(sampled, drafter=chosen[index % len(chosen)]) for index in range(draws)]
    outputs = generate(engine, [prompt] * draws, params, 0.5)
    assert engine.pauses > draws / 4
    assert not misses(np.array([output.tokens for output in outputs]), law / law.sum(), 16)


def submit(engine: em.Engine, client: str, prompt: list[int], params: em.SamplingParams = OPEN) -> RequestState:
    request = engine.prepare(prompt, params, client=client)
    engine.submit(request)
    return request


def steps_until(engine: em.Engine, request: RequestState) -> int:
    """Return how many steps it takes until a request's first token."""
    steps = 0
    while not request.tokens and request.finish_reason is None:
        engine.step()
        steps += 1
        assert steps < 1000
    return steps


def finish(engine: em.Engine) -> None:
    while not engine.idle:
        engine.step()


MOST_STEPS, SLICE = 4, 64
"""Steps until another client's short prompt has its first token; rounds after which the only row is paused."""


def test_the_guide_states_the_numbers_that_are_measured_here() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"first token within {MOST_STEPS} steps" in guide
    assert f"gets the row after {SLICE} rounds" in guide


def short() -> em.Target:
    """Return a target at whose context's end rows without a limit soon end."""
    target = tiny_target()
    target.context_length = 100
    return target


ONCE: dict[tuple[tuple[int, ...], int | None], list[int]] = {}


def alone(prompt: list[int], params: em.SamplingParams = OPEN) -> list[int]:
    """Return the text of the only request of that target: greedy, or of a seed."""
    key = tuple(prompt), params.seed
    if key not in ONCE:
        ONCE[key] = em.Engine(short()).generate([prompt], params)[0].tokens
    return ONCE[key]


@pytest.mark.parametrize(("drafts", "kept"), diagonal(["none", "head"], [0, 1 << 22]))
def test_a_client_with_all_rows_gives_one_back(drafts: str, kept: int) -> None:
    target = short()
    engine = em.Engine(target, DRAFTS[drafts](target), policy=em.FixedPolicy(2), max_batch=4, prefix_cache_bytes=kept)
    greedy = [submit(engine, "a", prompt) for prompt in PROMPTS]
    for turn in range(3):
        for _ in range(8):
            engine.step()
        assert engine.active == 4
        other = submit(engine, "b", PROMPTS[turn][:5], replace(OPEN, max_tokens=6))
        assert steps_until(engine, other) <= MOST_STEPS
        while other.finish_reason is None:
            engine.step()
        assert other.tokens == em.Engine(target).generate([PROMPTS[turn][:5]], replace(OPEN, max_tokens=6))[0].tokens
    assert engine.pauses == 3  # once for each
    finish(engine)
    assert [request.tokens for request in greedy] == [alone(prompt) for prompt in PROMPTS]
    assert {request.finish_reason for request in greedy} == {"length"}


def test_rows_are_shared_fairly() -> None:
    engine = em.Engine(TARGET, max_batch=4)
    rows = {name: [submit(engine, name, PROMPTS[0]) for _ in range(6)] for name in ("a", "b", "c")}

    def holding(name: str) -> int:
        return sum(bool(row.tokens) and not row.paused and row.finish_reason is None for row in rows[name])

    for _ in range(40):
        engine.step()
    assert sorted(map(holding, rows)) == [1, 1, 2]
    before = engine.pauses
    for _ in range(40):
        engine.step()
    assert engine.pauses == before  # rows do not alternate
    assert [row.counts.pauses for row in rows["a"][:1]] == [0]  # the newest was paused, not the oldest
    for requests in rows.values():
        for request in requests:
            engine.cancel(request)
    assert engine.idle


def test_the_only_row_is_given_back_after_some_rounds() -> None:
    target = tiny_target()
    target.context_length = in_full(200, 140)
    text = em.Engine(target).generate([PROMPTS[0]], OPEN)[0].tokens
    engine = em.Engine(target, max_batch=1, prefix_cache_bytes=1 << 22)
    first = submit(engine, "a", PROMPTS[0])
    engine.step()
    second = submit(engine, "b", PROMPTS[0])
    assert SLICE - 4 <= steps_until(engine, second) <= SLICE + MOST_STEPS
    finish(engine)
    assert first.tokens == second.tokens == text
    assert 3 <= engine.pauses <= 8  # every 64 rounds, of two times 195 or 135


def test_a_request_that_does_not_fit_does_not_delay_other_clients() -> None:
    """Its client already has rows. Other clients pass it, more often than requests of its own client may."""
    engine = em.Engine(TARGET, max_batch=4)
    size = engine.kv_budget.size
    engine = em.Engine(TARGET, max_batch=4, kv_bytes=size.nbytes(2, 300))
    named = em.SamplingParams(max_tokens=250, ignore_eos=True)
    submit(engine, "a", PROMPTS[0], named)
    engine.step()
    large = submit(engine, "a", PROMPTS[1], replace(named, max_tokens=400))
    for turn in range(12):
        other = submit(engine, "b", PROMPTS[0], replace(named, max_tokens=4, temperature=1.0, seed=turn))
        assert steps_until(engine, other) <= MOST_STEPS
        while other.finish_reason is None:
            engine.step()
    assert not large.tokens


def test_memory_is_given_back_too() -> None:
    size = em.Engine(TARGET).kv_budget.size
    engine = em.Engine(TARGET, max_batch=4, kv_bytes=size.nbytes(2, 300))
    named = em.SamplingParams(max_tokens=250, ignore_eos=True)
    rows = [submit(engine, "a", prompt, named) for prompt in (PROMPTS[0], PROMPTS[2])]
    for _ in range(4):
        engine.step()
    assert engine.active == 2
    other = submit(engine, "b", PROMPTS[4], named)
    assert steps_until(engine, other) <= MOST_STEPS
    assert [row.paused for row in rows] == [False, True]
    for _ in range(20):
        engine.step()
    assert engine.pauses == 1


@pytest.mark.parametrize("end", ["cancel", "cut off", "abandon"])
def test_a_paused_request_can_be_ended(end: str) -> None:
    engine = em.Engine(TARGET, max_batch=2, prefix_cache_bytes=1 << 20)
    rows = [submit(engine, "a", prompt) for prompt in (PROMPTS[0], PROMPTS[2])]
    for _ in range(4):
        engine.step()
    other = submit(engine, "b", PROMPTS[4], em.SamplingParams(max_tokens=40, ignore_eos=True))
    steps_until(engine, other)
    assert [row.paused for row in rows] == [False, True]
    tokens = list(rows[1].tokens)
    if end == "cancel":
        engine.cancel(rows[1])
    elif end == "cut off":
        engine.cut_off(rows[1], "time")
    else:
        engine.abandon("enough")
    assert rows[1].finish_reason == {"cancel": "cancelled", "cut off": "length", "abandon": "error"}[end]
    engine.cancel(rows[0])
    finish(engine)
    assert rows[1].tokens == tokens
    assert len(other.tokens) == 40 or end == "abandon"


def test_a_step_that_fails_leaves_paused_requests_alone() -> None:
    engine = em.Engine(TARGET, max_batch=2)
    rows = [submit(engine, "a", prompt, em.SamplingParams(max_tokens=30, ignore_eos=True)) for prompt in PROMPTS[:3:2]]
    for _ in range(4):
        engine.step()
    submit(engine, "b", PROMPTS[4])

    def fail(result: object) -> None:
        if rows[1].paused:
            engine.observer = None
            raise RuntimeError("no more")

    engine.observer = fail
    with pytest.raises(RuntimeError, match="no more"):
        finish(engine)
    assert rows[0].finish_reason == "error"
    assert rows[1].finish_reason is None
    finish(engine)
    alone = em.Engine(TARGET).generate([PROMPTS[2]], em.SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert rows[1].tokens == alone.tokens


def test_a_request_pauses_once_each_time_it_is_asked() -> None:
    engine = em.Engine(TARGET)
    rows = [engine.prepare(prompt, replace(OPEN, max_tokens=20)) for prompt in PROMPTS[:2]]
    for row in rows:
        engine.submit(row)
    while len(rows[0].tokens) < 5:
        engine.step()
    engine.pause(rows[0])
    while not engine.idle:
        engine.step()
    assert engine.pauses == 1


def test_a_step_pauses_as_many_rows_as_do_not_fit() -> None:
    with steps_of(8):
        engine = em.Engine(TARGET, max_batch=6)
        rows = [engine.prepare(PROMPTS[0], replace(OPEN, max_tokens=40)) for _ in range(6)]
        for row in rows:
            engine.submit(row)
        while engine.active < 6:
            engine.step()
        engine.kv_budget.nbytes = engine.snapshot().kv_used // 2
        while not engine.pauses:
            engine.step()
        assert engine.pauses > 1
        assert engine.snapshot().kv_used <= engine.kv_budget.nbytes
        while not engine.idle:
            engine.step()
    assert {len(row.tokens) for row in rows} == {40}


@pytest.mark.parametrize(("drafts", "kept"), diagonal(["none", "head"], [0, 1 << 22]))
def test_rows_without_a_limit_never_outgrow_the_memory(drafts: str, kept: int) -> None:
    target = short()
    prompts = [prompt[:20] for prompt in PROMPTS]
    options = [replace(OPEN, temperature=1.0, seed=seed) for seed in range(8)]
    texts = [prompts[seed % len(prompts)] for seed in range(8)]
    with steps_of(8):
        size = em.Engine(target, DRAFTS[drafts](target)).kv_budget.size
        allowed = size.nbytes(3, 100)
        engine = em.Engine(
            target,
            DRAFTS[drafts](target),
            policy=em.FixedPolicy(2),
            max_batch=8,
            prefix_cache_bytes=kept,
            kv_bytes=allowed,
        )
        engine.kv_budget.reserve = 12  # so that all eight begin, as if the context were much longer than the reserve
        rows = [engine.prepare(p, o) for p, o in zip(texts, options, strict=True)]
        for row in rows:
            engine.submit(row)
        most, together = 0, 0
        while not engine.idle:
            engine.step()
            most, together = max(most, engine.snapshot().kv_used), max(together, engine.active)
    assert together == 8
    assert engine.pauses >= 5
    assert most <= allowed + size.nbytes(8, 3)
    assert [row.tokens for row in rows] == [alone(p, o) for p, o in zip(texts, options, strict=True)]
