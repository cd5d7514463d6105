"""Draft trees: parents define masks and depths, and at most one branch is accepted, the target's own."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.decoding.draft import Tree, walk
from tests.full import some


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Draw parents of some rows' nodes, equally many in each row, and their maximum depth."""
    levels, count = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        depths, parents = [0], []
        for _ in range(count):
            parents.append(draw(st.sampled_from([n for n, depth in enumerate(depths) if depth < levels])))
            depths.append(depths[parents[-1]] + 1)
        rows.append(parents)
    return rows, levels


def branch(parents: list[int], node: int) -> list[int]:
    """Return the path from the newest token to a node."""
    return [*branch(parents, parents[node - 1]), node] if node else [0]


@settings(max_examples=some(150), deadline=None)
@given(trees())
def test_a_node_sees_its_branch_and_has_its_depth(grown: tuple[list[list[int]], int]) -> None:
    rows, levels = grown
    branches = Tree(mx.array(rows, mx.int32), levels).branches()
    seen, depths = np.array(branches.seen), np.array(branches.depths)
    for row, parents in enumerate(rows):
        for node in range(len(parents) + 1):
            assert sorted(np.flatnonzero(seen[row, node]).tolist()) == branch(parents, node)
            assert depths[row, node] == len(branch(parents, node)) - 1
    assert (branches.count, branches.before) == (len(rows[0]) + 1, 0)
    assert depths.dtype == np.int32


@settings(max_examples=some(100), deadline=None)
@given(trees(), st.integers(0, 2**32 - 1), st.sampled_from([None, 3, 9]), st.booleans())
def test_a_node_sees_all_text_of_its_row_from_the_first_token_on(
    grown: tuple[list[list[int]], int], seed: int, window: int | None, in_ring: bool
) -> None:
    """Rows of random lengths; with a window, each node sees as many tokens as it would in a chain."""
    rows, levels = grown
    branches = Tree(mx.array(rows, mx.int32), levels).branches()
    texts = np.random.default_rng(seed).integers(1, 12, len(rows)).tolist()
    lengths, count = RowLengths(len(rows)), len(rows[0]) + 1
    lengths.advance(mx.array(texts, mx.int32), at_most=max(texts))
    lengths.sync(texts)
    lengths.branch(branches)
    ring = window + count + 1 if window and in_ring else None
    mask = np.array(lengths.mask(count, window, ring))[:, 0]
    mask = np.broadcast_to(mask, (len(rows), *mask.shape[1:]))
    size = ring or max(texts) + count
    for row, (parents, text) in enumerate(zip(rows, texts, strict=True)):
        for node in range(count):
            path = [*range(text), *(text + other for other in branch(parents, node))]  # the entries of its chain
            expected = {entry % size for entry in path[-(window or len(path)) :]}
            assert set(np.flatnonzero(mask[row, node]).tolist()) == expected


@settings(max_examples=some(200), deadline=None)
@given(trees(), st.integers(0, 2**32 - 1))
def test_the_branch_that_the_target_draws_is_kept(grown: tuple[list[list[int]], int], seed: int) -> None:
    rows, levels = grown
    rng, tree = np.random.default_rng(seed), Tree(mx.array(rows, mx.int32), levels)
    count = len(rows[0])
    samples = rng.integers(0, 4, (len(rows), count + 1))
    drafts = np.zeros((len(rows), count), np.int64)
    for row, parents in enumerate(rows):
        for node in range(count):  # siblings always differ
            taken = {int(drafts[row, other]) for other in range(node) if parents[other] == parents[node]}
            drafts[row, node] = rng.choice([token for token in range(20) if token not in taken][:5])
    valid = rng.random((len(rows), count)) < 0.9
    arrays = (mx.array(x, mx.int32) for x in (samples, drafts))
    nodes, accepted = walk(*arrays, mx.array(valid), tree, tree.branches())
    for row, parents in enumerate(rows):
        at, expected = 0, [0]
        while True:
            below = [
                node + 1
                for node in range(count)
                if parents[node] == at and valid[row, node] and drafts[row, node] == samples[row, at]
            ]
            if not below:
                break
            at = below[0]
            expected.append(at)
        length = int(accepted[row].item())
        assert np.array(nodes)[row, : length + 1].tolist() == expected
    assert nodes.shape == (len(rows), levels + 1)


def test_a_chain_is_a_tree_without_branches() -> None:
    tree = Tree(mx.array([[0, 1, 2]] * 2), 3)
    assert np.array(tree.branches().seen).tolist() == [np.tri(4, dtype=bool).tolist()] * 2
    samples = mx.array([[5, 6, 7, 8], [5, 6, 7, 8]])
    _, accepted = walk(samples, mx.array([[5, 6, 0], [5, 6, 7]]), mx.ones((2, 3), mx.bool_), tree, tree.branches())
    assert accepted.tolist() == [2, 3]


@settings(max_examples=some(200), deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_only_nodes_deeper_than_levels_are_lost(levels: int, count: int, seed: int) -> None:
    """Equal siblings are one node."""
    rng = np.random.default_rng(seed)
    parents = np.where(rng.random(count) < 0.6, np.arange(count), rng.integers(0, np.arange(1, count + 1)))
    drafts = rng.integers(0, 2, count)

    def text(node: int) -> list[int]:
        """Return the draft tokens on the path to a node."""
        return [*text(int(parents[node - 1])), int(drafts[node - 1])] if node else []

    drawn = {tuple(text(node)): int(rng.integers(0, 2)) for node in range(count + 1)}
    samples = np.array([drawn[tuple(text(node))] for node in range(count + 1)])
    tree = Tree(mx.array(parents[None], mx.int32), levels)
    arrays = (mx.array(x[None], mx.int32) for x in (samples, drafts))
    walked = walk(*arrays, mx.ones((1, count), mx.bool_), tree, tree.branches())
    nodes, accepted = np.array(walked[0])[0], int(walked[1].item())
    longest: list[int] = []  # plain decoding's text, as far as the tree has nodes for it
    while len(longest) < levels and tuple(longest) in drawn:
        longest.append(drawn[tuple(longest)])
    texts = [text(node) for node in range(count + 1)]
    wanted = max(length for length in range(len(longest) + 1) if longest[:length] in texts)
    assert accepted == wanted
    assert [text(node) for node in nodes[: accepted + 1].tolist()] == [longest[:n] for n in range(accepted + 1)]
