"""A head with a draft window sees the first and the newest entries of a text, whatever happens to its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache.draft_window import DraftWindow
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3 import PEagleHead
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import DROPPED, HeadPiece, Observation
from eagle_mlx.proposers.head import HeadProposer, HeadState
from eagle_mlx.sampling_params import SamplingParams
from tests.eagle_mlx.heads import dflash, dspark, eagle, eagle3, mtp, peagle
from tests.fakes import tiny_target
from tests.full import diagonal, some

TARGET = tiny_target(vocab=64)
HEADS: dict[str, DraftHead] = {
    "eagle": eagle(TARGET),
    "eagle3": eagle3(TARGET),
    "eagle3, two layers": eagle3(TARGET, num_hidden_layers=2, norm_output=True),
    "peagle": peagle(TARGET),
    "mtp": mtp(TARGET),
    "mtp of deepseek": mtp(TARGET, model_type="deepseek_v3"),
    "dflash": dflash(TARGET),
    "dspark": dspark(TARGET, markov_head=None),
}
for head in HEADS.values():
    head.attach(TARGET)
LONGEST = 60


@dataclass
class Row:
    """A text, of which a state has read the first `end` tokens but one."""

    text: list[int]
    end: int
    joined: int = 0  # positions that came from a snapshot
    gone: int = 0  # of these, positions after the sink that the snapshot could not show
    early: HeadPiece | None = None  # a snapshot from the time when it was opened

    def sees(self, window: DraftWindow, query: int, newest: int) -> np.ndarray:
        """Return which of the positions up to `query` it sees, if the text's newest entry is at `newest`."""
        keys = np.arange(query + 1)
        lost = (keys >= window.sink) & (keys < window.sink + self.gone) if query >= self.joined else False
        return ((keys < window.sink) | (keys > newest - window.size)) & ~lost


