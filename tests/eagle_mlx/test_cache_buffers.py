"""Buffers of keys and values are never much larger than the rows in them, after any history."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache, full
from eagle_mlx.cache.full import STEP, RaggedKV, RaggedQuantized, capacity, gathered, room, shrunk
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.proposers.head import HeadState
from eagle_mlx.request_state import RequestState
from tests.fakes import steps_of, tiny_head, tiny_target
from tests.full import some

DIM = 32
WINDOW = 600
TARGET = tiny_target()
DEPTH = 3


def bound(rows: int, longest: int) -> int:
    """Return the promised limit: 1.3 times the longest row for each row, and one step per row."""
    return math.ceil(rows * (1.3 * longest + full.STEP))


def slots(part: RaggedKV) -> int:
    if part.keys is None or part.values is None:
        return 0
    assert part.keys.shape[::2] == part.values.shape[::2]
    return part.keys.shape[0] * part.keys.shape[2]


class Rows:
    """One layer's cache and its expected content: each entry has a number, and its key repeats the number."""

    def __init__(self, kind: str, rows: int):
        self.kind, self.texts, self.next = kind, [[] for _ in range(rows)], 1.0
        layer: dict[str, Callable[[RowLengths], Any]] = {
            "full": RaggedKV,
            "quantized": lambda lengths: RaggedQuantized(lengths, 8),
            "window": lambda lengths: RaggedWindow(lengths, WINDOW),
        }
        self.cache = RaggedCache([layer[kind]], rows)
        self.most_rows = rows

    def write(self, counts: list[int]) -> None:
        """Read as many positions in each row as in the longest; row i keeps counts[i] of them."""
        width = max(counts)
        new = self.next + np.arange(len(counts) * width, dtype=np.float32).reshape(len(counts), 1, width, 1)
        self.next += new.size
        entries = mx.broadcast_to(mx.array(new), (len(counts), 1, width, DIM))
        self.cache[0].update_and_fetch(entries, -entries)
        for text, numbers, count in zip(self.texts, new[:, 0, :, 0], counts, strict=True):
            text += numbers[:count].tolist()
        self.cache.lengths.advance(mx.array(counts, mx.int32), at_most=width)
        self.cache.lengths.sync([len(text) for text in self.texts])
        self.cache.compact()

    def join(self, other: Rows) -> None:
        self.cache.append(other.cache)
        self.texts += other.texts
        self.most_rows = max(self.most_rows, len(self.texts))

    def leave(self, row: int) -> None:
        self.cache.remove(row)
        self.texts[row] = self.texts[-1]
        self.texts.pop()

    def check(self, wide: int = 0) -> None:
        """Check the rows' content and that buffers are little larger. `wide`: positions read and dropped."""
        layer = self.cache[0]
        for part in layer.caches if isinstance(layer, RaggedQuantized) else [layer]:
            longest = max(map(len, self.texts)) + wide
            used = min(longest, layer.ring) if isinstance(layer, RaggedWindow) else longest
            assert slots(part) <= bound(len(self.texts), used)
            assert part.keys is None or part.keys.shape[0] <= self.most_rows
        for row, text in enumerate(self.texts):
            if text:
                assert self.held(row, len(text)) == (text[-WINDOW:] if self.kind == "window" else text)

    def held(self, row: int, length: int) -> list[float]:
        layer = self.cache[0]
        if isinstance(layer, RaggedQuantized):
            keys = mx.dequantize(*(part.keys[row, 0, :length] for part in layer.caches), full.GROUP_SIZES[-1], 8)
        elif isinstance(layer, RaggedWindow):
            keys = layer.keys[row, 0, mx.arange(max(0, length - WINDOW), length) % layer.ring]
        else:
            keys = layer.keys[row, 0, :length]
        return np.rint(np.array(keys[:, 0])).astype(float).tolist()


def width_of(data: st.DataObject) -> int:
    return data.draw(st.sampled_from([1, 4, 30, 255, 256, 257, 700, 2500]))


