"""Texts are collected with the hidden states that a forward over the whole text gives, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.engine.collector import Collector
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hidden_states import Example, from_16_bits, in_16_bits, read_states
from eagle_mlx.policy import Policy
from eagle_mlx.target import Target
from tests.eagle_mlx import heads
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal, in_turn

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=48)


def collector_for(target: Target, head: DraftHead, nbytes: int = 1 << 20, **more: object) -> Collector:
    head.attach(target)
    return Collector(head.named_layers, target.num_layers - 1, nbytes, **more)  # type: ignore[arg-type]


def engine_with(target: Target, collector: Collector, head: DraftHead, depth: int = 3, **more: object) -> em.Engine:
    policy: Policy = em.FixedPolicy(depth)
    return em.Engine(target, em.HeadProposer(head), policy=policy, collector=collector, **more)  # type: ignore[arg-type]


class SyncsBy:
    """MLX, of which `eval` is another function."""

    def __init__(self, evaluate: Callable[..., None]):
        self.eval = evaluate

    def __getattr__(self, name: str) -> object:
        return getattr(mx, name)


def check(example: Example, target: Target, layers: tuple[int, ...], text: list[int] | None = None) -> None:
    """Compare an example's states with those of one forward over `text`, which ends like the example."""
    assert example.states is not None
    tokens = example.tokens.tolist()
    text = text or tokens
    assert text[-len(tokens) :] == tokens
    whole = in_16_bits(read_states(target, mx.array(text)[None], layers))[0, -len(tokens) :]
    there, here = (
        np.array(from_16_bits(np.array(bits)).astype(mx.float32))[:-1] for bits in (example.states.whole, whole)
    )
    np.testing.assert_allclose(there, here, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("kind", "max_batch"), in_turn(diagonal(heads.ALL, [3, 1]), of=3))
def test_the_states_are_those_of_a_forward_over_the_text(kind: str, max_batch: int, target: Target) -> None:
    head = heads.ALL[kind](target)
    collector = collector_for(target, head)
    outputs = engine_with(target, collector, head, max_batch=max_batch).generate(
        PROMPTS, em.SamplingParams(max_tokens=16)
    )
    examples = {tuple(example.tokens.tolist()): example for example in collector.take()}
    assert collector.nbytes == 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        example = examples.pop((*prompt, *output.tokens))
        assert example.loss_mask.tolist() == [0] * len(prompt) + [1] * len(output.tokens)
        check(example, target, head.named_layers)
    assert not examples


