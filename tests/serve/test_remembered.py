"""`--memory` reads conversations, texts and folders of source code, which then draft for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.proposers.suffixes import last_of
from eagle_mlx.serve.prompts import remember
from tests.serve.api.given import given_target

TEXT = "def area(width, height):\n    return width * height\n"


def matched(engine: em.Engine, text: str) -> int:
    """Return how many of the last tokens of a text the memory knows, with a token after them."""
    assert engine.proposer is not None
    assert engine.proposer.memory is not None
    assert engine.target.tokenizer is not None
    last = last_of(engine.target.tokenizer.encode(text))
    return max((texts.longest(last) for texts in engine.proposer.memory.of("any")), default=0)


@pytest.fixture
def engine() -> em.Engine:
    return em.Engine(given_target(), em.NgramProposer(memory=em.Memory()))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("area.py", TEXT),
        ("texts.jsonl", json.dumps({"text": f"{TEXT}\u2028"}, ensure_ascii=False)),
        ("windows.jsonl", "\ufeff" + json.dumps({"text": TEXT}) + "\r\n\r\n"),
        ("chats.jsonl", json.dumps({"messages": [{"role": "user", "content": TEXT}]})),
    ],
)
def test_files_are_read(tmp_path: Path, engine: em.Engine, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    lines = list[str]()
    remember([str(tmp_path / name)], engine, lines.append)
    assert matched(engine, "def area(width") > 2
    assert lines[0].startswith("memory: 1 texts, ")


def test_a_folder_is_read_without_hidden_large_and_binary_files(tmp_path: Path, engine: em.Engine) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "area.py").write_text(TEXT, encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    (tmp_path / "data.csv").write_text("1," * 600_000, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    lines = list[str]()
    remember([str(tmp_path)], engine, lines.append)
    assert lines[0].startswith("memory: 1 texts, ")
    assert matched(engine, "def area(width") > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "texts.jsonl:1: JSONDecodeError"), ('{"text": "a"}\n[]', "texts.jsonl:2: TypeError"), ("{}", "'text'")],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, engine: em.Engine, content: str, message: str) -> None:
    (tmp_path / "texts.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        remember([str(tmp_path / "texts.jsonl")], engine, print)


def test_a_missing_file_and_an_engine_without_memory_are_named(tmp_path: Path, engine: em.Engine) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        remember([str(tmp_path / "nowhere.txt")], engine, print)
    with pytest.raises(ConfigError, match="n-grams draft with texts, and they are off"):
        remember(["texts.txt"], em.Engine(given_target()), print)