@pytest.mark.parametrize("kind", ["full", "quantized", "window"])
@settings(max_examples=some(20))
@given(rows=st.integers(1, 3), data=st.data())
def test_buffers_are_little_larger_than_their_rows_after_any_history(kind: str, rows: int, data: st.DataObject) -> None:
    here = Rows(kind, rows)
    for _ in range(data.draw(st.integers(1, 10))):
        event = data.draw(st.sampled_from(["write", "write", "join", "leave", "leave"]))
        wide = 0
        if event == "write":
            count = width_of(data)
            counts = [data.draw(st.sampled_from([count, count // 2])) for _ in here.texts]
            wide, shortest = max(counts), max(map(len, here.texts))
            here.write(counts)
            wide -= max(map(len, here.texts)) - shortest
        elif event == "join" and len(here.texts) < 6:
            other = Rows(kind, data.draw(st.integers(1, 2)))
            other.next = here.next = here.next + 20_000
            if data.draw(st.booleans()):
                other.write([width_of(data)] * len(other.texts))
            here.join(other)
        elif event == "leave" and len(here.texts) > 1:
            here.leave(data.draw(st.integers(0, len(here.texts) - 1)))
        here.check(wide)


def test_buffers_shrink_after_a_long_row_leaves() -> None:
    here = Rows("full", 7)
    here.write([100] * 7)
    long = Rows("full", 1)
    long.write([8000])
    here.join(long)
    assert slots(here.cache[0]) <= 8 * capacity(8000)
    mx.eval(here.cache.state)
    before = mx.get_active_memory()
    here.leave(7)
    mx.eval(here.cache.state)
    assert slots(here.cache[0]) <= 7 * STEP
    assert before - mx.get_active_memory() > 0.9 * 2 * 8 * 8000 * DIM * 4  # nothing keeps it in memory
    here.check()


def test_nothing_is_read_beyond_a_buffer() -> None:
    """Where another head's entries are, or other memory."""
    buffer = mx.arange(6).reshape(1, 2, 3, 1)
    assert gathered(buffer, mx.array([[1, 3, 9]])).reshape(2, 3).tolist() == [[1, 2, 2], [4, 5, 5]]


def test_a_row_that_leaves_and_another_that_joins_cost_no_copy() -> None:
    here = Rows("full", 8)
    here.write([900] * 8)
    for _ in range(3):
        before = here.cache[0].keys.shape
        here.leave(2)
        assert here.cache[0].keys.shape == before
        other = Rows("full", 1)
        other.write([700])
        here.join(other)
        assert here.cache[0].keys.shape == before


def test_few_copies_are_made_while_a_text_grows_and_while_rows_leave() -> None:
    buffer, copies = mx.zeros((8, 1, 1, 1)), 0
    like = mx.zeros((8, 1, 1, 1))
    for end in range(1, 32_768):
        grown = room(buffer, like, 8, end)
        copies, buffer = copies + (grown is not buffer), grown
    assert copies < 40
    copied = 0
    for rows in range(7, 0, -1):
        shorter = shrunk(buffer, rows, 32_768)
        copied += 0 if shorter is buffer else rows
        buffer = shorter
    assert copied <= 3 * 8  # rows, over all copies


@cache
def alone() -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(3, 128, n)] for n in (5, 100, 17, 60, 2, 33)]
    params = em.SamplingParams(max_tokens=12)
    return [[*p, *em.Engine(TARGET, max_batch=1).generate([p], params)[0].tokens] for p in prompts]


@settings(max_examples=some(10))
@given(
    st.lists(st.sampled_from(["submit", "submit", "cancel", "step", "step", "step"]), max_size=30),
    st.randoms(use_true_random=False),
)
def test_no_batch_uses_more_than_its_rows_need(events: list[str], random: object) -> None:
    texts = alone()
    with steps_of(4):
        head = em.HeadProposer(tiny_head(TARGET))
        busy = em.Engine(TARGET, head, policy=em.FixedPolicy(DEPTH), max_batch=4, prefill_chunk=16)
        rows: list[tuple[int, RequestState]] = []
        for event in events:
            if event == "submit":
                which = random.randrange(6)  # type: ignore[attr-defined]
                rows.append((which, busy.prepare(texts[which][:-12], em.SamplingParams(max_tokens=12))))
                busy.submit(rows[-1][1])
            elif event == "cancel" and rows:
                busy.cancel(random.choice(rows)[1])  # type: ignore[attr-defined]
            else:
                busy.step()
            check(busy)
        while not busy.idle:
            busy.step()
            check(busy)
    for which, row in rows:
        assert row.tokens == texts[which][len(row.prompt) :][: len(row.tokens)]


def check(engine: em.Engine) -> None:
    """Check the target's and the head's buffers, with a draft after the longest row."""
    for batch in engine.groups.batches:
        rows, longest = len(batch.requests), max(request.length for request in batch.requests)
        assert isinstance(batch.state, HeadState)
        for caches in (batch.cache, batch.state.cache):
            for part in caches.parts:
                assert slots(part) <= bound(rows, longest + DEPTH + 1)
                assert part.keys is None or part.keys.shape[0] <= engine.max_batch


@pytest.mark.parametrize("length", [3, 9, 20, 21, 30])
def test_a_window_forgets_all_entries_after_a_length_and_none_before_it(length: int) -> None:
    """Snapshots are cut here: what a row read after the cut must not stay in the buffer, as it may be NaN."""
    window, written, dim = 8, length + 3, 2
    cache = RaggedCache([lambda lengths: RaggedWindow(lengths, window)], 1)
    [part] = cache.parts
    for position in range(written):
        entry = mx.full((1, 1, 1, dim), position + 1.0)
        part.update_and_fetch(entry, entry)
        cache.advance(1)
    cache.sync([written])
    part.zero(0, length)
    kept = {int(x) for x in np.array(part.keys)[0, 0, :, 0] if x}
    assert kept == {position + 1 for position in range(max(0, written - part.ring), length)}
