"""Penalties, bias, callables, grammars, stop strings and log probabilities work in any round as in plain decoding."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import eagle_mlx as em
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.processors import Processors, walk
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.decoding.verify import Verdict
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.errors import PromptError
from eagle_mlx.plan import PLAIN, Plan
from eagle_mlx.proposers.base import Observation, Proposer
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.text import IncrementalText, StopStrings
from tests import grammars
from tests.fakes import RowsState, tiny_head, tiny_target
from tests.full import FULL, diagonal, in_full, some

TARGET = tiny_target()
VOCAB = TARGET.vocab_size
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 7, 8, 7, 8, 7], [100, 3]]
LENGTH = in_full(20, 14)
Array = np.ndarray[Any, Any]


class Guess(Proposer):
    """A proposer that knows some rows' text and makes random errors."""

    name = "guess"

    def __init__(self, texts: list[list[int]], wrong: float = 0.3, vocab: int = VOCAB):
        self.texts, self.wrong, self.vocab, self.rng = texts, wrong, vocab, np.random.default_rng(0)

    def open(self, prompts: Sequence[Sequence[int]]) -> GuessState:
        return GuessState(self, [list(p) for p in prompts])


class GuessState(RowsState):
    def __init__(self, guess: Guess, rows: list[list[int]]):
        self.guess, self.rows = guess, rows

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        rng, tokens, depth = self.guess.rng, [], plan.depth
        for row in self.rows:
            text = next((t for t in self.guess.texts if t[: len(row)] == row), [])
            continuation = (text[len(row) : len(row) + depth] + [0] * depth)[:depth]
            tokens.append(
                [int(rng.integers(self.guess.vocab)) if rng.random() < self.guess.wrong else t for t in continuation]
            )
        lengths = rng.integers(depth // 2, depth + 1, len(tokens))
        return Draft(mx.array(tokens, mx.int32), mx.array(lengths, mx.int32))

    def observe(self, seen: Observation) -> None:
        for row, new in zip(self.rows, seen.tokens, strict=True):
            row += new


def by_hand(logits: Array, params: SamplingParams, prompt: list[int], text: list[int]) -> Array:
    """Compute the logits [V] after a text from the definitions."""
    out = logits.astype(np.float64)
    for token in {*prompt, *text}:
        out[token] *= 1 / params.repetition_penalty if out[token] > 0 else params.repetition_penalty
    for token in text:
        out[token] -= params.frequency_penalty
    for token in set(text):
        out[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


some_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.sampled_from([{}, {3: 2.0}, {0: -100.0, 8: 1.5}]),
)


def row(params: SamplingParams, prompt: list[int], tokens: list[int]) -> RequestState:
    return RequestState(Request(prompt, params, 0, 99, frozenset()), tokens=tokens)


@settings(max_examples=some(60), deadline=None)
@given(
    params=st.lists(some_params, min_size=1, max_size=4),
    width=st.integers(0, 4),
    rounds=st.integers(1, 3),
    data=st.data(),
)
def test_every_position_is_treated_as_plain_decoding_would(
    params: list[SamplingParams], width: int, rounds: int, data: st.DataObject
) -> None:
    """Over several rounds with a different number of accepted tokens per row."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    vocab, count = 9, len(params)
    texts = [
        ([int(t) for t in rng.integers(0, vocab, 3)], [int(t) for t in rng.integers(0, vocab, i)]) for i in range(count)
    ]
    processors = Processors.of([row(p, *text) for p, text in zip(params, texts, strict=True)], vocab)
    if processors is None:
        assert not any(p.penalizes or p.logit_bias for p in params)
        return
    for _ in range(rounds):
        logits = rng.normal(scale=3, size=(count, width + 1, vocab)).astype(np.float32)
        drafts = rng.integers(0, vocab, (count, width)).astype(np.int32)
        lengths = mx.full((count,), width, mx.int32)
        changed, _ = processors.apply(mx.array(logits), Draft(mx.array(drafts).reshape(count, width), lengths))
        actual = np.array(changed)
        for b, (prompt, text) in enumerate(texts):
            for i in range(width + 1):
                expected = by_hand(logits[b, i], params[b], prompt, [*text, *map(int, drafts[b, :i])])
                np.testing.assert_allclose(actual[b, i], expected, rtol=1e-5, atol=1e-5)
        accepted = rng.integers(0, width + 1, count).astype(np.int32)
        tokens = np.concatenate([drafts, rng.integers(0, vocab, (count, 1)).astype(np.int32)], axis=1)
        processors.commit(Verdict(mx.array(accepted), mx.array(tokens)))
        for (_, text), emitted, kept in zip(texts, tokens, accepted, strict=True):
            text += map(int, emitted[: kept + 1])


def test_rows_without_processors_pay_nothing() -> None:
    plain = row(SamplingParams(temperature=1, top_p=0.9, min_p=0.1, logprobs=True), [1], [2])
    assert Processors.of([plain, plain], 9) is None
    asking = row(SamplingParams(presence_penalty=1), [1], [2])
    processors = Processors.of([plain, asking], 9)
    assert processors is not None
    assert processors.penalties is not None
    assert processors.penalties.counts.shape == (1, 9)
    assert processors.on_host == []
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 1, 9)).astype(np.float32))
    before = np.array(logits)
    out, _ = processors.apply(logits, Draft(mx.zeros((2, 0), mx.int32), mx.zeros((2,), mx.int32)))
    assert mx.array_equal(out[0], logits[0])
    assert out[1, 0, 2].item() == pytest.approx(before[1, 0, 2] - 1)
    assert (np.array(logits) == before).all()
    assert Processors.of([plain], 9) is None


def halve_repeats(tokens: list[int], logits: mx.array) -> mx.array:
    """Change logits in place, as mlx-lm's processors do."""
    assert logits.shape == (1, VOCAB)
    logits[:, mx.array(tokens[-4:])] *= 0.5
    return logits


def by_length(tokens: list[int], logits: mx.array) -> mx.array:
    """Depend on the number of tokens, so that missing or repeated tokens are noticed."""
    return logits + mx.where(mx.arange(VOCAB) % 7 == (len(tokens) + tokens[-1]) % 7, 1.0, 0.0)


class Steps(grammars.Steps):
    vocab, end = VOCAB, None


ASKING: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {5: 3.0, 9: -50.0}},
    "callables": {"logits_processors": (halve_repeats, by_length)},
    "grammar": {"grammar": Steps},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
        "logits_processors": (by_length,),
        "grammar": Steps,
        "min_p": 0.01,
    },
}


