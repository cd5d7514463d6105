"""Ragged caches equal fresh single-row runs after any history of appends, rollbacks, joins and leaves."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache, check_cacheable, full, without_row
from eagle_mlx.cache.full import STEP
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.recurrent import RecurrentState
from eagle_mlx.cache.window import SLACK, RaggedWindow
from eagle_mlx.errors import TargetError
from eagle_mlx.target import Target
from tests.architectures import tiny_model
from tests.fakes import Oracle, randomize, steps_of, tiny_target
from tests.full import some
from tests.shortcuts import without_shortcuts

TARGET = tiny_target()
WIDTH = 5


def target_of(name: str) -> Target:
    if name == "qwen3":
        return TARGET
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    return Target(model)


def fresh_logits(tokens: list[int], target: Target) -> np.ndarray:
    return np.array(target.forward(mx.array([tokens])).logits[0, -1])


def run(
    cache: RaggedCache,
    texts: list[list[int]],
    rows: list[list[int]],
    kept: list[int],
    settle: bool,
    target: Target = TARGET,
) -> None:
    """Run one ragged forward: row i gets rows[i] and keeps kept[i] tokens. Check the logits of kept tokens."""
    width = max(map(len, rows))
    tokens = mx.array([row + [0] * (width - len(row)) for row in rows], mx.int32)
    logits = np.array(target.forward(tokens, cache).logits)
    cache.advance(mx.array(kept, mx.int32), at_most=width)
    for text, row, keep, out in zip(texts, rows, kept, logits, strict=True):
        text.extend(row[:keep])
        if keep:
            np.testing.assert_allclose(out[keep - 1], fresh_logits(text, target), rtol=1e-3, atol=1e-3)
    if settle:
        cache.sync([len(text) for text in texts])


step = st.tuples(
    st.lists(st.lists(st.integers(0, 95), min_size=2, max_size=WIDTH), min_size=6, max_size=6),
    st.lists(st.integers(0, WIDTH), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from(["stay", "join", "leave"]),
    st.integers(0, 5),
)


@pytest.mark.parametrize(
    ("name", "examples"),
    [("qwen3", 25), ("gemma3_text", 5), ("lfm2", 10), ("falcon_h1", 5), ("rwkv7", 5), ("mamba", 5)],
)
def test_rows_equal_fresh_runs_after_any_history(name: str, examples: int) -> None:
    target = target_of(name)

    @settings(max_examples=some(examples), deadline=None)
    @given(st.integers(1, 3), st.lists(step, min_size=1, max_size=6))
    def check(rows: int, steps: list) -> None:  # type: ignore[type-arg]
        live_through(target, rows, steps)

    check()


def live_through(target: Target, rows: int, steps: list) -> None:  # type: ignore[type-arg]
    cache, texts = RaggedCache.of(target.model, rows), [[] for _ in range(rows)]
    for pieces, keeps, settle, event, which in steps:
        pieces = pieces[: len(texts)]
        kept = [min(keep, len(piece)) for keep, piece in zip(keeps, pieces, strict=False)]
        run(cache, texts, pieces, kept, settle, target)
        if event == "join" and len(texts) < 6:
            other, new = RaggedCache.of(target.model, 1), [[]]
            run(other, new, [[7, which, 3]], [3], True, target)
            cache.append(other)
            texts.extend(new)
        elif event == "leave" and len(texts) > 1:
            row = which % len(texts)
            cache.remove(row)
            texts[row] = texts[-1]
            texts.pop()


@pytest.mark.parametrize(("name", "examples"), [("qwen3", 15), ("gemma3_text", 5), ("falcon_h1", 5)])
def test_rows_equal_fresh_runs_in_buffers_that_change_all_the_time(
    name: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "STEP", 2)
    test_rows_equal_fresh_runs_after_any_history(name, examples)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "lfm2", "falcon_h1", "rwkv7", "deepseek_v3"])
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_empty_rows_join_and_leave(name: str, leaving: int) -> None:
    target = target_of(name)
    cache, texts = RaggedCache.of(target.model, 2), [[], []]
    run(cache, texts, [[1, 2, 3], [4, 5, 6]], [3, 2], True, target)
    for _ in range(2):
        cache.append(RaggedCache.of(target.model, 1))
        texts.append([])
    cache.remove(leaving)
    texts[leaving] = texts[-1]
    texts.pop()
    cache.sync([len(text) for text in texts])
    run(cache, texts, [[7, 8], [9, 10], [11, 12]], [2, 1, 2], True, target)
    other = RaggedCache.of(target.model, 1)
    other.append(RaggedCache.of(target.model, 1))
    cache.append(other)
    texts += [[], []]
    run(cache, texts, [[7, 1], [9, 1], [11, 1], [3, 1], [5, 1]], [1, 2, 1, 2, 1], True, target)


@pytest.mark.parametrize("name", ["rwkv7", "mamba"])
def test_rows_that_read_nothing_keep_their_state(name: str) -> None:
    target, texts = target_of(name), [[], [], []]
    cache = RaggedCache.of(target.model, 3)
    for counts in ((2, 0, 1), (0, 3, 1), (1, 0, 0), (0, 2, 2), (1, 1, 1)):
        width = max(2, *counts)
        pieces = [[7 * row + len(text) + at for at in range(width)] for row, text in enumerate(texts)]
        logits = np.array(target.forward(mx.array(pieces), cache).logits)
        cache.advance(mx.array(counts, mx.int32), at_most=width)
        for text, piece, count, out in zip(texts, pieces, counts, logits, strict=True):
            text += piece[:count]
            if count:
                np.testing.assert_allclose(out[count - 1], fresh_logits(text, target), rtol=1e-3, atol=1e-3)
        cache.sync([len(text) for text in texts])


@pytest.mark.parametrize("rows", [1, 3])
def test_buffers_grow_past_their_step(rows: int) -> None:
    rng = np.random.default_rng(0)
    cache, texts = RaggedCache(TARGET.num_layers, rows), [[] for _ in range(rows)]
    for width in (250, 4, 4, 4):
        pieces = rng.integers(0, 128, (rows, width)).tolist()
        run(cache, texts, pieces, [width - 1 - (i % 2) for i in range(rows)], True)


def test_restore_forgets_what_was_written_since() -> None:
    cache, texts = RaggedCache(TARGET.num_layers, 2), [[], []]
    run(cache, texts, [[1, 2, 3], [4, 5, 6]], [3, 1], True)
    saved = cache.lengths.save()
    for token in (9, 10, 11):
        TARGET.forward(mx.array([[token], [token]]), cache)
        cache.lengths.advance(1)
    cache.lengths.restore(saved)
    run(cache, texts, [[7, 8], [7, 8]], [2, 2], True)


@pytest.mark.usefixtures("with_shortcuts")
def test_uniform_rows_use_the_cheap_masks_and_ragged_ones_do_not() -> None:
    cache = RaggedCache(1, 2)
    assert cache[0].make_mask(1) is None
    mask = cache[0].make_mask(3)  # on the CPU, tiles of a prompt are cut from it
    assert mask is cache[0].make_mask(3)
    assert np.array(mask)[:, 0].astype(int).tolist() == 2 * [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    with without_shortcuts():
        assert cache[0].make_mask(3) == "causal"
    cache.lengths.advance(mx.array([1, 2]), at_most=2)
    mask = cache[0].make_mask(2)
    assert np.array(mask)[:, 0].astype(int).tolist() == [[[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    cache.lengths.sync([2, 2])
    assert cache[0].make_mask(1) is None


class Ring:
    """A window cache and its expected content: each row's own numbers, in order, each written once."""

    def __init__(self, window: int, rows: int, first: int = 0):
        self.window = window
        self.cache = RaggedWindow(RowLengths(rows), window)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.next = first
        self.guessed = False
        """Whether the host did not know the lengths for a while."""

    def write(self, width: int, kept: list[int], settle: bool) -> None:
        """Write `width` numbers, of which row i keeps kept[i]. Check what every position sees."""
        rows = len(self.rows)
        new = np.arange(self.next, self.next + rows * width, dtype=np.float32).reshape(rows, 1, width, 1)
        self.next += rows * width
        mask = self.cache.make_mask(width, return_array=True)
        keys, _ = self.cache.update_and_fetch(mx.array(new), mx.array(new))
        seen = np.broadcast_to(np.array(mask), (rows, 1, width, keys.shape[2]))[:, 0]
        ring, new = np.array(keys)[:, 0, :, 0], new[:, 0, :, 0]
        for row, held, visible, numbers in zip(self.rows, ring, seen, new, strict=True):
            whole = row + numbers.tolist()
            for i in range(width):
                end = len(row) + i + 1
                assert sorted(held[visible[i]]) == sorted(whole[max(0, end - self.window) : end])
        for row, numbers, count in zip(self.rows, new, kept, strict=True):
            row.extend(numbers[:count].tolist())
        self.cache.lengths.advance(mx.array(kept, mx.int32), at_most=width)
        self.guessed |= not settle
        if settle:
            self.cache.lengths.sync([len(row) for row in self.rows])

    def join(self, other: Ring) -> None:
        self.cache.append(other.cache)
        self.cache.lengths.append(other.cache.lengths)
        self.rows += other.rows

    def cut(self, row: int, length: int) -> Ring:
        """Return a fork of the first `length` numbers of a row."""
        lengths = RowLengths(1)
        lengths.sync([length])
        other = Ring(self.window, 1, first=self.next + 200_000)
        other.cache, other.rows = self.cache.fork(row, length, lengths), [self.rows[row][:length]]
        return other

    def leave(self, row: int) -> None:
        lengths, last = self.cache.lengths, len(self.rows) - 1
        moved = None if row == last else self.cache.fork(last, lengths.upper, RowLengths(1))
        self.cache.remove(row, moved)
        lengths.remove(row)
        self.cache.fit()
        self.rows[row] = self.rows[-1]
        self.rows.pop()


