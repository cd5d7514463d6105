"""Drafting with a model: its drafts equal those without a cache; which targets it can draft for."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map

import eagle_mlx as em
from eagle_mlx.cache import may_pad
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample
from eagle_mlx.errors import TargetError
from eagle_mlx.plan import Context, Plan, RoundResult
from eagle_mlx.proposers.base import Observation
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Forward
from tests.architectures import VOCAB, tiny_model
from tests.fakes import length_of, randomize, tiny_target
from tests.full import diagonal, in_full, some

TARGET, DRAFT = tiny_target(), tiny_target(seed=1, layers=2)
CACHES = {"full": DRAFT}
for _name in ("gemma3_text", "qwen3_5", "rwkv7"):  # windows; a state with one call for all rows; a state token by token
    CACHES[_name] = em.Target(tiny_model(_name))
    randomize(CACHES[_name].model, 0, 0.2)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [100], [11, 12, 11, 12, 11, 12]]


def slow_draft(draft: em.Target, text: list[int], depth: int, params: SamplingParams) -> list[int]:
    """Draft after a text without a cache: every step reads the whole text."""
    batch, tokens = SamplingBatch.of([params], [params.seed or 0]), list(text)
    for _ in range(depth):
        logits = draft.forward(mx.array([tokens])).logits[:, -1:]
        tokens.append(int(draft_sample(logits, batch, mx.array([[len(tokens)]]), draft.vocab_size)[0].item()))
    return tokens[len(text) :]


def some_branch(draft: Draft, row: int, rng: np.random.Generator) -> list[int]:
    """Return the tokens of a row's chain, or of a path in its tree."""
    tokens = [int(token) for token in draft.tokens[row]]
    if draft.tree is None:
        return tokens
    parents, branch = [int(parent) for parent in draft.tree.parents[row]], list[int]()
    node = int(rng.integers(len(tokens) + 1))
    while node:
        branch, node = [tokens[node - 1], *branch], parents[node - 1]
    return branch


@pytest.mark.parametrize("cache", CACHES)
@settings(max_examples=some(15), deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(st.integers(1, 3), st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 1000))
def test_drafts_equal_those_of_a_model_without_a_cache(cache: str, rows: int, depths: list[int], seed: int) -> None:
    """After rounds of any kind and depth with random acceptance, of others' drafts too, while rows leave."""
    draft, rng = CACHES[cache], np.random.default_rng(seed)
    params = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.2, seed=4)][:rows]
    texts = [[int(t) for t in rng.integers(0, VOCAB, 1 + 8 * row)] for row in range(rows)]
    proposer = em.DraftModelProposer(draft)
    state = proposer.open(texts[:1])
    if rows > 1:
        state.append(proposer.open(texts[1:]))
    for number, depth in enumerate(depths):
        branches: list[list[int]] = [[] for _ in texts]
        if depth:
            batch = SamplingBatch.of(params, [p.seed or 0 for p in params])
            stop_below = float(rng.choice([0.0, 1e-4, 1e-2, 1.5]))
            plans = [Plan(depth), Plan(depth, stop_below=stop_below), Plan(depth, depth + int(rng.integers(1, 5)))]
            plan, others = plans[int(rng.integers(3))], [row for row in range(len(texts)) if rng.random() < 0.2]
            plan = replace(plan, lookups=tuple(depth * (row in others) for row in range(len(texts))))
            drawn = state.draft(plan, batch, mx.array([len(text) for text in texts]))
            branches = [some_branch(drawn, row, rng) for row in range(len(texts))]
            for row, (text, p) in enumerate(zip(texts, params, strict=True)):
                if not plan.is_tree:
                    assert drawn.tokens[row].tolist() == slow_draft(draft, text, length_of(plan, drawn), p)
            branches = [rng.integers(0, VOCAB, depth).tolist() if i in others else b for i, b in enumerate(branches)]
        gains = [[*branch[: rng.integers(0, depth + 1)], int(rng.integers(0, VOCAB))] for branch in branches]
        for text, gain in zip(texts, gains, strict=True):
            text += gain
        state.observe(Observation(gains, ()))
        if number == 1 and len(texts) > 1:
            state.remove(0)
            texts[0], params[0] = texts[-1], params[-1]
            texts.pop()
            params.pop()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[em.Target, int]]:
    """Notes each forward: its model, and the number of positions, over all rows."""
    noted, forward = list[tuple[em.Target, int]](), em.Target.forward

    def noting(target: em.Target, tokens: mx.array, *args: Any, **more: Any) -> Forward:
        noted.append((target, tokens.size))
        return forward(target, tokens, *args, **more)

    monkeypatch.setattr(em.Target, "forward", noting)
    return noted