def plain_text(prompt: list[int], params: SamplingParams) -> list[int]:
    return em.Engine(TARGET).generate([prompt], params)[0].tokens


def mlx_lms_text(prompt: list[int], params: SamplingParams) -> list[int]:
    """Decode greedily with mlx-lm and callables that implement the penalties."""
    steps = itertools.count()

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        written = next(steps)
        text = [int(token) for token in tokens.tolist()[len(tokens) - written :]]  # type: ignore[union-attr]
        out = mx.array(by_hand(np.array(logits[0]), params, prompt, text).astype(np.float32))[None]
        for processor in params.logits_processors:
            out = processor([*prompt, *text], out)
        if params.grammar is not None:
            grammar = params.grammar()
            assert all(map(grammar.advance, text))
            out = mx.where(grammar.mask(), out, -math.inf)
        return out

    generated = generate_step(mx.array(prompt), TARGET.model, max_tokens=LENGTH, logits_processors=[process])
    return [int(token) for token, _ in generated]


@pytest.mark.parametrize("case", ASKING)
def test_greedy_text_is_that_of_mlx_lm_with_the_same_processors(case: str) -> None:
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=LENGTH, **ASKING[case])
        assert plain_text(prompt, params) == mlx_lms_text(prompt, params)
        assert case == "all" or plain_text(prompt, params) != plain_text(prompt, SamplingParams(max_tokens=LENGTH))


KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.95}}


