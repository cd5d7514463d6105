"""Requests that come and go: prefill in chunks between rounds, cancels, and failures of one row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3

import eagle_mlx as em
from eagle_mlx.engine.admission import Admit, Fetch, Read
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.groups import RoundReads
from eagle_mlx.engine.runner import Collect, Decode, Move, Pause, Work
from eagle_mlx.plan import RoundResult
from eagle_mlx.request_state import RequestState
from tests import disk_tier
from tests.fakes import randomize, tiny_config, tiny_head, tiny_target
from tests.full import in_full, some

TARGET = tiny_target()
RNG = np.random.default_rng(0)
PROMPTS = [[int(t) for t in RNG.integers(3, 128, n)] for n in (5, 100, 17, 60, 2, 33)]


def engine(**settings: object) -> em.Engine:
    head = em.HeadProposer(tiny_head(TARGET))
    return em.Engine(TARGET, head, policy=em.FixedPolicy(3), **{"max_batch": 4, **settings})  # type: ignore[arg-type]


ALONE = [
    em.Engine(TARGET, max_batch=1).generate([prompt], em.SamplingParams(max_tokens=12))[0].tokens for prompt in PROMPTS
]


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
def test_prompts_of_all_lengths_are_read_in_chunks(chunk: int) -> None:
    outputs = engine(prefill_chunk=chunk).generate(PROMPTS, em.SamplingParams(max_tokens=12))
    assert [output.tokens for output in outputs] == ALONE


@settings(max_examples=some(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    chunk=st.integers(4, 100),
    later=st.integers(0, 5),
    prefixes=st.sampled_from([0, 1 << 20]),
)
def test_no_forward_reads_more_than_a_chunk_over_all_rows(
    positions_read: list[int], lengths: list[int], chunk: int, later: int, prefixes: int
) -> None:
    """Eight prompts with a chunk each would take eight times the intended memory."""
    busy = em.Engine(TARGET, max_batch=4, prefill_chunk=chunk, prefix_cache_bytes=prefixes)
    prompts = [PROMPTS[1][:length] for length in lengths]
    rows = [busy.prepare(prompt, em.SamplingParams(max_tokens=2, ignore_eos=True)) for prompt in prompts]
    positions_read.clear()
    for number, row in enumerate(rows):
        if number >= later:
            busy.step()
        busy.submit(row)
    while not busy.idle:
        busy.step()
    assert all(len(row.tokens) == 2 for row in rows)
    assert max(positions_read) <= chunk
    assert prefixes or sum(positions_read) >= sum(lengths)


def test_prompts_that_fit_into_a_chunk_together_are_read_in_one_forward(positions_read: list[int]) -> None:
    prompts = [PROMPTS[1][:length] for length in (20, 9, 30, 10, 4, 5, 10, 6)]
    params = em.SamplingParams(max_tokens=1)
    em.Engine(TARGET, prefill_chunk=8 * 29).generate(prompts, params)
    assert [count for count in positions_read if count > 8] == [8 * 29]
    positions_read.clear()
    em.Engine(TARGET, prefill_chunk=8 * 29 - 1).generate(prompts, params)
    assert [count for count in positions_read if count > 8] == [7 * 29]


def test_others_decode_while_a_long_prompt_is_read() -> None:
    busy = engine(prefill_chunk=8)
    talking, reading = (busy.prepare(PROMPTS[i], em.SamplingParams(max_tokens=40)) for i in (0, 1))
    busy.submit(talking)
    busy.step()
    busy.submit(reading)
    rounds = [len(talking.tokens)]
    while not reading.tokens:
        busy.step()
        rounds.append(len(talking.tokens))
    assert len(rounds) > 12  # 99 positions, 8 at a time
    assert all(a < b for a, b in itertools.pairwise(rounds))


@settings(max_examples=some(25))
@given(
    st.lists(st.sampled_from(["submit", "cancel", "pause", "step", "step"]), max_size=40),
    st.randoms(use_true_random=False),
)
def test_rows_that_leave_do_not_disturb_others(events: list[str], random: object) -> None:
    busy = engine(max_batch=3, prefill_chunk=16)
    rows: list[tuple[int, RequestState]] = []
    for event in events:
        if event == "submit":
            which = random.randrange(len(PROMPTS))  # type: ignore[attr-defined]
            rows.append((which, busy.prepare(PROMPTS[which], em.SamplingParams(max_tokens=12))))
            busy.submit(rows[-1][1])
        elif event == "cancel" and rows:
            busy.cancel(random.choice(rows)[1])  # type: ignore[attr-defined]
        elif event == "pause" and rows:
            busy.pause(random.choice(rows)[1])  # type: ignore[attr-defined]
        else:
            busy.step()
    while not busy.idle:
        busy.step()
    assert busy.active == busy.waiting == 0
    for which, row in rows:
        assert row.finish_reason in ("length", "cancelled")
        assert row.tokens == ALONE[which][: len(row.tokens)]
        assert len(row.tokens) == 12 or row.finish_reason == "cancelled"


def test_each_row_has_its_own_limit_of_drafts() -> None:
    most = [None, 0, 1, 2, 3, 9]
    params = [em.SamplingParams(max_tokens=12, num_speculative_tokens=k) for k in most]
    outputs = engine(max_batch=6).generate(PROMPTS, params)
    assert [output.tokens for output in outputs] == ALONE
    assert [len(output.drafted_by_position) for output in outputs] == [3, 0, 1, 2, 3, 3]


def poisoned(token: int) -> em.Target:
    """Return a target that reads one token as NaN, and can still emit it."""
    args = qwen3.ModelArgs(**{**tiny_config(vocab=16), "tie_word_embeddings": False})  # type: ignore[arg-type]
    model = qwen3.Model(args)
    randomize(model, 0, 0.2)
    model.model.embed_tokens.weight[token] = mx.nan
    return em.Target(model, name="poisoned")


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sick", [0, 1, 2])
def test_a_row_with_nan_logits_fails_alone(drafts: bool, sick: int) -> None:
    target = poisoned(15)
    proposer = em.HeadProposer(tiny_head(target)) if drafts else None
    busy, params = em.Engine(target, proposer, policy=em.FixedPolicy(2), max_batch=3), em.SamplingParams(max_tokens=10)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    healthy = [
        em.Engine(target, proposer, policy=em.FixedPolicy(2)).generate([prompt], params)[0] for prompt in prompts
    ]
    company = [*prompts[:sick], [4, 15, 5, 6, 7, 8, 9], *prompts[sick + 1 :], prompts[sick], prompts[0]]
    outputs = busy.generate(company, params)
    assert (outputs[sick].finish_reason, outputs[sick].tokens) == ("error", [])
    assert "NaN" in (outputs[sick].error or "")
    others = [o for index, o in enumerate(outputs) if index != sick]
    expected = [*healthy[:sick], *healthy[sick + 1 :], healthy[sick], healthy[0]]
    assert [o.tokens for o in others] == [o.tokens for o in expected]
    assert [o.accepted_by_position for o in others] == [o.accepted_by_position for o in expected]


class Steep(qwen3.Model):
    """Valid logits whose sum is not a number in their type: some are infinite, others large."""

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        logits = super().__call__(*args, **options)
        largest = mx.max(mx.abs(logits), axis=-1, keepdims=True)
        steep = (6e4 * logits / largest).astype(mx.float16)
        out: mx.array = mx.where(mx.arange(steep.shape[-1]) % 5 == 0, mx.array(-mx.inf, mx.float16), mx.abs(steep))
        return out


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("drafts", ["plain", "chains", "trees"])
def test_infinite_logits_are_not_nan(drafts: str) -> None:
    """Inf minus inf in a sum would be NaN, so every logit is checked by itself."""
    model = Steep(qwen3.ModelArgs(**tiny_config()))  # type: ignore[arg-type]
    randomize(model, 0, 0.2)
    model.set_dtype(mx.float16)
    target = em.Target(model)
    logits = target.forward(mx.array([PROMPTS[0]])).logits
    assert mx.all(mx.min(logits, axis=-1) == -mx.inf)
    assert mx.all(mx.sum(mx.maximum(logits, 0), axis=-1) == mx.inf)
    policy = em.FixedPolicy(2, nodes=4 if drafts == "trees" else 0)
    proposer = em.HeadProposer(tiny_head(target)) if drafts != "plain" else None
    params = [
        em.SamplingParams(max_tokens=8, ignore_eos=True),
        em.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, seed=1),
        em.SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={3: 1.0}),
    ]
    busy = em.Engine(target, proposer, policy=policy, max_batch=3)
    assert busy.chains_only is None
    outputs = busy.generate([PROMPTS[0]] * 3, params)
    assert [output.error for output in outputs] == [None] * 3
    assert all(len(output.tokens) == 8 and all(token % 5 for token in output.tokens) for output in outputs)
    assert (sum(output.drafted for output in outputs) > 0) == (drafts != "plain")


def test_a_callable_that_raises_fails_its_own_request() -> None:
    def broken(tokens: list[int], logits: mx.array) -> mx.array:
        if len(tokens) > len(PROMPTS[2]) + 3:
            raise ValueError("no more")
        return logits

    params = [em.SamplingParams(max_tokens=12) for _ in PROMPTS]
    params[2] = em.SamplingParams(max_tokens=12, logits_processors=(broken,))
    outputs = engine().generate(PROMPTS, params)
    assert (outputs[2].finish_reason, outputs[2].tokens) == ("error", ALONE[2][: len(outputs[2].tokens)])
    assert "no more" in (outputs[2].error or "")
    assert [o.tokens for i, o in enumerate(outputs) if i != 2] == [t for i, t in enumerate(ALONE) if i != 2]


def test_an_engine_continues_after_a_step_that_raised() -> None:
    busy = engine(max_batch=2)
    rows = [busy.prepare(prompt, em.SamplingParams(max_tokens=12)) for prompt in PROMPTS[:4]]
    for row in rows:
        busy.submit(row)
    busy.step()
    busy.abandon("out of memory")
    assert busy.idle
    assert {(row.finish_reason, row.error) for row in rows} == {("error", "out of memory")}
    assert [o.tokens for o in busy.generate(PROMPTS, em.SamplingParams(max_tokens=12))] == ALONE


def test_a_row_that_ends_does_not_cost_the_others_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that were dispatched ahead are dropped only if no row needs them."""
    dispatched, collected = list[Round](), list[Round]()
    dispatch, collect = Batch.dispatch, Round.collect

    def noted(*arguments: Any, **more: Any) -> Round:
        dispatched.append(dispatch(*arguments, **more))
        return dispatched[-1]

    monkeypatch.setattr(Batch, "dispatch", noted)
    monkeypatch.setattr(Round, "collect", lambda self: (collected.append(self), collect(self))[1])
    sampled = em.SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    texts = [output.tokens for output in em.Engine(TARGET, max_batch=1).generate(PROMPTS, sampled)]
    ends = [next(i for i in range(3 * k, 24) if text[i] not in text[:i]) for k, text in enumerate(texts, 1)]
    params = [replace(sampled, stop_token_ids=(text[end],)) for end, text in zip(ends, texts, strict=True)]
    dispatched.clear()
    collected.clear()
    outputs = em.Engine(TARGET, max_batch=6).generate(PROMPTS, params)
    assert [o.tokens for o in outputs] == [text[: end + 1] for end, text in zip(ends, texts, strict=True)]
    assert len(set(ends)) > 3
    assert len(dispatched) - len(collected) <= 1