@settings(max_examples=some(60), deadline=None)
@given(st.sampled_from([1, 3, 8]), st.integers(1, 3), st.data())
def test_a_window_shows_the_last_positions_after_any_history(window: int, rows: int, data: st.DataObject) -> None:
    with steps_of(data.draw(st.sampled_from([1, 256]))):
        write_and_move(window, rows, data)


def write_and_move(window: int, rows: int, data: st.DataObject) -> None:
    ring = Ring(window, rows)
    for _ in range(data.draw(st.integers(1, 12))):
        width = data.draw(st.sampled_from([1, 2, 5, 9, SLACK + 1, 40]))
        kept = [data.draw(st.integers(0, width)) for _ in ring.rows]
        if data.draw(st.booleans()):
            kept = [width] * len(kept)
        ring.write(width, kept, data.draw(st.booleans()))
        event = data.draw(st.sampled_from(["stay", "stay", "compact", "join", "leave", "cut"]))
        if event == "compact":
            ring.cache.compact()
        elif event == "join" and len(ring.rows) < 5:
            other = Ring(window, 1, first=ring.next + 100_000)
            other.write(30, [data.draw(st.integers(0, 30))], True)
            other.cache.compact()
            ring.join(other)
        elif event == "cut":
            check_cuts(ring, data)
        elif event == "leave" and len(ring.rows) > 1:
            ring.leave(data.draw(st.integers(0, len(ring.rows) - 1)))


