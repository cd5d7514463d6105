"""Every switch that a failure throws has a way back while other requests decode (docs/life-of-a-request.md)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine.disk.snapshot_file import BLOCK
from eagle_mlx.engine.prefix_tree import PrefixTree
from eagle_mlx.plan import Plan, RoundResult
from eagle_mlx.proposers.base import ProposerState
from eagle_mlx.request_state import MOST_DRAFT_FAILURES, RequestState
from tests import disk_tier
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import tiny_target
from tests.full import diagonal
from tests.grammars import END, Steps

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 40, 17, 2, 33, 9, 60, 4, 21, 12, 7, 30)]
GREEDY = em.SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=3)


class WideSteps(Steps):
    vocab = 128


def alone(params: em.SamplingParams) -> list[list[int]]:
    engine = em.Engine(TARGET, max_batch=1)
    return [engine.generate([prompt], params)[0].tokens for prompt in PROMPTS]


TEXTS = {params: alone(params) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize(
    ("drafts", "params", "settings"),
    diagonal(
        ["head", "draft model", "n-grams", "head, n-grams", "recurrent draft model", "dspark"],
        [GREEDY, SEEDED],
        [
            {"max_batch": 2, "groups": 1},
            {"max_batch": 3, "prefix_cache_bytes": 1 << 22},
            {"max_batch": 4, "prefill_chunk": 16},
        ],
    ),
)
def test_a_proposer_that_raised_once_drafts_again_for_every_request(
    drafts: str,
    params: em.SamplingParams,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proposer = PROPOSERS[drafts](TARGET)
    proposer.bind(TARGET)
    owner, calls = type(proposer.open([[1]])), count()
    real = owner.draft

    def draft(self: Any, *args: Any) -> Draft:
        out: Draft = real(self, *args)
        if next(calls) == 4:
            raise RuntimeError("broken once")
        return out

    monkeypatch.setattr(owner, "draft", draft)
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3), **settings)
    outputs = engine.generate(PROMPTS, params)
    assert [(output.error, output.tokens) for output in outputs] == [(None, text) for text in TEXTS[params]]
    assert drafts == "n-grams" or min(output.drafted for output in outputs) > 0
    assert engine.draft_failures == 1
    assert 1 <= sum(output.draft_failures for output in outputs) <= settings["max_batch"]
    assert sum("raised" in record.message for record in caplog.records) == 1


class Poisoned(em.DraftModelProposer):
    """A draft model that raises while one of its rows has a certain first token."""

    def __init__(self, token: int):
        super().__init__(TARGET)
        self.token = token

    def open(self, prompts: Sequence[Sequence[int]]) -> Any:
        return PoisonedState(self, [prompt[0] for prompt in prompts], super().open(prompts))


@ProposerState.register
class PoisonedState:
    def __init__(self, proposer: Poisoned, firsts: list[int], inner: Any):
        self.proposer, self.firsts, self.inner = proposer, firsts, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        if self.proposer.token in self.firsts:
            raise RuntimeError("a text that cannot be drafted")
        assert positions.tolist() == [text.read + len(text.unread) for text in self.inner.texts]
        out: Draft = self.inner.draft(plan, sampling, positions)
        return out

    def append(self, other: PoisonedState) -> None:
        self.firsts += other.firsts
        self.inner.append(other.inner)

    def remove(self, row: int) -> None:
        self.firsts[row] = self.firsts[-1]
        self.firsts.pop()
        self.inner.remove(row)


@pytest.mark.parametrize("grammar", [False, True])
def test_a_request_for_which_the_proposer_always_raises_decodes_plainly_to_its_end(
    grammar: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that join while it decodes draft. `grammar`: another request follows a grammar."""
    engine = em.Engine(TARGET, Poisoned(126), policy=em.FixedPolicy(3), max_batch=3)  # type: ignore[arg-type]
    long = replace(GREEDY, max_tokens=80)
    poisoned = engine.prepare([126, *PROMPTS[0]], long)
    guided = engine.prepare(PROMPTS[2], replace(GREEDY, grammar=WideSteps, stop_token_ids=(END,)))
    rows = [engine.prepare(prompt, GREEDY) for prompt in PROMPTS]
    for row in [poisoned, *([guided] if grammar else []), *rows]:
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert poisoned.tokens == em.Engine(TARGET).generate([poisoned.prompt], long)[0].tokens
    assert [(row.error, row.tokens) for row in rows] == [(None, text) for text in TEXTS[GREEDY]]
    outputs = [engine.output(row) for row in rows]
    assert engine.output(poisoned).draft_failures == MOST_DRAFT_FAILURES
    assert [output.drafted > 0 for output in outputs[4:]] == [True] * 8
    assert max(output.draft_failures for output in outputs[4:]) == 0
    assert sum("raised" in record.message for record in caplog.records) <= 3
    if grammar:
        plain = em.Engine(TARGET).generate([guided.prompt], guided.params)[0]
        assert (guided.error, guided.tokens) == (None, plain.tokens)


