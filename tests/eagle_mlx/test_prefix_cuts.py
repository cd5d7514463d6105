"""Pasts that are cut back: after any drafts, cancels or stops, the text equals a cold engine's."""

from __future__ import annotations

from functools import cache
from itertools import takewhile

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.kinds import ONE_ROW
from tests.architectures import VOCAB, tiny_model
from tests.fakes import Oracle, randomize
from tests.full import diagonal, in_full, in_turn

LONG = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 90)]
MANY = 1 << 30
MARGIN = 1e-3
"""Scores closer than this may be decided by rounding between forwards of different widths."""


@cache
def target(name: str, window: int | None = None) -> em.Target:
    model = tiny_model(name, window)
    randomize(model, 0, 0.2)
    return em.Target(model, name=name)


@cache
def cold(which: em.Target, prompt: tuple[int, ...], params: em.SamplingParams) -> list[int]:
    return em.Engine(which, max_batch=1).generate([list(prompt)], params)[0].tokens


def same(which: em.Target, prompt: list[int], got: list[int], wanted: list[int]) -> bool:
    """Return whether greedy texts are equal up to a point where two tokens were equally good."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, wanted, strict=False)))
    if common == len(got) == len(wanted):
        return True
    cache = RaggedCache.of(which.model, 1)
    logits = which.forward(mx.array([[*prompt, *wanted[:common]]]), cache).logits[0, -1]
    best = np.sort(np.array(logits, dtype=np.float32))[-2:]
    return float(best[1] - best[0]) < MARGIN


def busy(which: em.Target, proposer: object, depth: int, rows: int = 1) -> em.Engine:
    return em.Engine(which, proposer, policy=em.FixedPolicy(depth), max_batch=rows, prefix_cache_bytes=MANY)  # type: ignore[arg-type]


def cancelled(engine: em.Engine, prompt: list[int], tokens: int, params: em.SamplingParams) -> None:
    """Start a request and cancel it after this many tokens."""
    row = engine.prepare(prompt, params)
    engine.submit(row)
    while len(row.tokens) < tokens and not row.finish_reason:
        engine.step()
    engine.cancel(row)


@pytest.mark.parametrize(
    ("kind", "seeded"), diagonal([("gemma3_text", 32), ("gpt_oss", 32), ("gemma3_text", 128)], [False, True])
)
def test_drafts_that_wrapped_around_the_ring_are_not_reused(kind: tuple[str, int], seeded: bool) -> None:
    """Rejected drafts reach further than the text: the ring's first slots hold them, not the start of the text."""
    params = em.SamplingParams(temperature=0.8 if seeded else 0.0, seed=3, max_tokens=12)
    name, window = kind
    ring = window + 16
    long = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 2 * ring)]
    which = target(name, window)
    for length in range(ring - 12, ring - 4, in_full(2, 4)):
        engine = busy(which, Oracle({tuple(long[:length]): [0] * 99}, wrong=1.0), 8)
        cancelled(engine, long[:length], 6, em.SamplingParams(max_tokens=30))
        for shared in (30, length - 2):
            prompt = [*long[:shared], 1, 2, 3]
            engine.proposer.texts = {tuple(prompt): [0] * 99}  # type: ignore[union-attr]
            got = engine.generate([prompt], params)[0]
            assert got.tokens == cold(which, tuple(prompt), params)


def test_a_plain_round_past_a_stop_is_not_reused() -> None:
    """The text ends when the ring is full, and one more entry has been written by then."""
    which = target("gemma3_text", 32)
    params = em.SamplingParams(max_tokens=12)
    for length in range(38, 48):
        prompt = LONG[:length]
        text = cold(which, tuple(prompt), em.SamplingParams(max_tokens=12))
        end = next((n for n in range(11) if text[n] not in text[:n] and length + n == 48), None)
        if end is None:
            continue
        engine = busy(which, None, 1, rows=2)
        stopped = em.SamplingParams(max_tokens=12, stop_token_ids=(text[end],))
        engine.generate([prompt, [1, 2, 3]], [stopped, params])
        again = [*prompt[:30], 1, 2, 3]
        got = engine.generate([again], params)[0]
        assert same(which, again, got.tokens, cold(which, tuple(again), params))


def test_a_text_is_reused_if_its_windows_are_complete() -> None:
    """Also a shorter past is reused if the ring still holds every entry that it sees."""
    which = target("gemma3_text", 32)
    params = em.SamplingParams(max_tokens=10)
    # 69 positions went into 48 slots: 21 to 68 remain, and separately 10 to 57 from the end of the prompt.
    for kept, reused in ((66, 65), (53, 52), (52, 51), (42, 41), (41, 0), (30, 0)):
        engine = busy(which, None, 1)
        text = [*LONG[:60], *engine.generate([LONG[:60]], params)[0].tokens]
        prompt = [*text[:kept], (text[kept] + 1) % VOCAB, 2, 3]
        got = engine.generate([prompt], params)[0]
        assert got.cached_tokens == reused
        assert same(which, prompt, got.tokens, cold(which, tuple(prompt), params))


request = st.fixed_dictionaries(
    {
        "beginning": st.integers(14, 50),
        "rest": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        "tokens": st.integers(2, 12),
        "boundary": st.integers(0, 15),
        "end": st.sampled_from(["length", "cancel", "stop"]),
    }
)


@pytest.mark.parametrize(
    "name",
    in_turn(
        [
            *("gemma3_text", "gpt_oss", "qwen3", "gemma3n", "lfm2", "iquestloopcoder", "llama4", "laguna"),
            *("recurrent_gemma", "baichuan_m1"),
        ]
    ),
)
def test_any_history_and_any_cut_equal_a_cold_engine(name: str) -> None:
    which = target(name, 32)
    rows = 1 if name in ONE_ROW else 2

    @settings(max_examples=in_full(12, 3))
    @given(st.sampled_from([0, 3, 8]), st.sampled_from([0.0, 0.5, 1.0]), st.lists(request, min_size=3, max_size=5))
    def check(depth: int, wrong: float, requests: list[dict]) -> None:  # type: ignore[type-arg]
        oracle = Oracle({}, wrong)
        engine = busy(which, oracle if depth else None, max(depth, 1), rows)
        if rows > 1:  # with a longer row
            other = engine.prepare(LONG[:75], em.SamplingParams(max_tokens=99))
            oracle.texts[tuple(other.prompt)] = [0] * 99  # type: ignore[index]
            engine.submit(other)
        for fields in requests:
            prompt = [*LONG[: fields["beginning"]], *fields["rest"]]
            params = em.SamplingParams(max_tokens=fields["tokens"])
            wanted = cold(which, tuple(prompt), params)
            oracle.texts[tuple(prompt)] = wanted  # type: ignore[index]
            if fields["end"] == "cancel":
                cancelled(engine, prompt, fields["tokens"] // 2, params)
                continue
            if fields["end"] == "stop":
                stop = wanted[fields["tokens"] // 2]
                params = em.SamplingParams(max_tokens=fields["tokens"], stop_token_ids=(stop,))
                wanted = wanted[: wanted.index(stop) + 1]
            row = engine.prepare(prompt, params, boundaries=(min(2 * fields["boundary"], len(prompt)),))
            engine.submit(row)
            while row.finish_reason is None:
                engine.step()
            assert same(which, prompt, row.tokens, wanted)

    check()
