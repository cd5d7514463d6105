"""Pasts reused from earlier requests: the same text and acceptance, within the limit on bytes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine import prefix_tree
from eagle_mlx.engine.prefix import LEAST, PrefixCache
from eagle_mlx.engine.prefix_tree import Past
from tests.architectures import VOCAB, tiny_model
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import Oracle, tiny_head, tiny_target
from tests.full import diagonal, in_full

TARGET = tiny_target(vocab=16)
HEAD = tiny_head(TARGET)
LONG = [(7 * i * i + 3 * i) % 16 for i in range(120)]
MANY = 1 << 30
GREEDY = em.SamplingParams(max_tokens=in_full(20, 12))
THRESHOLD = replace(GREEDY, temperature=1.0, seed=1, acceptance="threshold", threshold=0.05)


def engine(nbytes: int = MANY, proposer: object = "head", **settings: object) -> em.Engine:
    drafting = em.HeadProposer(HEAD) if proposer == "head" else proposer
    return em.Engine(TARGET, drafting, policy=em.FixedPolicy(3), prefix_cache_bytes=nbytes, **settings)  # type: ignore[arg-type]


def turns(first: list[int], answer: list[int], more: list[int]) -> list[int]:
    return [*first, *answer, *more]


@pytest.mark.parametrize(
    ("drafts", "chunk", "params"), diagonal(PROPOSERS, [16, 512], [GREEDY, GREEDY, THRESHOLD, THRESHOLD])
)
def test_the_next_turn_reuses_the_cache(drafts: str, chunk: int, params: em.SamplingParams) -> None:
    """Also if drafts change the text, which then shows how they continue."""
    with_cache = engine(proposer=PROPOSERS[drafts](TARGET), prefill_chunk=chunk)
    without = engine(0, PROPOSERS[drafts](TARGET))
    prompt, reusable = LONG[:70], 0
    for extra in in_full([[1, 2, 3], [4], [5, 6, 7, 8]], [[1, 2, 3], [4]]):
        got, wanted = with_cache.generate([prompt], params)[0], without.generate([prompt], params)[0]
        assert (got.tokens, got.rounds, got.accepted_by_position) == (
            wanted.tokens,
            wanted.rounds,
            wanted.accepted_by_position,
        )
        assert got.cached_tokens == reusable
        reusable = len(prompt) + len(got.tokens) - 1
        prompt = turns(prompt, got.tokens, extra)


@settings(max_examples=in_full(30, 6))
@given(st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 15), min_size=1, max_size=40)), max_size=6))
def test_any_common_prefix_is_safe(requests: list[tuple[int, list[int]]]) -> None:
    with_cache, without = engine(max_batch=2), engine(0)
    prompts = [LONG[:common] + rest for common, rest in requests]
    params = em.SamplingParams(max_tokens=6)
    for prompt in prompts:
        got, wanted = with_cache.generate([prompt], params)[0], without.generate([prompt], params)[0]
        assert (got.tokens, got.accepted_by_position) == (wanted.tokens, wanted.accepted_by_position)
        assert got.cached_tokens == 0 or LEAST <= got.cached_tokens <= len(prompt) - 2


@pytest.mark.parametrize("common", [0, LEAST, LEAST + 1, 30, 50, 62])
def test_only_the_common_prefix_is_reused(common: int) -> None:
    """The head's entry at a position needs the token after it, so the last common position is read again."""
    busy = engine()
    [output] = busy.generate([LONG[:60]], em.SamplingParams(max_tokens=3))
    text = [*LONG[:60], *output.tokens]
    prompt = [*text[:common], *((t + 1) % 16 for t in text[common:]), 1, 2, 3]
    [output] = busy.generate([prompt], em.SamplingParams(max_tokens=3))
    assert output.cached_tokens == (common - 1 if common > LEAST else 0)


def test_a_mixed_batch_of_hits_and_misses() -> None:
    params = em.SamplingParams(max_tokens=12)
    busy, plain = engine(max_batch=4), engine(0, max_batch=1)
    busy.generate([LONG[:50], LONG[60:110]], params)
    prompts = [[*LONG[:50], 1, 2], [3, 4], LONG[60:100], LONG[5:50], LONG[:30]]
    outputs = busy.generate(prompts, params)
    assert [o.tokens for o in outputs] == [plain.generate([p], params)[0].tokens for p in prompts]
    assert [o.cached_tokens > 0 for o in outputs] == [True, False, True, False, True]