def check_cuts(ring: Ring, data: st.DataObject) -> None:
    """Check that rows cut back to any possible length see what they would have seen at that length."""
    ring.cache.lengths.sync([len(row) for row in ring.rows])
    for row, text in enumerate(ring.rows):
        shortest = ring.cache.shortest(row)
        if shortest > len(text):  # always possible for a row's own length if the host always knew it
            assert ring.guessed
            continue
        part = ring.cut(row, data.draw(st.integers(shortest, len(text))))
        for width in (data.draw(st.sampled_from([1, 9, 40])), 2):
            part.write(width, [width], True)
            part.cache.compact()


def test_a_row_can_be_cut_back_while_its_window_is_complete() -> None:
    ring = Ring(8, 2)
    ring.write(20, [20, 20], True)
    ring.cache.compact()
    assert [ring.cache.shortest(row) for row in range(2)] == [0, 0]
    ring.write(6, [1, 0], True)  # 26 positions in 24 entries, however many are kept
    assert [ring.cache.shortest(row) for row in range(2)] == [9, 9]
    ring.write(1, [0, 0], True)  # brings back nothing of what the wider draft overwrote
    assert [ring.cache.shortest(row) for row in range(2)] == [9, 9]
    ring.write(9, [9, 0], True)
    assert [ring.cache.shortest(row) for row in range(2)] == [13, 12]
    ring.leave(0)
    assert ring.cache.shortest(0) == 12


def test_a_ring_does_not_grow_with_the_text() -> None:
    ring = Ring(8, 2)
    ring.write(100, [100, 70], True)
    ring.cache.compact()
    for _ in range(200):
        ring.write(4, [4, 3], True)
    keys = ring.cache.keys
    assert keys is not None
    assert ring.cache.ring == 8 + SLACK
    assert keys.shape[2] <= 256


