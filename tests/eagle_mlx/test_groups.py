"""Two groups of rows: same text, separate buffers, fair turns, and failures that stay in one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3

import eagle_mlx as em
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.engine.groups import RoundReads, size_of
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Context, Plan, RoundResult
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Drafter
from tests.architectures import VOCAB, tiny_model
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import Oracle, randomize, steps_of, tiny_config, tiny_target
from tests.full import diagonal, in_full, in_turn, mixed

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, VOCAB, n)] for n in (5, 150, 17, 40, 2, 120)]
TOKENS = in_full(14, 10)
GREEDY = em.SamplingParams(max_tokens=TOKENS)
ALONE = [em.Engine(TARGET, max_batch=1).generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]
DRAFTERS: list[Drafter | None] = [None, None, "ngrams", "model", "none"]
ALWAYS, NEVER = RoundReads(fixed=0, position=1 << 20), RoundReads(fixed=1 << 60, position=1)
"""Free weights, so that any difference in length separates rows; and weights that cost more than everything else."""


def grouped(engine: em.Engine, reads: RoundReads = ALWAYS) -> em.Engine:
    engine.groups.reads = reads
    return engine


def decode(engine: em.Engine, rows: Sequence[RequestState]) -> int:
    """Step to the end. Return the largest number of groups."""
    for row in rows:
        engine.submit(row)
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.snapshot().groups))
    return most


def requests(engine: em.Engine, params: em.SamplingParams = GREEDY) -> list[RequestState]:
    return [engine.prepare(prompt, params) for prompt in PROMPTS]


class Wandering:
    """A policy that cycles through all plans."""

    wants_trees = True

    def __init__(self) -> None:
        self.plans = [Plan(0), Plan(3), Plan(0), Plan(0), Plan(5, stop_below=0.4), Plan(2, 6), Plan(0), Plan(1)]
        self.rounds = 0

    def plan(self, context: Context) -> Plan:
        plan = self.plans[self.rounds % len(self.plans)]
        return plan if context.can.trees or not plan.is_tree else replace(plan, nodes=0)

    def observe(self, result: RoundResult) -> None:
        self.rounds += 1


CACHES = ["full", "quantized", "window", "recurrent"]
SAMPLING = {
    "greedy": GREEDY,
    "seeded": em.SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=3),
    "penalised": em.SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=3, repetition_penalty=1.2),
}
CASES = in_full(mixed, diagonal)(CACHES, in_turn(PROPOSERS), SAMPLING)


def target_of(cache: str) -> em.Target:
    if cache in ("full", "quantized"):
        return TARGET if cache == "full" else wide()
    made = tiny_model({"window": "gemma3_text", "recurrent": "qwen3_next"}[cache])
    randomize(made, 1, 0.2)
    return em.Target(made)


def wide() -> em.Target:
    """Return a target with heads of 32 numbers, which can be quantized."""
    model = qwen3.Model(qwen3.ModelArgs(**tiny_config() | {"head_dim": 32}))  # type: ignore[arg-type]
    randomize(model, 0, 0.2)
    return em.Target(model)


@pytest.mark.parametrize(("cache", "drafts", "sampling"), CASES)
def test_text_does_not_depend_on_groups(cache: str, drafts: str, sampling: str) -> None:
    target, bits = target_of(cache), 8 if cache == "quantized" else None
    texts = []
    for groups in (1, 2):
        engine = em.Engine(
            target,
            PROPOSERS[drafts](target),
            policy=Wandering(),
            max_batch=4,
            prefill_chunk=64,
            kv_bits=bits,
            groups=groups,
        )
        with steps_of(8):
            rows = requests(grouped(engine), SAMPLING[sampling])
            assert decode(engine, rows) == groups
        texts.append([row.tokens for row in rows])
        assert [row.finish_reason for row in rows] == ["length"] * len(rows)
    assert texts[0] == texts[1]


SICK = 95
"""A token that `sickly` targets read as NaN."""


def sickly(cache: str) -> em.Target:
    if cache == "quantized":
        config = tiny_config(vocab=VOCAB) | {"head_dim": 32, "tie_word_embeddings": False}
        made: Any = qwen3.Model(qwen3.ModelArgs(**config))  # type: ignore[arg-type]
    else:
        made = tiny_model({"full": "llama", "window": "gpt_oss", "recurrent": "qwen3_next"}[cache])
    randomize(made, 1, 0.2)
    made.model.embed_tokens.weight[SICK] = mx.nan
    return em.Target(made)


@pytest.mark.parametrize(("cache", "drafts"), diagonal(CACHES, ["none", "head", "draft model"]))
def test_an_unchecked_row_leaves_clean_slots(cache: str, drafts: str) -> None:
    """Its keys are NaN, and it is cancelled before a round notices. A shorter row gets its place.

    One of eight rows can leave without a copy of the others, so its place remains.
    """
    if (cache, drafts) == ("recurrent", "draft model"):
        drafts = "none"
    target, bits = sickly(cache), 8 if cache == "quantized" else None
    rng = np.random.default_rng(3)
    long, sick, short, after = ([int(t) for t in rng.integers(3, 90, n)] for n in (180, 170, 4, 140))
    sick[100] = SICK
    lone = em.Engine(target, max_batch=1, kv_bits=bits)
    params = em.SamplingParams(max_tokens=in_full(24, 14), logit_bias={SICK: -1e4})
    wanted = {tuple(p): lone.generate([p], params)[0].tokens for p in (long, short, after)}
    engine = em.Engine(
        target, PROPOSERS[drafts](target), policy=em.FixedPolicy(2), max_batch=9, prefill_chunk=2000, kv_bits=bits
    )
    engine = grouped(engine, ALWAYS)
    rows = [engine.prepare(prompt, params) for prompt in (*[long] * 7, short)]
    for row in rows:
        engine.submit(row)
    while not all(row.tokens for row in rows):
        engine.step()
    for attempt in range(6):  # the group that is next when it joins is not known
        bad = engine.prepare(sick, em.SamplingParams(max_tokens=60))
        engine.submit(bad)
        while bad in engine.admission.waiting or bad in engine.admission.prefilling:
            engine.step()
        if bad.error is None:
            break
        for _ in range(attempt):
            engine.step()
    assert bad.error is None
    engine.cancel(bad)
    rows.append(engine.prepare(after, params))
    engine.submit(rows[-1])
    while not engine.idle:
        engine.step()
    assert [row.error for row in rows] == [None] * 9
    assert [row.tokens for row in rows] == [wanted[tuple(row.prompt)] for row in rows]


@settings(max_examples=in_full(30, 7))
@given(
    st.lists(
        st.sampled_from(["submit", "submit", "cancel", "pause", "step", "step", "other costs", "other drafts"]),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from([*PROPOSERS]),
    st.integers(0, 3),
)
def test_rows_that_join_leave_and_move_keep_their_text(events: list[str], random: Any, drafts: str, depth: int) -> None:
    """Costs change at random, so rows are separated and joined at any time. So does what drafts."""
    engine = grouped(
        em.Engine(
            TARGET,
            PROPOSERS[drafts](TARGET),
            policy=em.FixedPolicy(depth),
            max_batch=4,
            prefill_chunk=32,
            prefix_cache_bytes=1 << 20,
        )
    )
    submitted: list[tuple[int, RequestState]] = []

    def step() -> None:
        engine.step()
        current = engine.snapshot().requests
        assert len(set(current)) == len(current)
        assert {row for _, row in submitted if row.finish_reason is None} == {
            r for r in current if r.finish_reason is None
        }

    with steps_of(4):
        for event in events:
            if event == "submit":
                which = random.randrange(len(PROMPTS))
                params = replace(GREEDY, drafter=random.choice(DRAFTERS))
                submitted.append((which, engine.prepare(PROMPTS[which], params)))
                engine.submit(submitted[-1][1])
            elif event == "cancel" and submitted:
                engine.cancel(random.choice(submitted)[1])
            elif event == "pause" and submitted:
                engine.pause(random.choice(submitted)[1])
            elif event == "other costs":
                grouped(engine, random.choice([ALWAYS, NEVER, RoundReads(10_000, 100)]))
            elif event == "other drafts":
                engine.drafter = random.choice(DRAFTERS)
                engine.use_policy(em.FixedPolicy(random.randrange(4)))
            step()
        while not engine.idle:
            step()
    for which, row in submitted:
        assert row.tokens == ALONE[which][: len(row.tokens)]
        assert row.finish_reason in ("length", "cancelled")


def test_a_long_row_does_not_enlarge_the_buffers_of_short_ones() -> None:
    """Seven short rows and one of 8,000, or of the same number of steps of a smaller buffer."""
    target, step = tiny_target(layers=1), in_full(256, 16)
    target.context_length, long = 10_000, step * 125 // 4
    with steps_of(step):
        engine = em.Engine(target, max_batch=8)
        engine.groups.reads = RoundReads(10, 1)
        params = em.SamplingParams(max_tokens=40, ignore_eos=True)
        rows = [engine.prepare([5] * n, params) for n in (long, *[step // 4] * 7)]
        for row in rows:
            engine.submit(row)
        while engine.active < 8:
            engine.step()
    keys = [batch.cache.layers[0].keys for batch in engine.groups.batches]
    assert sorted(x.shape[0] for x in keys) == [1, 7]
    assert sum(x.shape[0] * x.shape[2] for x in keys) <= 1.2 * long + 7 * 2 * step


def test_a_row_gets_its_own_group_only_if_padding_costs_more() -> None:
    """Lengths of 5 and 40 make 105 positions of padding, and more if the long row's drafts are good."""
    engine = grouped(em.Engine(TARGET, Uneven(), policy=em.FixedPolicy(3), max_batch=4), RoundReads(150, 1))
    rows = [engine.prepare(PROMPTS[3], em.SamplingParams(max_tokens=120))]
    slow = em.SamplingParams(max_tokens=120, num_speculative_tokens=0)
    rows += [engine.prepare(PROMPTS[0], slow) for _ in range(3)]
    for row in rows:
        engine.submit(row)
    crossed = []
    while rows[0].finish_reason is None:
        engine.step()
        if engine.active == 4 and rows[0].finish_reason is None:
            padding = 3 * (rows[0].length - rows[1].length)
            crossed.append((padding, len(engine.snapshot().groups)))
    apart = [padding for padding, groups in crossed if groups == 2]
    together = [padding for padding, groups in crossed if groups == 1]
    assert crossed == [(padding, 1) for padding in together] + [(padding, 2) for padding in apart]
    assert 100 < together[0] < 150 < apart[0] < apart[-1]
    assert [row.tokens[:TOKENS] for row in rows[:2]] == [ALONE[3], ALONE[0]]


