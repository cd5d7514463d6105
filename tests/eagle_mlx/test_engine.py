"""The engine: the text is the target's own, whatever drafts, and what it counts is what it emitted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, PromptError
from tests.fakes import Oracle, tiny_head, tiny_target

TARGET = tiny_target()
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8, 7, 8, 7, 8, 7], list(range(40)), [100, 3]]
MARGIN = 1e-3
"""Logits closer than this may fall either way between a verify of one token and one of several."""


def plain_greedy(prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """mlx-lm's own decoding, with the margin between the two best logits at each step."""
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
        *(Oracle(texts, wrong, aux_layers=(0, 2)) for wrong in (0.0, 0.3, 1.0)),
    ]


@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: getattr(p, "name", "plain"))
@pytest.mark.parametrize(("depth", "max_batch"), [(1, 1), (4, 2), (5, 8)])
def test_greedy_text_is_mlx_lms_own(proposer: object, depth: int, max_batch: int) -> None:
    engine = em.Engine(TARGET, proposer, em.FixedPolicy(depth), max_batch=max_batch)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, em.SamplingParams(max_tokens=24))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert len(output.tokens) == 24
        assert output.finish_reason == "length"
        assert_same_text(prompt, output.tokens)


def test_a_perfect_proposer_is_accepted_whole() -> None:
    texts = {p: t for p, (t, _) in GREEDY.items()}
    oracle = Oracle(texts, 0.0, aux_layers=(0, 2))
    oracle.rng = type("Full", (), {"random": lambda self: 1.0, "integers": lambda self, n: n - 1})()  # type: ignore[assignment]
    output = em.Engine(TARGET, oracle, em.FixedPolicy(5)).generate([PROMPTS[3]], em.SamplingParams(max_tokens=24))[0]  # type: ignore[arg-type]
    assert output.tokens == GREEDY[tuple(PROMPTS[3])][0]
    assert (output.rounds, output.accepted, output.drafted) == (4, 20, 20)
    assert output.acceptance_length == 6.0
    assert output.drafted_by_position == output.accepted_by_position == [4, 4, 4, 4, 4]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([0.7, 1.5]), st.integers(1, 5), st.integers(0, 1))
def test_seeded_text_is_the_same_with_any_proposer_depth_and_company(
    seed: int, temperature: float, depth: int, which: int
) -> None:
    params = em.SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=12)
    alone = em.Engine(TARGET, max_batch=1).generate([PROMPTS[which]], params)[0]
    company = [em.SamplingParams(temperature=1.0, seed=seed + 1, max_tokens=9), params, em.SamplingParams(max_tokens=5)]
    proposer = [em.HeadProposer(tiny_head(TARGET)), em.NgramProposer()][which]
    engine = em.Engine(TARGET, proposer, em.FixedPolicy(depth))
    together = engine.generate([PROMPTS[2], PROMPTS[which], PROMPTS[3]], company)[1]
    assert together.tokens == alone.tokens


def test_rows_join_and_leave_in_the_middle_and_come_back_in_order() -> None:
    lengths = [3, 20, 1, 11, 7]
    params = [em.SamplingParams(max_tokens=n) for n in lengths]
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), em.FixedPolicy(3), max_batch=2)
    for prompt, n, output in zip(PROMPTS, lengths, engine.generate(PROMPTS, params), strict=True):
        assert len(output.tokens) == n
        assert_same_text(prompt, output.tokens)


@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: getattr(p, "name", "plain"))
def test_nothing_after_a_stop_token_is_emitted_or_counted(proposer: object) -> None:
    for prompt in PROMPTS:
        expected = GREEDY[tuple(prompt)][0]
        stop = expected[7]
        first = expected.index(stop)
        engine = em.Engine(TARGET, proposer, em.FixedPolicy(5))  # type: ignore[arg-type]
        output = engine.generate([prompt], em.SamplingParams(max_tokens=24, stop_token_ids=(stop,)))[0]
        assert output.tokens == expected[: first + 1]
        assert output.finish_reason == "stop"
        assert output.accepted + output.rounds >= len(output.tokens) >= output.accepted
        assert output.accepted <= output.drafted
        assert len(output.accepted_by_position) == len(output.drafted_by_position)


@pytest.mark.parametrize("depth", [1, 4, 9])
def test_max_tokens_is_never_passed_and_drafts_stop_short_of_it(depth: int) -> None:
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), em.FixedPolicy(depth))
    for count in (1, 2, 5):
        output = engine.generate([PROMPTS[0]], em.SamplingParams(max_tokens=count))[0]
        assert len(output.tokens) == count
        assert output.drafted <= (count - 1) * output.rounds


def test_long_prompts_are_read_in_chunks_to_the_same_end() -> None:
    head = tiny_head(TARGET)
    prompts = [list(range(100)), [5, 6], list(range(50, 120))]
    whole = em.Engine(TARGET, em.HeadProposer(head), em.FixedPolicy(3)).generate(
        prompts, em.SamplingParams(max_tokens=8)
    )
    engine = em.Engine(TARGET, em.HeadProposer(head), em.FixedPolicy(3), prefill_chunk=7)
    chunked = engine.generate(prompts, em.SamplingParams(max_tokens=8))
    assert [o.tokens for o in whole] == [o.tokens for o in chunked]
    assert [o.accepted for o in whole] == [o.accepted for o in chunked]


def test_a_row_ends_where_the_context_does() -> None:
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 128, TARGET.context_length - 6)]
    engine = em.Engine(TARGET, em.HeadProposer(tiny_head(TARGET)), em.FixedPolicy(4))
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
