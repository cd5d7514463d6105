"""Third-party proposers with arbitrary drafts: a bad draft costs time, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.sampling import SamplingBatch, distribution
from eagle_mlx.errors import ConfigError, ProposerError
from eagle_mlx.plan import Abilities, Context, Plan, RoundResult
from eagle_mlx.proposers.base import Observation, Proposer, check_draft
from tests.architectures import VOCAB, sicken, tiny_model
from tests.fakes import RowsState, generate, known_text, randomize, tiny_config, tiny_target
from tests.full import diagonal, in_full
from tests.hostile import HostileProposer, Manners

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 40, 17, 2, 33)]
COUNT = 14
TURNS = in_full(3, 2)
"""Hostile proposers of a test, each with another seed."""
GREEDY = em.SamplingParams(max_tokens=COUNT)
SEEDED = em.SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3)
Change = Callable[[Draft], Any]


def plain(target: em.Target, params: em.SamplingParams) -> list[list[int]]:
    return [em.Engine(target, max_batch=1).generate([prompt], params)[0].tokens for prompt in PROMPTS]


ALONE = {params: plain(TARGET, params) for params in (GREEDY, SEEDED)}


class Hostile(Proposer):
    """Knows the rows' texts. It drafts a right prefix and then spoils it.

    Every round has a random length, random errors and, with `spoil`, other random faults.
    """

    name = "hostile"
    aux_layers = (1,)
    abilities = Abilities(trees=True, early_exit=True)

    def __init__(self, texts: Sequence[Sequence[int]], seed: int, spoil: Change | None = None, vocab: int = 128):
        self.texts = {tuple(p): list(text) for p, text in zip(PROMPTS, texts, strict=True)}
        self.rng, self.spoil, self.vocab = np.random.default_rng(seed), spoil, vocab

    def open(self, prompts: Sequence[Sequence[int]]) -> HostileState:
        return HostileState(self, [known_text(self.texts, prompt) for prompt in prompts])


class HostileState(RowsState):
    def __init__(self, proposer: Hostile, rows: list[tuple[list[int], int]]):
        self.proposer, self.rows = proposer, rows

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        return self._spoilt(self._tree(plan) if plan.is_tree else self._chain(plan))

    def _chain(self, plan: Plan) -> Draft:
        """Return chains of any length and confidence, with any early exit."""
        rng = self.proposer.rng
        draft = self._known(int(rng.integers(0, 2 * plan.depth + 1)))
        if plan.stop_below is None:
            return draft
        looks = int(rng.integers(0, 2 * plan.depth + 1))
        return replace(draft, confidences=rng.choice([0.0, 1.0, 0.5], (looks, len(self.rows))).tolist())

    def _tree(self, plan: Plan) -> Draft:
        """Return a right chain, followed by anything.

        Parents may come later, be out of range or form a loop; siblings may share a token; the depth may be too small.
        """
        rng = self.proposer.rng
        draft = self._known(int(rng.integers(1, 2 * plan.nodes)))
        rows, width = draft.tokens.shape
        chain = np.arange(width)[None].repeat(rows, 0)
        parents = np.where(rng.random((rows, width)) < 0.6, chain, rng.integers(-3, width + 3, (rows, width)))
        return replace(draft, tree=Tree(mx.array(parents), int(rng.integers(1, 2 * plan.depth))))

    def _known(self, width: int) -> Draft:
        rng, vocab = self.proposer.rng, self.proposer.vocab
        tokens = [(text[at : at + width] + [0] * width)[:width] for text, at in self.rows]
        wrong = rng.random((len(self.rows), width)) < 0.2
        drafts = np.where(wrong, rng.integers(0, vocab, wrong.shape), np.array(tokens, np.int64).reshape(wrong.shape))
        return Draft(mx.array(drafts), mx.array(rng.integers(0, width + 1, len(self.rows))))

    def _spoilt(self, draft: Draft) -> Draft:
        out: Draft = draft if self.proposer.spoil is None else self.proposer.spoil(draft)
        return out

    def prefill(self, seen: Observation) -> None:
        assert all(bool(mx.all(mx.isfinite(x))) for x in seen.aux)

    def observe(self, seen: Observation) -> None:
        assert all(bool(mx.all(mx.isfinite(x))) for x in seen.aux)
        self.rows = [(text, at + len(new)) for (text, at), new in zip(self.rows, seen.tokens, strict=True)]


def spoiler(seed: int, dtypes: Sequence[mx.Dtype]) -> Change:
    """Return a change to meaningless lengths and ids, of any integer type, and to invalid probabilities."""
    rng = np.random.default_rng(seed)

    def spoil(draft: Draft) -> Draft:
        tokens, lengths = np.array(draft.tokens, np.int64), np.array(draft.lengths, np.int64)
        lengths = np.where(rng.random(lengths.shape) < 0.5, rng.integers(-9, 40, lengths.shape), lengths)
        outside = rng.choice([-1, -(2**31), 128, 129, 5000, 2**31 - 1], tokens.shape)
        tokens = np.where(rng.random(tokens.shape) < 0.1, outside, tokens)
        dtype = dtypes[int(rng.integers(len(dtypes)))]
        probs = None
        if rng.random() < 0.5:
            probs = mx.array(rng.choice([0.0, 1.0, -1.0, np.nan, np.inf], (*tokens.shape, 128)), mx.float32)
        return replace(draft, tokens=mx.array(tokens).astype(dtype), lengths=mx.array(lengths), probs=probs)

    return spoil


class Free(em.FixedPolicy):
    """Requests early exits, for trees too."""

    def plan(self, context: Context) -> Plan:
        return replace(super().plan(context), stop_below=0.5)

    def observe(self, result: RoundResult) -> None:
        assert all(0 <= a <= d for a, d in zip(result.accepted, result.drafted, strict=True))


POLICIES = [em.FixedPolicy(3), em.FixedPolicy(3, nodes=9), Free(4), Free(4, nodes=9)]


@settings(max_examples=in_full(60, 12))
@given(
    st.integers(0, 999),
    st.sampled_from(POLICIES),
    st.sampled_from([GREEDY, SEEDED]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
)
def test_text_is_the_targets_own_whatever_is_drafted(
    seed: int, policy: em.FixedPolicy, params: em.SamplingParams, max_batch: int, stops: bool, pauses: float
) -> None:
    spoil = spoiler(seed, [mx.int32, mx.int64, mx.uint32])
    engine = em.Engine(
        TARGET, Hostile(ALONE[params], seed, spoil), policy=policy, max_batch=max_batch, prefix_cache_bytes=1 << 20
    )
    row_params = [replace(params, max_tokens=COUNT - (index if stops else 0)) for index in range(len(PROMPTS))]
    outputs = generate(engine, PROMPTS, row_params, pauses, seed)
    assert [o.tokens for o in outputs] == [t[: p.max_tokens] for t, p in zip(ALONE[params], row_params, strict=True)]
    assert sum(output.accepted for output in outputs) > 0
    assert all(output.accepted <= output.drafted for output in outputs)


@pytest.mark.parametrize("seed", range(3))
def test_a_learning_policy_survives_made_up_confidences(seed: int) -> None:
    spoil = spoiler(seed, [mx.int32])
    policy = em.ThroughputPolicy(6, max_nodes=12)
    for _ in range(TURNS):
        engine = em.Engine(TARGET, Hostile(ALONE[GREEDY], seed, spoil), policy=policy, max_batch=3)
        assert [output.tokens for output in engine.generate(PROMPTS, GREEDY)] == ALONE[GREEDY]


class Heedless:
    """A policy that asks for the same plan, whatever the rows can do."""

    wants_trees = True

    def __init__(self, wanted: Plan):
        self.wanted, self.plans = wanted, list[Plan]()

    def plan(self, context: Context) -> Plan:
        return self.wanted

    def observe(self, result: RoundResult) -> None:
        self.plans.append(result.plan)


@pytest.mark.parametrize("wanted", [Plan(3, 8), Plan(3, 8, stop_below=0.5, lookups=(3, 3, 3))])
@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 5}])
def test_a_policy_gets_no_tree_if_the_rows_do_not_allow_one(wanted: Plan, more: dict[str, Any]) -> None:
    """Penalties depend on the tokens before, which differ between the branches of a tree."""
    params = em.SamplingParams(max_tokens=COUNT, repetition_penalty=1.8, presence_penalty=0.5, **more)
    texts, policy = plain(TARGET, params), Heedless(wanted)
    outputs = em.Engine(TARGET, Hostile(texts, 0), policy=policy, max_batch=3).generate(PROMPTS, params)
    assert [output.tokens for output in outputs] == texts
    assert sum(output.accepted for output in outputs) > 0
    assert not any(plan.is_tree or plan.lookups for plan in policy.plans)


def test_invalid_probabilities_are_not_used() -> None:
    """The draft ends at a position whose q is not a distribution, so the output still follows p."""
    target = tiny_target(vocab=16, seed=4, layers=2)
    prompt, draws = [3, 7, 9], 600
    sampled = em.SamplingParams(temperature=1.0, max_tokens=2)
    logits = target.forward(mx.array([[*[5] * 128, *prompt]]), None).logits[:, -1:]
    law = np.array(distribution(logits, SamplingBatch.of([sampled], [0])))[0, 0]

    def spoil(draft: Draft) -> Draft:
        q = np.full((*draft.tokens.shape, 16), 1 / 16, np.float32)
        q[..., 0] = np.nan
        q[:, :, 1] = -3
        return replace(draft, tokens=mx.full(draft.tokens.shape, 2), probs=mx.array(q))

    class Uniform(Hostile):
        def open(self, prompts: Sequence[Sequence[int]]) -> HostileState:
            return HostileState(self, [([], 0) for _ in prompts])

    uniform = Uniform([[]] * len(PROMPTS), 0, spoil, 16)
    engine = em.Engine(target, uniform, policy=em.FixedPolicy(2), max_batch=64, prefill_chunk=64 * 131)
    long = [5] * 128  # prefill does not finish: the first token comes from a round that drafts
    outputs = engine.generate([[*long, *prompt]] * draws, sampled)
    assert all(output.accepted == 0 for output in outputs)
    first = np.bincount([output.tokens[0] for output in outputs], minlength=16) / draws
    assert np.abs(first - law).sum() / 2 < 0.1  # 0.065 is expected of equal chances


def test_each_draft_token_is_judged_by_its_own_probability() -> None:
    """The rejection rule divides by it. Each of 5 rows drafts one id of 5, under each distribution of one id."""
    ids = mx.arange(5, dtype=mx.int32)
    for certain in range(5):
        q = mx.broadcast_to((ids == certain).astype(mx.float32), (5, 1, 5))
        draft = Draft(ids[:, None], mx.ones(5, mx.int32), q)
        kept = check_draft(draft, "test", Plan(1), [1] * 5, 5, mx.zeros((5, 1), mx.int32), mx.array([True] * 5))
        assert kept.lengths.tolist() == [int(token == certain) for token in range(5)]


@pytest.mark.parametrize(
    "invalid",
    [[-0.1, 0.5, 0.2, 0.2, 0.2], [0.5, 0.2, 0.2, 0.2, -0.1], [0.2, 0.2, 0.2, 0.2, 0.21], [0.2] * 4 + [math.nan]],
)
def test_a_draft_ends_before_a_position_whose_probabilities_are_invalid(invalid: list[float]) -> None:
    q = np.full((2, 3, 5), 0.2, np.float32)
    q[:, 1] = invalid
    draft = Draft(mx.full((2, 3), 2), mx.array([3, 3]), mx.array(q))
    kept = check_draft(draft, "test", Plan(3), [3, 3], 5, mx.zeros((2, 1), mx.int32), mx.array([True, False]))
    assert kept.lengths.tolist() == [1, 3], "only rejection sampling reads them"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: None, "None as a draft"),
        (lambda d: replace(d, tokens=d.tokens[0]), r"\[3\] int32 as tokens; return \[2, k\] int32"),
        (lambda d: replace(d, tokens=d.tokens[:1]), r"\[1, 3\] int32 as tokens"),
        (lambda d: replace(d, tokens=d.tokens.astype(mx.float32)), r"\[2, 3\] float32 as tokens"),
        (lambda d: replace(d, tokens=[[1], [2]]), r"\[\[1\], \[2\]\] as tokens"),
        (lambda d: replace(d, lengths=d.lengths[:1]), r"\[1\] int32 as lengths; return \[2\] int32"),
        (lambda d: replace(d, lengths=3), "3 as lengths"),
        (lambda d: replace(d, lengths=d.lengths.astype(mx.float32)), "float32 as lengths"),
        (
            lambda d: replace(d, probs=mx.zeros((2, 3, 5))),
            r"\[2, 3, 5\] float32 as probs; return \[2, 3, 128\] float32",
        ),
        (lambda d: replace(d, tree=Tree(mx.zeros((2, 3), mx.int32), 3)), "a tree instead of a chain"),
        (
            lambda d: replace(d, confidences=[[0.5]]),
            r"\[0.5\] as confidences; return 2 numbers from 0 to 1",
        ),
        (lambda d: replace(d, confidences=[[0.5, 0.5], [0.5, float("nan")]]), "as confidences"),
        (lambda d: replace(d, confidences=[[0.5, 1.5]]), "as confidences"),
        (lambda d: replace(d, confidences=[[-0.1, 0.5]]), "as confidences"),
        (lambda d: replace(d, confidences=None), "None as confidences"),
        (lambda d: replace(d, confidences=[0.5, 0.5]), "0.5 as confidences"),
        (lambda d: replace(d, confidences=[["a", "b"]]), "'b'. as confidences"),
        (lambda d: replace(d, tokens=np.zeros((2, 3))), r"array\(\[\[0., 0., 0.\], \[0., 0., 0.\]\]\) as tokens"),
    ],
)
def test_unreadable_drafts_are_refused_with_the_proposers_name(change: Change, message: str) -> None:
    def spoil(draft: Draft) -> Draft:
        rows = draft.lengths.size
        out: Draft = change(Draft(mx.zeros((rows, 3), mx.int32), mx.full((rows,), 3, mx.int32)))
        return out

    engine = em.Engine(TARGET, Hostile(ALONE[GREEDY], 0, spoil), policy=em.FixedPolicy(3))
    with pytest.raises(ProposerError, match="the proposer 'hostile' returned .*" + message):
        engine.generate(PROMPTS[:2], GREEDY)
    assert engine.idle


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree(mx.zeros((1, 2), mx.int32), 2), "as a tree's parents"),
        (Tree(mx.zeros((1, 3), mx.float32), 2), "float32 as a tree's parents"),
        (Tree(mx.zeros((1, 3), mx.int32), 0), "0 as a tree's levels"),
        (Tree(mx.zeros((1, 3), mx.int32), 2.5), "2.5 as a tree's levels"),  # type: ignore[arg-type]
        ([[0, 0, 0]], r"\[\[0, 0, 0\]\] as a tree; return an eagle_mlx.decoding.draft.Tree"),
    ],
)
def test_unreadable_trees_are_refused(tree: Any, message: str) -> None:
    def spoil(draft: Draft) -> Draft:
        return Draft(mx.zeros((1, 3), mx.int32), mx.array([3]), tree=tree)

    engine = em.Engine(TARGET, Hostile(ALONE[GREEDY], 0, spoil), policy=em.FixedPolicy(3, nodes=8))
    with pytest.raises(ProposerError, match=message):
        engine.generate(PROMPTS[:1], GREEDY)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"open": lambda *_: None}, "what Mine.open returns must be a ProposerState; got None"),
        ({"open": lambda *_: [[1]]}, "what Mine.open returns must be a ProposerState; got"),
        ({"aux_layers": 0}, "aux_layers of Mine must be a tuple of layers; got 0"),
    ],
)
def test_a_proposer_without_a_state_or_layers_is_refused_by_its_class(attributes: dict[str, Any], message: str) -> None:
    mine = type("Mine", (Hostile,), attributes)
    with pytest.raises(ConfigError, match=message):
        em.Engine(TARGET, mine(ALONE[GREEDY], 0, lambda draft: draft)).generate(PROMPTS[:2], GREEDY)


def test_a_proposer_needs_no_name() -> None:
    class Nameless(Proposer):
        def open(self, prompts: Sequence[Sequence[int]]) -> Any:
            return em.NgramProposer().open(prompts)

    outputs = em.Engine(TARGET, Nameless(), policy=em.FixedPolicy(3)).generate(PROMPTS[:2], GREEDY)
    assert [output.tokens for output in outputs] == ALONE[GREEDY][:2]


def poisoned(poison: Sequence[int]) -> em.Target:
    """Return a target that reads some tokens as NaN and rarely emits token 0."""
    args = qwen3.ModelArgs(**{**tiny_config(), "tie_word_embeddings": False, "head_dim": 32})  # type: ignore[arg-type]
    model = qwen3.Model(args)
    randomize(model, 0, 0.2)
    model.lm_head.weight[0] = 0
    for token in poison:
        model.model.embed_tokens.weight[token] = mx.nan
    return em.Target(model, name="poisoned")


CHAIN_AND_TREE = pytest.mark.parametrize(
    "policy", [em.FixedPolicy(4), em.FixedPolicy(4, nodes=9)], ids=["chain", "tree"]
)


@CHAIN_AND_TREE
def test_padding_that_leads_to_nan_is_not_read(policy: em.FixedPolicy) -> None:
    """Padding of drafts after their lengths, and of prompts that are read together."""
    texts = plain(poisoned([]), GREEDY)
    used = {token for text in [*texts, *PROMPTS] for token in text}
    assert 0 not in used
    target = poisoned([token for token in range(128) if token not in used])

    def spoil(draft: Draft) -> Draft:
        counts = mx.arange(draft.tokens.shape[1]) < draft.lengths[:, None]
        right = mx.array(np.isin(np.array(draft.tokens), list(used)).all(axis=1))
        return replace(draft, tokens=mx.where(counts, draft.tokens, 0), lengths=mx.where(right, draft.lengths, 0))

    for seed in range(TURNS):
        engine = em.Engine(target, Hostile(texts, seed, spoil), policy=policy, max_batch=3, prefill_chunk=16)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [(output.error, output.tokens) for output in outputs] == [(None, text) for text in texts]


@CHAIN_AND_TREE
@pytest.mark.parametrize("spread", [False, True])
def test_a_rejected_draft_with_nan_logits_does_not_harm_its_row(policy: em.FixedPolicy, spread: bool) -> None:
    """`spread`: its cache entries are NaN too, as with attention that does not read masked entries."""
    target = tiny_target()
    used = {token for text in ALONE[GREEDY] for token in text}
    bad = next(token for token in range(128) if token not in used)
    base = type(target.model)
    spoilt: list[int] = []

    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = base.__call__(self, inputs, cache)
        drafted = (inputs == bad) if inputs.shape[1] > 1 else mx.zeros(inputs.shape, mx.bool_)
        spoilt.append(int(drafted.sum()))
        if spread and cache is not None and inputs.shape[1] > 1:
            start = cache[0].lengths.offset[:, None] + mx.arange(inputs.shape[1])
            for layer in cache:
                wrong = mx.where(drafted, mx.nan, 0.0)[:, None, :, None]
                held = mx.zeros((layer.values.shape[0], 1, layer.values.shape[2], 1))
                rows = inputs.shape[0]
                at = mx.broadcast_to(start[:, None, :, None], wrong.shape)
                held = mx.concatenate([mx.put_along_axis(held[:rows], at, wrong, axis=2), held[rows:]], axis=0)
                layer.values = layer.values + held
        return mx.where(drafted[..., None], mx.nan, logits)

    target.model.__class__ = type("Poisoned", (base,), {"__call__": call})
    rng = np.random.default_rng(1)

    def spoil(draft: Draft) -> Draft:
        return replace(draft, tokens=mx.where(mx.array(rng.random(draft.tokens.shape) < 0.2), bad, draft.tokens))

    prompts = [prompt for prompt in PROMPTS if bad not in prompt]
    wanted = [ALONE[GREEDY][PROMPTS.index(prompt)] for prompt in prompts]
    for seed in range(TURNS):
        engine = em.Engine(target, Hostile(ALONE[GREEDY], seed, spoil), policy=policy, max_batch=3)
        outputs = engine.generate(prompts, GREEDY)
        assert [(output.error, output.tokens) for output in outputs] == [(None, text) for text in wanted]
    assert sum(spoilt) > 10


def test_half_precision_logits_that_overflow_in_a_sum_are_not_nan() -> None:
    """Their sum is not: infinity minus infinity."""
    target = tiny_target()
    base = type(target.model)

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = base.__call__(self, *args, **kwargs)
        ends = mx.concatenate([mx.full(64, 60000.0), mx.full(64, -60000.0)])
        ends = mx.where(mx.arange(128) % 64 < 8, ends, 0.0)
        return mx.clip(logits + ends, -65000, 65000).astype(mx.float16)

    target.model.__class__ = type("Loud", (base,), {"__call__": call})
    outputs = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(3)).generate(PROMPTS, GREEDY)
    assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("length", [3, 8, 9, 23, 24, 25, 31, 60])
def test_zeroing_a_ring_keeps_visible_entries(length: int) -> None:
    cache = RaggedCache([lambda lengths: RaggedWindow(lengths, 8)], 2)
    lengths, ring = cache.lengths, cache[0]
    ring.ring = 24
    for place in range(length):
        ring.update_and_fetch(mx.full((2, 1, 1, 4), place + 1.0), mx.full((2, 1, 1, 4), place + 1.0))
        lengths.advance(1)
    bad = mx.full((2, 1, 17, 4), mx.nan)  # the most that this ring takes at once
    ring.update_and_fetch(bad, bad)
    cache.zero(0, length)
    cache.zero(1, length)
    for buffer in (ring.keys, ring.values):
        assert buffer is not None
        held = np.array(buffer[:, 0, :, 0])
        assert np.isfinite(held[:2]).all()
        for place in range(max(0, length - 7), length):
            assert (held[:, place % 24] == place + 1).all()


def assert_nan_ends_its_rows_alone(outputs: Sequence[em.Output], texts: Sequence[Sequence[int]]) -> int:
    """Check that rows end with their own text, or earlier because of NaN. Return how many rows NaN ended."""
    for output, text in zip(outputs, texts, strict=True):
        assert output.tokens == text[: len(output.tokens)]
        if output.error is None:
            assert len(output.tokens) == len(text)
        else:
            assert "NaN" in output.error
    return sum(output.error is not None for output in outputs)


@CHAIN_AND_TREE
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_that_leads_to_nan_ends_only_its_row(policy: em.FixedPolicy, params: em.SamplingParams) -> None:
    """Its keys affect earlier positions: masked attention multiplies them by 0. No cached prefix has them."""
    texts = plain(poisoned([]), params)
    used = {token for text in [*texts, *PROMPTS] for token in text}
    bad = next(token for token in range(1, 128) if token not in used)
    rng = np.random.default_rng(2)

    def spoil(draft: Draft) -> Draft:
        wrong = mx.array((rng.random(draft.tokens.shape) < 0.02) & spoils)
        return replace(draft, tokens=mx.where(wrong, bad, mx.where(draft.tokens == bad, 0, draft.tokens)))

    ended = 0
    for seed in range(TURNS):
        spoils, proposer = True, Hostile(texts, seed, spoil)
        engine = em.Engine(poisoned([bad]), proposer, policy=policy, max_batch=3, prefix_cache_bytes=1 << 20)
        ended += assert_nan_ends_its_rows_alone(engine.generate(PROMPTS, params), texts)
        spoils = False
        outputs = engine.generate(PROMPTS, params)
        assert [(output.error, output.tokens) for output in outputs] == [(None, text) for text in texts]
        assert sum(output.accepted for output in outputs) > 0
    assert 0 < ended < TURNS * len(PROMPTS)


@CHAIN_AND_TREE
def test_a_text_that_leads_to_nan_fails_even_if_it_was_drafted(policy: em.FixedPolicy) -> None:
    """At the same token as plain decoding, or in the round that reads it."""
    texts = plain(poisoned([]), GREEDY)
    bad = texts[1][6]
    target = poisoned([bad])
    for seed in range(TURNS):
        engine = em.Engine(target, Hostile(texts, seed), policy=policy, max_batch=3)
        output = engine.generate([PROMPTS[1]], GREEDY)[0]
        assert assert_nan_ends_its_rows_alone([output], [texts[1]]) == 1
        assert bad not in output.tokens[:-1]


SICK = 95


class Sickening(HostileProposer):
    """Knows the rows' texts, and sometimes drafts SICK."""

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        return [SICK if self.rng.random() < 0.06 else token for token in super().continuation(text, count)]


