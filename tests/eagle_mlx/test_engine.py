"""The engine returns the target's own text with any proposer, and its counts match what it emitted."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import eagle_mlx as em
from eagle_mlx.engine.batch import Batch, Round
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.plan import CONFIDENCE_LAG, Context, Plan, RoundResult
from eagle_mlx.proposers.base import HeadPiece, Proposer
from eagle_mlx.request import Prompt, draft_runs
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Forward
from tests.fakes import Oracle, tiny_head, tiny_target, tiny_target_folder
from tests.full import diagonal, in_full

TARGET = tiny_target()
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8, 7, 8, 7, 8, 7], list(range(40)), [100, 3]]
MARGIN = 1e-3
"""Logits closer than this may be decided by rounding in a verify of several tokens."""


def plain_greedy(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Decode with mlx-lm. Also return the margin between the two best logits at each step."""
    tokens, margins = [], []
    for (token, logprobs), _ in zip(generate_step(mx.array(prompt), TARGET.model), range(count), strict=False):
        best = np.sort(np.array(logprobs))[-2:]
        tokens.append(int(token))
        margins.append(float(best[1] - best[0]))
    return tokens, margins


GREEDY = {tuple(p): plain_greedy(p, 24) for p in PROMPTS}


def assert_same_text(prompt: list[int], tokens: list[int]) -> None:
    expected, margins = GREEDY[tuple(prompt)]
    for index, (got, want) in enumerate(zip(tokens, expected, strict=False)):
        if got != want:
            assert margins[index] < MARGIN, f"token {index} of {prompt}: {got}, not {want}"
            return


def proposers() -> list[object]:
    texts = {p: t for p, (t, _) in GREEDY.items()}
    return [
        None,
        em.NgramProposer(),
        em.HeadProposer(tiny_head(TARGET)),
        em.HeadProposer(tiny_head(TARGET, draft_vocab=40)),
        em.HybridProposer(em.HeadProposer(tiny_head(TARGET)), em.NgramProposer()),
        *(Oracle(texts, wrong, aux_layers=(0, 2)) for wrong in (0.0, 0.3, 1.0)),
    ]


def in_turns(count: int, others: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    """Return all pairs of one of `count` numbers and one of the others; unless in full, `most` others per number."""
    places = (
        (number, (number + step) % len(others)) for number in range(count) for step in range(in_full(len(others), most))
    )
    return [(number, others[place]) for number, place in places]


SIZES = [(1, 1, False), (4, 2, True), (5, 8, False), (0, 3, True)]
"""Depth, rows, and whether the engine is exact."""


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("which", "size"), in_turns(len(proposers()), SIZES, 1))
def test_greedy_text_is_mlx_lms_own(which: int, size: tuple[int, int, bool]) -> None:
    depth, max_batch, exact = size
    engine = em.Engine(TARGET, proposers()[which], policy=em.FixedPolicy(depth), max_batch=max_batch, exact=exact)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, em.SamplingParams(max_tokens=24))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.tokens) == 24
        assert output.finish_reason == "length"
        assert_same_text(prompt, output.tokens)