@pytest.mark.parametrize(("case", "kind"), diagonal(ASKING, KINDS))
def test_speculation_and_batches_change_nothing(case: str, kind: str) -> None:
    """Unless in full, each text uses half of the proposers, alternately."""
    options = KINDS[kind]
    params = SamplingParams(max_tokens=LENGTH, **ASKING[case], **options)
    company = [
        SamplingParams(max_tokens=7, **options),
        SamplingParams(max_tokens=11, frequency_penalty=1.0, **options),
        params,
        SamplingParams(max_tokens=LENGTH, **options),
        params,
    ]
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    alone = [plain_text(prompt, choice) for prompt, choice in zip(prompts, company, strict=True)]
    texts = [[*prompt, *text] for prompt, text in zip(prompts, alone, strict=True)]
    head = em.HeadProposer(tiny_head(TARGET))
    drafting = [None, em.NgramProposer(), head, Guess(texts), Guess(texts, 0.0), em.HybridProposer(head)]
    turn = list(ASKING).index(case) // 2 % 2
    for proposer in drafting if FULL else drafting[turn::2]:
        engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(4), max_batch=4)  # type: ignore[arg-type]
        outputs = engine.generate(prompts, company)
        assert [output.tokens for output in outputs] == alone
        if isinstance(proposer, Guess):
            assert outputs[4].accepted > 3


def test_unseeded_rows_follow_their_processors_too() -> None:
    params = SamplingParams(temperature=1.2, max_tokens=40, **ASKING["grammar"], logit_bias={7: -1e4})
    for proposer in (None, em.HeadProposer(tiny_head(TARGET)), em.NgramProposer()):
        for output in em.Engine(TARGET, proposer, policy=em.FixedPolicy(3)).generate(PROMPTS, params):
            assert len(output.tokens) == 40
            assert set(np.diff(output.tokens) % VOCAB) <= set(range(1, 10))
            assert 7 not in output.tokens


def test_a_grammar_has_seen_only_the_accepted_tokens() -> None:
    made: list[Steps] = []

    def make() -> Steps:
        made.append(Steps())
        return made[-1]

    params = SamplingParams(max_tokens=LENGTH, grammar=make)
    text = plain_text(PROMPTS[0], params)
    engine = em.Engine(TARGET, Guess([[*PROMPTS[0], *text]]), policy=em.FixedPolicy(5))  # type: ignore[arg-type]
    output = engine.generate([PROMPTS[0]], params)[0]
    assert output.rounds < LENGTH
    assert made[-1].taken == output.tokens == text
    assert made[-1].deepest > 0
    assert made[0].deepest == 0


def test_walking_a_draft_ends_at_its_first_illegal_token() -> None:
    grammar = Steps()
    assert grammar.advance(10)
    masks = walk(grammar, [12, 20, 99, 100])
    assert [np.flatnonzero(np.array(mask))[0] for mask in masks] == [11, 13, 21]
    assert grammar.taken == [10]


class Short:
    """Allows any three tokens, then none, not even a stop token."""

    def __init__(self) -> None:
        self.taken = 0

    def mask(self) -> mx.array:
        return mx.full((VOCAB,), self.taken < 3)

    def advance(self, token: int) -> bool:
        self.taken += 1
        return self.taken <= 3 or bool(self.rollback(1))

    def forced(self, most: int) -> list[int]:
        return []

    def rollback(self, count: int) -> None:
        self.taken -= count


@pytest.mark.parametrize("kind", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}])
def test_a_grammar_that_allows_nothing_ends_its_row_and_no_other(kind: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=9, **kind), SamplingParams(max_tokens=9, grammar=Short, **kind)]
    for proposer in (None, em.NgramProposer(), em.HeadProposer(tiny_head(TARGET))):
        free, bound = em.Engine(TARGET, proposer, policy=em.FixedPolicy(4)).generate(PROMPTS[:2], params)
        assert (len(free.tokens), free.finish_reason) == (9, "length")
        assert (len(bound.tokens), bound.finish_reason) == (3, "stop")


@pytest.mark.parametrize("drafting", [False, True])
def test_each_callable_sees_the_text_of_plain_decoding(drafting: bool) -> None:
    seen: list[list[int]] = []

    def look(tokens: list[int], logits: mx.array) -> mx.array:
        seen.append(list(tokens))
        return logits

    params = SamplingParams(max_tokens=LENGTH, logits_processors=(look,))
    text = plain_text(PROMPTS[0], SamplingParams(max_tokens=LENGTH))
    proposer = Guess([[*PROMPTS[0], *text]]) if drafting else None
    output = em.Engine(TARGET, proposer, policy=em.FixedPolicy(4)).generate([PROMPTS[0]], params)[0]  # type: ignore[arg-type]
    assert output.tokens == text
    whole = [*PROMPTS[0], *text]
    for length in range(len(PROMPTS[0]), len(whole)):
        assert whole[:length] in seen