def model_with(cache: object, file: str = "own") -> nn.Module:
    """Return a model of one layer with this cache, as if from mlx_lm/models/{file}.py."""
    members = {"layers": [nn.Module()], "make_cache": lambda self: [cache], "__module__": f"mlx_lm.models.{file}"}
    return type("Model", (nn.Module,), members)()  # type: ignore[no-any-return]


class OwnCache(KVCache):
    """An architecture's own cache."""


@pytest.mark.parametrize("cache", [RotatingKVCache(8, keep=4), OwnCache()])
def test_caches_that_cannot_be_rolled_back_are_refused(cache: KVCache) -> None:
    with pytest.raises(TargetError, match=rf"layer 0 .* uses a {type(cache).__name__}.*mlx_lm"):
        check_cacheable(model_with(cache))


def test_an_architecture_for_one_row_is_refused_with_a_remedy() -> None:
    model = tiny_model("llama4")
    check_cacheable(model, rows=1)
    with pytest.raises(TargetError, match="llama4 decode one row at a time.*max_batch=1"):
        check_cacheable(model, rows=2)


def test_an_architecture_that_cannot_be_exact_is_refused() -> None:
    with pytest.raises(TargetError, match="longcat_flash_ngram cannot be decoded"):
        check_cacheable(model_with(ArraysCache(1), "longcat_flash_ngram"))


def test_a_state_outside_of_layers_is_detected() -> None:
    state = RecurrentState(RowLengths(2), 1, masked=True)
    with pytest.raises(TargetError, match="outside of its layers"):
        state.commit(mx.array([1, 2]))


def test_decoding_with_mlx_lm_is_not_disturbed() -> None:
    target = target_of("lfm2")
    before = np.array(target.forward(mx.array([[1, 2, 3]])).logits)
    RaggedCache.of(target.model, 2)
    RaggedCache.of(target.model, 2)
    assert (np.array(target.forward(mx.array([[1, 2, 3]])).logits) == before).all()


@given(st.integers(1, 6), st.data())
def test_without_row_moves_the_last_row_into_the_gap(rows: int, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, rows - 1))
    expected = list(range(rows))
    expected[row] = expected[-1]
    assert without_row(mx.arange(rows), row).tolist() == expected[:-1]


def test_a_row_that_leaves_does_not_move_the_others() -> None:
    cache = RaggedCache(1, 8)
    [layer] = cache
    new = mx.random.normal((8, 2, STEP - 9, 8))
    layer.update_and_fetch(new, new)
    cache.lengths.advance(STEP - 9)
    mx.eval(cache.state)
    whole = sum(x.nbytes for x in cache.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.remove(0)
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < 0.3 * whole  # one row of eight, not all of them
    for row, was in enumerate((7, 1, 2, 3, 4, 5, 6)):
        assert mx.array_equal(layer.keys[row, :, : STEP - 9], new[was])
        assert mx.array_equal(layer.values[row, :, : STEP - 9], new[was])


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "rwkv7", "jamba", "mamba"])
def test_rolling_a_state_back_reads_no_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reuses the verify's projections, in one call or token by token.

    Mamba also projects token by token in the verify.
    """
    target, calls = target_of(name), list[int]()
    plain = nn.Linear.__call__

    def counting(self: nn.Linear, x: mx.array) -> mx.array:
        calls.append(x.shape[1])
        return plain(self, x)

    prompts, params = [[5, 6, 7, 8], [9, 8, 7, 6]], em.SamplingParams(max_tokens=12)
    texts = [output.tokens for output in em.Engine(target).generate(prompts, params)]
    wrong = Oracle({tuple(p): [t + 1 for t in text] for p, text in zip(prompts, texts, strict=True)}, 1.0)
    engine = em.Engine(target, wrong, policy=em.FixedPolicy(3))  # type: ignore[arg-type]
    monkeypatch.setattr(nn.Linear, "__call__", counting)
    target.forward(mx.array([[1, 2, 3, 4]] * 2), RaggedCache.of(target.model, 2))
    in_one_forward = len(calls)
    for prompt in prompts:
        engine.submit(engine.prepare(prompt, params))
    verifies = 0
    while not engine.idle:
        joining = engine.waiting > 0
        calls.clear()
        engine.step()
        verifies += 4 in calls and not joining
        assert len(calls) <= in_one_forward or joining
    assert verifies > 5
