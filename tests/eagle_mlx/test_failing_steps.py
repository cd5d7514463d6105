"""Steps that raise: every request has an owner at any time, and what remains is valid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.engine.groups import RoundReads
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix import PrefixCache
from eagle_mlx.plan import Plan, RoundResult
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState
from eagle_mlx.proposers.ngram import NgramState
from eagle_mlx.request_state import RequestState
from tests.eagle_mlx.heads import IN_BLOCKS
from tests.fakes import tiny_target
from tests.full import in_full

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 70, 17, 40, 2, 33)]
COUNT = 12
ALONE = [
    em.Engine(TARGET, max_batch=1).generate([prompt], em.SamplingParams(max_tokens=COUNT))[0].tokens
    for prompt in PROMPTS
]
HEADS = [None, *(em.HeadProposer(make(TARGET)) for make in IN_BLOCKS.values())]
METHODS = ("open", "prefill", "draft", "observe", "append", "remove")


class Broken(RuntimeError):
    """Raised by the proposers here."""


class Failing(Proposer):
    """A proposer that drafts at random and raises on the `nth` call of one of its methods, counted from 1.

    By then the method has done half of its work.
    """

    name = "failing"
    aux_layers = (0, 2)

    def __init__(self, method: str, nth: int, every: bool = False, head: em.HeadProposer | None = None):
        """`head`: drafts in place of chance."""
        self.method, self.nth, self.every, self.head = method, nth, every, head
        if head is not None:
            self.aux_layers = head.aux_layers
        self.calls = 0
        self.rng = np.random.default_rng(nth)

    def bind(self, target: em.Target) -> None:
        """Accept any target."""
        if self.head is not None:
            self.head.bind(target)

    def called(self, method: str) -> None:
        if method != self.method:
            return
        self.calls += 1
        if self.calls == self.nth or (self.every and self.calls > self.nth):
            raise Broken(f"{method} is broken")

    def open(self, prompts: Sequence[Sequence[int]]) -> FailingState:
        self.called("open")
        state = None if self.head is None else self.head.open(prompts)
        return FailingState(self, [list(prompt) for prompt in prompts], state)


class FailingState(ProposerState):
    def __init__(self, proposer: Failing, rows: list[list[int]], head: ProposerState | None):
        self.proposer, self.rows, self.head = proposer, rows, head

    def prefill(self, seen: Observation) -> None:
        if self.head is not None:
            self.head.prefill(seen)
        self.proposer.called("prefill")

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        drafted = None if self.head is None else self.head.draft(plan, sampling, positions)
        self.proposer.called("draft")
        if drafted is not None:
            return drafted
        rng, rows, depth = self.proposer.rng, len(self.rows), plan.depth
        return Draft(mx.array(rng.integers(0, 128, (rows, depth))), mx.array(rng.integers(0, depth + 1, rows)))

    def observe(self, seen: Observation) -> None:
        for row, tokens in zip(self.rows, seen.tokens, strict=True):
            row.extend(tokens)
        if self.head is not None:
            self.head.observe(seen)
        self.proposer.called("observe")

    def append(self, other: FailingState) -> None:
        self.rows.extend(other.rows)
        if self.head is not None and other.head is not None:
            self.head.append(other.head)
        self.proposer.called("append")

    def remove(self, row: int) -> None:
        self.rows[row] = self.rows[-1]
        if self.head is not None:
            self.head.remove(row)
        self.proposer.called("remove")
        self.rows.pop()


def assert_owned(engine: em.Engine, rows: Sequence[RequestState]) -> None:
    """Check that the engine knows each unfinished request in exactly one place."""
    requests = engine.snapshot().requests
    assert len({id(row) for row in requests}) == len(requests)
    assert {id(row) for row in rows if row.finish_reason is None} <= {id(row) for row in requests}


def run(engine: em.Engine, rows: Sequence[RequestState], caught: type[BaseException]) -> int:
    """Step to the end as a server does. Return how many steps raised."""
    raised = 0
    while not engine.idle:
        alive = [row for row in rows if row.finish_reason is None]
        try:
            engine.step()
        except caught:
            raised += 1
            assert any(row.finish_reason == "error" for row in alive)
        assert_owned(engine, rows)
    assert all(row.finish_reason for row in rows)
    return raised


def assert_sound(rows: Sequence[RequestState], error: str) -> None:
    """Check that every text is a prefix of the target's own, and that requests that end early say why."""
    for row in rows:
        expected = ALONE[PROMPTS.index(row.prompt)]
        assert row.tokens == expected[: len(row.tokens)]
        if row.finish_reason == "error":
            assert error in (row.error or "")
        else:
            assert (row.finish_reason, len(row.tokens)) == ("length", COUNT)