def test_prompts_are_read_when_a_round_first_drafts_for_them(reads: list[tuple[em.Target, int]]) -> None:
    """So a draft model that does not pay costs nothing."""
    draft, prompts = tiny_target(seed=1, layers=2), [[3 + 7 * i % 90 for i in range(60)], [4, 5, 6]]
    plain, drafting = (em.Engine(TARGET, em.DraftModelProposer(draft), policy=em.FixedPolicy(k)) for k in (0, 2))
    reads.clear()
    plain.generate(prompts, SamplingParams(max_tokens=in_full(50, 30)))
    assert not [count for model, count in reads if model is draft]
    drafting.generate(prompts, SamplingParams(max_tokens=in_full(50, 30)))
    assert sum(count for model, count in reads if model is draft) >= 60


@pytest.mark.parametrize(("cache", "with_ngrams"), diagonal(CACHES, [False, True]))
def test_a_cached_prefix_is_not_read_again(cache: str, with_ngrams: bool, reads: list[tuple[em.Target, int]]) -> None:
    draft, target, params = CACHES[cache], tiny_target(vocab=CACHES[cache].vocab_size), SamplingParams(max_tokens=12)
    proposer: Any = em.DraftModelProposer(draft)
    if with_ngrams:
        proposer = em.HybridProposer(proposer)
    cold, warm = (
        em.Engine(target, proposer, policy=em.FixedPolicy(2), prefill_chunk=16, prefix_cache_bytes=nbytes)
        for nbytes in (0, 1 << 20)
    )
    text = [3 + 7 * i % 90 for i in range(120)]
    for turn in range(in_full(3, 2)):
        wanted = cold.generate([text], params)[0]
        reads.clear()
        got = warm.generate([text], params)[0]
        assert (got.tokens, got.accepted_by_position) == (wanted.tokens, wanted.accepted_by_position)
        assert (got.cached_tokens > 100) == (turn > 0)
        counts = [count for model, count in reads if model is draft]
        assert (sum(counts) < 80) == (turn > 0)
        text = [*text, *got.tokens, *range(9)]


def test_rows_that_are_far_behind_read_a_chunk_per_draft(reads: list[tuple[em.Target, int]]) -> None:
    """After a prefix that only the target has. Meanwhile, the others draft."""
    proposer, length = em.DraftModelProposer(DRAFT), 200
    texts = [[3 + (7 + row) * i % 90 for i in range(length if row else 5)] for row in range(8)]
    state, batch = proposer.open(texts), SamplingBatch.of([SamplingParams()] * 8, [0] * 8)
    calls = 0
    while True:
        reads.clear()
        drawn = state.draft(Plan(2), batch, mx.array([len(text) for text in texts]))
        assert sum(count for _, count in reads) <= 512 + 8
        calls += 1
        if all(drawn.lengths.tolist()):
            break
        assert drawn.lengths.tolist() == [2] + [0] * 7
        for text in texts:
            text.append(calls)
        state.observe(Observation([[calls]] * 8, ()))
    assert calls == 3  # `observe` reads some, too
    drafts = [slow_draft(DRAFT, text, 2, SamplingParams()) for text in texts]
    assert drawn.tokens.tolist() == drafts


