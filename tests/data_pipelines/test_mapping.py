"""Rows with other field names."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_mlx.data_pipelines import Conversation, Message
from eagle_mlx.data_pipelines.sources.rows import FieldMap, choose, parse_row
from eagle_mlx.errors import ConfigError, DataError

HI = (Message("user", "Hi"), Message("assistant", "Yo"))


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "Hi", "answer": "Yo"}, "prompt=question,completion=answer"),
        ({"messages": [{"who": "user", "said": "Hi"}, {"who": "assistant", "said": "Yo"}]}, "role=who,content=said"),
        ({"chat": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}, "messages=chat"),
        (
            {"d": [{"speaker": "Human", "text": "Hi"}, {"speaker": "AI", "text": "Yo"}]},
            "messages=d, role=speaker, content=text, user=Human, assistant=AI",
        ),
        ({"conversations": [{"from": "human", "text": "Hi"}, {"from": "gpt", "text": "Yo"}]}, "content=text"),
        ({"messages": [{"kind": "human", "value": "Hi"}, {"kind": "gpt", "value": "Yo"}]}, "role=kind"),
        ({"prompt": "Hi", "completion": "Yo", "sys": None}, "system=sys"),
    ],
)
def test_named_fields_are_read(row: dict[str, Any], fields: str) -> None:
    assert parse_row(row, "x:1", FieldMap.parse(fields)) == Conversation(HI)


def test_a_system_column_comes_first_and_text_and_tools_have_names() -> None:
    system = Message("system", "Be brief")
    for row, fields in (
        ({"q": "Hi", "a": "Yo", "s": "Be brief"}, "prompt=q,completion=a,system=s"),
        ({"messages": [m.as_dict() for m in HI], "s": "Be brief"}, "system=s"),
        ({"prompt": "Hi", "completion": "Yo", "s": "Be brief"}, "system=s"),
    ):
        assert parse_row(row, "x:1", FieldMap.parse(fields)).messages == (system, *HI)
    columns = {"system": "Be brief", "id": 1}
    assert parse_row({"prompt": "Hi", "completion": "Yo", **columns}, "x:1").messages == (system, *HI)
    assert (
        parse_row({"q": "Hi", "a": "Yo", **columns}, "x:1", FieldMap.parse("prompt=q,completion=a")).messages[0]
        == system
    )
    own = {"messages": [m.as_dict() for m in (Message("system", "My own"), *HI)]}
    assert (
        parse_row({**own, **columns}, "x:1") == parse_row({**own, "system": {"id": 1}}, "x:1") == parse_row(own, "x:1")
    )
    assert parse_row({"body": "import os"}, "x:1", FieldMap.parse("text=body")) == Conversation(text="import os")
    row = {"q": "Hi", "functions": '[{"name": "f"}]'}
    assert parse_row(row, "x:1", FieldMap.parse("prompt=q,tools=functions")).tools == ({"name": "f"},)


def test_thoughts_and_calls_have_names_too() -> None:
    row = {"messages": [{"role": "assistant", "content": "Yo", "thinking": "Hm", "calls": [{"name": "f"}]}]}
    [message] = parse_row(row, "x:1", FieldMap.parse("reasoning_content=thinking,tool_calls=calls")).messages
    assert message.extra == {"reasoning_content": "Hm", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("row", "fields", "reason"),
    [
        ({"a": 1}, "prompt=q", "f:3: no field `q`, which --map names as the prompt; the row's fields are: a"),
        ({"q": None}, "prompt=q", "f:3: no field `q`"),
        ({"messages": [{"role": "user"}]}, "role=who", "f:3: `messages`, message 1: no field `who`.* are: role"),
        ({"messages": [{"role": "user"}]}, "content=said", "message 1: no field `said`, which --map names as the cont"),
        ({"chat": []}, "role=who", "f:3: .* no `messages` or `conversations`.*messages=NAME"),
        ({"chat": ["Hi"]}, "messages=chat", "message 1 must be an object"),
        ({"chat": 3}, "messages=chat", "must be a non-empty list of messages"),
    ],
)
def test_a_row_that_does_not_fit_its_map_is_named(row: dict[str, Any], fields: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_row(row, "f:3", FieldMap.parse(fields))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("role", "not of the form FIELD=NAME"),
        ("role=", "not of the form FIELD=NAME"),
        ("rolle=x", "did you mean role"),
        ("role=a,role=b", "role appears twice"),
        ("prompt=q,role=r", "either messages or prompt"),
        ("text=t,prompt=q", "either prompt or text"),
        ("completion=a", "needs a prompt"),
    ],
)
def test_a_map_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FieldMap.parse(text)


def test_a_map_may_be_for_one_source() -> None:
    maps = ["prompt=q", "user/name:config:train:text=body"]
    assert choose(maps, "a.jsonl") == FieldMap({"prompt": "q"})
    assert choose(maps, "user/name:config:train") == FieldMap({"text": "body"})
    assert choose([], "a.jsonl") is None
    with pytest.raises(ConfigError, match="there is another map for this"):
        choose(["role=a", "content=b"], "a.jsonl")