@dataclass
class FullCache:
    """Keys and values of all positions of one layer and row, with a mask."""

    row: Row
    window: DraftWindow
    newest: int | None = None  # while drafting
    offset: int = 0
    parts: list[tuple[mx.array, mx.array]] = field(default_factory=list)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        mask = np.zeros((count, self.offset + count), bool)
        for i in range(count):
            query = self.offset + i
            mask[i, : query + 1] = self.row.sees(self.window, query, query if self.newest is None else self.newest)
        return mx.array(mask)[None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        self.parts.append((keys, values))
        keys, values = (mx.concatenate(list(x), axis=2) for x in zip(*self.parts, strict=True))
        return keys, values


def reference(head: DraftHead, row: Row, window: DraftWindow, drafted: list[int]) -> np.ndarray:
    """Return the logits of each draft token, [k, V], with a mask over the whole text."""
    depth, entries = len(drafted), row.end - 1
    g = head.features(TARGET.forward(mx.array([row.text[:entries]]), aux_layers=head.aux_layers).aux)
    if isinstance(head, BlockHead):
        return block_reference(head, row, window, g)[:depth]
    caches = [FullCache(row, window) for _ in range(head.cache_layers)]
    h = head(head.embed(mx.array([row.text[1 : row.end]])), g, caches)[:, -1:]
    for cache in caches:
        cache.newest = entries - 1
    outputs = [h]
    if isinstance(head, PEagleHead):
        outputs += [head.masks(1, depth - 1, caches)] if depth > 1 else []
    else:
        for token in drafted[:-1]:
            outputs.append(head(head.embed(mx.array([[token]])), outputs[-1], caches))
    return np.array(head.logits(mx.concatenate(outputs, axis=1))[0])


def block_reference(head: BlockHead, row: Row, window: DraftWindow, g: mx.array) -> np.ndarray:
    config, length = head.config, row.end - 1
    x = head.embed(mx.array([[row.text[length], *[config.mask_token_id] * (config.block_size - 1)]]))
    context = row.sees(window, length, length - 1)[:length]
    mask = mx.array(np.concatenate([context, np.ones(config.block_size, bool)]))[None, None, None]
    for layer in head.layers:
        x = layer(x, mask, layer.self_attn.context(g, 0), length)
    return np.array(head.logits(head.norm(x))[0, 0 if config.first_slot_drafts else 1 :])


def proposer_of(head: DraftHead, window: DraftWindow | None) -> HeadProposer:
    proposer = HeadProposer(head)
    proposer.draft_window = window
    proposer.bind(TARGET)
    return proposer


def seen(head: DraftHead, rows: list[Row], starts: list[int], stops: list[int]) -> Observation:
    """Return what the target shows of positions starts..stops-1 of each row."""
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    layers = []
    for row, start, stop in zip(rows, starts, stops, strict=True):
        aux = TARGET.forward(mx.array([row.text[:stop]]), aux_layers=head.aux_layers).aux
        layers.append([mx.pad(x[:, start:], [(0, 0), (0, width - (stop - start)), (0, 0)]) for x in aux])
    tokens = [row.text[a + 1 : b + 1] for row, a, b in zip(rows, starts, stops, strict=True)]
    return Observation(tokens, tuple(mx.concatenate(list(x)) for x in zip(*layers, strict=True)))


def opened(proposer: HeadProposer, row: Row, chunk: int) -> HeadState:
    state = proposer.open([row.text[: row.end]])
    for start in range(0, row.end - 1, chunk):
        state.prefill(seen(proposer.head, [row], [start], [min(start + chunk, row.end - 1)]))
    row.early = state.piece(0, 0, row.end - 1)
    return state


def read_more(state: HeadState, rows: list[Row], gains: list[int]) -> None:
    before = [row.end for row in rows]
    for row, gain in zip(rows, gains, strict=True):
        row.end += gain
    state.observe(seen(state.head, rows, [n - 1 for n in before], [row.end - 1 for row in rows]))


def drafted(state: HeadState, rows: list[Row], depth: int) -> tuple[list[list[int]], np.ndarray]:
    """Return the tokens and the distributions from which they were drawn."""
    sampling = SamplingBatch.of([SamplingParams(temperature=1.0)] * len(rows), range(len(rows)))
    draft = state.draft(Plan(depth), sampling, mx.array([row.end for row in rows]))
    assert draft.probs is not None
    return draft.tokens.tolist(), np.array(draft.probs)


def check_drafts(state: HeadState, rows: list[Row], window: DraftWindow, depth: int) -> None:
    tokens, probs = drafted(state, rows, depth)
    for row, line, q in zip(rows, tokens, probs, strict=True):
        wanted = mx.softmax(mx.array(reference(state.head, row, window, line)), axis=-1)
        np.testing.assert_allclose(q, wanted, atol=2e-5)
    assert state.cache.lengths.upper <= window.most


def text_of(rng: np.random.Generator) -> list[int]:
    return [int(token) for token in rng.integers(0, 64, LONGEST + 30)]


@settings(max_examples=some(30), deadline=None)
@example("eagle3", DraftWindow(6, 2, slack=4), ["read", "fork", "fork", "fork"], 36)  # a gap after all of a short text
@given(
    st.sampled_from(list(HEADS)),
    st.builds(DraftWindow, st.integers(1, 12), st.integers(0, 3), st.integers(0, 6)),
    st.lists(st.sampled_from(["read", "join", "leave", "move", "fork"]), min_size=2, max_size=6),
    st.integers(0, 2**31),
)
def test_drafts_are_those_of_a_mask_over_the_whole_text(
    name: str, window: DraftWindow, events: list[str], seed: int
) -> None:
    """After rows have joined, left, moved between batches, and begun from another row's snapshot."""
    head, rng = HEADS[name], np.random.default_rng(seed)
    proposer = proposer_of(head, window)
    rows = [Row(text_of(rng), int(rng.integers(2, 30)))]
    state = opened(proposer, rows[0], int(rng.integers(1, 12)))
    check_drafts(state, rows, window, 3)
    for event in events:
        index = int(rng.integers(len(rows)))
        if event == "join":
            rows.append(Row(text_of(rng), int(rng.integers(2, 30))))
            state.append(opened(proposer, rows[-1], int(rng.integers(1, 12))))
        elif event == "leave" and len(rows) > 1:
            state.remove(index)
            rows[index] = rows[-1]
            rows.pop()
        elif event == "move" and len(rows) > 1:
            moved, row = state.take(index), rows[index]
            rows[index] = rows[-1]
            rows[-1] = row
            state.append(moved)
        elif event == "fork" and rows[index].early is not None:
            source, length = rows[index], int(rng.integers(1, state.length(index) + 1))
            assert source.early is not None
            middle = int(rng.integers(0, len(source.early.marks) + 1))
            pieces = [source.early.split(middle)[0], state.piece(index, middle, state.length(index))]
            source.early = None  # a piece is split once
            row = Row(source.text[: length + 1] + text_of(rng), length + 1, length)
            last = b"".join(piece.marks for piece in pieces)[:length].rfind(DROPPED)
            row.gone = max(0, last + 1 - window.sink)
            other = proposer.join(pieces, length, row.text)
            read_more(other, [row], [1])
            rows.append(row)
            state.append(other)
        gains = [int(gain) for gain in rng.integers(1, 6, len(rows))]
        read_more(state, rows, gains)
        check_drafts(state, rows, window, int(rng.integers(1, 4)))


@pytest.mark.parametrize(("name", "nodes"), diagonal(HEADS, [0, 6, 14]))
def test_a_window_larger_than_the_context_changes_no_bit(name: str, nodes: int) -> None:
    head, rng = HEADS[name], np.random.default_rng(0)
    texts, plan = [text_of(rng), text_of(rng)], Plan(3, nodes)
    results = []
    for window in (None, DraftWindow(100, 4)):
        rows = [Row(texts[0], 20), Row(texts[1], 13)]
        proposer = proposer_of(head, window)
        state = opened(proposer, rows[0], 8)
        state.append(opened(proposer, rows[1], 8))
        read_more(state, rows, [2, 1])
        params = [SamplingParams(temperature=0.9, seed=1), SamplingParams()]
        draft = state.draft(plan, SamplingBatch.of(params, [1, 0]), mx.array([22, 14]))
        results.append((draft.tokens.tolist(), np.array(state.hidden)))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", ["eagle3", "mtp", "eagle3, two layers"])
def test_a_trees_nodes_see_what_a_chain_sees(name: str) -> None:
    """The likeliest chain of a tree is the greedy chain, though most of the text is outside of the window."""
    window, rng = DraftWindow(5, 1, slack=3), np.random.default_rng(1)
    row = Row(text_of(rng), 30)
    state, greedy = opened(proposer_of(HEADS[name], window), row, 7), SamplingBatch.of([SamplingParams()], [0])
    chain = state.draft(Plan(3), greedy, mx.array([30])).tokens[0].tolist()
    wide = state.draft(Plan(3, 40), greedy, mx.array([30]))
    assert wide.tree is not None
    tokens, parents = wide.tokens[0].tolist(), wide.tree.parents[0].tolist()
    place = 0
    for token in chain:
        place = 1 + next(i for i, parent in enumerate(parents) if parent == place and tokens[i] == token)
    check_drafts(state, [row], window, 3)  # the tree left nothing behind


@pytest.mark.parametrize("name", HEADS)
def test_the_bytes_of_a_windowed_cache_do_not_grow_with_the_text(name: str) -> None:
    head, window = HEADS[name], DraftWindow(16, 4, slack=8)
    proposer = proposer_of(head, window)
    most = proposer.cache_size().nbytes(1, 1_000_000)
    row = Row([token % 64 for token in range(180)], 90)
    state, sizes = opened(proposer, row, 50), []
    for _ in range(5):
        read_more(state, [row], [15])
        drafted(state, [row], 3)
        sizes.append(sum(x.nbytes for x in state.cache.state))
    assert max(sizes) <= most
    assert state.length(0) == row.end - 1
    piece: Any = state.piece(0, 0, row.end - 1)
    assert sum(x.nbytes for x in piece.arrays) <= most
    assert piece.marks[:4] == b"\1\1\1\1"
    assert piece.marks[-16:] == b"\1" * 16


def test_a_head_uses_the_window_that_it_was_trained_with() -> None:
    head = eagle3(TARGET)
    assert em.HeadProposer(head).draft_window is None
    assert em.HeadProposer(head, 64).draft_window == DraftWindow(64, 4)
    assert em.HeadProposer(head, 64, 0).draft_window == DraftWindow(64, 0)
    head.draft_window = 32
    assert em.HeadProposer(head).draft_window == DraftWindow(32, 0)
    assert em.HeadProposer(head, 0).draft_window is None
    with pytest.raises(ConfigError, match="set draft_window, too"):
        em.HeadProposer(head, 0, 4)
    with pytest.raises(ConfigError, match="at least 0; got -1"):
        em.HeadProposer(head, -1)
    with pytest.raises(ConfigError, match="sliding windows of their own"):
        em.HeadProposer(eagle3(TARGET, num_hidden_layers=2, windows=(None, 6)), 64)
