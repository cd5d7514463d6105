"""Answers of the target's own, turn by turn."""

from __future__ import annotations

import pytest

from eagle_mlx.data_pipelines import Conversation, Message, RegenerateReport, regenerate
from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.loops import distinct_ratio
from eagle_mlx.params import SamplingParams
from eagle_mlx.target import Target
from tests.fakes import tiny_target

U, A, S = "user", "assistant", "system"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tokenizer=True)


@pytest.fixture(scope="module")
def ending(target: Target) -> int:
    """A token that soon comes up in greedy answers: taken as a stop token, it ends them before they are cut."""
    return Engine(target).generate([[{"role": U, "content": "a"}]], SamplingParams(max_tokens=4))[0].tokens[3]


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), origin="x:1")


def answer(target: Target, messages: list[Message], params: SamplingParams) -> str:
    return Engine(target).generate([[m.as_dict() for m in messages]], params)[0].text


def test_each_answer_stands_on_the_new_ones_before_it(target: Target) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, stop_token_ids=tuple(range(3, 4096)))
    report = RegenerateReport()
    asked = chat((S, "brief"), (U, "a"), (A, "old"), (U, "b"), (A, "old"))
    [made] = regenerate(Engine(target), [asked], params, report=report)
    assert [m.role for m in made.messages] == [S, U, A, U, A]
    for turn in (2, 4):
        assert made.messages[turn].content == answer(target, list(made.messages[:turn]), params)
    assert made.messages[:2] == asked.messages[:2]
    assert made.messages[3] == asked.messages[3]
    assert (report.answers, report.cut, made.origin) == (2, 0, "x:1")


def test_a_cut_answer_ends_its_conversation(target: Target) -> None:
    report = RegenerateReport()
    params = SamplingParams(max_tokens=3)
    [made] = regenerate(Engine(target), [chat((U, "a"), (A, "b"), (U, "c"), (A, "d"))], params, report=report)
    assert [m.role for m in made.messages] == [U, A]
    assert (report.answers, report.tokens, report.cut) == (1, 3, 1)


def test_an_answer_that_loops_is_left_out_with_what_follows_it(target: Target) -> None:
    asked = [(U, "a"), (U, "e")]
    params = SamplingParams(max_tokens=40)
    spoken = Engine(target).generate([[{"role": U, "content": text}] for _, text in asked], params)
    ratios = {distinct_ratio(output.tokens): turn for output, turn in zip(spoken, asked, strict=True)}
    assert len(ratios) == 2, "the two answers repeat themselves equally, which proves nothing"
    looping, fine = ratios[min(ratios)], ratios[max(ratios)]
    report = RegenerateReport()
    conversations = [chat(looping, (A, "b"), (U, "c"), (A, "d")), chat(fine, (A, "f"))]
    threshold = sum(ratios) / 2
    [made] = regenerate(Engine(target), conversations, params, report=report, least_distinct=threshold)
    assert made.messages[0].content == fine[1]
    assert (report.answers, report.looping, report.dropped) == (1, 1, 1)


def test_many_conversations_keep_their_order_and_do_not_touch_each_other(target: Target, ending: int) -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=(ending,))
    asked = [chat((U, f"{n} " * (n + 1))) for n in range(20)] + [Conversation(text="import os")]
    made = list(regenerate(Engine(target, max_batch=2), asked, params))
    assert [c.messages[0] for c in made[:-1]] == [c.messages[0] for c in asked[:-1]]
    assert made[-1] == asked[-1]
    for conversation in made[:-1:7]:
        assert conversation.messages[1].content == answer(target, list(conversation.messages[:1]), params)


def test_an_answer_that_calls_tools_and_a_greeting_stay(target: Target) -> None:
    call = Message(A, "", {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    asked = Conversation((Message(A, "Hello!"), Message(U, "a"), call, Message("tool", "7"), Message(A, "old")))
    [made] = regenerate(Engine(target), [asked], SamplingParams(max_tokens=2))
    assert made.messages[:4] == asked.messages[:4]
    assert made.messages[4].content != "old"


def test_what_does_not_fit_the_context_is_counted(target: Target) -> None:
    report = RegenerateReport()
    params = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(3, 4096)))
    long = "word " * 600
    asked = [chat((U, long), (A, "b")), chat((U, "a"), (A, "b"), (U, long), (A, "d")), chat((S, "alone"))]
    made = list(regenerate(Engine(target), asked, params, report=report))
    assert [[m.role for m in c.messages] for c in made] == [[U, A]]
    assert (report.too_long, report.dropped) == (2, 2)


def test_a_target_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        list(regenerate(Engine(tiny_target()), [chat((U, "a"))]))