@settings(max_examples=in_full(25, 6))
@given(
    st.sampled_from(METHODS),
    st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from([8, 512]),
    st.sampled_from(HEADS),
)
def test_a_proposer_that_raises_ends_only_the_rows_of_its_step(
    method: str, nth: int, depth: int, chunk: int, head: em.HeadProposer | None
) -> None:
    proposer = Failing(method, nth, head=head)
    engine = em.Engine(
        TARGET, proposer, policy=em.FixedPolicy(depth), max_batch=2, prefill_chunk=chunk, prefix_cache_bytes=1 << 20
    )
    rows = [engine.prepare(prompt, em.SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
    for row in rows:
        engine.submit(row)
    raised = run(engine, rows, Broken)
    assert raised == (proposer.calls >= nth and method != "draft")  # without a draft, the step continues
    proposer.method = "none"
    assert_sound(rows, f"{method} is broken")
    assert sum(row.finish_reason == "error" for row in rows) <= 4 * raised  # two decoding and two in prefill
    again = engine.generate(PROMPTS[:3], em.SamplingParams(max_tokens=COUNT))
    assert [output.tokens for output in again] == ALONE[:3]


@pytest.mark.parametrize("method", ["open", "prefill"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_prompt_that_cannot_be_read_ends_no_other_request(method: str, groups: int) -> None:
    proposer = Failing(method, 4 if method == "prefill" else 3)
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(2), max_batch=3, prefill_chunk=40, groups=groups)
    rows = [engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=COUNT)) for i in (0, 1, 3)]
    engine.submit(rows[0])
    engine.step()
    engine.submit(rows[1])
    while not rows[1].tokens:
        engine.step()
    engine.submit(rows[2])
    assert run(engine, rows, Broken) == 1
    assert [row.finish_reason for row in rows] == ["length", "length", "error"]
    assert_sound(rows, f"{method} is broken")


@pytest.mark.parametrize("place", [(PrefixCache, "keep"), (NgramState, "remove"), (Batch, "release")])
def test_a_pause_that_fails_decodes_no_request_twice(place: tuple[type, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of different groups are paused in one step, and leaving raises in the first group."""
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(2), max_batch=4, prefix_cache_bytes=1 << 20)
    engine.groups.reads = RoundReads(fixed=0, position=1 << 20)
    rows = [engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=COUNT)) for i in (0, 4, 1, 3)]
    for row in rows:
        engine.submit(row)
    while not all(row.tokens for row in rows):
        engine.step()
    assert [len(group) for group in engine.snapshot().groups] == [2, 2]

    def fail(*args: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt("no more")

    monkeypatch.setattr(*place, fail)
    engine.pause(rows[0])
    engine.pause(rows[2])
    assert run(engine, rows, KeyboardInterrupt) == 1
    assert_sound(rows, "no more")
    again = engine.generate(PROMPTS, em.SamplingParams(max_tokens=COUNT))
    assert [output.tokens for output in again] == ALONE


@pytest.mark.parametrize("method", [method for method in METHODS if method != "draft"])
def test_a_proposer_that_always_raises_fails_batch_after_batch(method: str) -> None:
    engine = em.Engine(TARGET, Failing(method, 1, every=True), policy=em.FixedPolicy(3), max_batch=2, prefill_chunk=16)
    rows = [engine.prepare(prompt, em.SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
    for row in rows:
        engine.submit(row)
    assert run(engine, rows, Broken) > 0
    assert_sound(rows, f"{method} is broken")


@pytest.mark.parametrize(("every", "groups"), [(False, 1), (True, 2)])
def test_rows_continue_if_drafting_raises(every: bool, groups: int, caplog: pytest.LogCaptureFixture) -> None:
    """The target has read nothing by then. Each request is reported once."""
    proposer = Failing("draft", 3, every)
    engine = em.Engine(
        TARGET,
        proposer,
        policy=em.FixedPolicy(3),
        max_batch=2,
        prefill_chunk=16,
        prefix_cache_bytes=1 << 20,
        groups=groups,
    )
    outputs = engine.generate(PROMPTS, em.SamplingParams(max_tokens=COUNT))
    assert [(output.error, output.tokens) for output in outputs] == [(None, text) for text in ALONE]
    told = [record for record in caplog.records if "the proposer 'failing' raised" in record.message]
    assert 1 <= len(told) <= len(PROMPTS) if every else len(told) == 1
    assert [output.drafted > 0 for output in outputs[2:]] == [not every] * 4
    again = engine.generate(PROMPTS[:3], em.SamplingParams(max_tokens=COUNT))
    assert [output.tokens for output in again] == ALONE[:3]


PLACES: list[tuple[type, str]] = [
    (Batch, "__init__"),
    (Prefill, "step"),
    (Batch, "dispatch"),
    (Round, "collect"),
    (Batch, "append"),
    (Batch, "release"),
    (Batch, "pasts"),
    (RaggedCache, "append"),
    (RaggedCache, "remove"),
    (RaggedCache, "sync"),
    (em.Target, "forward"),
]


@settings(max_examples=in_full(25, 7))
@given(
    st.sampled_from(PLACES),
    st.integers(1, 10),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([em.NgramProposer(), *HEADS]),
)
def test_memory_may_run_out_anywhere(place: tuple[type, str], nth: int, late: bool, depth: int, proposer: Any) -> None:
    """`late`: after the work is done, which is as bad as before it."""
    owner, name = place
    real, calls = getattr(owner, name), count(1)

    def short_of_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs) if late else None
        if next(calls) == nth:
            raise MemoryError("no room left")
        return out if late else real(self, *args, **kwargs)

    engine = em.Engine(
        TARGET, proposer, policy=em.FixedPolicy(depth), max_batch=2, prefill_chunk=16, prefix_cache_bytes=1 << 20
    )
    rows = [engine.prepare(prompt, em.SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, short_of_memory)
        for row in rows:
            engine.submit(row)
        assert run(engine, rows, MemoryError) <= 1
    assert_sound(rows, "no room left")
    again = engine.generate(PROMPTS[:3], em.SamplingParams(max_tokens=COUNT))
    assert [output.tokens for output in again] == ALONE[:3]


def test_generate_raises_once_and_other_outputs_have_the_error() -> None:
    proposer = Failing("observe", 3)
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(2), max_batch=2)
    beside, waiting = (engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=COUNT)) for i in (0, 1))
    engine.submit(beside)
    engine.step()
    with pytest.raises(Broken, match="observe is broken"):
        engine.generate(PROMPTS[2:5], em.SamplingParams(max_tokens=COUNT))
    assert engine.idle
    assert engine.output(beside).error == "the engine failed: Broken: observe is broken"
    engine.submit(waiting)
    while not engine.idle:
        engine.step()
    assert waiting.tokens == ALONE[1]


def test_a_stream_ends_with_the_error_of_a_step_that_raised() -> None:
    talker = tiny_target(tokenizer=True)
    engine = em.Engine(talker, Failing("observe", 2), policy=em.FixedPolicy(2), max_batch=2)
    stream = engine.stream([5, 6, 7], em.SamplingParams(max_tokens=30))
    first = next(stream)
    with pytest.raises(Broken):
        engine.generate([[8, 9]], em.SamplingParams(max_tokens=30))
    *_, last = [first, *stream]
    assert last.output is not None
    assert last.output.finish_reason == "error"
    assert "observe is broken" in (last.output.error or "")
    other = em.Engine(talker, Failing("observe", 2), policy=em.FixedPolicy(2)).stream([5, 6, 7])
    with pytest.raises(Broken):
        list(other)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_leaves_no_requests(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = em.Engine(TARGET, max_batch=2)
    collect, rounds = Round.collect, count()

    def interrupted(collected: Round) -> Any:
        if next(rounds) == 4:
            raise error
        return collect(collected)

    monkeypatch.setattr(Round, "collect", interrupted)
    with pytest.raises(error):
        engine.generate(PROMPTS, em.SamplingParams(max_tokens=COUNT))
    assert engine.idle
    assert [o.tokens for o in engine.generate(PROMPTS, em.SamplingParams(max_tokens=COUNT))] == ALONE


@settings(max_examples=in_full(20, 6))
@given(
    st.lists(st.sampled_from(range(len(PROMPTS))), max_size=4),
    st.integers(0, 6),
    st.integers(0, 3),
    st.sampled_from([8, 512]),
)
def test_an_observer_may_cancel_any_request(gone: list[int], after: int, depth: int, chunk: int) -> None:
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(depth), max_batch=3, prefill_chunk=chunk)
    rows = [engine.prepare(prompt, em.SamplingParams(max_tokens=COUNT)) for prompt in PROMPTS]
    results = count()
    taken: dict[int, int] = {}

    def observer(result: RoundResult) -> None:
        if next(results) == after:
            for index in gone:
                engine.cancel(rows[index])
                taken[index] = len(rows[index].tokens)

    engine.observer = observer
    for row in rows:
        engine.submit(row)
    finished = []
    while not engine.idle:
        finished += engine.step()
        assert_owned(engine, rows)
    for index, row in enumerate(rows):
        assert row.tokens == ALONE[index][: len(row.tokens)]
        if row.finish_reason == "cancelled":
            assert len(row.tokens) == taken[index]
            assert row not in finished
        else:
            assert (row.finish_reason, len(row.tokens)) == ("length", COUNT)
            assert finished.count(row) == 1


@pytest.mark.parametrize("victim", [0, 2, 5])
@pytest.mark.parametrize("own", [False, True])
def test_a_logits_processor_may_cancel_a_request(victim: int, own: bool) -> None:
    """The request itself, one that decodes with it, or one that waits."""
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(2), max_batch=3)
    rows: list[RequestState] = []
    at = len(PROMPTS[victim if own else 1]) + 4

    def processor(tokens: list[int], logits: mx.array) -> mx.array:
        if len(tokens) >= at:
            engine.cancel(rows[victim])
        return logits

    watching = em.SamplingParams(max_tokens=COUNT, logits_processors=(processor,))
    for index, prompt in enumerate(PROMPTS):
        params = watching if index == (victim if own else 1) else em.SamplingParams(max_tokens=COUNT)
        rows.append(engine.prepare(prompt, params))
        engine.submit(rows[-1])
    while not engine.idle:
        engine.step()
        assert_owned(engine, rows)
    assert rows[victim].finish_reason == "cancelled"
    assert rows[victim].tokens == ALONE[victim][: len(rows[victim].tokens)]
    assert [row.tokens for i, row in enumerate(rows) if i != victim] == [t for i, t in enumerate(ALONE) if i != victim]