@pytest.mark.parametrize(
    ("name", "params"),
    diagonal(
        ["qwen3_next", "mamba2", "olmo_hybrid", "jamba", "baichuan_m1"],
        [GREEDY, SEEDED, em.SamplingParams(max_tokens=COUNT, temperature=1.0, top_k=1)],
    ),
)
def test_a_draft_with_nan_harms_no_other_rows_recurrent_state(name: str, params: em.SamplingParams) -> None:
    """Sampling from one token makes the rejection rule's text predictable."""
    params = replace(params, logit_bias={SICK: -1e4})
    healthy, sick = tiny_model(name), tiny_model(name)
    for model in (healthy, sick):
        randomize(model, 1, 0.2)
    sicken(sick, SICK)
    prompts = [[token % (VOCAB - 4) for token in prompt] for prompt in PROMPTS]
    lone = em.Engine(em.Target(healthy), max_batch=1)
    texts = [lone.generate([prompt], params)[0].tokens for prompt in prompts]
    sequences = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    proposer = Sickening(np.random.default_rng(0), sequences, Manners())
    outputs = em.Engine(em.Target(sick), proposer, policy=em.FixedPolicy(3), max_batch=3).generate(prompts, params)
    assert 0 < assert_nan_ends_its_rows_alone(outputs, texts) < len(texts)
    assert sum(output.accepted for output in outputs) > 0
