"""Questions from files: their rows and limits, errors for bad rows, and their encoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.errors import PromptError
from eagle_mlx.serve.prompts import Question, read_questions
from tests.fakes import tiny_target
from tests.serve.questions import ROWS, write


def test_all_kinds_of_rows_are_read(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    file = write(tmp_path / "p.jsonl", {"messages": turns}, {"prompt": "def f():"}, *ROWS)
    with file.open("a") as end:
        end.write(" \n\n")
    questions = read_questions(file)
    assert [question.origin for question in questions] == [f"{file}:{number}" for number in range(1, 9)]
    assert [question.content for question in questions[:2]] == [turns[:2], "def f():"]
    assert [question.category for question in questions[2:]] == [row["category"] for row in ROWS]
    assert questions[2].content == [{"role": "user", "content": "Write."}]
    assert questions[2].later == ("Again, shorter.",)


@pytest.mark.parametrize(
    ("limit", "ids"), [(1, [81]), (3, [81, 111, 161]), (4, [81, 82, 111, 161]), (5, [81, 82, 111, 161, 162])]
)
def test_a_limit_takes_questions_from_all_categories(tmp_path: Path, limit: int, ids: list[int]) -> None:
    wanted = [(row["turns"][0], row["category"]) for row in ROWS if row["question_id"] in ids]
    taken = read_questions(write(tmp_path / "q.jsonl", *ROWS), limit)
    assert [(question.content[0]["content"], question.category) for question in taken] == wanted  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "needs `messages`"),
        ('{"text": "x"}', "needs `messages`"),
        ('{"prompt": ""}', "non-empty"),
        ('{"prompt": 3}', "must be non-empty text"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "turn 1 must be"),
        ('{"messages": [{"role": "human", "content": "x"}]}', "turn 1 must be"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn to answer"),
        ('{"messages": []}', "no turn to answer"),
        ('{"category": "qa", "turns": "x"}', "a list with at least one text"),
        ('{"category": "qa", "turns": []}', "a list with at least one text"),
        ('{"category": "qa", "turns": ["x", ""]}', "turn 2 must be non-empty text"),
        ('{"category": "qa", "turns": [3]}', "turn 1 must be non-empty text"),
        ('{"category": "", "turns": ["x"]}', "`category` must be non-empty text"),
        ('{"category": 7, "turns": ["x"]}', "`category` must be non-empty text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, reason: str) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row, {"prompt": "fine"})
    with pytest.raises(PromptError, match=reason) as error:
        read_questions(file)
    assert str(error.value).startswith(f"{file}:2: ")


def test_a_file_may_come_from_windows(tmp_path: Path) -> None:
    """Its editors write a byte order mark, and two characters at the ends of lines."""
    (tmp_path / "q.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [question.content for question in read_questions(tmp_path / "q.jsonl")] == ["a", "b"]


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no rows"):
        read_questions(write(tmp_path / "empty.jsonl"))
    with pytest.raises(PromptError, match="cannot be read"):
        read_questions(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(PromptError, match="UTF-8"):
        read_questions(tmp_path / "latin.jsonl")


def test_questions_are_encoded_and_must_fit(tmp_path: Path) -> None:
    target = tiny_target(tokenizer=True)
    chat, text = read_questions(
        write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"})
    )
    assert target.tokenizer is not None
    assert target.tokenizer.decode(chat.encode(target)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(text.encode(target)) == "hi"
    with pytest.raises(PromptError, match=r"p\.jsonl:2: .* do not fit the target's context of 512"):
        text.encode(target, max_tokens=512)
    question = Question([{"role": "user", "content": "hi"}], ("and then?",), origin="q.jsonl:1")
    question.check(target, 100)
    with pytest.raises(PromptError, match=r"q\.jsonl:1: .* do not fit the target's context of 512"):
        question.check(target, 250)


def test_the_embedded_prompts_are_usable() -> None:
    questions = read_questions(Path(__file__).parents[2] / "checkpoints" / "prompts.jsonl")
    assert len(questions) >= 100
    assert len({json.dumps(question.content) for question in questions}) == len(questions)
