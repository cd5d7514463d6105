"""Prompts from files: their shapes, their limits, and what is said of a bad row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.errors import PromptError
from eagle_mlx.serve.prompts import encode, read_prompts
from tests.fakes import tiny_target


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_both_shapes_are_read(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    file = write(tmp_path / "p.jsonl", {"messages": turns}, {"prompt": "def f():"}, {"prompt": "x"})
    rows = read_prompts(file, limit=2)
    assert [row.content for row in rows] == [tuple(turns[:2]), "def f():"]
    assert [row.origin for row in rows] == [f"{file}:1", f"{file}:2"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("", "the line is empty"),
        ("{", "not valid JSON"),
        ("[]", "needs `messages`"),
        ('{"text": "x"}', "needs `messages`"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "must be text"),
        ('{"messages": "x"}', "must be a list"),
        ('{"messages": [{"role": "user"}]}', "turn 1 must be"),
        ('{"messages": [{"role": "human", "content": "x"}]}', "turn 1 must be"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn to answer"),
        ('{"messages": []}', "no turn to answer"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row, {"prompt": "fine"})
    with pytest.raises(PromptError, match=said) as error:
        read_prompts(file)
    assert f"{file}:2: " in str(error.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no rows"):
        read_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(PromptError, match="UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


def test_prompts_are_encoded_and_bounded(tmp_path: Path) -> None:
    target = tiny_target(tokenizer=True)
    rows = read_prompts(
        write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"})
    )
    assert target.tokenizer is not None
    assert target.tokenizer.decode(encode(rows[0], target, 8)) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert target.tokenizer.decode(encode(rows[1], target, 8)) == "hi"
    with pytest.raises(PromptError, match=r"p\.jsonl:2: .* do not fit the target's context of 512"):
        encode(rows[1], target, 512)


def test_the_embedded_prompts_are_usable() -> None:
    rows = read_prompts(Path(__file__).parents[2] / "checkpoints" / "prompts.jsonl")
    assert len(rows) >= 100
    assert len({str(row.content) for row in rows}) == len(rows)