def test_bytes_are_bounded_and_the_least_recently_used_go_first() -> None:
    busy = engine()
    assert busy.prefixes is not None
    params = em.SamplingParams(max_tokens=2)
    busy.generate([LONG[:40]], params)
    text_bytes = busy.prefixes.nbytes
    busy.prefixes.capacity = int(2.5 * text_bytes)
    prompts = [[i, *LONG[1:40]] for i in range(4)]
    for prompt in prompts:
        busy.generate([prompt], params)
        assert busy.prefixes.nbytes <= busy.prefixes.capacity
    assert len(busy.prefixes.tree.used) == 2
    assert [busy.prefixes.find(prompt) is not None for prompt in prompts] == [False, False, True, True]
    busy.prefixes.find(prompts[2])
    busy.generate([[9, *LONG[1:40]]], params)
    assert [busy.prefixes.find(prompt) is not None for prompt in prompts] == [False, False, True, False]


def test_the_number_of_arrays_is_bounded_because_metal_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = engine(proposer=None)
    assert busy.prefixes is not None
    monkeypatch.setattr(prefix_tree, "MOST_ARRAYS", 2 * 2 * TARGET.num_layers)  # of two texts
    prompts = [[i, *LONG[1:40]] for i in range(4)]
    for prompt in prompts:
        busy.generate([prompt], em.SamplingParams(max_tokens=2))
    assert [busy.prefixes.find(prompt) is not None for prompt in prompts] == [False, False, True, True]


def test_a_text_above_the_limit_is_not_copied() -> None:
    cache, new = RaggedCache(2, 2), mx.random.normal((2, 2, 4000, 16))
    for layer in cache:
        layer.update_and_fetch(new, new)
    cache.advance(4000)
    mx.eval(cache.state)
    past = Past(3000, cache)
    size = sum(x.nbytes for x in cache.fork(0, 3000).state)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for limit, kept in ((size - 1, 0), (size, 1)):
        prefixes = PrefixCache(limit)
        prefixes.keep(range(3001), past)
        assert len(prefixes.tree.used) == kept
        copied = mx.get_peak_memory() - before
        assert copied >= size if kept else copied < 0.1 * size


def test_decoding_rows_leave_memory_to_the_cache() -> None:
    spare = [MANY]
    prefixes = PrefixCache(MANY, spare=lambda: spare[0])
    cache, new = RaggedCache(1, 4), mx.random.normal((4, 2, 100, 16))
    cache[0].update_and_fetch(new, new)
    cache.advance(100)
    for row in range(4):
        prefixes.keep([row] * 101, Past(100, cache, row))
    text_bytes = prefixes.nbytes // 4
    for left, count in ((4 * text_bytes, 4), (3 * text_bytes, 3), (text_bytes, 1), (-1, 0)):
        spare[0] = left
        prefixes.trim()
        assert len(prefixes.tree.used) == count
    prefixes.keep([0] * 101, Past(100, cache))
    assert len(prefixes.tree.used) == 0


def test_a_longer_text_replaces_its_prefix() -> None:
    busy = engine()
    prompt = LONG[:40]
    for _ in range(4):
        [output] = busy.generate([prompt], em.SamplingParams(max_tokens=3))
        prompt = [*prompt, *output.tokens, 1]
    assert busy.prefixes is not None
    assert len(busy.prefixes.tree.used) == 1


def test_cancelled_rows_are_cached_and_failed_ones_are_not() -> None:
    busy = engine()
    assert busy.prefixes is not None
    row = busy.prepare(LONG[:40], em.SamplingParams(max_tokens=50))
    busy.submit(row)
    for _ in range(3):
        busy.step()
    busy.cancel(row)
    assert len(busy.prefixes.tree.used) == 1
    again = engine(0).generate([LONG[:40]], em.SamplingParams(max_tokens=9))[0]
    assert busy.generate([LONG[:40]], em.SamplingParams(max_tokens=9))[0].tokens == again.tokens


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "mamba2", "lfm2", "deepseek_v3", "gpt_oss"])
def test_other_kinds_of_cache(name: str) -> None:
    target = em.Target(tiny_model(name))
    params = em.SamplingParams(max_tokens=8)
    with_cache = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(2), prefix_cache_bytes=MANY)
    prompt = [t % min(target.vocab_size, 16) + 1 for t in LONG[:50]]
    hits = []
    for extra in ([1, 2, 3], [4, 5]):
        got = with_cache.generate([prompt], params)[0]
        assert got.tokens == em.Engine(target).generate([prompt], params)[0].tokens
        hits.append(got.cached_tokens)
        prompt = turns(prompt, got.tokens, extra)
    assert hits[0] == 0
    assert hits[1] == 57


