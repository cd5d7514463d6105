"""The target's own answers, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.data_pipelines import Conversation, Message
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.data_pipelines.synthesis.loop import run_tasks, seed_of
from eagle_mlx.data_pipelines.synthesis.regeneration import (
    RegenerateConfig,
    RegenerateReport,
    regenerate_to_file,
    regenerations,
)
from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.plan import RoundResult
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import distinct_ratio
from tests.fakes import tiny_head, tiny_target
from tests.full import in_full

U, A, S = "user", "assistant", "system"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tokenizer=True)


@pytest.fixture(scope="module")
def ending(target: Target) -> int:
    """Return a token that soon occurs in greedy answers; as a stop token, it ends them before they are cut."""
    return Engine(target).generate([[{"role": U, "content": "a"}]], SamplingParams(max_tokens=4))[0].tokens[3]


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), origin="x:1")


def answer(target: Target, messages: Sequence[Message], params: SamplingParams) -> str:
    return Engine(target).generate([[m.as_dict() for m in messages]], params)[0].text


def counted(
    engine: Engine, conversations: Iterable[Conversation], params: SamplingParams | None = None, **config: Any
) -> tuple[list[Conversation], RegenerateReport]:
    """Return the remaining conversations in order, and the counts."""
    done, report = {}, RegenerateReport()
    tasks = regenerations(engine, conversations, RegenerateConfig(params or SamplingParams(), **config))
    for task in run_tasks(engine, lambda _: next(tasks, None)):
        done[task.position] = task.result()
        report = report.plus(task.report.counts())
    return [conversation for _, conversation in sorted(done.items()) if conversation is not None], report


def answered(
    engine: Engine, conversations: Iterable[Conversation], params: SamplingParams | None = None, **config: Any
) -> list[Conversation]:
    return counted(engine, conversations, params, **config)[0]


STOPS = tuple(range(3, 4096, 7))
"""Stop tokens that soon occur, so that answers have several lengths and are not cut."""


def test_each_answer_stands_on_the_new_ones_before_it_and_has_a_seed_of_its_own(target: Target) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=3, stop_token_ids=STOPS)
    conversation = chat((S, "brief"), (U, "a"), (A, "old"), (U, "b"), (A, "old"))
    [made], report = counted(Engine(target), [conversation], params)
    assert [m.role for m in made.messages] == [S, U, A, U, A]
    for number, turn in enumerate((2, 4)):
        own = replace(params, seed=seed_of(3, conversation.prompt_key(), 0, number))
        assert made.messages[turn].content == answer(target, made.messages[:turn], own)
    assert made.messages[:2] == conversation.messages[:2]
    assert made.messages[3] == conversation.messages[3]
    assert (report.answers, report.cut, made.origin) == (2, 0, "x:1")


def test_a_cut_answer_ends_its_conversation(target: Target) -> None:
    params = SamplingParams(max_tokens=3)
    [made], report = counted(Engine(target), [chat((U, "a"), (A, "b"), (U, "c"), (A, "d"))], params)
    assert [m.role for m in made.messages] == [U, A]
    assert (report.answers, report.tokens, report.cut) == (1, 3, 1)


def test_an_answer_that_loops_is_left_out_with_what_follows_it(target: Target) -> None:
    turns = [(U, "a"), (U, "e")]
    params = SamplingParams(max_tokens=40)
    spoken = Engine(target).generate([[{"role": U, "content": text}] for _, text in turns], params)
    ratios = {distinct_ratio(output.tokens): turn for output, turn in zip(spoken, turns, strict=True)}
    assert len(ratios) == 2, "the two answers repeat themselves equally, which proves nothing"
    looping, fine = ratios[min(ratios)], ratios[max(ratios)]
    conversations = [chat(looping, (A, "b"), (U, "c"), (A, "d")), chat(fine, (A, "f"))]
    threshold = sum(ratios) / 2
    [made], report = counted(Engine(target), conversations, params, least_distinct=threshold)
    assert made.messages[0].content == fine[1]
    assert (report.answers, report.looping, report.dropped) == (1, 1, 1)


def test_an_answer_that_is_certain_to_loop_is_given_up(target: Target) -> None:
    """Greedy text of a tiny random model soon repeats itself."""
    params, rounds = SamplingParams(max_tokens=500, ignore_eos=True), list[RoundResult]()
    engine = Engine(target)
    engine.observer = rounds.append
    made, report = counted(engine, [chat((U, "a"), (A, "b"), (U, "c"))], params, least_distinct=0.6)
    assert (made, report.looping, report.dropped) == ([], 1, 1)
    assert 200 <= len(rounds) < 400
    assert engine.idle


def test_no_conversation_begins_once_there_are_enough(target: Target, tmp_path: Path) -> None:
    """The file counts as complete, also if it was begun when more were wanted."""
    file, config = tmp_path / "x.jsonl", RegenerateConfig(SamplingParams(max_tokens=2))
    engine = Engine(target, max_batch=2)
    rows, report = regenerate_to_file(engine, questions(20), config, file, enough=lambda begun: begun >= 6)
    assert rows == report.answers == 6

    part = tmp_path / "y.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate_to_file(engine, questions(20), config, part, enough=lambda begun: interrupted(begun >= 10))
    rows, _ = regenerate_to_file(engine, questions(20), config, part, enough=lambda begun: True)
    assert 0 < rows < 10


def interrupted(now: bool) -> bool:
    if now:
        raise KeyboardInterrupt
    return False


def test_many_conversations_keep_their_order_and_do_not_touch_each_other(target: Target, ending: int) -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=(ending,))
    conversations = [chat((U, f"{n} " * (n + 1))) for n in range(in_full(20, 8))] + [Conversation(text="import os")]
    made = answered(Engine(target, max_batch=2), conversations, params)
    assert [c.messages[0] for c in made[:-1]] == [c.messages[0] for c in conversations[:-1]]
    assert made[-1] == conversations[-1]
    for conversation in made[:-1:7]:
        assert conversation.messages[1].content == answer(target, conversation.messages[:1], params)


def questions(count: int) -> list[Conversation]:
    """Return similar conversations of one to three turns."""
    return [chat(*[(U, f"{n} and {turn}") for turn in range(1 + n % 3)]) for n in range(count)]


def test_order_company_and_drafts_change_nothing(target: Target) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, top_k=50, top_p=0.9, seed=1, stop_token_ids=STOPS[::9])
    conversations = [
        c
        for n in range(in_full(6, 3))
        for c in (chat((U, f"{n}")), chat((U, f"{n}?"), (A, "x"), (U, "and then?"), (A, "y")))
    ]
    alone = answered(Engine(target, max_batch=1), conversations, params)
    assert len({c.messages for c in alone}) == len(conversations)
    head = HeadProposer(tiny_head(target))
    for engine in (Engine(target, max_batch=5), Engine(target, head, policy=FixedPolicy(3), max_batch=4)):
        assert answered(engine, conversations, params) == alone
    backwards = answered(Engine(target, max_batch=3), conversations[::-1], params)
    assert backwards[::-1] == alone
    assert answered(Engine(target), conversations, replace(params, seed=2)) != alone


def test_the_same_prompt_again_gets_another_answer(target: Target) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    made = answered(Engine(target), [chat((U, "a"))] * 4, params)
    assert len({c.messages[1].content for c in made}) == 4
    assert made == answered(Engine(target, max_batch=2), [chat((U, "a"))] * 4, params)


def test_system_prompts_are_set_and_drawn_by_the_seed(target: Target) -> None:
    params = SamplingParams(max_tokens=2, seed=0)
    conversations = [chat((S, "old"), (U, f"{n}"), (A, "b")) for n in range(24)]
    [first] = answered(Engine(target), conversations[:1], params, systems=("Be brief",))
    assert [(m.role, m.content) for m in first.messages[:2]] == [(S, "Be brief"), (U, "0")]
    assert first.messages[2].content == answer(target, first.messages[:2], params)
    made = answered(Engine(target), conversations, params, systems=("Be brief", ""))
    brief = [c.messages[0] == Message(S, "Be brief") for c in made]
    assert 5 <= sum(brief) <= 19
    assert all(c.messages[0].role == U for c, is_brief in zip(made, brief, strict=True) if not is_brief)
    again = answered(Engine(target), conversations[::-1], params, systems=("Be brief", ""))
    assert [c.messages[0] for c in again][::-1] == [c.messages[0] for c in made]
    other = answered(Engine(target), conversations, replace(params, seed=1), systems=("Be brief", ""))
    assert [c.messages[0] for c in other] != [c.messages[0] for c in made]


def test_an_answer_that_calls_tools_and_a_greeting_stay(target: Target) -> None:
    call = {"role": A, "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turns = [{"role": A, "content": "Hello!"}, {"role": U, "content": "a"}, call, {"role": "tool", "content": "7"}]
    conversation = parse_row({"messages": [*turns, {"role": A, "content": "old"}], "tools": [{"name": "f"}]}, "x:1")
    [made] = answered(Engine(target), [conversation], SamplingParams(max_tokens=2))
    assert made.messages[:4] == conversation.messages[:4]
    assert made.messages[4].content != "old"
    assert made.tools == conversation.tools


def test_what_does_not_fit_the_context_is_counted(target: Target) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(3, 4096)))
    long = "word " * 600
    conversations = [chat((U, long), (A, "b")), chat((U, "a"), (A, "b"), (U, long), (A, "d")), chat((S, "alone"))]
    made, report = counted(Engine(target), conversations, params)
    assert [[m.role for m in c.messages] for c in made] == [[U, A]]
    assert (report.too_long, report.dropped) == (2, 2)


def test_a_target_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        answered(Engine(tiny_target()), [chat((U, "a"))])


def test_whoever_stops_listening_frees_the_engine(target: Target) -> None:
    engine = Engine(target, max_batch=2)
    tasks = regenerations(engine, questions(9), RegenerateConfig(SamplingParams(max_tokens=5)))
    stream = run_tasks(engine, lambda _: next(tasks, None))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.idle
