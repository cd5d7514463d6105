"""Prompts that diverge from earlier ones at a boundary: everything before it is reused, with any kind of cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.prefill import stops
from eagle_mlx.errors import PromptError
from eagle_mlx.request_state import RequestState
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import randomize, tiny_head, tiny_target
from tests.full import diagonal, in_turn

MANY = 1 << 30
SYSTEM = [(7 * i * i + 3 * i) % 90 + 1 for i in range(50)]
CHAT = [*SYSTEM, *((5 * i * i + i) % 90 + 1 for i in range(40))]
OPENING = [91, 92]
"""The template adds this before an answer, and leaves it out of the next turn's prompt."""
KINDS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_5", "mamba2", "rwkv7", "llama4_text"]
DRAFTS = [name for name in PROPOSERS if name != "head, n-grams"]
PARAMS = em.SamplingParams(max_tokens=8, ignore_eos=True, memory=False)  # drafts of two engines are compared


@cache
def target(name: str) -> em.Target:
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    return em.Target(model, name=name)


def answered(engine: em.Engine, prompt: Sequence[int], boundaries: Sequence[int] = ()) -> RequestState:
    row = engine.prepare(list(prompt), PARAMS, boundaries)
    engine.submit(row)
    while row.finish_reason is None:
        engine.step()
    return row


@pytest.mark.parametrize(("name", "drafts", "chunk"), diagonal(KINDS, in_turn(DRAFTS), [16, 7, 512]))
def test_the_next_turn_and_another_question_continue_from_a_boundary(name: str, drafts: str, chunk: int) -> None:
    which = target(name)

    def engine(nbytes: int) -> em.Engine:
        drafting = PROPOSERS[drafts](which)
        return em.Engine(
            which, drafting, policy=em.FixedPolicy(3), max_batch=1, prefill_chunk=chunk, prefix_cache_bytes=nbytes
        )

    busy, cold = engine(MANY), engine(0)
    answered(busy, [*CHAT, *OPENING], (len(SYSTEM), len(CHAT)))
    for shared, more in ((CHAT, [5, 6, 7] * 4), (SYSTEM, [8, 9] * 10)):
        got, wanted = answered(busy, [*shared, *more]), answered(cold, [*shared, *more])
        assert (got.tokens, got.counts.accepted_by_position) == (wanted.tokens, wanted.counts.accepted_by_position)
        assert got.counts.cached_tokens == len(shared) - 1


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_without_a_boundary_a_prompt_ends_in_one(name: str) -> None:
    busy = em.Engine(target(name), prefix_cache_bytes=MANY)
    answered(busy, CHAT)
    again = answered(busy, CHAT)
    assert again.counts.cached_tokens == len(CHAT) - 2
    assert again.tokens == answered(em.Engine(target(name)), CHAT).tokens


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_prompts_in_one_batch_have_separate_boundaries(name: str) -> None:
    prompts = [[number, *CHAT[: 40 + 13 * number]] for number in range(1, 4)]
    ends = [20 + 9 * number for number in range(1, 4)]
    busy = em.Engine(target(name), max_batch=3, prefix_cache_bytes=MANY)
    rows = [busy.prepare(prompt, PARAMS, (end,)) for prompt, end in zip(prompts, ends, strict=True)]
    for row in rows:
        busy.submit(row)
    while not busy.idle:
        busy.step()
    for row, prompt, end in zip(rows, prompts, ends, strict=True):
        assert row.tokens == answered(em.Engine(target(name)), prompt).tokens
        other = [*prompt[:end], *([3] * 20)]
        got = answered(busy, other)
        assert got.counts.cached_tokens == end - 1
        assert got.tokens == answered(em.Engine(target(name)), other).tokens


def test_a_forward_ends_at_a_boundary_only_for_recurrent_states(positions_read: list[int]) -> None:
    for name, wanted in (("qwen3", [89]), ("gemma3_text", [89]), ("qwen3_5", [49, 39])):
        busy = em.Engine(target(name), prefill_chunk=89, prefix_cache_bytes=MANY)
        positions_read.clear()
        answered(busy, CHAT, (len(SYSTEM),))
        assert [count for count in positions_read if count > 2] == wanted


def test_keys_and_values_are_kept_once() -> None:
    which = tiny_target()
    busy = em.Engine(which, em.HeadProposer(tiny_head(which)), prefix_cache_bytes=MANY)
    assert busy.prefixes is not None
    answered(busy, CHAT)
    token_bytes = busy.prefixes.nbytes / (len(CHAT) + PARAMS.max_tokens - 1)
    for last in range(4):
        answered(busy, [*CHAT, 100 + last])
    assert busy.prefixes.nbytes == pytest.approx(token_bytes * (len(CHAT) + 5 * PARAMS.max_tokens), rel=0.05)


def test_a_state_is_kept_once_per_shared_prefix() -> None:
    which = target("mamba2")
    busy = em.Engine(which, prefix_cache_bytes=MANY)
    assert busy.prefixes is not None
    state = sum(x.nbytes for x in _states(which))
    for last in range(4):
        answered(busy, [*SYSTEM, *([last] * 20)], (len(SYSTEM),))
    assert busy.prefixes.nbytes == (1 + 2 * 4) * state  # after the system prompt, each prompt and each text
    busy.prefixes.capacity = 3 * state
    busy.prefixes.trim()
    assert (busy.prefixes.nbytes, len(busy.prefixes.tree.used)) == (3 * state, 3)


def _states(which: em.Target) -> list[mx.array]:
    cache = RaggedCache.of(which.model, 1)
    which.forward(mx.zeros((1, 1), mx.int32), cache)
    return cache.state


def test_stops_are_worth_a_snapshot() -> None:
    assert stops((), 100) == [98]
    assert stops((50, 95), 100) == [49, 94]
    assert stops((40, 50, 60), 100) == [39, 59, 98]
    assert stops((16, 17), 30) == [16]
    assert stops((50, 95), 100, cached=40) == [94]
    assert stops((0, 100), 10) == []


@pytest.mark.parametrize("boundary", [-1, 91])
def test_a_boundary_outside_of_the_prompt_is_refused(boundary: int) -> None:
    with pytest.raises(PromptError, match=f"boundary {boundary} is outside the prompt of 90 tokens"):
        em.Engine(target("qwen3")).prepare(CHAT, PARAMS, (boundary,))