class Uneven(em.NgramProposer):
    """Knows the long row's text."""

    def open(self, prompts: Sequence[Sequence[int]]) -> Any:
        state = super().open(prompts)
        for row, prompt in zip(state.rows, prompts, strict=True):
            if list(prompt) == PROMPTS[3]:
                row.tokens = [*PROMPTS[3], *long_answer(), *PROMPTS[3]]
        return state


@cache
def long_answer() -> list[int]:
    return em.Engine(TARGET, max_batch=1).generate([PROMPTS[3]], em.SamplingParams(max_tokens=120))[0].tokens


def test_groups_take_turns_a_round_each() -> None:
    engine = grouped(em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(0), max_batch=4))
    rows = [engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=60, ignore_eos=True)) for i in (0, 1, 4)]
    for row in rows:
        engine.submit(row)
    while engine.active < 3:
        engine.step()
    before = [len(row.tokens) for row in rows]
    for _ in range(40):
        engine.step()
        new = [len(row.tokens) - was for row, was in zip(rows, before, strict=True)]
        assert max(new) - min(new) <= 1
    assert new == [20] * 3
    assert engine.active == 3


@pytest.mark.parametrize("drafts", ["none", "n-grams"])
def test_plain_rounds_are_dispatched_during_those_of_the_other_group(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round also gets its own time, on a device that is done when dispatch returns."""
    now, log, told = [100.0], list[tuple[str, int]](), list[tuple[int, float]]()
    dispatch, collect = Batch.dispatch, Round.collect

    def slow(batch: Batch, *args: Any) -> Round:
        now[0] += 10.0 if len(batch.requests) == 1 else 4.0
        log.append(("dispatch", len(batch.requests)))
        return dispatch(batch, *args)

    def noted(collected: Round) -> RoundResult:
        log.append(("collect", len(collected.batch.requests)))
        return collect(collected)

    engine = grouped(em.Engine(TARGET, PROPOSERS[drafts](TARGET), policy=em.FixedPolicy(0), max_batch=4))
    engine.runner.clock = lambda: now[0]
    rows = [engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=60, ignore_eos=True)) for i in (0, 1, 4)]
    for row in rows:
        engine.submit(row)
    while engine.active < 3:
        engine.step()
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(Batch, "dispatch", slow)
    monkeypatch.setattr(Round, "collect", noted)
    engine.observer = lambda result: told.append((result.rows, result.seconds))
    for _ in range(8):
        engine.step()
    assert [kind for kind, _ in log[-8:]] == ["dispatch", "collect"] * 4
    assert all(log[i][1] != log[i + 1][1] for i in range(len(log) - 8, len(log), 2))  # the other group's is pending
    assert set(told[1:]) == {(1, 10.0), (2, 4.0)}
    assert [rows for rows, _ in told[1:5]] in ([1, 2, 1, 2], [2, 1, 2, 1])
    monkeypatch.undo()
    while not engine.idle:
        engine.step()
    assert [row.tokens[:TOKENS] for row in rows] == [ALONE[0], ALONE[1], ALONE[4]]


def test_memory_for_long_rows_is_counted_per_group() -> None:
    """The quota fits one row of 250 and three of 60. Without separation, the long row would make it four of 250."""
    size = size_of(TARGET, None, None)
    with steps_of(4):
        allowed = size.nbytes(1, 250) + size.nbytes(3, 60)
        together = {}
        for groups in (1, 2):
            engine = em.Engine(TARGET, max_batch=4, kv_bytes=allowed, groups=groups)
            long = engine.prepare([7] * 230, em.SamplingParams(max_tokens=20, ignore_eos=True))
            short = [engine.prepare(PROMPTS[3], em.SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(3)]
            for row in [long, *short]:
                engine.submit(row)
            most = 0
            while not engine.idle:
                engine.step()
                real = sum(x.nbytes for batch in engine.groups.batches for x in batch.cache.state)
                most = max(most, engine.active)
                assert real <= engine.kv_budget.set_aside(engine.kv_budget.admitted) <= allowed
                assert engine.snapshot().kv_used <= allowed
            together[groups] = most
            assert [row.tokens[:TOKENS] for row in short] == [ALONE[3]] * 3
    assert together[1] < 4 == together[2]


def test_rows_stay_in_one_batch_if_the_proposer_cannot_move_them() -> None:
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, ALONE, strict=True)}
    engine = grouped(em.Engine(TARGET, Oracle(texts, 0.3), policy=em.FixedPolicy(3), max_batch=4))  # type: ignore[arg-type]
    rows = requests(engine)
    assert decode(engine, rows) == 1
    assert engine.kv_budget.groups == 1
    assert [row.tokens for row in rows] == ALONE


@pytest.mark.parametrize("groups", [0, 3])
def test_there_are_one_or_two_groups(groups: int) -> None:
    with pytest.raises(ConfigError, match=f"groups must be 1 or 2; got {groups}"):
        em.Engine(TARGET, groups=groups)


def parted(depth: int = 2, **settings: Any) -> tuple[em.Engine, list[RequestState], list[RequestState]]:
    """Return an engine with a group of two short rows and one of two long rows, and both groups' requests."""
    engine = grouped(
        em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(depth), max_batch=4, **settings), RoundReads(50, 1)
    )
    rows = [engine.prepare(PROMPTS[i], GREEDY) for i in (0, 4, 1, 5)]
    for row in rows:
        engine.submit(row)
    while engine.active < 4:
        engine.step()
    sizes = [[len(row.prompt) for row in rows] for rows in engine.snapshot().groups]
    assert sorted(map(max, sizes)) == [5, 150]
    return engine, rows[:2], rows[2:]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("which", ["short", "long"])