def test_prompts_that_are_read_together_keep_their_own_last_positions(target: Target) -> None:
    head = heads.ALL["eagle3.1"](target)
    collector = collector_for(target, head, context=4)
    outputs = engine_with(target, collector, head, max_batch=3).generate(PROMPTS, em.SamplingParams(max_tokens=8))
    texts = [[*prompt, *output.tokens] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    kept = {(*prompt[-4:], *text[len(prompt) :]): text for prompt, text in zip(PROMPTS, texts, strict=True)}
    for example in collector.take():
        check(example, target, head.named_layers, kept.pop(tuple(example.tokens.tolist())))
    assert not kept


def test_the_states_of_a_prompt_are_bit_equal_to_a_forward_of_its_shape(target: Target) -> None:
    layers, prompt = (0, 2, 3), list(range(10, 40))
    collector = Collector(layers[:-1], layers[-1], 1 << 20)
    em.Engine(target, policy=em.FixedPolicy(0), collector=collector).generate(prompt, em.SamplingParams(max_tokens=8))
    [example] = collector.take()
    assert example.states is not None
    alone = target.forward(mx.array([prompt]), aux_layers=layers).aux
    expected = np.array(in_16_bits(mx.concatenate(list(alone), axis=-1)[0]))
    assert np.array_equal(example.states.whole[: len(prompt) - 1], expected[:-1])


def test_a_text_after_a_prefix_begins_where_the_target_read_on(target: Target) -> None:
    head = tiny_head(target)
    collector = collector_for(target, head)
    engine = engine_with(target, collector, head, prefix_cache_bytes=1 << 20)
    first = list(range(4, 40))
    for prompt in (first, [*first, 41, 42, 43]):
        output = engine.generate(prompt, em.SamplingParams(max_tokens=8))
        [example] = collector.take()
        check(example, target, head.named_layers, [*prompt, *output.tokens])
    assert output.cached_tokens > 0
    assert len(example) == len(prompt) - output.cached_tokens + len(output.tokens)
    assert example.loss_mask.sum() == len(output.tokens)


def test_a_paused_request_is_collected_without_gaps(target: Target) -> None:
    head = tiny_head(target)
    collector = collector_for(target, head)
    engine = engine_with(target, collector, head, max_batch=2)
    requests = [engine.prepare(prompt, em.SamplingParams(max_tokens=24)) for prompt in PROMPTS[:2]]
    for request in requests:
        engine.submit(request)
    while len(requests[0].tokens) < 8:
        engine.step()
    engine.pause(requests[0])
    while not engine.idle:
        engine.step()
    assert requests[0].counts.pauses == 1
    examples = {tuple(example.tokens.tolist()): example for example in collector.take()}
    for request in requests:
        check(examples[tuple(request.text)], target, head.named_layers)


def test_a_request_that_opts_out_or_fails_is_not_collected(target: Target) -> None:
    head = tiny_head(target)
    collector = collector_for(target, head)
    engine = engine_with(target, collector, head)
    engine.generate(PROMPTS, [em.SamplingParams(max_tokens=8, learn=index == 1) for index in range(3)])
    failing = engine.prepare(PROMPTS[0], em.SamplingParams(max_tokens=50))
    engine.submit(failing)
    while len(failing.tokens) < 5:
        engine.step()
    engine.cut_off(failing, "time", "it took too long")
    [example] = collector.take()
    assert example.tokens.tolist()[: len(PROMPTS[1])] == PROMPTS[1]


def test_a_text_whose_states_were_lost_with_another_request_is_left_out(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may run out when the states of several batches are copied together."""
    head = tiny_head(target)
    collector = collector_for(target, head)
    engine = engine_with(target, collector, head, depth=0, max_batch=2, prefill_chunk=1)
    first, second = (
        engine.prepare(prompt, em.SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt, count in (([5, 6, 7], 60), ([8] * 60, 4))
    )

    def short_of_memory(states: object) -> None:
        monkeypatch.undo()
        raise MemoryError("no room left")

    engine.submit(first)
    while not first.tokens:
        engine.step()
    engine.submit(second)
    monkeypatch.setattr("eagle_mlx.engine.collector.mx", SyncsBy(short_of_memory))
    while not engine.idle:
        with suppress(MemoryError):
            engine.step()
    assert [request.finish_reason for request in (first, second)] == ["length", "error"]
    assert collector.take() == []
    output = engine.generate(PROMPTS[0], em.SamplingParams(max_tokens=8))
    [example] = collector.take()
    assert example.tokens.tolist() == [*PROMPTS[0], *output.tokens]
    check(example, target, head.named_layers)


def test_texts_that_end_after_each_other_are_copied_together(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy waits for the device, and a full server ends a text in every other round."""
    head, copies = tiny_head(target), list[int]()

    def counted(states: list[mx.array]) -> None:
        copies.append(len(states))
        mx.eval(states)

    monkeypatch.setattr("eagle_mlx.engine.collector.mx", SyncsBy(counted))
    collector = collector_for(target, head)
    params = [em.SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 4, 6)]
    engine_with(target, collector, head).generate(PROMPTS, params)
    assert not copies, "no text was needed yet"
    assert collector.waiting
    assert [len(example.tokens) for example in collector.take()] == [6, 6, 16]
    assert len(copies) == 1
    assert not collector.waiting


def test_what_must_not_be_kept_is_left_out(target: Target) -> None:
    head = tiny_head(target)
    texts: list[list[int]] = []

    def keeps(tokens: Sequence[int]) -> bool:
        texts.append(list(tokens))
        return 13 not in tokens

    collector = collector_for(target, head, keeps=keeps)
    output = engine_with(target, collector, head).generate(PROMPTS[2], em.SamplingParams(max_tokens=4))
    assert texts == [[*PROMPTS[2], *output.tokens]], "the whole text is judged"
    assert collector.take() == []
    assert collector.left_out == 1


def test_long_texts_and_many_texts_need_bounded_memory(target: Target) -> None:
    head = tiny_head(target)
    width = 2 * target.hidden_size * (len(head.named_layers) + 1)
    collector = collector_for(target, head, nbytes=50 * width, context=8, most=20)
    engine = engine_with(target, collector, head)
    prompt = list(range(4, 40))
    for end in (30, 33, 36):
        output = engine.generate(prompt[:end], em.SamplingParams(max_tokens=40))
        assert collector.nbytes <= 50 * width
    examples = collector.take()
    assert [len(example) for example in examples] == [21, 21]
    assert examples[-1].tokens.tolist() == [*prompt[28:], *output.tokens][:21]
    check(examples[-1], target, head.named_layers, [*prompt, *output.tokens][: 28 + 21])


def test_only_the_kept_positions_of_a_prompt_stay_in_memory(target: Target) -> None:
    """A view of the last positions would keep the states of the whole chunk, and states to be computed its keys."""
    head = tiny_head(target)
    collector = collector_for(target, head, context=8)
    engine = engine_with(target, collector, head, depth=0)
    for first in range(8):
        engine.generate([first + 4] * 400, em.SamplingParams(max_tokens=2, ignore_eos=True))
    before = mx.get_active_memory()
    assert len(collector.take()) == 8
    chunk = 4 * 400 * target.hidden_size * (len(head.named_layers) + 1)
    assert before - mx.get_active_memory() < chunk, "of eight"


def test_the_turns_of_a_conversation_have_the_same_key(target: Target) -> None:
    head = tiny_head(target)
    collector = collector_for(target, head)
    engine = engine_with(target, collector, head)
    for prompt, name in (([5, 6, 7], "a"), ([5, 6, 7, 8, 9], "a"), ([5, 6, 7], "b"), ([5, 6], ""), ([5, 7], "")):
        engine.submit(engine.prepare(prompt, em.SamplingParams(max_tokens=4), conversation=name))
        while not engine.idle:
            engine.step()
    first, second, *others = [example.key for example in collector.take()]
    assert first == second
    assert len({first, *others}) == 4