def test_a_lone_row_that_is_far_behind_drafts_nothing_until_it_has_read_its_text(
    reads: list[tuple[em.Target, int]],
) -> None:
    text = [3 + 7 * i % 90 for i in range(1100)]
    draft = em.Target(tiny_model("qwen3", max_position_embeddings=2048))
    state, batch = em.DraftModelProposer(draft).open([text]), SamplingBatch.of([SamplingParams()], [0])
    shapes = []
    for plan in (Plan(2), Plan(2, nodes=4), Plan(2)):
        reads.clear()
        shapes.append(state.draft(plan, batch, mx.array([len(text)])).tokens.shape)
        assert sum(count for _, count in reads) <= 513
    assert shapes == [(1, 0), (1, 0), (1, 2)]


@pytest.mark.parametrize("cache", CACHES)
def test_the_draft_model_reads_along_while_nothing_is_drafted(cache: str, reads: list[tuple[em.Target, int]]) -> None:
    draft, texts = CACHES[cache], [[1, 2, 3], [4]]
    state = em.DraftModelProposer(draft).open(texts)
    batch = SamplingBatch.of([SamplingParams()] * 2, [0] * 2)
    state.draft(Plan(1), batch, mx.array([3, 1]))
    for index in range(in_full(100, 68)):
        gains = [[index % 90], [index % 7, 5] if index % 3 else [5]]
        state.observe(Observation(gains, ()))
        texts = [[*text, *gain] for text, gain in zip(texts, gains, strict=True)]
    assert max(count for _, count in reads) <= 2 * 32
    reads.clear()
    drawn = state.draft(Plan(2), batch, mx.array([len(text) for text in texts]))
    assert sum(count for _, count in reads) <= 2 * 35
    assert drawn.tokens.tolist() == [slow_draft(draft, text, 2, SamplingParams()) for text in texts]


def test_a_draft_may_end_at_the_last_position_of_the_draft_models_context() -> None:
    draft = em.Target(tiny_model("qwen3", max_position_embeddings=40))
    for length, drafts in ((37, 2), (38, 2), (39, 0)):
        state = em.DraftModelProposer(draft).open([[3 + 7 * i % 90 for i in range(length)]])
        drawn = state.draft(Plan(2), SamplingBatch.of([SamplingParams()], [0]), mx.array([length]))
        assert drawn.lengths.tolist() == [drafts]


@pytest.mark.parametrize("plan", [em.FixedPolicy(3), em.FixedPolicy(3, nodes=5)], ids=["chain", "tree"])
def test_texts_longer_than_the_draft_models_context_continue_without_drafts(
    plan: em.FixedPolicy, reads: list[tuple[em.Target, int]], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = tiny_target(vocab=VOCAB), em.Target(tiny_model("qwen3", max_position_embeddings=40))
    prompts = [[3 + 7 * i % 90 for i in range(count)] for count in (60, 5, 30)]
    params = SamplingParams(max_tokens=in_full(50, 40), ignore_eos=True)
    engine = em.Engine(target, em.DraftModelProposer(draft), policy=plan, max_batch=3)
    outputs = engine.generate(prompts, params)
    assert [o.tokens for o in outputs] == [o.tokens for o in em.Engine(target).generate(prompts, params)]
    assert outputs[0].drafted == 0
    assert all(0 < o.drafted < 3 * (40 - len(prompt)) for o, prompt in zip(outputs[1:], prompts[1:], strict=True))
    assert [record.message for record in caplog.records] == [
        "the draft model reads up to 40 tokens; longer texts continue without its drafts"
    ]
    reads.clear()
    assert engine.generate(prompts[:1], params)[0].drafted == 0
    assert not [model for model, _ in reads if model is draft]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, seed=5)])
