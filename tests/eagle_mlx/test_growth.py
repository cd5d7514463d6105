"""A tree grown with a head: every node follows the head's distribution, and the likeliest nodes are chosen."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch, draft_scores
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import Observation
from eagle_mlx.proposers.drafting import TreeShape, side_branch_tree
from eagle_mlx.proposers.head import HeadProposer, HeadState
from eagle_mlx.sampling_params import SamplingParams
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal

TARGET = tiny_target()
HEAD = tiny_head(TARGET)
TEXTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


def opened() -> HeadState:
    proposer = HeadProposer(HEAD)
    proposer.bind(TARGET)
    state = proposer.open(TEXTS)
    width = max(map(len, TEXTS)) - 1
    aux = TARGET.forward(
        mx.array([text[:-1] + [0] * (width + 1 - len(text)) for text in TEXTS]), aux_layers=HEAD.aux_layers
    ).aux
    state.prefill(Observation([text[1:] for text in TEXTS], aux))
    return state


def shares(text: list[int], drafted: list[int], params: SamplingParams) -> dict[int, float]:
    """Return the head's log probabilities after a branch by target id, computed from the whole text."""
    batch = SamplingBatch.of([params], [params.seed or 0])
    tokens = [*text, *drafted]
    g = HEAD.features(TARGET.forward(mx.array([text[:-1]]), aux_layers=HEAD.aux_layers).aux)
    for step in range(len(drafted) + 1):
        h = HEAD(TARGET.embed(mx.array([tokens[1 : len(text) + step]])), g, mask="causal")
        g = mx.concatenate([g, h[:, -1:]], axis=1)
    at = mx.array([[len(tokens)]])
    scores = draft_scores(HEAD.logits(h[:, -1:]), batch, at, TARGET.vocab_size, HEAD.token_ids)[0, 0]
    scores = scores - mx.logsumexp(scores)
    ids = range(scores.size) if HEAD.token_ids is None else HEAD.token_ids.tolist()
    return {int(token): score for token, score in zip(ids, scores.tolist(), strict=True)}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sizes", "params"),
    diagonal(
        [(3, 12), (4, 8), (3, 4), (1, 2)],  # level by level, and with a chain
        [SamplingParams(), SamplingParams(temperature=0.9, seed=4, top_k=50)],
    ),
)
def test_the_most_likely_branches_are_drafted(sizes: tuple[int, int], params: SamplingParams) -> None:
    depth, nodes = sizes
    state = opened()
    batch = SamplingBatch.of([params] * 2, [params.seed or 0] * 2)
    draft = state.draft(Plan(depth, nodes), batch, mx.array([len(text) for text in TEXTS]))
    assert draft.tree is not None
    tokens, parents = np.array(draft.tokens), np.array(draft.tree.parents)
    assert draft.lengths.tolist() == [nodes, nodes]
    for row, text in enumerate(TEXTS):
        joint, branches = [0.0], [[]]  # type: ignore[var-annotated]
        for node in range(nodes):
            above = int(parents[row, node])
            assert above <= node
            logprobs = shares(text, branches[above], params)
            branches.append([*branches[above], int(tokens[row, node])])
            joint.append(joint[above] + logprobs[int(tokens[row, node])])
            assert len(branches[-1]) <= depth
        assert len({tuple(branch) for branch in branches}) == nodes + 1
        assert all(a >= b - 0.05 for a, b in itertools.pairwise(joint))  # likeliest first
        first = shares(text, [], params)
        below = [tokens for tokens in branches if len(tokens) == 1]
        likeliest = sorted(first, key=lambda token: -first[token])[: len(below)]
        assert sorted(token for [token] in below) == sorted(likeliest)
        assert branches[1] == likeliest[:1]