@pytest.mark.parametrize("name", in_full(["qwen3_next", "mamba2", "gemma3_text"], ["mamba2", "gemma3_text"]))
def test_a_state_that_cannot_be_cut_is_reused_whole_or_not_at_all(name: str) -> None:
    target = em.Target(tiny_model(name))
    params = em.SamplingParams(max_tokens=24)
    first = [t % 16 + 1 for t in LONG[:50]]
    answer = em.Engine(target).generate([first], params)[0].tokens
    for end in in_full(range(1, 8), (1, 3, 4)):  # the text may end anywhere in a round
        oracle = Oracle({tuple(first): answer}, wrong=0.0)
        busy = em.Engine(target, oracle, policy=em.FixedPolicy(4), prefix_cache_bytes=MANY)
        stopped = replace(params, stop_token_ids=(answer[end],))
        tokens = busy.generate([first], stopped)[0].tokens
        for prompt in ([*first, *tokens, 1, 2], [*first[:40], 3, 4]):
            oracle.texts = {tuple(prompt): em.Engine(target).generate([prompt], params)[0].tokens}
            assert busy.generate([prompt], params)[0].tokens == oracle.texts[tuple(prompt)]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_text_that_ends_while_others_decode_is_reused_whole(name: str) -> None:
    """The next plain round is dispatched before the end is known, and would advance a recurrent state past it."""
    busy = em.Engine(em.Target(tiny_model(name)), prefix_cache_bytes=MANY)
    anything = tuple(range(VOCAB))
    ends, goes_on = (
        busy.prepare(LONG[:40], em.SamplingParams(max_tokens=60, stop_token_ids=stops)) for stops in (anything, ())
    )
    for request in (ends, goes_on):
        busy.submit(request)
    while not ends.finish_reason:
        busy.step()
    following = busy.prepare([*ends.text, 1, 2], GREEDY)
    busy.submit(following)
    while not following.finish_reason:
        busy.step()
    assert goes_on.finish_reason is None
    assert following.counts.cached_tokens == len(ends.text) - 1


@pytest.mark.parametrize("method", ["join", "piece"])
def test_a_lookup_or_copy_that_fails_is_a_miss(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails each time. Rows that decode continue, and the prompt is read."""
    busy, alone = engine(max_batch=2), engine(0)
    first = busy.generate([LONG[:50]], GREEDY)[0]
    rows = [busy.prepare(prompt, GREEDY) for prompt in (LONG[60:], [*LONG[:50], *first.tokens, 3, 4])]
    busy.submit(rows[0])
    busy.step()

    def fail(*args: object) -> None:
        raise ValueError("a broken state")

    owner = em.HeadProposer if method == "join" else type(busy.groups.batches[0].state)
    monkeypatch.setattr(owner, method, fail)
    busy.submit(rows[1])
    while not busy.idle:
        busy.step()
    assert [row.tokens for row in rows] == [alone.generate([row.prompt], GREEDY)[0].tokens for row in rows]
    assert [row.error for row in rows] == [None, None]


def test_no_namespace_is_that_of_a_draft_model() -> None:
    busy = engine(proposer=em.DraftModelProposer(tiny_target(vocab=16, seed=3, layers=1)))

    def answered(namespace: str) -> tuple[int, list[int]]:
        row = busy.prepare(LONG[:50], GREEDY, namespace=namespace)
        busy.submit(row)
        while not busy.idle:
            busy.step()
        return row.counts.cached_tokens, row.tokens

    first = answered("mine")
    for namespace in ("\0draft model\0mine", "draft model", "mine\0", "True"):
        assert answered(namespace) == first
    assert answered("mine") == (48, first[1])
