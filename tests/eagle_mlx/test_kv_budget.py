"""Memory for keys and values stays within its limit, no request waits forever, and requests that cannot fit say why."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.engine.admission import MOST_SKIPS, Admission
from eagle_mlx.engine.groups import KVBudget, size_of
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from tests import disk_tier
from tests.architectures import VOCAB, tiny_model
from tests.fakes import steps_of, tiny_head, tiny_target
from tests.full import diagonal, some

TARGET = tiny_target()
HEAD = em.HeadProposer(tiny_head(TARGET))
HEAD.bind(TARGET)
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 100, 17, 60, 2, 33, 140)]
TOKENS = 10
ALONE = [
    em.Engine(TARGET, max_batch=1).generate([prompt], em.SamplingParams(max_tokens=TOKENS))[0].tokens
    for prompt in PROMPTS
]


def taken(engine: em.Engine) -> int:
    """Return the actual bytes of all caches: rows, proposer, and prompts in prefill."""
    batches = [*engine.groups.batches, *(prefill.batch for prefill in engine.admission.prefills)]
    states = [batch.state for batch in batches]
    caches = [batch.cache for batch in batches] + [state.cache for state in states if hasattr(state, "cache")]
    return sum(x.nbytes for cache in caches for x in cache.state)


@pytest.mark.parametrize(
    ("name", "rows"),
    diagonal(["deepseek_v3", "falcon_h1", "gemma3_text", "gpt_oss", "lfm2", "mamba2", "qwen3_next"], [1, 3]),
)
def test_sizes_equal_those_of_real_caches(name: str, rows: int) -> None:
    target = em.Target(tiny_model(name))
    size, cache = size_of(target, None, None), RaggedCache.of(target.model, rows)
    read = 0
    with steps_of(4):
        for count in (1, 30, 1, 60):
            target.forward(mx.array(RNG.integers(0, VOCAB, (rows, count)), mx.int32), cache)
            read += count
            cache.advance(count)
            cache.compact()
            mx.eval(cache.state)
            real = sum(x.nbytes for x in cache.state)
            assert 0.6 * size.nbytes(rows, read) - 16 * rows * size.position <= real <= size.nbytes(rows, read)


CACHES = ("deepseek_v3", "falcon_h1", "gemma3_text", "gpt_oss", "lfm2", "mamba2", "qwen3_next", "quantised")


@pytest.mark.parametrize(
    ("name", "drafter", "chunk"),
    [*diagonal(CACHES, ["none", "draft model"], [512]), ("five windows of six", "none", 200)],
)
def test_after_long_prompts_caches_hold_no_more_than_is_counted(name: str, drafter: str, chunk: int) -> None:
    """Wide forwards of a prompt need more slots of a sliding window than decoding does, also between its chunks."""
    mostly_windows = {"num_hidden_layers": 6, "sliding_window_pattern": 6}
    models = {"five windows of six": lambda: em.Target(tiny_model("gemma3_text", **mostly_windows))}
    target, bits = models.get(name, lambda: disk_tier.target(name))(), 8 if name == "quantised" else None
    proposer = em.DraftModelProposer(disk_tier.target(name)) if drafter == "draft model" else None
    lengths = [400] if proposer else [400, 150, 390]  # a draft model that catches up in a batch pads the other rows
    prompts = [[int(t) for t in RNG.integers(3, VOCAB, n)] for n in lengths]
    with steps_of(4):
        engine = em.Engine(target, proposer, policy=em.FixedPolicy(3), max_batch=3, prefill_chunk=chunk, kv_bits=bits)
        for prompt in prompts:
            engine.submit(engine.prepare(prompt, em.SamplingParams(max_tokens=12, ignore_eos=True)))
        while not engine.idle:
            engine.step()
            assert taken(engine) <= engine.snapshot().kv_used


def test_quantized_keys_and_the_proposers_cache_count() -> None:
    target = em.Target(tiny_model("gpt_oss"))
    whole, small = size_of(TARGET, None, None), size_of(TARGET, HEAD, None)
    assert small.position == whole.position * (TARGET.num_layers + 1) // TARGET.num_layers
    assert size_of(TARGET, em.DraftModelProposer(TARGET), None).position == 2 * whole.position
    assert size_of(TARGET, em.NgramProposer(), None) == whole
    assert size_of(target, None, None).windows


def test_sizes_are_known_without_computing_anything() -> None:
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert size_of(TARGET, HEAD, None).position > 0
    assert mx.get_peak_memory() - before < 4096  # a few numbers, but neither logits nor buffers


def budget_for(rows: int, longest: int) -> int:
    return size_of(TARGET, HEAD, None).nbytes(rows, longest)


def test_a_snapshot_tells_the_caches_of_the_head_from_the_targets() -> None:
    engine = em.Engine(TARGET, HEAD, policy=em.FixedPolicy(3))
    request = engine.prepare(PROMPTS[0], em.SamplingParams(max_tokens=TOKENS))
    engine.submit(request)
    while not request.tokens:
        engine.step()
    now, own = engine.snapshot(), size_of(TARGET, None, None).nbytes(1, request.length)
    assert now.draft_kv_used == engine.kv_budget.size.nbytes(1, request.length) - own > 0
    assert now.kv_used == own + now.draft_kv_used


@settings(max_examples=some(15))
@given(
    st.lists(st.sampled_from(["submit", "submit", "submit", "cancel", "step", "step"]), max_size=40),
    st.randoms(use_true_random=False),
    st.sampled_from([(1, 150), (2, 150), (3, 80), (4, 150)]),
    st.booleans(),
)
def test_rows_and_prefixes_stay_within_the_budget(
    events: list[str], random: object, room: tuple[int, int], keeps: bool
) -> None:
    with steps_of(4):
        allowed = max(budget_for(*room), budget_for(1, 150))
        busy = em.Engine(
            TARGET,
            HEAD,
            policy=em.FixedPolicy(3),
            max_batch=4,
            prefill_chunk=16,
            prefix_cache_bytes=allowed if keeps else 0,
            kv_bytes=allowed,
        )
        submitted: list[tuple[int, RequestState]] = []

        def step() -> None:
            busy.step()
            snapshot = busy.snapshot()
            set_aside = busy.kv_budget.set_aside(busy.kv_budget.admitted)
            assert taken(busy) <= set_aside <= allowed
            assert snapshot.kv_used <= set_aside
            if busy.prefixes is not None:
                assert busy.prefixes.nbytes + set_aside <= allowed

        for event in events:
            if event == "submit":
                which = random.randrange(len(PROMPTS))  # type: ignore[attr-defined]
                submitted.append((which, busy.prepare(PROMPTS[which], em.SamplingParams(max_tokens=TOKENS))))
                busy.submit(submitted[-1][1])
            elif event == "cancel" and submitted:
                busy.cancel(random.choice(submitted)[1])  # type: ignore[attr-defined]
            else:
                step()
        while not busy.idle:
            step()
    for which, request in submitted:
        assert request.finish_reason in ("length", "cancelled")
        assert request.tokens == ALONE[which][: len(request.tokens)]


def test_a_request_that_never_fits_is_refused_with_numbers() -> None:
    engine = em.Engine(TARGET, HEAD, kv_bytes=budget_for(1, 100))
    assert engine.kv_budget.longest == 100
    for most in (10, TARGET.context_length):
        with pytest.raises(PromptError, match=r"140 tokens needs .* limit is .* for 100 tok.*kv"):
            engine.prepare(PROMPTS[6], em.SamplingParams(max_tokens=most))


@pytest.mark.parametrize("most", [41, TARGET.context_length])
def test_a_request_gets_as_many_tokens_as_fit(most: int) -> None:
    engine = em.Engine(TARGET, HEAD, kv_bytes=budget_for(1, 100))
    assert engine.prepare(PROMPTS[3], em.SamplingParams(max_tokens=40)).limit == 40
    [output] = engine.generate([PROMPTS[3]], em.SamplingParams(max_tokens=most, ignore_eos=True))
    assert (output.finish_reason, len(output.tokens)) == ("length", 40)


def test_a_budget_must_hold_something() -> None:
    with pytest.raises(ConfigError, match="kv_bytes must be a number of at least 1"):
        em.Engine(TARGET, kv_bytes=0)


def test_by_default_the_budget_is_a_share_of_free_memory() -> None:
    assert em.Engine(TARGET).kv_budget.longest == TARGET.context_length


def test_prefixes_give_way_to_rows() -> None:
    allowed = budget_for(3, 150)
    engine = em.Engine(
        TARGET, HEAD, policy=em.FixedPolicy(2), max_batch=4, prefix_cache_bytes=allowed, kv_bytes=allowed
    )
    params = em.SamplingParams(max_tokens=TOKENS)
    assert engine.prefixes is not None
    for prompt in PROMPTS:
        engine.generate([prompt], params)
    kept = len(engine.prefixes.tree.used)
    assert kept > 2
    rows = [engine.prepare([int(t) for t in RNG.integers(3, 128, 140)], params) for _ in range(3)]
    for row in rows:
        engine.submit(row)
    while engine.active < 3:
        engine.step()
    assert len(engine.prefixes.tree.used) < kept
    assert engine.prefixes.nbytes + engine.kv_budget.set_aside(rows) <= allowed


def request(prompt: int, tokens: int = 10, client: str = "") -> RequestState:
    params = em.SamplingParams(max_tokens=tokens)
    return RequestState(Request([3] * prompt, params, seed=0, limit=tokens, stop_ids=frozenset(), client=client))


class Seats:
    """An admission without an engine: which requests it admits, and when they end."""

    def __init__(self, nbytes: int, seats: int = 4):
        self.budget = KVBudget(nbytes, CacheSize(position=1), context=10_000)
        self.admission = Admission(TARGET, None, 512, self.budget)
        self.seats = seats
        self.let_in: list[RequestState] = []

    def submit(self, *requests: RequestState) -> None:
        for row in requests:
            self.budget.limited(row.request)
            self.admission.waiting.append(row)

    def admit(self) -> list[RequestState]:
        new = []
        while len(self.budget.admitted) < self.seats:
            following = self.admission.waiting.first(partial(self.budget.fits, self.budget.admitted))
            if following is None:
                break
            self.admission.take(following)
            new.append(following)
            assert self.budget.set_aside(self.budget.admitted) <= self.budget.nbytes
        self.let_in += new
        return new

    @staticmethod
    def end(requests: Sequence[RequestState]) -> None:
        for row in requests:
            row.finish("length")


BYTES = CacheSize(position=1).nbytes(4, 1000)
"""Enough for four rows of a thousand tokens, or one of 4,600."""


def test_short_requests_pass_one_that_waits_for_memory_a_limited_number_of_times() -> None:
    seats = Seats(BYTES)
    short, long = [request(400, client="a") for _ in range(60)], request(4000, client="b")
    seats.submit(*short[:4])
    assert seats.admit() == short[:4]
    seats.submit(long, *short[4:])
    passed = 0
    while long not in seats.let_in:
        rows = seats.budget.admitted
        assert rows
        seats.end(rows[:1])
        passed += len([row for row in seats.admit() if row is not long])
    assert passed <= MOST_SKIPS
    assert seats.budget.admitted == [long]


@settings(max_examples=some(100))
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([5, 300, 700, 1500, 4000]), st.integers(0, 3)),
        min_size=1,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_no_request_waits_forever(arrivals: list[tuple[str, int, int]], random: object) -> None:
    """Only a few requests may pass the next in turn, and once rows end, every request is admitted."""
    seats, submitted = Seats(BYTES), []
    passes: dict[int, int] = {}
    for client, prompt, leave in arrivals:
        submitted.append(request(prompt, client=client))
        seats.submit(submitted[-1])
        before = list(seats.admission.waiting)
        for row in seats.admit():
            for passed in before[: before.index(row)]:
                passes[id(passed)] = passes.get(id(passed), 0) + 1
            before.remove(row)
        rows = list(seats.budget.admitted)
        random.shuffle(rows)  # type: ignore[attr-defined]
        seats.end(rows[:leave])
    assert all(count <= MOST_SKIPS for count in passes.values())
    for _ in itertools.count():
        if not seats.admission.waiting:
            break
        new = seats.admit()
        assert new or seats.budget.admitted
        seats.end(seats.budget.admitted[:1])
    assert sorted(map(id, seats.let_in)) == sorted(map(id, submitted))


def test_a_long_request_is_answered_while_short_ones_keep_arriving() -> None:
    with steps_of(4):
        allowed = max(budget_for(1, 150), budget_for(4, 20))
        engine = em.Engine(TARGET, HEAD, policy=em.FixedPolicy(2), max_batch=4, prefill_chunk=16, kv_bytes=allowed)
        params = em.SamplingParams(max_tokens=TOKENS)
        long = engine.prepare(PROMPTS[6], params)
        for steps in range(400):
            short = engine.prepare(PROMPTS[4], params, client=str(steps % 3))
            engine.submit(short)
            if steps == 6:
                engine.submit(long)
            engine.step()
            if long.finish_reason:
                break
        assert long.tokens == ALONE[6]


def test_a_request_cancelled_while_it_waits_for_memory_blocks_no_other() -> None:
    seats = Seats(BYTES)
    short, long = [request(400, client="a") for _ in range(20)], request(4000, client="b")
    seats.submit(*short[:4])
    seats.admit()
    seats.submit(long, *short[4:])
    for _ in range(MOST_SKIPS):
        seats.end(seats.budget.admitted[:1])
        seats.admit()
    seats.end(seats.budget.admitted[:1])
    assert seats.admit() == []
    long.finish("cancelled")
    seats.admission.remove_ended()
    assert len(seats.admit()) == 1


@pytest.mark.parametrize("ends", ["cancelled", "error"])
def test_an_idle_engine_keeps_no_request_that_ended_while_its_prompt_was_read(ends: str) -> None:
    """Neither its tokens nor the embeddings of its images."""
    engine = em.Engine(TARGET, HEAD, prefill_chunk=8)
    request = engine.prepare(PROMPTS[1], em.SamplingParams(max_tokens=TOKENS))
    engine.submit(request)
    engine.step()
    if ends == "cancelled":
        engine.cancel(request)
    else:
        engine.abandon("a test ends it")
    assert engine.idle
    assert request.finish_reason == ends
    kept = weakref.ref(request)
    del request
    gc.collect()
    assert kept() is None