def test_a_bias_outside_the_vocabulary_and_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = em.Engine(TARGET)
    with pytest.raises(PromptError, match="logit_bias has a token id outside the target's vocabulary of 128"):
        engine.generate([[1]], SamplingParams(logit_bias={128: 1.0}))
    with pytest.raises(PromptError, match="no tokenizer; give stop_token_ids instead of stop"):
        engine.generate([[1]], SamplingParams(stop=("a",)))


@pytest.mark.parametrize(
    ("kind", "top"), diagonal([{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}], [5, 1, 0])
)
def test_logprobs_are_the_targets_own(kind: dict[str, Any], top: int) -> None:
    params = SamplingParams(max_tokens=12, logprobs=True, top_logprobs=top, presence_penalty=2.0, **kind)
    company = [params, SamplingParams(max_tokens=9, **kind), replace(params, max_tokens=5, top_logprobs=2)]
    for proposer in (None, em.HeadProposer(tiny_head(TARGET)), em.NgramProposer()):
        outputs = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3)).generate(PROMPTS, company)
        assert outputs[1].logprobs is None
        for prompt, output, most in ((PROMPTS[0], outputs[0], top), (PROMPTS[2], outputs[2], 2)):
            logits = TARGET.forward(mx.array([[*prompt, *output.tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            assert output.logprobs is not None
            assert [entry.token for entry in output.logprobs] == output.tokens
            for entry, row_ in zip(output.logprobs, expected, strict=True):
                assert entry.logprob == pytest.approx(row_[entry.token], abs=1e-3)
                assert [p for _, p in entry.top] == pytest.approx(np.sort(row_)[::-1][:most], abs=1e-3)
                assert [row_[token] for token, _ in entry.top] == pytest.approx([p for _, p in entry.top], abs=1e-3)


def test_no_logprobs_are_listed_after_a_stop() -> None:
    text = plain_text(PROMPTS[0], SamplingParams(max_tokens=LENGTH))
    params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(text[6],), top_logprobs=1)
    output = em.Engine(TARGET, Guess([[*PROMPTS[0], *text]], 0.0), policy=em.FixedPolicy(5)).generate(
        [PROMPTS[0]], params
    )[0]  # type: ignore[arg-type]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.tokens) == text.index(text[6]) + 1


WORDED = tiny_target(tokenizer=True)


def first_end(tokens: list[int], strings: tuple[str, ...]) -> int:
    """Return the number of tokens when the first of the strings is complete."""
    assert WORDED.tokenizer is not None
    for count in range(1, len(tokens) + 1):
        if any(text in WORDED.tokenizer.decode(tokens[:count]) for text in strings):
            return count
    return len(tokens)


def text_and_tokens(prompt: str, count: int) -> tuple[str, list[int]]:
    output = em.Engine(WORDED).generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0]
    return output.text, output.tokens


@pytest.mark.parametrize("proposer", [lambda texts: None, lambda texts: Guess(texts, 0.0), lambda texts: Guess(texts)])
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(proposer: Callable[..., Any]) -> None:
    prompt = "def f(x):"
    text, tokens = text_and_tokens(prompt, 30)
    assert WORDED.tokenizer is not None
    whole = [*WORDED.tokenizer.encode(prompt), *tokens]
    assert len(text) > 40
    for start, length in ((0, 1), (10, 3), (17, 9), (25, 12), (30, 2)):
        stop = (text[start : start + length], "never in it")
        engine = em.Engine(WORDED, proposer([whole]), policy=em.FixedPolicy(5))
        params = SamplingParams(max_tokens=30, ignore_eos=True, stop=stop, logprobs=True)
        output = engine.generate([prompt], params)[0]
        assert output.text == text[: text.index(stop[0])]
        assert output.tokens == tokens[: first_end(tokens, stop)]
        assert output.finish_reason == "stop"
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.tokens)
        assert output.accepted + output.rounds >= len(output.tokens)


@settings(max_examples=some(100), deadline=None)
@given(st.text(min_size=1, max_size=30), st.integers(0, 29), st.integers(1, 8), st.integers(0, 30))
def test_a_string_is_found_with_the_token_that_completes_it(text: str, start: int, length: int, noise: int) -> None:
    """Includes characters of several tokens, and bytes that never become a character."""
    tokenizer = WORDED.tokenizer
    assert tokenizer is not None
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    tokens += [int(t) for t in np.random.default_rng(noise).integers(0, 4096, noise)]
    start %= len(text)
    stop = (text[start : start + length],)
    watch, decoder, ended = StopStrings(stop), IncrementalText(tokenizer), len(tokens)
    for count, token in enumerate(tokens, 1):
        if watch.complete(*decoder.add([token])):
            ended = count
            break
        assert len(decoder.window) < 30
    assert ended == first_end(tokens, stop)


def test_the_earliest_stop_string_cuts_the_text() -> None:
    stops = StopStrings(("cd", "bcde", "x"))
    assert stops.cut("abcdef") == ("a", "bcde")
    assert stops.cut("none") == ("none", None)


def test_a_round_that_is_cancelled_was_never_counted() -> None:
    params = SamplingParams(max_tokens=LENGTH, frequency_penalty=2.0)
    batch = Batch(TARGET, None, [RequestState(Request(PROMPTS[0], params, 0, LENGTH, frozenset()))])
    prefill = Prefill(batch)
    prefill.step(512)
    assert not prefill.left
    while not batch.requests[0].finish_reason:
        current = batch.dispatch(PLAIN)
        batch.dispatch(PLAIN).cancel()
        current.collect()
    assert batch.requests[0].tokens == plain_text(PROMPTS[0], params)


class Misshapen(Steps):
    """Its masks have the wrong shape."""

    def __init__(self, shape: Callable[[mx.array], Any]):
        super().__init__()
        self.shape = shape

    def mask(self) -> mx.array:
        out: mx.array = self.shape(super().mask())
        return out


SHAPES: dict[str, tuple[Callable[[mx.array], Any], str]] = {
    "shorter": (lambda mask: mask[:5], r"returned \[5\] bool as a mask; return \[128\] bool"),
    "longer": (lambda mask: mx.concatenate([mask, mask]), r"returned \[256\] bool as a mask; return \[128\] bool"),
    "none": (lambda mask: None, r"returned None as a mask; return \[128\] bool"),
    "list": (lambda mask: mask.tolist(), r"returned \[True, .* as a mask; return \[128\] bool"),
    "two axes": (lambda mask: mask[None], r"returned \[1, 128\] bool as a mask; return \[128\] bool"),
}


def fails_alone(params: SamplingParams, message: str, drafts: bool) -> None:
    """Check that the request fails while two others get the same text as alone."""
    free = SamplingParams(max_tokens=LENGTH)
    wanted = [plain_text(prompt, free) for prompt in PROMPTS]
    proposer = Guess([[*p, *t] for p, t in zip(PROMPTS, wanted, strict=True)]) if drafts else None
    engine = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3), max_batch=3)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, [free, params, free])
    assert [outputs[0].tokens, outputs[2].tokens] == [wanted[0], wanted[2]]
    assert (outputs[1].finish_reason, outputs[0].error, outputs[2].error) == ("error", None, None)
    assert re.search(message, outputs[1].error or ""), outputs[1].error