def test_drafting_does_not_change_the_heads_cache() -> None:
    batch = SamplingBatch.of([SamplingParams()] * 2, [0, 0])
    at = mx.array([len(text) for text in TEXTS])
    chain = opened().draft(Plan(3), batch, at).tokens.tolist()
    state = opened()
    state.draft(Plan(4, 14), batch, at)
    assert state.draft(Plan(3), batch, at).tokens.tolist() == chain
    state.draft(Plan(6, stop_below=0.01), batch, at)
    again = state.draft(Plan(4, 14), batch, at)
    fresh = opened().draft(Plan(4, 14), batch, at)
    assert again.tokens.tolist() == fresh.tokens.tolist()


@pytest.mark.parametrize("nodes", [2, 3, 8, 16, 60])
@pytest.mark.parametrize("levels", [1, 2, 6])
def test_there_are_candidates_for_every_node(nodes: int, levels: int) -> None:
    shape = TreeShape.of(nodes, levels)
    assert shape.candidates(levels) >= nodes
    assert 1 <= shape.width < shape.children <= max(nodes, 4)


def test_the_first_level_has_the_children_of_one_node_and_the_others_those_of_all() -> None:
    assert [TreeShape(2, 4).candidates(levels) for levels in (1, 2, 4)] == [4, 12, 28]


def test_side_branches_are_some_of_a_few_candidates_of_each_position() -> None:
    """However flat the distribution of the first position is; a small vocabulary has fewer candidates."""
    _, tree = side_branch_tree(mx.zeros((1, 2, 8)), nodes=5, children=3, token_ids=None)
    assert tree.parents[0].tolist().count(0) == 3
    tokens, _ = side_branch_tree(mx.zeros((1, 2, 2)), nodes=4, children=3, token_ids=None)
    assert tokens.shape == (1, 4)


def test_a_tree_accepts_more_than_a_chain_with_the_same_text() -> None:
    target = em.load_target("checkpoints/target")
    proposer = em.HeadProposer(em.load_head("checkpoints/head", target))
    prompts = ["def mean(values):", "class Stack:\n    def push(self, item):", "import os\n\ndef size(path):"]
    params = SamplingParams(max_tokens=24)
    plain, chain, tree = (
        em.Engine(target, proposer, policy=policy, max_batch=2).generate(prompts, params)
        for policy in (em.FixedPolicy(0), em.FixedPolicy(4), em.FixedPolicy(6, nodes=16))
    )
    assert [o.tokens for o in plain] == [o.tokens for o in chain] == [o.tokens for o in tree]
    assert sum(o.rounds for o in tree) < 0.9 * sum(o.rounds for o in chain)


def test_a_batch_of_mixed_rows_equals_each_row_alone() -> None:
    """Trees if all rows allow them, else chains; log probabilities along the accepted branch."""
    kinds = [
        SamplingParams(max_tokens=20, logprobs=True, top_logprobs=2),
        SamplingParams(max_tokens=24, temperature=0.8, seed=3, num_speculative_tokens=2),
        SamplingParams(max_tokens=9, temperature=0.8, seed=4, num_speculative_tokens=0, logprobs=True),
        SamplingParams(max_tokens=14, frequency_penalty=1.5, stop_token_ids=(1,)),
    ]
    prompts = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [5]]
    plain = em.Engine(TARGET, None, max_batch=4).generate(prompts, kinds)
    for rows in (kinds[:3], kinds):
        engine = em.Engine(TARGET, HeadProposer(HEAD), policy=em.FixedPolicy(3, nodes=7), max_batch=4)
        assert engine.chains_only is None
        for output, alone in zip(engine.generate(prompts[: len(rows)], rows), plain, strict=False):
            assert output.tokens == alone.tokens
            assert output.finish_reason == alone.finish_reason
            if alone.logprobs is not None:
                assert output.logprobs is not None
                assert [x.token for x in output.logprobs] == output.tokens
                np.testing.assert_allclose(
                    [x.logprob for x in output.logprobs], [x.logprob for x in alone.logprobs], atol=1e-4
                )
    assert plain[1].tokens != plain[0].tokens
