"""Texts of ended requests draft for later ones of their namespace, within a limit; the text never changes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.proposers.suffixes import REACH, last_of
from tests.fakes import tiny_head, tiny_target

TARGET = tiny_target()
PROMPT = [5, 6, 7, 8]
PARAMS = em.SamplingParams(max_tokens=24)


def drafted(engine: em.Engine, namespace: str = "", params: em.SamplingParams = PARAMS) -> int:
    """Return how many tokens were drafted and accepted for the prompt."""
    request = engine.prepare(PROMPT, params, namespace=namespace)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    output = engine.output(request)
    assert output.tokens == expected()
    return output.accepted


def expected() -> list[int]:
    [output] = em.Engine(TARGET).generate([PROMPT], PARAMS)
    return output.tokens


def remembering(nbytes: int = 1 << 16, head: bool = False) -> em.Engine:
    ngrams = em.NgramProposer(min_ngram=4, memory=em.Memory(nbytes))
    proposer = em.HybridProposer(em.HeadProposer(tiny_head(TARGET)), ngrams) if head else ngrams
    return em.Engine(TARGET, proposer, policy=em.FixedPolicy(4), max_batch=2, drafter="ngrams")


@pytest.mark.parametrize("head", [False, True])
def test_a_text_drafts_for_the_same_prompt_later(head: bool) -> None:
    engine = remembering(head=head)
    before = drafted(engine)
    assert drafted(engine) >= before + 12


@pytest.mark.parametrize(("prompt", "follower"), [([3, 60, 1, 2, 3], 50), ([0, 1, 2, 3, 60, 0, 1, 2, 3], 60)])
def test_the_longest_match_drafts_whether_it_is_in_the_text_or_remembered(prompt: list[int], follower: int) -> None:
    memory = em.Memory()
    memory.add([1, 2, 3, 50, 51])
    state = em.NgramProposer(memory=memory).open([prompt])
    state.enter([""])
    assert state.rows[0].match[0] == follower


def test_a_namespace_does_not_draft_with_the_texts_of_another() -> None:
    engine = remembering()
    before = drafted(engine, "a")
    assert drafted(engine, "b") == before
    assert drafted(engine, "a") > before


def test_a_request_may_neither_use_nor_leave_texts() -> None:
    engine = remembering()
    private = em.SamplingParams(max_tokens=24, memory=False)
    before = drafted(engine, params=private)
    assert drafted(engine) == before  # nothing was left
    assert drafted(engine, params=private) == before  # and nothing is used
    assert drafted(engine) > before


def test_a_request_that_failed_leaves_nothing() -> None:
    engine = remembering()
    request = engine.prepare(PROMPT, em.SamplingParams(max_tokens=24, logits_processors=(fail_late,)))
    engine.submit(request)
    while not engine.idle:
        with suppress(ZeroDivisionError):
            engine.step()
    assert engine.output(request).error
    assert engine.proposer is not None
    assert engine.proposer.memory is not None
    assert engine.proposer.memory.nbytes == 0


def fail_late(tokens: list[int], logits: Any) -> Any:
    return logits if len(tokens) < len(PROMPT) + 8 else 1 / 0


def test_a_turn_of_a_chat_adds_only_what_is_new() -> None:
    memory, rng = em.Memory(1 << 20), np.random.default_rng(0)
    text = rng.integers(0, 1000, 2000).tolist()
    for end in range(500, 2001, 100):
        memory.add(text[:end])
    assert memory.nbytes <= 8 * (2000 + 16 * 3 * REACH)
    [texts] = memory.of("")
    for end in range(REACH, 2000, 7):
        assert texts.longest(last_of(text[:end])) == REACH


def test_a_memory_keeps_to_its_limit_and_forgets_the_oldest_first() -> None:
    memory, rng = em.Memory(100_000), np.random.default_rng(0)
    texts = [rng.integers(0, 50_000, 300).tolist() for _ in range(100)]
    for text in texts:
        memory.add(text)
        assert memory.nbytes <= 100_000
    [kept] = memory.of("")
    remembered = [kept.longest(last_of(text[:50])) == REACH for text in texts]
    assert remembered == sorted(remembered)
    assert sum(remembered) >= 10


def test_a_client_with_many_texts_forgets_its_own() -> None:
    memory, rng = em.Memory(50_000), np.random.default_rng(0)
    memory.add([1, 2, 3, 4] * 20, "quiet")
    for _ in range(50):
        memory.add(rng.integers(0, 50_000, 500).tolist(), "loud")
    [quiet] = memory.of("quiet")
    assert quiet.longest(last_of([1, 2, 3, 4])) == 4


def test_namespaces_without_texts_take_no_memory() -> None:
    memory = em.Memory(20_000)
    for number in range(1000):
        memory.add([number] * 100, f"client {number}")
        assert memory.nbytes <= 20_000
    assert sum(len(memory.of(f"client {number}")) for number in range(1000)) <= 50


def test_a_text_of_no_namespace_drafts_for_all() -> None:
    engine = remembering()
    assert engine.proposer is not None
    assert engine.proposer.memory is not None
    engine.proposer.memory.add([*PROMPT, *expected()], None)
    assert drafted(engine, "a") >= 12


def test_a_memory_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="nbytes must be a number of bytes, at least 1; got 0"):
        em.Memory(0)