def test_a_target_that_drafts_for_itself_is_always_accepted(params: SamplingParams) -> None:
    outputs = em.Engine(TARGET, em.DraftModelProposer(TARGET), policy=em.FixedPolicy(4), max_batch=3).generate(
        PROMPTS, SamplingParams(params.temperature, max_tokens=20, seed=params.seed)
    )
    assert [(output.rounds, output.accepted, output.drafted) for output in outputs] == [(4, 16, 16)] * 4


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.9, 5)])
def test_the_text_is_the_targets(temperature: float, seed: int | None) -> None:
    params = SamplingParams(temperature, max_tokens=in_full(20, 12), seed=seed)
    plain = em.Engine(TARGET).generate(PROMPTS, params)
    for depth, batch in ((1, 1), (3, 2), (4, 8)):
        engine = em.Engine(TARGET, em.DraftModelProposer(DRAFT), policy=em.FixedPolicy(depth), max_batch=batch)
        assert [output.tokens for output in engine.generate(PROMPTS, params)] == [output.tokens for output in plain]


class Phases:
    """A policy that drafts only in given rounds."""

    wants_trees = False

    def __init__(self, *depths: int):
        self.depths = list(depths)

    def plan(self, context: Context) -> Plan:
        return Plan(self.depths[0] if self.depths else 2)

    def observe(self, result: RoundResult) -> None:
        self.depths = self.depths[1:]


