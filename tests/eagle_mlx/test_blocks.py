"""Drafting whole blocks: what each row's block has, where it ends, and that the text stays the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.plan import Context, Plan, RoundResult
from eagle_mlx.proposers.base import Observation
from eagle_mlx.proposers.head import HeadState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from tests.eagle_mlx.heads import BLOCKS, IN_BLOCKS, dflash, dspark
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal, in_turn

TARGET = tiny_target(vocab=64)
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 7, 8, 50, 3, 2, 1, 60, 33], list(range(30))]
TEXT = [5, 6, 7, 8]


def state_of(head: BlockHead, rows: int = 2) -> HeadState:
    """Return the state of rows that have read three positions of the text."""
    proposer = em.HeadProposer(head)
    proposer.bind(TARGET)
    state = proposer.open([TEXT] * rows)
    aux = TARGET.forward(mx.array([TEXT[:3]] * rows), aux_layers=head.aux_layers).aux
    state.prefill(Observation([TEXT[1:]] * rows, aux))
    return state


def batch_of(*params: SamplingParams) -> SamplingBatch:
    return SamplingBatch.of(list(params), range(len(params)))


GREEDY, COLD = SamplingParams(), SamplingParams(temperature=0.5, seed=1)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_longer_chain_begins_like_a_shorter_one(name: str) -> None:
    """The whole block is read whatever is asked for, unless slots do not see later ones."""
    head = BLOCKS[name](TARGET)
    state, most = state_of(head), head.config.drafts
    drafts = [state.draft(Plan(depth), batch_of(GREEDY, COLD), mx.array([4, 4])).tokens for depth in range(1, most + 3)]
    assert [draft.shape[1] for draft in drafts] == [*range(1, most + 1), most, most]
    assert all(draft.tolist() == drafts[-1][:, : draft.shape[1]].tolist() for draft in drafts)


@pytest.mark.parametrize("name", BLOCKS)
def test_rejection_rows_get_the_distribution_of_each_slot(name: str) -> None:
    head = BLOCKS[name](TARGET)
    params = SamplingParams(temperature=1.0)
    draft = state_of(head).draft(Plan(head.config.drafts), batch_of(params, params), mx.array([4, 4]))
    assert draft.probs is not None
    q = np.array(draft.probs)
    assert q.shape == (2, head.config.drafts, 64)
    np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-5)
    assert all(q[row, slot, token] > 0 for row in (0, 1) for slot, token in enumerate(draft.tokens[row].tolist()))
    assert np.allclose(q[0, 1], q[1, 1], atol=1e-5) == (not head.is_sequential)  # by the token before


@pytest.mark.parametrize("name", in_turn(BLOCKS))
def test_sampled_requests_without_a_seed_are_drafted_for(name: str) -> None:
    """A draft that cannot be read would end drafting, and no text would show it."""
    engine = em.Engine(TARGET, em.HeadProposer(BLOCKS[name](TARGET)), policy=em.FixedPolicy(4), max_batch=3)
    outputs = engine.generate(PROMPTS, SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True))
    assert all(output.drafted > 6 for output in outputs)
    assert sum(output.accepted for output in outputs) > 0


@pytest.mark.parametrize(("name", "nodes"), in_turn(diagonal(BLOCKS, [6, 14]), of=3))
def test_trees_are_the_chain_with_side_branches(name: str, nodes: int) -> None:
    head = BLOCKS[name](TARGET)
    state, batch, at = state_of(head), batch_of(GREEDY, GREEDY), mx.array([4, 4])
    chain = state.draft(Plan(3), batch, at).tokens[0].tolist()
    draft = state.draft(Plan(3, nodes), batch, at)
    assert draft.tree is not None
    assert draft.tokens.shape == draft.tree.parents.shape == (2, nodes)
    tokens, parents, on_chain = draft.tokens[0].tolist(), draft.tree.parents[0].tolist(), [0]
    nodes_of = {(token, parent): node for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1)}
    for token in chain:
        on_chain.append(nodes_of.get((token, on_chain[-1]), -1))
    assert len(on_chain) > 1
    assert set(parents) <= set(on_chain)  # a branch hangs on the chain
    params = SamplingParams(max_tokens=24)
    plain = em.Engine(TARGET).generate(PROMPTS, params)
    trees = em.Engine(TARGET, em.HeadProposer(head), policy=em.FixedPolicy(3, nodes=nodes)).generate(PROMPTS, params)
    assert [output.tokens for output in trees] == [output.tokens for output in plain]


def test_a_row_whose_prompt_is_one_token_waits_a_round() -> None:
    proposer = em.HeadProposer(dspark(TARGET))
    proposer.bind(TARGET)
    state = proposer.open([[3], [5]])
    assert state.draft(Plan(2), batch_of(GREEDY, GREEDY), mx.array([1, 1])).lengths.tolist() == [0, 0]


def test_embeddings_are_those_of_a_target_that_scales_them() -> None:
    target = tiny_target(vocab=64)
    target.model.args.model_type = "gemma3_text"
    plain, scaled = dflash(target), dflash(target)
    plain.attach(TARGET)
    scaled.attach(target)
    tokens = mx.array([[1, 2]])
    assert mx.allclose(scaled.embed(tokens), plain.embed(tokens) * 32**0.5)


def test_the_confidence_head_is_not_quantised() -> None:
    head = dspark(tiny_target(hidden=64), markov_rank=64)
    quantize_for(head, None, 4)
    assert "scales" not in head.confidence_head.proj
    assert "scales" in head.markov_head.markov_w1
    assert "scales" in head.fc


@dataclass
class Always:
    """A policy with one plan."""

    next: Plan
    wants_trees = False

    def plan(self, context: Context) -> Plan:
        return self.next

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_the_host_waits_only_to_collect_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with chains of a fixed length; only their early exits wait for confidences."""
    waits, of_rounds = count(), list[int]()
    for owner, name in ((mx, "eval"), (mx.array, "tolist"), (mx.array, "item")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real: (next(waits), real(*args))[1])
    dispatch = Batch.dispatch

    def counted(batch: Batch, plan: Plan, *args: Any) -> Round:
        before = next(waits)
        dispatched = dispatch(batch, plan)
        of_rounds.append(next(waits) - before - 1)
        return dispatched

    monkeypatch.setattr(Batch, "dispatch", counted)

    def waits_with(make: Callable[[Target], DraftHead], stop_below: float | None) -> int:
        of_rounds.clear()
        engine = em.Engine(TARGET, em.HeadProposer(make(TARGET)), policy=Always(Plan(4, stop_below=stop_below)))
        engine.generate(PROMPTS[:2], SamplingParams(max_tokens=8))
        return sum(of_rounds)

    assert waits_with(IN_BLOCKS[kind], 0.3) == waits_with(tiny_head, None) == 0
    assert waits_with(tiny_head, 0.3) > 0


def test_early_exits_are_not_offered_to_policies() -> None:
    """The target reads a whole block in any case."""
    assert not em.HeadProposer(dspark(TARGET)).abilities.early_exit
    assert em.HeadProposer(dspark(TARGET)).abilities.trees