def test_cancelling_a_group_leaves_the_other_intact(depth: int, which: str) -> None:
    engine, short, long = parted(depth)
    gone, left = (short, long) if which == "short" else (long, short)
    engine.step()
    engine.cancel(gone[0])
    engine.step()
    engine.cancel(gone[1])
    assert len(engine.snapshot().groups) == 1
    while not engine.idle:
        engine.step()
    assert [row.finish_reason for row in (*gone, *left)] == ["cancelled"] * 2 + ["length"] * 2
    for row in (*gone, *left):
        assert row.tokens == ALONE[PROMPTS.index(row.prompt)][: len(row.tokens)]


@pytest.mark.parametrize(
    ("name", "which", "depth"), mixed(["dispatch", "collect", "release"], ["short", "long"], [0, 2])
)
def test_a_round_that_raises_ends_only_its_own_group(
    name: str, which: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, short, long = parted(depth)
    gone, left = (short, long) if which == "short" else (long, short)
    owner: type = Round if name == "collect" else Batch
    real = getattr(owner, name)

    def broken(self: Any, *args: Any) -> Any:
        batch = self.batch if name == "collect" else self
        if gone[0] in batch.requests and (name != "release" or gone[0].finish_reason):
            raise MemoryError("no room left")
        return real(self, *args)

    monkeypatch.setattr(owner, name, broken)
    raised = 0
    for _ in range(40):
        try:
            engine.step()
        except MemoryError:
            raised += 1
            assert {row.finish_reason for row in gone} <= {"error", "length"}
            assert engine.active == (2 if left[0].finish_reason is None else 0)
    assert raised == 1
    assert engine.idle
    assert [row.tokens for row in left] == [ALONE[PROMPTS.index(row.prompt)] for row in left]
    for row in gone:
        assert row.tokens == ALONE[PROMPTS.index(row.prompt)][: len(row.tokens)]


@settings(max_examples=in_full(20, 6))
@given(st.sampled_from(["append", "take", "release"]), st.integers(1, 4), st.booleans(), st.integers(0, 2))
def test_a_move_that_fails_loses_no_request(name: str, nth: int, late: bool, depth: int) -> None:
    """Rows of the groups that were to change end with the error. Waiting rows and the engine continue."""
    real, calls = getattr(Batch, name), count(1)

    def short_of_memory(self: Batch, *args: Any) -> Any:
        out = real(self, *args) if late else None
        if next(calls) == nth:
            raise MemoryError("no room left")
        return out if late else real(self, *args)

    engine = grouped(
        em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(depth), max_batch=4, prefill_chunk=32), NEVER
    )
    rows = requests(engine)
    for row in rows:
        engine.submit(row)
    raised = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batch, name, short_of_memory)
        for steps in count():
            if engine.idle:
                break
            grouped(engine, [ALWAYS, NEVER][steps // 5 % 2])
            try:
                engine.step()
            except MemoryError:
                raised += 1
    assert raised <= 1
    for row, expected in zip(rows, ALONE, strict=True):
        assert row.finish_reason in ("length", "error")
        assert row.tokens == expected[: len(row.tokens)]
        assert (row.finish_reason == "length") == (row.tokens == expected) or row.error
    assert [output.tokens for output in engine.generate(PROMPTS[:3], GREEDY)] == ALONE[:3]


def test_observers_see_the_rows_of_both_groups() -> None:
    engine, short, long = parted()
    size, lengths = engine.kv_budget.size, [[row.length for row in rows] for rows in (short, long)]
    assert (engine.active, engine.waiting) == (4, 0)
    assert engine.snapshot().kv_used == sum(size.nbytes(2, max(group)) for group in lengths)
    told = list[RoundResult]()
    engine.observer = told.append
    before = sum(len(row.tokens) for row in (*short, *long))
    while not engine.idle:
        engine.step()
    assert sum(result.emitted for result in told) == 4 * TOKENS - before
    assert {result.rows for result in told} <= {1, 2}
    assert (engine.active, engine.snapshot().kv_used) == (0, 0)


def test_each_group_is_planned_separately_and_both_learn() -> None:
    """Alternate between seven rows, whose drafts are expensive, and one, whose drafts are nearly free.

    A single policy would take each round for a change of plan: it decoded seven rows plainly 4 times of 100, and
    drafted as much as pays for the one row 25 times.
    """
    policy = em.ThroughputPolicy(max_depth=4)
    plans: dict[int, list[int]] = {7: [], 1: []}
    for group, rows, per_token in ((0, 7, 2.0), (1, 1, 0.01)) * 100:
        plan = policy.plan(Context(rows, group=group))
        drafted = [plan.depth] * rows
        plans[rows].append(plan.depth)
        taken, seconds = [1 + plan.depth] * rows, 1 + per_token * plan.depth
        policy.observe(RoundResult(plan, drafted, drafted, taken, seconds, group=group))
    assert plans[7].count(0) > 80
    assert plans[1].count(4) > 80


@pytest.mark.parametrize(("limit", "drafts"), [(5, True), (4, False)])
def test_a_policy_that_stops_drafting_under_load_counts_the_rows_of_both_groups(limit: int, drafts: bool) -> None:
    engine, _, _ = parted()
    engine.use_policy(em.AcceptancePolicy(4, disable_at_rows=limit))
    results = list[RoundResult]()
    engine.observer = results.append
    engine.step()
    engine.step()
    assert {result.group for result in results} == {0, 1}
    assert any(result.plan.size for result in results) == drafts


def test_a_failed_round_ends_only_its_group() -> None:
    """An observer raises after a round. The other group and a prompt in prefill continue."""
    engine, short, long = parted(prefill_chunk=160)
    late = engine.prepare([9] * 150 + PROMPTS[5], GREEDY)
    engine.cancel(short[1])
    engine.submit(late)
    seen = count()

    def observer(result: RoundResult) -> None:
        if next(seen) == 0:
            raise RuntimeError("the observer is broken")

    engine.observer = observer
    with pytest.raises(RuntimeError):
        engine.step()
    assert late.finish_reason is None
    assert engine.active in (1, 2)
    while not engine.idle:
        engine.step()
    assert late.finish_reason == "length"
    for row in (short[0], *long):
        expected = ALONE[PROMPTS.index(row.prompt)]
        assert row.tokens == expected[: len(row.tokens)]
        assert (row.finish_reason == "length") == (len(row.tokens) == TOKENS)