def test_a_prompt_of_one_token_joins_while_decoding_is_plain_and_an_earlier_row_leaves() -> None:
    """Its row in the draft model's cache is empty until the next draft, so it moves into the gap."""
    params = [em.SamplingParams(max_tokens=n) for n in (6, 20, 20)]
    prompts = [[1, 2, 3], [4, 5, 6, 7], [9]]
    engine = em.Engine(TARGET, em.DraftModelProposer(DRAFT), policy=Phases(2, 2, *([0] * 8)), max_batch=3)
    rows = [engine.prepare(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    engine.submit(rows[0])
    engine.submit(rows[1])
    for _ in range(3):
        engine.step()
    assert rows[0].finish_reason is None
    engine.submit(rows[2])
    while not engine.idle:
        engine.step()
    plain = em.Engine(TARGET).generate(prompts, params)
    assert [row.tokens for row in rows] == [output.tokens for output in plain]


@pytest.mark.parametrize("plain", [3, 12])
def test_a_prompt_is_read_by_itself_while_others_draft(plain: int, reads: list[tuple[em.Target, int]]) -> None:
    """Else the other rows wait for its first draft, which reads it padded, as often as there are rows. After eight
    plain rounds, drafts are over."""
    policy = Phases(2, 2, *([0] * (plain + 1)))
    engine = em.Engine(TARGET, em.DraftModelProposer(DRAFT), policy=policy, max_batch=4)
    params = em.SamplingParams(max_tokens=40, ignore_eos=True)
    rows = [engine.prepare(prompt, params) for prompt in (*PROMPTS[:3], [3 + 7 * i % 90 for i in range(60)])]
    for row in rows[:3]:
        engine.submit(row)
    while len(policy.depths) > 1:
        engine.step()
    reads.clear()
    engine.submit(rows[3])
    while not engine.idle:
        engine.step()
    longest = max(count for model, count in reads if model is DRAFT)
    assert longest == (59 if plain == 3 else 4 * 60)
    assert [row.tokens for row in rows] == [
        o.tokens for o in em.Engine(TARGET).generate([r.prompt for r in rows], params)
    ]


@pytest.mark.parametrize("cache", CACHES)
def test_drafts_do_not_depend_on_when_a_prompt_was_read(cache: str) -> None:
    draft, texts = CACHES[cache], [[3 + 7 * i % 90 for i in range(50)]]
    if may_pad(draft.model):
        texts.append([5, 6, 7, 8, 9])
    proposer, batch = em.DraftModelProposer(draft), SamplingBatch.of([SamplingParams()] * len(texts), [0] * len(texts))
    proposer.open([[1, 2]]).draft(Plan(1), SamplingBatch.of([SamplingParams()], [0]), mx.array([2]))
    state = proposer.open(texts)
    for start, end in ((0, 20), (20, 49)):
        state.prefill(Observation([text[start + 1 : end + 1] for text in texts], ()))
    assert [state.length(row) for row in range(len(texts))] == [len(text) - 1 for text in texts]
    drawn = state.draft(Plan(3), batch, mx.array(list(map(len, texts))))
    assert drawn.tokens.tolist() == [slow_draft(draft, text, 3, SamplingParams()) for text in texts]


@pytest.mark.parametrize("vocab", [96, 160])
def test_padding_of_the_vocabulary_does_not_matter(vocab: int) -> None:
    """The tokenizer is the same; only the embeddings have another size."""
    draft = tiny_target(seed=1, layers=2, vocab=vocab)
    proposer = em.DraftModelProposer(draft)
    proposer.vocab_size = TARGET.vocab_size
    state = proposer.open([[1, 2, 3]])
    drawn = state.draft(Plan(3), SamplingBatch.of([SamplingParams(temperature=1.0)], [1]), mx.array([3]))
    assert drawn.probs is not None
    assert drawn.probs.shape == (1, 3, 128)
    assert mx.allclose(drawn.probs.sum(axis=-1), mx.ones((1, 3)), rtol=1e-5).item()
    assert mx.max(drawn.tokens).item() < 128
    if vocab < 128:
        assert mx.max(drawn.probs[..., vocab:]).item() == 0


def test_another_vocabulary_is_refused_when_the_engine_is_built() -> None:
    with pytest.raises(TargetError, match="number of tokens: 64 and 128"):
        em.Engine(TARGET, em.DraftModelProposer(tiny_target(vocab=64)))


def test_other_tokenizers_and_ends_of_turn_are_refused() -> None:
    target, draft = tiny_target(tokenizer=True), tiny_target(tokenizer=True, layers=2)
    em.Engine(target, em.DraftModelProposer(draft))
    assert draft.tokenizer is not None
    draft.tokenizer = deepcopy(draft.tokenizer)
    draft.tokenizer.eos_token_ids = {7}
    with pytest.raises(TargetError, match=r"tokens that end a turn: \[7\] and "):
        em.Engine(target, em.DraftModelProposer(draft))
    draft.tokenizer.add_tokens(["<|extra|>"])
    with pytest.raises(TargetError, match=r"id of .<\|extra\|>.: \d+ and missing"):
        em.Engine(target, em.DraftModelProposer(draft))


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, None), (0.8, 2)])
def test_trees_of_a_draft_model_keep_the_text_and_accept_more(temperature: float, seed: int | None) -> None:
    """The draft model is the target with noise, so its second choice is often right."""
    params = SamplingParams(temperature, max_tokens=in_full(24, 14), seed=seed)
    draft = tiny_target()
    noise = np.random.default_rng(0)
    draft.model.update(
        tree_map(lambda w: w + mx.array(noise.normal(0, 0.03, w.shape), w.dtype), draft.model.parameters())
    )
    plain = em.Engine(TARGET).generate(PROMPTS, params)
    rounds = []
    for policy in (em.FixedPolicy(3), em.FixedPolicy(3, nodes=12)):
        outputs = em.Engine(TARGET, em.DraftModelProposer(draft), policy=policy, max_batch=3).generate(PROMPTS, params)
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
        rounds.append(sum(o.rounds for o in outputs))
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize(("drafted", "read"), [(True, 32), (False, 0)])
def test_plain_rounds_leave_few_tokens_unread_of_rows_that_have_drafted(
    drafted: bool, read: int, positions_read: list[int]
) -> None:
    proposer = em.DraftModelProposer(DRAFT)
    proposer.bind(TARGET)
    state = proposer.open([[5, 6, 7]])
    if drafted:
        state.draft(Plan(2), SamplingBatch.of([SamplingParams()], [0]), mx.array([3]))
    positions_read.clear()
    for _ in range(40):
        state.observe(Observation([[9]], ()))
    assert sum(positions_read) == read