@pytest.mark.parametrize(("shape", "drafts"), diagonal(SHAPES, [False, True]))
def test_masks_of_another_shape_fail_their_row_alone(shape: str, drafts: bool) -> None:
    change, message = SHAPES[shape]
    fails_alone(
        SamplingParams(max_tokens=LENGTH, grammar=lambda: Misshapen(change)), f"the grammar failed: .*{message}", drafts
    )


def doubled(tokens: list[int], logits: mx.array) -> mx.array:
    return mx.concatenate([logits, logits])


def nothing(tokens: list[int], logits: mx.array) -> Any:
    return None


def spoils(tokens: list[int], logits: mx.array) -> mx.array:
    return mx.where(mx.arange(VOCAB) == 7, mx.nan, logits) if len(tokens) > 10 else logits


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (doubled, r"a logits processor failed: doubled returned \[2, 128\] float32; return \[1, 128\]"),
        (nothing, r"a logits processor failed: nothing returned None; return \[1, 128\]"),
        (spoils, r"a logits processor returned NaN"),
    ],
)
def test_processors_with_invalid_results_fail_only_their_row(processor: Any, message: str, drafts: bool) -> None:
    fails_alone(SamplingParams(max_tokens=LENGTH, logits_processors=(processor,)), message, drafts)
