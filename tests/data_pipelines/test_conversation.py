"""The known shapes of rows, and errors for other rows."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_mlx.data_pipelines import Conversation, Message
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.errors import DataError

HI = (Message("user", "Hi"), Message("assistant", "Yo"))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]'},
        {"prompt": "Hi", "completion": "Yo"},
        {"instruction": "Hi", "input": "", "output": "Yo", "text": "Below is an instruction"},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yo"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                      {"role": "assistant", "content": "Yo", "tool_calls": None}], "text": None, "id": 3},
    ],
    ids=["messages", "sharegpt", "json", "prompt and completion", "alpaca", "as messages", "parts and nulls"],
)  # fmt: skip
def test_every_shape_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert parse_row(row, "x:1") == Conversation(HI)


def test_further_shapes() -> None:
    assert parse_row({"text": "import os"}, "x:1") == Conversation(text="import os")
    assert parse_row({"prompt": "Hi"}, "x:1") == Conversation(HI[:1])
    assert parse_row({"instruction": "Hi", "input": "there", "output": ""}, "x:1").messages[0].content == "Hi\n\nthere"
    assert parse_row({"turns": ["Hi", "More"], "category": "x"}, "x:1") == Conversation(HI[:1])
    roles = [{"from": r, "value": "v"} for r in ("system", "human", "gpt", "tool")]
    messages = parse_row({"conversations": roles}, "x:1").messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool"]
    capitals = [{"role": r, "content": "v"} for r in ("System", "User", "ASSISTANT", "Human", "GPT")]
    messages = parse_row({"messages": capitals}, "x:1").messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert parse_row({"messages": [call]}, "x:1").messages[0].as_dict() == {**call, "content": ""}


@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [{"role": "assistant", "content": "a", "name": "b"}]}])
def test_a_row_comes_back_as_it_was(row: dict[str, Any]) -> None:
    assert parse_row(row, "x:1").as_row() == row


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": 1, "answer": 2}, r"f:3: the row's keys \(question, answer\) have no known shape.*\n.*messages"),
        ({}, r"f:3: the row's keys \(none\)"),
        ({"instruction": "Hi", "context": "", "response": "Yo"}, "have no known shape"),
        ({"instruction": "Hi", "output": "Yo", "history": [["a", "b"]]}, "have no known shape"),
        ({"messages": []}, "f:3: `messages` must be a non-empty list of messages"),
        ({"messages": "Hi"}, "f:3: `messages` must be a non-empty list"),
        ({"messages": ["Hi"]}, "f:3: `messages`, message 1 must be an object"),
        ({"messages": [{"content": "Hi"}]}, "f:3: `messages`, message 1 has no `role`.*keys are: content"),
        ({"conversations": [{"from": "gpt", "text": "Hi"}]}, "message 1 has no `value`.*keys are: text"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: the content must be text or images, not 3"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "must be text"),
        ({"text": ""}, "f:3: `text` must be a non-empty string"),
        ({"prompt": 3}, "f:3: the prompt must be a non-empty list"),
        ({"turns": [3]}, r"f:3: `turns` must be a list of the user's texts, not \[3\]"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_row(row, "f:3")


def test_regenerated_answers_keep_the_side_of_the_split() -> None:
    other = Conversation((HI[0], Message("assistant", "Hello")))
    assert Conversation(HI).prompt_key() == other.prompt_key()
    assert Conversation(HI).prompt_key() != Conversation((Message("user", "Ho"), HI[1])).prompt_key()