def test_a_proposer_that_always_raises_costs_each_request_a_few_reads() -> None:
    """Each repetition reads one token, because the prefix cache keeps the others."""
    reads: list[int] = []
    target = tiny_target()
    forward = target.forward

    def counted(tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
        reads.append(tokens.size)
        return forward(tokens, *args, **kwargs)

    target.forward = counted  # type: ignore[method-assign]
    poisoned: Any = Poisoned(PROMPTS[1][0])
    engine = em.Engine(target, poisoned, policy=em.FixedPolicy(3), max_batch=1, prefix_cache_bytes=1 << 20)
    reads.clear()
    output = engine.generate([PROMPTS[1]], GREEDY)[0]
    assert (output.tokens, output.drafted, output.draft_failures) == (TEXTS[GREEDY][1], 0, MOST_DRAFT_FAILURES)
    assert reads == [len(PROMPTS[1]) - 1] + [1] * (12 + MOST_DRAFT_FAILURES)


def test_a_text_beyond_the_draft_models_context_ends_no_other_requests_drafts() -> None:
    small = tiny_target()
    small.context_length = 60
    engine = em.Engine(TARGET, em.DraftModelProposer(small), policy=em.FixedPolicy(3), max_batch=2)
    long = PROMPTS.index(max(PROMPTS, key=len))
    outputs = engine.generate([PROMPTS[long], *PROMPTS[:4]], [replace(GREEDY, max_tokens=30), *[GREEDY] * 4])
    assert [output.tokens for output in outputs[1:]] == TEXTS[GREEDY][:4]
    assert [output.drafted > 0 for output in outputs] == [False, True, True, True, True]


def test_the_prefix_cache_fills_again_after_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = em.Engine(TARGET, max_batch=2, prefix_cache_bytes=1 << 22)
    real, calls = PrefixTree.insert, count()

    def insert(self: PrefixTree, *args: Any) -> bool:
        done = real(self, *args)
        if next(calls) == 2:
            raise MemoryError("no room left")
        return done

    monkeypatch.setattr(PrefixTree, "insert", insert)
    first = engine.generate(PROMPTS, GREEDY)
    assert engine.prefixes is not None
    again = engine.generate(PROMPTS, GREEDY)
    assert [output.tokens for output in (*first, *again)] == TEXTS[GREEDY] * 2
    long = [index for index, prompt in enumerate(PROMPTS) if len(prompt) > 20]
    assert sum(again[index].cached_tokens > 0 for index in long) >= len(long) - 2


def test_files_are_written_again_after_the_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each outage is reported once."""
    heard, seconds = list[str](), 0.0
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.monotonic", lambda: seconds)
    engine = disk_tier.engine(tmp_path, say=disk_tier.said_of(["No space left on device"], heard))
    texts = [[number, *disk_tier.TEXT[1:140]] for number in range(8)]

    def answer(*numbers: int) -> None:
        rows = [engine.prepare(texts[number], GREEDY) for number in numbers]
        for row in rows:
            engine.submit(row)
        while not engine.idle:
            engine.step()
        while disk_tier.disk(engine).bytes_waiting:
            os.sched_yield()

    for outage in (1, 2):
        with monkeypatch.context() as full:
            full.setattr("os.fsync", no_space)
            answer(4 * outage - 4, 4 * outage - 3)
        written = disk_tier.disk(engine).bytes_written
        answer(4 * outage - 2)
        assert disk_tier.disk(engine).bytes_written == written, "it waits a minute"
        seconds += 61
        answer(4 * outage - 1)
        assert disk_tier.disk(engine).bytes_written > written
        assert len(heard) == outage
    disk_tier.written(engine)


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_could_not_be_opened_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = disk_tier.TEXT
    disk_tier.with_text(tmp_path)
    engine = disk_tier.engine(tmp_path, say=disk_tier.said_of(["Too many open files"]))
    with monkeypatch.context() as exhausted:
        exhausted.setattr("pathlib.Path.read_bytes", raiser(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        assert disk_tier.answered(engine, text).counts.cached_tokens == 0
    assert engine.prefixes is not None
    engine.prefixes.capacity = 0
    engine.prefixes.trim()
    engine.prefixes.capacity = disk_tier.MANY
    while disk_tier.disk(engine).bytes_waiting:
        os.sched_yield()
    assert disk_tier.answered(engine, text).counts.cached_tokens == BLOCK
    disk_tier.written(engine)


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_trees_are_drafted_again_after_a_request_that_does_not_allow_them() -> None:
    """Its penalties end trees for the rows that decode with it."""
    results = list[tuple[bool, bool]]()
    engine = em.Engine(TARGET, PROPOSERS["head"](TARGET), policy=em.FixedPolicy(2, 6), max_batch=3)
    penalized = engine.prepare(PROMPTS[4], replace(GREEDY, max_tokens=6, repetition_penalty=1.2))
    rows = [engine.prepare(prompt, replace(GREEDY, max_tokens=40)) for prompt in PROMPTS[:2]]

    def observe(result: RoundResult) -> None:
        if result.plan.depth:  # not in the last round
            results.append((penalized in engine.groups.requests, result.plan.is_tree))

    engine.observer = observe
    for row in rows:
        engine.submit(row)
    for step in count():
        if engine.idle:
            break
        if step == 4:
            engine.submit(penalized)
        engine.step()
    assert set(results) == {(False, True), (True, False)}
    assert results[-1] == (False, True)


def test_rows_paused_for_memory_resume_when_others_end() -> None:
    """Without limits, eight rows outgrow the memory for three."""
    target = tiny_target()
    target.context_length = 100
    params = em.SamplingParams(max_tokens=1 << 30, ignore_eos=True)
    size = em.Engine(target).kv_budget.size
    engine = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(2), kv_bytes=size.nbytes(3, 100))
    engine.kv_budget.reserve = 12
    rows = [engine.prepare(prompt[:20], params) for prompt in PROMPTS[:8]]
    for row in rows:
        engine.submit(row)
    paused = set[RequestState]()
    while not engine.idle:
        engine.step()
        paused |= {row for row in rows if row.paused}
    assert paused
    single = em.Engine(target, max_batch=1)
    assert [row.tokens for row in rows] == [single.generate([row.prompt], params)[0].tokens for row in rows]