def test_observers_see_every_round() -> None:
    results: list[RoundResult] = []
    busy = engine()
    busy.observer = results.append
    outputs = busy.generate(PROMPTS, em.SamplingParams(max_tokens=12))
    assert sum(result.emitted for result in results) == sum(len(output.tokens) for output in outputs)
    assert sum(sum(result.kept) for result in results) == sum(output.accepted for output in outputs)
    assert sum(sum(result.drafted) for result in results) == sum(output.drafted for output in outputs)
    assert max(result.rows for result in results) == 4
    assert all(0 < (result.draft_seconds or 0) < result.seconds for result in results if result.plan.depth)


def roomy() -> em.Target:
    target = tiny_target(layers=1)
    target.context_length = 4096
    return target


@pytest.mark.parametrize(("speed", "chunk"), [(1000, 400), (100, 128), (1 << 20, 1024)])
def test_a_chunk_takes_no_longer_than_asked_while_others_decode(
    positions_read: list[int], speed: int, chunk: int
) -> None:
    """On a clock where the model reads a given number of positions per second: from 128 to what fits memory."""
    busy = em.Engine(roomy(), prefill_chunk=1024, prefill_ms=400)
    busy.runner.clock = lambda: sum(positions_read) / speed
    params = em.SamplingParams(max_tokens=400, ignore_eos=True)
    talking, reading = busy.prepare([5, 6, 7], params), busy.prepare(PROMPTS[1] * 26, params)
    busy.submit(talking)
    while len(talking.tokens) < 3:
        busy.step()
    busy.submit(reading)
    begun = len(positions_read)
    while not reading.tokens:
        busy.step()
    chunks = [count for count in positions_read[begun:] if count > 2]
    assert chunks[0] == 128  # nothing has been timed yet
    assert max(chunks[1:]) <= chunk
    assert len(chunks[1:]) == -(-sum(chunks[1:]) // chunk)
    assert sum(chunks) in (26 * 100 - 1, 26 * 100)


def test_a_prompt_has_the_fewest_chunks_if_no_request_decodes(positions_read: list[int]) -> None:
    busy = em.Engine(roomy(), prefill_chunk=1024)
    reading = busy.prepare(PROMPTS[1] * 26, em.SamplingParams(max_tokens=1))
    busy.submit(reading)
    while not reading.tokens:
        busy.step()
    assert [count for count in positions_read if count > 2] == [867, 866, 866]


def test_a_short_chat_passes_many_prompts_of_another_client() -> None:
    busy = em.Engine(TARGET, max_batch=8)
    params = em.SamplingParams(max_tokens=8, ignore_eos=True)
    many = [busy.prepare(PROMPTS[1] * 2, params, client="many") for _ in range(64)]
    for request in many:
        busy.submit(request)
    for _ in range(12):
        busy.step()
    other = busy.prepare(PROMPTS[4], params, client="other")
    busy.submit(other)
    for _ in range(4):
        busy.step()
    assert other.tokens
    for request in many:
        busy.cancel(request)


def facts(busy: em.Engine, files: DiskTier) -> list[object]:
    """Return all that a decision could change: queue, rows, groups, rounds, budget, cached prefixes, files."""
    admission, prefixes, snapshot = busy.admission, busy.prefixes, busy.snapshot()
    assert prefixes is not None
    return [
        snapshot,
        [(row.text, row.paused, row.finish_reason, str(row.counts)) for row in snapshot.requests],
        {client: list(line) for client, line in admission.waiting.lines.items()},
        (list(admission.to_pause), [(prefill.batch, prefill.left) for prefill in admission.prefills]),
        [(batch, list(batch.requests), batch.cache.lengths.upper, batch.state) for batch in busy.groups.batches],
        (list(busy.runner.rounds), busy.runner.depth, busy.runner.last_plain, busy.kv_budget.admitted),
        (prefixes.tree, list(prefixes.tree.used), prefixes.nbytes),
        ({path: list(blocks) for path, blocks in files.ahead.items()}, files.bytes_read, files.hits, files.tokens),
        {path: path.stat().st_mtime_ns for path in files.folder.iterdir()},
    ]


@pytest.mark.parametrize("seed", range(in_full(20, 1)))
def test_deciding_changes_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step, the schedule is asked twice and gives equal work."""
    monkeypatch.setattr("eagle_mlx.engine.disk.snapshot_file.BLOCK", 32)
    monkeypatch.setattr("eagle_mlx.engine.disk.tier.STEP_BYTES", 1)
    disk_tier.with_text(tmp_path, drafts="head")
    target = disk_tier.target("full")
    head = em.HeadProposer(tiny_head(target))
    files = DiskTier(tmp_path, disk_tier.MANY, target, head)
    assert files.close(60)  # nothing is written any more, only read
    busy = em.Engine(
        target,
        head,
        policy=em.AcceptancePolicy(2),  # it drafts, and soon decodes plainly
        max_batch=3,
        prefill_chunk=32,
        prefix_cache_bytes=1 << 20,
        prefix_files=files,
    )
    busy.groups.reads = RoundReads(fixed=0, position=1 << 20)
    decide, works = busy.schedule.next, set[type]()

    def decide_twice(*about: Any) -> Work | None:
        before = facts(busy, files)
        first, second = decide(*about), decide(*about)
        assert first == second
        assert facts(busy, files) == before
        works.add(type(first))
        return first

    monkeypatch.setattr(busy.schedule, "next", decide_twice)
    rng, rows = np.random.default_rng(seed), list[RequestState]()
    text = [*disk_tier.TEXT[: disk_tier.SYSTEM], 5, 6, 7]
    for prompt in (text, *PROMPTS, text[:70], *PROMPTS):
        rows.append(busy.prepare(prompt, disk_tier.GREEDY, client="ab"[int(rng.integers(2))]))
        busy.submit(rows[-1])
        for _ in range(int(rng.integers(4))):
            busy.step()
        act = (busy.pause, busy.pause, busy.cancel)[int(rng.integers(3))]
        act(rows[int(rng.integers(len(rows)))])
    while not busy.idle:
        busy.step()
    assert {row.finish_reason for row in rows} <= {"length", "cancelled"}
    assert works == {Pause, Fetch, Admit, Read, Move, Decode, Collect, type(None)}


def test_work_names_the_rows_that_it_touches() -> None:
    busy = engine()
    rows = [busy.prepare(prompt, em.SamplingParams(max_tokens=12)) for prompt in PROMPTS[:3]]
    for row in rows:
        busy.submit(row)
    while busy.active < 3:
        busy.step()
    work = busy.schedule.next(None, busy.max_batch, "model")
    assert isinstance(work, Decode)
    assert (set(work.touches), work.plan.depth) == (set(rows), 3)
    while not busy.idle:
        busy.step()
    assert [row.tokens for row in rows] == ALONE[:3]