@pytest.mark.parametrize("which", [0, 1, 2, 4])
def test_an_exact_engine_reads_one_position_with_the_kernels_of_two(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here forwards of one position give other logits, as they may on a GPU."""
    widths, forward = list[int](), TARGET.forward

    def other_kernels(tokens: mx.array, *args: Any, **kwargs: Any) -> Forward:
        widths.append(tokens.shape[1])
        out = forward(tokens, *args, **kwargs)
        return replace(out, logits=mx.roll(out.logits, tokens.shape[1] == 1, axis=-1))

    monkeypatch.setattr(TARGET, "forward", other_kernels)
    params = em.SamplingParams(max_tokens=24)
    for exact in (True, False):
        engine = em.Engine(TARGET, proposers()[which], policy=Recording([0, 0, 0, 4, 1]), max_batch=2, exact=exact)  # type: ignore[arg-type]
        widths.clear()  # of the constructor, which only asks for shapes
        outputs = engine.generate([PROMPTS[0], PROMPTS[2]], params)
        assert ([output.tokens for output in outputs] == [GREEDY[tuple(PROMPTS[at])][0] for at in (0, 2)]) == exact
        assert min(widths) == (2 if exact else 1)


def test_a_perfect_proposer_is_always_accepted() -> None:
    texts = {p: t for p, (t, _) in GREEDY.items()}
    oracle = Oracle(texts, 0.0, aux_layers=(0, 2))
    oracle.rng = type("Full", (), {"random": lambda self: 1.0, "integers": lambda self, n: n - 1})()  # type: ignore[assignment]
    output = em.Engine(TARGET, oracle, policy=em.FixedPolicy(5)).generate(
        [PROMPTS[3]], em.SamplingParams(max_tokens=24)
    )[0]  # type: ignore[arg-type]
    assert output.tokens == GREEDY[tuple(PROMPTS[3])][0]
    assert (output.rounds, output.accepted, output.drafted) == (4, 20, 20)
    assert output.acceptance_length == 6
    assert output.drafted_by_position == output.accepted_by_position == [4, 4, 4, 4, 4]


@settings(max_examples=in_full(15, 8), deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([0.7, 1.5]), st.integers(1, 5), st.integers(0, 1))
def test_seeded_text_is_the_same_with_any_proposer_depth_and_batch(
    seed: int, temperature: float, depth: int, which: int
) -> None:
    params = em.SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=12)
    alone = em.Engine(TARGET, max_batch=1).generate([PROMPTS[which]], params)[0]
    company = [em.SamplingParams(temperature=1.0, seed=seed + 1, max_tokens=9), params, em.SamplingParams(max_tokens=5)]
    proposer = [em.HeadProposer(tiny_head(TARGET)), em.NgramProposer()][which]
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(depth))
    together = engine.generate([PROMPTS[2], PROMPTS[which], PROMPTS[3]], company)[1]
    assert together.tokens == alone.tokens


def test_rows_join_and_leave_in_the_middle_and_come_back_in_order() -> None:
    lengths = [3, 20, 1, 11, 7]
    params = [em.SamplingParams(max_tokens=n) for n in lengths]
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=em.FixedPolicy(3), max_batch=2)
    for prompt, n, output in zip(PROMPTS, lengths, engine.generate(PROMPTS, params), strict=True):
        assert len(output.tokens) == n
        assert_same_text(prompt, output.tokens)


@pytest.mark.parametrize("exact", [False, True])
def test_rounds_read_no_more_than_the_longest_row(exact: bool) -> None:
    """Plain rounds add a position to the bound of all rows. Unless it is reset, it grows as long as any row remains.

    Without the reset, answering 12,000 prompts in batches of 64 became three times slower after 14 minutes.
    """
    engine = em.Engine(TARGET, max_batch=3, exact=exact)
    rows = [engine.prepare(PROMPTS[i % 5][:9], em.SamplingParams(max_tokens=3 + i % 5)) for i in range(40)]
    for row in rows:
        engine.submit(row)
    while not all(row.finish_reason for row in rows):
        engine.step()
        for batch in engine.groups.batches:
            assert batch.cache.lengths.upper <= max(row.length for row in batch.requests) + 2


@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: getattr(p, "name", "plain"))
def test_nothing_after_a_stop_token_is_emitted_or_counted(proposer: object) -> None:
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(5))  # type: ignore[arg-type]
    texts = [GREEDY[tuple(prompt)][0] for prompt in PROMPTS]
    params = [em.SamplingParams(max_tokens=24, stop_token_ids=(text[7],)) for text in texts]
    for text, output in zip(texts, engine.generate(PROMPTS, params), strict=True):
        assert output.tokens == text[: text.index(text[7]) + 1]
        assert output.finish_reason == "stop"
        assert output.accepted + output.rounds >= len(output.tokens) >= output.accepted
        assert output.accepted <= output.drafted
        assert len(output.accepted_by_position) == len(output.drafted_by_position)


@pytest.mark.parametrize("depth", [1, 4, 9])
def test_max_tokens_is_never_exceeded(depth: int) -> None:
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=em.FixedPolicy(depth))
    for count in (1, 2, 5):
        output = engine.generate([PROMPTS[0]], em.SamplingParams(max_tokens=count))[0]
        assert len(output.tokens) == count
        assert output.drafted <= (count - 1) * output.rounds


def test_long_prompts_are_read_in_chunks_with_the_same_result() -> None:
    head = tiny_head(TARGET)
    prompts = [list(range(100)), [5, 6], list(range(50, 120))]
    whole = em.Engine(TARGET, em.HeadProposer(head), policy=em.FixedPolicy(3)).generate(
        prompts, em.SamplingParams(max_tokens=8)
    )
    engine = em.Engine(TARGET, em.HeadProposer(head), policy=em.FixedPolicy(3), prefill_chunk=7)
    chunked = engine.generate(prompts, em.SamplingParams(max_tokens=8))
    assert [o.tokens for o in whole] == [o.tokens for o in chunked]
    assert [o.accepted for o in whole] == [o.accepted for o in chunked]


def test_a_row_ends_at_the_end_of_the_context() -> None:
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 128, TARGET.context_length - 6)]
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=em.FixedPolicy(4))
    output = engine.generate([prompt], em.SamplingParams(max_tokens=100))[0]
    assert (len(output.tokens), output.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (list(range(128)) * 4, "prompt of 512 tokens does not fit the target's context of 512"),
        ([5, 128], "outside the target's vocabulary of 128"),
        ([-1], "outside the target's vocabulary"),
        ("text", "no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused_before_anything_runs(prompt: object, message: str) -> None:
    engine = em.Engine(TARGET)
    with pytest.raises(PromptError, match=message):
        engine.generate([[1, 2], prompt])  # type: ignore[list-item]
    assert engine.generate([[1, 2]], em.SamplingParams(max_tokens=2))[0].prompt_tokens == 2


def test_prompts_and_params_must_pair_up() -> None:
    with pytest.raises(ConfigError, match="2 prompts but 1 SamplingParams"):
        em.Engine(TARGET).generate([[1], [2]], [em.SamplingParams()])


def test_text_and_messages_go_through_the_tokenizer() -> None:
    target = tiny_target(tokenizer=True)
    engine = em.Engine(target, em.NgramProposer())
    raw, chat = engine.generate(
        ["def f(x):", [{"role": "user", "content": "def f(x):"}]], em.SamplingParams(max_tokens=5, ignore_eos=True)
    )
    assert target.tokenizer is not None
    assert raw.prompt_tokens == len(target.tokenizer.encode("def f(x):"))
    assert chat.prompt_tokens > raw.prompt_tokens
    assert raw.text == target.tokenizer.decode(raw.tokens)


TALKER = tiny_target(tokenizer=True)


@pytest.mark.parametrize("params", [em.SamplingParams(max_tokens=30), em.SamplingParams(1.0, seed=2, max_tokens=30)])
def test_streamed_chunks_make_up_the_text(params: em.SamplingParams) -> None:
    engine = em.Engine(TALKER, em.HeadProposer(tiny_head(TALKER)), policy=em.FixedPolicy(3))
    [whole] = engine.generate(["def f(x):"], params)
    chunks = list(engine.stream("def f(x):", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert chunks[-1].output == whole
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert len(chunks) == whole.rounds
    assert [len(chunk.from_draft) for chunk in chunks] == [len(chunk.tokens) for chunk in chunks]
    assert sum(sum(chunk.from_draft) for chunk in chunks) == whole.accepted


def marked(engine: em.Engine, params: em.SamplingParams) -> tuple[list[int], list[int]]:
    """Stream one prompt; return its tokens and their marks, which must follow from the results of the rounds."""
    results: list[RoundResult] = []
    engine.observer = results.append
    chunks = list(engine.stream([7, 8], params))
    marks = [mark for chunk in chunks for mark in chunk.from_draft]
    counts = [(result.kept[0], result.taken[0]) for result in results if result.taken[0]]
    assert marks == [int(at < kept) for kept, taken in counts for at in range(taken)]
    runs = [(chunk.tokens[part], drafted) for chunk in chunks for part, drafted in draft_runs(chunk.from_draft)]
    assert [int(drafted) for tokens, drafted in runs for _ in tokens] == marks
    return [token for tokens, _ in runs for token in tokens], marks


def test_chunks_mark_accepted_drafts_up_to_the_end() -> None:
    [whole] = em.Engine(TALKER).generate([[7, 8]], em.SamplingParams(max_tokens=30))
    engine = em.Engine(TALKER, Oracle({(7, 8): whole.tokens}, 0.1), policy=em.FixedPolicy(3))
    tokens, marks = marked(engine, em.SamplingParams(max_tokens=30))
    assert tokens == whole.tokens
    assert 0 < sum(marks) < len(marks) - 1
    ends = 0
    for at, token in enumerate(tokens):
        if tokens.index(token) == at and not ends:
            stopped, marks = marked(engine, em.SamplingParams(max_tokens=30, stop_token_ids=(token,)))
            assert stopped == tokens[: at + 1]
            ends += marks[-1]
    assert ends, "no text ended with a draft token"


def test_a_chunk_without_tokens_is_one_empty_run() -> None:
    assert draft_runs(b"") == [(slice(0, 0), False)]


def test_a_stream_ends_before_its_stop_token() -> None:
    [whole] = em.Engine(TALKER).generate(["def f(x):"], em.SamplingParams(max_tokens=12))
    stop = em.SamplingParams(max_tokens=12, stop_token_ids=(whole.tokens[6],))
    chunks = list(em.Engine(TALKER).stream("def f(x):", stop))
    assert chunks[-1].output is not None
    assert chunks[-1].output.finish_reason == "stop"
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.text


def test_a_stream_never_shows_a_stop_string_nor_its_beginning() -> None:
    [whole] = em.Engine(TALKER).generate(["def f(x):"], em.SamplingParams(max_tokens=30))
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 9]
    params = em.SamplingParams(max_tokens=30, stop=(stop, "never said"))
    chunks = list(em.Engine(TALKER, em.NgramProposer()).stream("def f(x):", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text[: whole.text.find(stop)]
    assert chunks[-1].output is not None
    assert chunks[-1].output.finish_reason == "stop"


def test_streams_and_batches_share_an_engine() -> None:
    engine = em.Engine(TALKER, max_batch=3)
    [alone] = em.Engine(TALKER).generate([[5, 6, 7]], em.SamplingParams(max_tokens=9))
    stream = engine.stream("import os", em.SamplingParams(max_tokens=5))
    first = next(stream)
    [beside] = engine.generate([[5, 6, 7]], em.SamplingParams(max_tokens=9))
    assert beside.tokens == alone.tokens
    [text] = engine.generate(["import os"], em.SamplingParams(max_tokens=5))
    assert [*first.tokens, *(token for chunk in stream for token in chunk.tokens)] == text.tokens


@pytest.mark.parametrize("proposer", [None, em.NgramProposer()])
def test_an_abandoned_stream_frees_its_row(proposer: em.NgramProposer | None) -> None:
    engine = em.Engine(TALKER, proposer, max_batch=1)
    expected = [output.tokens for output in engine.generate([[5, 6, 7]], em.SamplingParams(max_tokens=9))]
    stream = engine.stream("import os", em.SamplingParams(max_tokens=500))
    next(stream)
    stream.close()
    assert [o.tokens for o in engine.generate([[5, 6, 7]], em.SamplingParams(max_tokens=9))] == expected
    assert engine.step() == []


def test_an_interrupted_batch_leaves_no_requests() -> None:
    engine = em.Engine(TALKER, max_batch=1)
    step, calls = engine.step, []

    def interrupted() -> list[object]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()  # type: ignore[return-value]

    engine.step = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6], [7, 8]], em.SamplingParams(max_tokens=50))
    engine.step = step  # type: ignore[method-assign]
    assert engine.step() == []


def test_streaming_needs_a_tokenizer() -> None:
    with pytest.raises(PromptError, match="no tokenizer"):
        next(em.Engine(TARGET).stream([5, 6]))


class Recording:
    """A policy that cycles through given depths and records its observations."""

    wants_trees = False

    def __init__(self, depths: list[int]):
        self.depths = depths
        self.results: list[RoundResult] = []

    def plan(self, context: Context) -> Plan:
        return Plan(self.depths[len(self.results) % len(self.depths)])

    def observe(self, result: RoundResult) -> None:
        assert result.seconds > 0
        counts = zip(result.drafted, result.accepted, strict=True)
        assert all(0 <= kept <= tried <= result.plan.size for tried, kept in counts)
        self.results.append(result)


class Capricious(Recording):
    """Plans chains with random early exit, or trees if `nodes` is more than the depth."""

    def __init__(self, k: int, nodes: int = 0):
        super().__init__([])
        self.k, self.nodes, self.wants_trees = k, nodes, nodes > k
        self.rng = np.random.default_rng(k)
        self.next = Plan(k, stop_below=0.5)

    def plan(self, context: Context) -> Plan:
        return self.next if context.can.trees or not self.next.is_tree else Plan(self.k)

    def observe(self, result: RoundResult) -> None:
        super().observe(result)
        tree = Plan(self.k, self.nodes)
        chain = Plan(self.k, stop_below=float(10 ** -self.rng.uniform(0, 5)))
        self.next = tree if self.wants_trees and self.rng.random() < 0.5 else chain


POLICIES = [
    lambda: em.ThroughputPolicy(3),
    lambda: em.AcceptancePolicy(5),
    lambda: em.AcceptancePolicy(4, disable_at_rows=2),
    lambda: Recording([0, 0, 0, 4, 1, 0, 2]),
    lambda: Recording([0] * 40 + [3]),
    lambda: Capricious(6),
    lambda: Capricious(6, nodes=12),
]


@cache
def seeded_alone(params: em.SamplingParams) -> list[int]:
    return em.Engine(TARGET).generate([PROMPTS[4]], params)[0].tokens


@pytest.mark.parametrize(("policy", "which"), in_turns(len(POLICIES), range(1, 5), 1))
def test_text_is_the_same_whatever_the_policy(policy: int, which: int) -> None:
    exact = which % 2 == 0
    engine = em.Engine(TARGET, proposers()[which], policy=POLICIES[policy](), max_batch=3, exact=exact)  # type: ignore[arg-type]
    seeded = em.SamplingParams(temperature=0.9, seed=5, max_tokens=20)
    lengths = [24, 7, 15, 24]
    params = [em.SamplingParams(max_tokens=n) for n in lengths]
    outputs = engine.generate([*PROMPTS[:4], PROMPTS[4]], [*params, seeded])
    for prompt, n, output in zip(PROMPTS[:4], lengths, outputs, strict=False):
        assert len(output.tokens) == n
        assert_same_text(prompt, output.tokens)
    assert outputs[4].tokens == seeded_alone(seeded)


def test_output_that_is_not_lossless_says_so() -> None:
    params = [em.SamplingParams(temperature=1.0, acceptance="threshold", max_tokens=6), em.SamplingParams(max_tokens=6)]
    outputs = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(3)).generate(PROMPTS[:2], params)
    assert [output.lossless for output in outputs] == [False, True]


def test_the_policy_observes_every_round() -> None:
    policy = Recording([2, 0, 3])
    texts = {p: t for p, (t, _) in GREEDY.items()}
    engine = em.Engine(TARGET, Oracle(texts, 0.3), policy=policy)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, [em.SamplingParams(max_tokens=n) for n in (24, 9, 16, 3, 24)])
    assert len(policy.results) == max(o.rounds for o in outputs)
    assert [result.plan for result in policy.results][:2] == [Plan(2), Plan(0)]
    assert sum(sum(result.drafted) for result in policy.results) == sum(o.drafted for o in outputs)
    assert sum(sum(result.accepted) for result in policy.results) == sum(o.accepted for o in outputs)
    assert policy.results[0].rows == 5


@pytest.mark.parametrize("nodes", [0, 12])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_policy_and_observer_see_the_same_early_exits_and_trees(rule: str, nodes: int) -> None:
    policy, seen = Capricious(7, nodes), list[RoundResult]()
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), policy=policy)
    engine.observer = seen.append
    params = em.SamplingParams(temperature=0.7, seed=1, max_tokens=24, acceptance=rule)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, params)
    rounds = [result for result in seen if result.plan.depth]
    assert rounds == [result for result in policy.results if result.plan.depth]
    assert sum(sum(result.kept) for result in rounds) == sum(output.accepted for output in outputs)
    assert sum(sum(result.drafted) for result in rounds) == sum(output.drafted for output in outputs)
    assert sum(result.emitted for result in seen) == sum(len(output.tokens) for output in outputs)
    trees = [result for result in rounds if result.plan.is_tree]
    exits = [result for result in rounds if result.plan.stop_below is not None]
    assert bool(trees) == (nodes > 0 and rule == "coupled")
    for result in trees:
        assert [len(path) for path in result.paths] == list(result.accepted)
        assert all(0 <= node < nodes for path in result.paths for node in path)
    for result in exits:
        looks, lag = result.confidences, CONFIDENCE_LAG
        assert all(len(row) == result.rows and all(0 < confidence <= 1 for confidence in row) for row in looks)
        assert len(looks) in {max(0, result.depth - n) for n in (lag, lag + 1)}
        assert (result.depth == result.plan.depth) or sum(looks[-1]) < result.plan.stop_below * result.rows
    assert len({result.depth for result in exits}) > 2


def test_rounds_account_for_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time between two rounds is time that the user waits, whatever the next round is."""
    now = [100.0]
    seconds: list[tuple[int, float]] = []

    class Timed(Recording):
        def observe(self, result: RoundResult) -> None:
            super().observe(result)
            seconds.append((result.plan.depth, result.seconds))

    collect = Round.collect

    def slow(collected: Round) -> RoundResult:
        now[0] += 10 if collected.plan.depth else 4
        return collect(collected)

    texts = {p: t for p, (t, _) in GREEDY.items()}
    engine = em.Engine(TARGET, Oracle(texts, 1.0), policy=Timed([2, 2, 0, 0, 0]))  # type: ignore[arg-type]
    engine.runner.clock = lambda: now[0]
    monkeypatch.setattr(Round, "collect", slow)
    row = engine.prepare(PROMPTS[3], em.SamplingParams(max_tokens=13))
    engine.submit(row)
    engine.step()
    began = now[0]
    while not row.finish_reason:
        engine.step()
        now[0] += 3  # the listener takes time for the tokens
    assert {(depth > 0, took) for depth, took in seconds[2:]} == {(False, 7.0), (True, 13.0)}
    assert sum(took for _, took in seconds[1:]) == now[0] - 3 - began


def test_a_single_plain_round_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device is done when dispatch returns, a second dispatched round would count for the first."""
    now = [100.0]
    dispatch = Batch.dispatch

    def slow(batch: Batch, plan: Plan, *args: Any) -> Round:
        now[0] += 10 if plan.depth else 4
        return dispatch(batch, plan, *args)

    monkeypatch.setattr(Batch, "dispatch", slow)

    class Looking(Recording):
        def plan(self, context: Context) -> Plan:
            return Plan(0 if len(self.results) % 4 == 3 or 20 <= len(self.results) < 30 else 2)

        def observe(self, result: RoundResult) -> None:
            self.results.append(result)

    looking = Looking([])
    texts = {p: t for p, (t, _) in GREEDY.items()}
    engine = em.Engine(TARGET, Oracle({p: t * 3 for p, t in texts.items()}, 1.0), policy=looking)  # type: ignore[arg-type]
    engine.runner.clock = lambda: now[0]
    engine.generate([PROMPTS[3]], em.SamplingParams(max_tokens=50))
    seen = [(result.plan.depth, result.seconds) for result in looking.results]
    assert seen[:20] == [(2, 10.0), (2, 10.0), (2, 10.0), (0, 4.0)] * 5
    assert [depth for depth, _ in seen[20:31]] == [0] * 11  # asked after ten of them were observed
    assert sum(seconds for _, seconds in seen[20:31]) == 11 * 4


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled"])
def test_rows_that_end_with_their_first_token_are_reported_once(reason: str) -> None:
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(2))
    talking = engine.prepare(PROMPTS[4], em.SamplingParams(max_tokens=24))
    params = em.SamplingParams(
        max_tokens=1 if reason == "length" else 9, stop_token_ids=tuple(GREEDY[tuple(PROMPTS[0])][0][:1])
    )
    for company in (False, True):
        row = engine.prepare(PROMPTS[0], params)
        if company:
            engine.submit(talking)
            engine.step()
        engine.submit(row)
        if reason == "cancelled":
            engine.cancel(row)
        ended = [done for _ in range(40) for done in engine.step()]
        assert ended.count(row) == (reason != "cancelled")
        assert row.finish_reason == ("stop" if reason == "length" else reason)
        assert engine.idle
    assert_same_text(PROMPTS[4], talking.tokens)


def test_requests_that_arrive_between_steps_wait_for_the_dispatched_round() -> None:
    for proposer in (None, em.NgramProposer()):
        engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(0))
        first, second = (engine.prepare(PROMPTS[i], em.SamplingParams(max_tokens=12)) for i in (0, 3))
        engine.submit(first)
        engine.step()
        engine.submit(second)
        while not engine.idle:
            engine.step()
        for prompt, row in ((PROMPTS[0], first), (PROMPTS[3], second)):
            assert_same_text(prompt, row.tokens)


class Turns:
    """Alternates between the model and, in rows that can, n-grams."""

    wants_trees = True

    def __init__(self, nodes: int):
        self.nodes, self.lookup = nodes, False

    def plan(self, context: Context) -> Plan:
        return Plan(3, self.nodes, lookups=(3 * self.lookup,) * len(context.sources))

    def observe(self, result: RoundResult) -> None:
        self.lookup = not self.lookup


@pytest.mark.parametrize(("drafter", "nodes"), diagonal(["ngrams", "model", "none"], [0, 6]))
def test_a_request_chooses_what_drafts(drafter: Drafter, nodes: int) -> None:
    def decode(*drafters: Drafter | None) -> list[RoundResult]:
        proposer = em.HybridProposer(em.HeadProposer(tiny_head(TARGET)), em.NgramProposer())
        engine = em.Engine(TARGET, proposer, policy=Turns(nodes), max_batch=2)
        results: list[RoundResult] = []
        engine.observer = results.append
        params = [em.SamplingParams(max_tokens=24, drafter=choice) for choice in drafters]
        prompts = [PROMPTS[2], PROMPTS[0]][: len(params)]
        for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
            assert_same_text(prompt, output.tokens)
        return [result for result in results if result.plan.size]

    alone = decode(drafter)
    assert {bool(result.plan.lookups) for result in alone} == {"ngrams": {True}, "model": {False}}.get(drafter, set())
    assert any(result.drafted[0] for result in alone) == (drafter != "none")
    both = [result for result in decode(drafter, None) if result.rows == 2]
    for result in both:
        [lookup, *_] = result.plan.lookups or [0]
        allowed = {"none": False, "model": not lookup, "ngrams": lookup > 0}[drafter]
        assert allowed or result.drafted[0] == 0
    assert any(result.drafted[1] > 0 for result in both)
    assert any(result.drafted[0] > 0 for result in both) == (drafter != "none")


@pytest.mark.parametrize("alone", [False, True])
def test_n_grams_are_tried_in_every_round_whatever_drafts(alone: bool) -> None:
    """The trials of a request do not depend on the drafts: they compare its text with itself."""
    ngrams = em.NgramProposer(4, 2)
    proposer = ngrams if alone else em.HybridProposer(em.HeadProposer(tiny_head(TARGET)), ngrams)
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(0))
    results: list[RoundResult] = []
    engine.observer = results.append
    [output] = engine.generate([PROMPTS[2]], em.SamplingParams(max_tokens=40))
    [row] = em.NgramProposer(4, 2).open([PROMPTS[2]]).rows
    expected = row.ended()
    for token in output.tokens:
        row.extend([token])
        expected += row.ended()
    assert expected
    assert [trial for result in results for trial in result.trials] == expected


def test_n_grams_that_no_request_may_use_cost_a_plain_engine_nothing() -> None:
    class Asked(em.FixedPolicy):
        def plan(self, context: Context) -> Plan:
            raise AssertionError("there is nothing to plan")

    engine = em.Engine(TARGET, em.NgramProposer(), policy=Asked(4), max_batch=2)
    engine.drafter = "none"
    request = engine.prepare(PROMPTS[2], em.SamplingParams(max_tokens=12))
    engine.submit(request)
    states = list[Any]()
    while not engine.idle:
        engine.step()
        states += [batch.state for batch in engine.groups.batches]
    assert_same_text(PROMPTS[2], request.tokens)
    assert states
    assert not any(row.tokens for state in states for row in state.rows)


def test_an_output_before_the_end_is_a_copy_without_a_reason() -> None:
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(2))
    request = engine.prepare([1, 2, 1, 2], em.SamplingParams(max_tokens=12, logprobs=True))
    engine.submit(request)
    while len(request.tokens) < 3:
        engine.step()
    output = engine.output(request)
    assert (output.finish_reason, output.tokens) == ("", request.tokens)
    lists = output.tokens, output.drafted_by_position, output.accepted_by_position, output.logprobs
    before = deepcopy(lists)
    while not engine.idle:
        engine.step()
    assert lists == before
    assert engine.output(request).finish_reason == "length"


@pytest.mark.parametrize("name", ["grammar", "stop_watcher"])
def test_a_grammar_or_watcher_that_is_not_returned_is_refused(name: str) -> None:
    params = em.SamplingParams(**{name: lambda: None})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grammar or stop_watcher returned None"):
        em.Engine(TARGET).generate([1, 2], params)


def test_a_batch_without_places_is_refused_between_steps() -> None:
    engine = em.Engine(TARGET)
    for wrong in (0, True):
        engine.max_batch = wrong
        with pytest.raises(ConfigError, match=f"max_batch must be an integer of at least 1; got {wrong}"):
            engine.generate([1, 2])
    engine.max_batch = 2
    assert engine.generate([1, 2], em.SamplingParams(max_tokens=2)).finish_reason == "length"


def test_drafter_and_policy_can_change_between_steps() -> None:
    proposer = em.HybridProposer(em.HeadProposer(tiny_head(TARGET)), em.NgramProposer())
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3))
    results: list[RoundResult] = []
    engine.observer = results.append
    request = engine.prepare(PROMPTS[2], em.SamplingParams(max_tokens=60))
    engine.submit(request)
    changes: list[tuple[Drafter | None, int]] = [("model", 3), ("none", 3), ("model", 1), ("ngrams", 2), (None, 0)]
    for drafter, depth in changes:
        engine.drafter = drafter
        engine.use_policy(em.FixedPolicy(depth))
        engine.step()
        after = len(results)
        for _ in range(3):
            engine.step()
        plans = {(result.plan.size, bool(result.plan.lookups)) for result in results[after:]}
        allowed = {"model": {(depth, False)}, "ngrams": {(depth, True), (0, False)}}
        assert plans <= allowed.get(drafter or "", {(0, False)})
    while not engine.idle:
        engine.step()
    assert_same_text(PROMPTS[2], request.tokens)
    with pytest.raises(ConfigError, match="drafter"):
        em.SamplingParams(drafter="head")  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 4])
def test_a_watcher_ends_the_text_with_its_token(depth: int) -> None:
    """The watcher sees only accepted tokens. If it raises, no other request ends."""
    texts = {p: t for p, (t, _) in GREEDY.items()}
    engine = em.Engine(TARGET, Oracle(texts, 0.3) if depth else None, policy=em.FixedPolicy(depth), max_batch=3)
    seen: list[int] = []

    def fifth(token: int, text: str) -> bool:
        seen.append(token)
        return len(seen) == 5

    def raising(token: int, text: str) -> bool:
        raise ValueError("no")

    watchers = [lambda: fifth, lambda: raising, None]
    params = [em.SamplingParams(max_tokens=24, stop_watcher=watcher) for watcher in watchers]
    ended, failed, other = engine.generate(PROMPTS[:3], params)
    assert (ended.finish_reason, ended.tokens) == ("stop", seen)
    assert_same_text(PROMPTS[0], ended.tokens)
    assert len(ended.tokens) == 5
    assert failed.finish_reason == "error"
    assert "stop watcher failed: no" in str(failed.error)
    assert len(other.tokens) == 24
    with pytest.raises(ConfigError, match="stop_watcher"):
        em.SamplingParams(stop_watcher=3)  # type: ignore[arg-type]


def test_one_prompt_gives_one_output() -> None:
    target = tiny_target(tokenizer=True)
    engine, params = em.Engine(target), em.SamplingParams(max_tokens=6)
    chat = [{"role": "user", "content": "def f(x):"}]
    assert target.tokenizer is not None
    tokens = target.tokenizer.encode("def f(x):")
    prompts: list[Prompt] = [
        "def f(x):",
        tokens,
        tuple(tokens),
        np.array(tokens).tolist(),
        list(np.array(tokens)),
        chat,
    ]
    listed = engine.generate(prompts, params)
    assert [engine.generate(prompt, params) for prompt in prompts] == listed
    assert listed[0].text == listed[1].text != ""
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "prompt", [["import os", "x"], [None], b"import os", {"role": "user"}, [{"content": "x"}], 3, np.array([1, 2])]
)
def test_what_is_no_prompt_is_refused_with_an_example(prompt: Any) -> None:
    engine = em.Engine(tiny_target(tokenizer=True))
    for decode in (lambda: engine.generate([prompt, "x"]), lambda: next(engine.stream(prompt))):
        with pytest.raises(PromptError, match="a prompt is text, a list of token ids, or a list of messages such as"):
            decode()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"prefix_cache_bytes": -5}, "prefix_cache_bytes must be a number of at least 0; got -5"),
        ({"prefix_cache_bytes": "2GB"}, "prefix_cache_bytes must be a number of at least 0; got '2GB'"),
        ({"max_batch": 0}, "max_batch must be an integer of at least 1; got 0"),
        ({"max_batch": None}, "max_batch must be an integer of at least 1; got None"),
        ({"prefill_chunk": "512"}, "prefill_chunk must be an integer of at least 1; got '512'"),
        ({"prefill_ms": "5"}, "prefill_ms must be a number above 0; got '5'"),
        ({"groups": None}, "groups must be 1 or 2; got None"),
        ({"drafter": "head"}, "drafter must be one of model, ngrams, none, or None; got 'head'"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_it_can_be(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        em.Engine(TARGET, em.NgramProposer(), **setting)


@pytest.mark.parametrize("prompt", [3, {"role": "user", "content": "import os"}])
def test_a_token_or_a_message_alone_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(PromptError, match="a prompt is text, a list of token ids, or a list of messages such as"):
        em.Engine(tiny_target(tokenizer=True)).generate(prompt)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(PromptError, match="not valid Unicode: surrogates not allowed at character 2"):
        em.Engine(tiny_target(tokenizer=True)).generate("ab\ud800")
    with pytest.raises(PromptError, match="a message is not valid Unicode; give text in UTF-8"):
        em.Engine(tiny_target(tokenizer=True)).generate([{"role": "user", "content": "ab\ud800"}])


def test_texts_in_parts_are_one_text() -> None:
    engine = em.Engine(tiny_target(tokenizer=True))
    parts = [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]
    prompts = [
        engine.prepare([{"role": "user", "content": x}], em.SamplingParams()).prompt for x in (parts, "import os")
    ]
    assert prompts[0] == prompts[1]


def test_a_message_that_breaks_the_template_is_one_error() -> None:
    target = tiny_target(tokenizer=True)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(PromptError, match="the chat template of .* refuses these messages: can only concatenate str"):
        em.Engine(target).generate([{"role": "user", "content": "x"}])


def test_a_head_drafts_without_being_wrapped() -> None:
    head = tiny_head(TARGET)
    engine = em.Engine(TARGET, head, policy=em.FixedPolicy(3))
    assert isinstance(engine.proposer, em.HeadProposer)
    assert engine.generate(PROMPTS[0], em.SamplingParams(max_tokens=12)).drafted > 0
    with_ngrams = em.Engine(TARGET, em.HybridProposer(head), policy=em.FixedPolicy(3))
    assert with_ngrams.generate(PROMPTS[0], em.SamplingParams(max_tokens=12)).drafted > 0
    for wrong in ("folder", TARGET, SimpleNamespace(bind=print)):
        with pytest.raises(ConfigError, match="proposer must be a head or a proposer .*em.load_head.*; got"):
            em.Engine(TARGET, wrong)  # type: ignore[arg-type]


def test_a_model_with_ngrams_is_told_the_same_as_alone() -> None:
    heard = list[Any]()

    class Model(em.HeadProposer):
        def open(self, prompts: Sequence[Sequence[int]]) -> Any:
            state: Any = super().open(prompts)
            state.enter = heard.append
            return state

        def join(self, pieces: Sequence[HeadPiece], length: int, prompt: Sequence[int] = ()) -> Any:
            heard.append(list(prompt))
            return super().join(pieces, length, prompt)

    def told(proposer: Proposer) -> list[Any]:
        heard.clear()
        engine = em.Engine(TARGET, proposer, prefix_cache_bytes=1 << 26)
        for prompt in (PROMPTS[3], [*PROMPTS[3], 5]):
            engine.submit(engine.prepare(prompt, em.SamplingParams(max_tokens=4), namespace="a"))
            while not engine.idle:
                engine.step()
        return list(heard)

    model = Model(tiny_head(TARGET))
    assert told(em.HybridProposer(model)) == told(model) == [["a"], [*PROMPTS[3], 5]]


def test_arguments_of_another_type_are_refused_with_what_to_write() -> None:
    engine, model = em.Engine(TARGET), TARGET.model
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: em.Engine(model), r"em.load_target\(name\), or em.Target\(model, tokenizer\)"),  # type: ignore[arg-type]
        (lambda: em.Target("name"), "em.load_target"),  # type: ignore[arg-type]
        (lambda: em.Target(TARGET), "em.load_target"),  # type: ignore[arg-type]
        (lambda: em.Engine(TARGET, policy="fixed"), "em.FixedPolicy"),  # type: ignore[arg-type]
        (lambda: em.Engine(TARGET, policy=em.FixedPolicy), "em.FixedPolicy"),  # type: ignore[arg-type]
        (lambda: em.HeadProposer("head"), r"em.load_head\(name, target\)"),  # type: ignore[arg-type]
        (lambda: em.DraftModelProposer("model"), r"em.load_target\(name\)"),  # type: ignore[arg-type]
        (lambda: engine.generate(PROMPTS[0], {"max_tokens": 3}), "em.SamplingParams"),  # type: ignore[call-overload]
        (lambda: engine.generate(PROMPTS[0], 3), "em.SamplingParams"),  # type: ignore[call-overload]
        (lambda: em.load_head("head", "target"), r"em.load_target\(name\)"),  # type: ignore[arg-type]
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()


def test_a_thread_is_refused_while_another_is_in_a_step() -> None:
    errors = list[BaseException | None]()

    def step_in_another_thread(result: RoundResult) -> None:
        engine.observer = None
        with ThreadPoolExecutor(1) as other:
            errors.append(other.submit(engine.step).exception())

    params = em.SamplingParams(max_tokens=8)
    engine = em.Engine(TARGET, observer=step_in_another_thread)
    assert engine.generate(PROMPTS[0], params).tokens == em.Engine(TARGET).generate(PROMPTS[0], params).tokens
    assert ["another thread decodes with this engine" in str(error) for error in errors] == [True]


def test_an_engine_loads_a_target_by_its_folder(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    params = em.SamplingParams(max_tokens=6)
    given = (folder, str(folder), em.load_target(folder))
    texts = [em.Engine(target).generate("def f(x):", params).text for target in given]
    assert len(set(texts)) == 1
    with pytest.raises(em.EagleError, match="there is no folder"):
        em.Engine(tmp_path / "nowhere")


def test_an_engine_is_complete_after_its_constructor() -> None:
    """No module sets a part of an engine, except what callers may change between steps."""
    root, may_change = Path(em.__file__).parents[1], {"max_batch", "drafter", "observer"}
    faults = []
    for path in (
        path for part in ("eagle_mlx", "serve", "train", "data_pipelines") for path in (root / part).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value)
                if re.search(r"\bengine(\.|$)", owner) and not (owner.endswith("engine") and node.attr in may_change):
                    faults.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert faults == []
