"""Mixes, filters and duplicates: which conversations are kept, in which shares, and reports on the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from eagle_mlx.data_pipelines import Conversation, DataConfig, Message, ReadReport, read_conversations
from eagle_mlx.data_pipelines.rendering import all_tokens
from eagle_mlx.data_pipelines.sources import parse
from eagle_mlx.data_pipelines.sources.reading import parse_range
from eagle_mlx.errors import ConfigError, DataError
from tests.fakes import EMBEDDED_TARGET


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, name: str, count: int) -> str:
    return write(path / f"{name}.jsonl", *({"text": f"{name}{n}"} for n in range(count)))


def texts(*sources: str, report: ReadReport | None = None, **options: Any) -> list[str]:
    conversations = read_conversations(DataConfig(sources, **options), "all", report=report)
    return [c.text or c.messages[0].content for c in conversations]


def test_a_mix_has_its_shares_at_every_place_and_ends_with_a_source(tmp_path: Path) -> None:
    a, b = numbered(tmp_path, "a", 100), numbered(tmp_path, "b", 100)
    mixed = texts(f"{a}=0.7", f"{b}=0.3")
    for place in range(1, len(mixed) + 1):
        assert abs(sum(text[0] == "a" for text in mixed[:place]) - 0.7 * place) <= 1
    assert sum(text[0] == "a" for text in mixed) == 100
    assert 42 <= len(mixed) - 100 <= 43
    assert len(set(mixed)) == len(mixed)
    assert mixed == texts(f"{a}=7", f"{b}=3"), "weights are relative"
    assert mixed[:20] == texts(f"{a}=0.7", f"{b}=0.3", limit=20)
    assert mixed != texts(f"{a}=0.7", f"{b}=0.3", seed=1)


def test_without_weights_sources_come_whole_one_after_the_other(tmp_path: Path) -> None:
    a, b = numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 2)
    assert texts(a, b, seed=None) == ["a0", "a1", "a2", "b0", "b1"]
    assert texts(a, b, seed=None, limit=4) == ["a0", "a1", "a2", "b0"]


def test_weights_that_cannot_be_are_refused(tmp_path: Path) -> None:
    a, b = numbered(tmp_path, "a", 1), numbered(tmp_path, "b", 1)
    with pytest.raises(ConfigError, match=r"b.jsonl has no weight, but others have"):
        DataConfig((f"{a}=1", b))
    for weight in ("0", "-1", "+0.0"):
        with pytest.raises(ConfigError, match="a weight must be above 0"):
            DataConfig((f"{a}={weight}",))
    odd = write(tmp_path / "x=0.5", {"text": "a"})
    with pytest.raises(DataError, match="not a source of conversations"):
        parse(odd)  # a file with that name is a file


@pytest.mark.parametrize(
    ("text", "name", "config", "split"),
    [
        ("user/name", "user/name", None, "train"),
        ("user/name:test", "user/name", None, "test"),
        ("user/name:main:train_sft", "user/name", "main", "train_sft"),
        ("name:main:train[:10%]", "name", "main", "train[:10%]"),
        ("name:train[10:20]+test", "name", None, "train[10:20]+test"),
    ],
)
def test_ids_with_configs_and_splits(text: str, name: str, config: str | None, split: str) -> None:
    source = parse(f"{text}=0.25")
    assert (source.kind, source.name, source.config, source.split) == ("hub", name, config, split)
    assert (source.spec, source.weight) == (text, 0.25)


def test_a_folder_has_splits_and_configs(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, text in (("train", "a"), ("test", "b")):
        pq.write_table(pa.Table.from_pylist([{"text": f"{text}{n}"} for n in range(4)]), folder / f"{split}.parquet")
    assert texts(str(folder), seed=None) == ["a0", "a1", "a2", "a3"]
    assert texts(f"{folder}:test", seed=None) == ["b0", "b1", "b2", "b3"]
    assert texts(f"{folder}:train[:2]", seed=None) == ["a0", "a1"]
    with pytest.raises(DataError, match=r"set \('nowhere'\) cannot be read"):
        texts(f"{folder}:nowhere")


def test_tools_of_parquet_rows_lose_what_other_rows_brought_in(tmp_path: Path) -> None:
    calls = [
        {"function": {"name": name, "arguments": arguments}} for name, arguments in (("f", {"x": 1}), ("g", {"y": 2}))
    ]
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [c]}]} for c in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    lines = write(tmp_path / "x.jsonl", *rows)
    for spec in (str(tmp_path / "x.parquet"), lines):
        conversations = list(read_conversations(DataConfig((spec,), seed=None), "all"))
        assert [c.messages[1].extra["tool_calls"] for c in conversations] == [[call] for call in calls]


def turns(count: int, words: str = "a") -> dict[str, Any]:
    pair = [{"role": "user", "content": words}, {"role": "assistant", "content": f"b{count}"}]
    return {"messages": pair * count}


def test_turns_and_tokens_are_kept_within_their_ranges(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", *(turns(n) for n in range(1, 6)), {"text": "plain"})
    report = ReadReport()
    conversations = list(read_conversations(DataConfig((spec,), seed=None, keep_turns="2:3"), "all", report=report))
    assert [c.turns for c in conversations] == [2, 3, 0]
    assert (report.kept, report.left_out["by number of turns"]) == (3, 3)
    assert "3 conversations read; left out: 3 by number of turns" in str(report)
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    lengths = [len(all_tokens(tokenizer, c)) for c in read_conversations(DataConfig((spec,), seed=None), "all")]
    config = DataConfig((spec,), seed=None, keep_tokens=f":{lengths[1]}")
    kept = read_conversations(config, "all", tokenizer, report)
    assert [len(all_tokens(tokenizer, c)) for c in kept] == [n for n in lengths if n <= lengths[1]]
    assert report.left_out["by number of tokens"] == sum(n > lengths[1] for n in lengths)
    with pytest.raises(ConfigError, match="--keep-tokens needs a model"):
        next(read_conversations(config, "all"))


@pytest.mark.parametrize("text", ["3", ":", "a:b", "5:4", "-1:3", "1:2:3"])
def test_ranges_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--keep-turns"):
        DataConfig(("builtin:python",), keep_turns=text)
    assert [[n in parse_range(text, "--x") or 0 for n in (0, 2, 7)] for text in ("2:", ":2")] == [[0, 1, 1], [1, 1, 0]]


def test_duplicates_are_left_out_whatever_their_case_and_spaces(tmp_path: Path) -> None:
    rows = [("Say  hi", "Hi"), ("say hi", "Ho"), ("Say hi", "hi "), ("Say \uff48\uff49", "Hi"), ("Other", "Hi")]
    spec = write(tmp_path / "x.jsonl", *({"prompt": p, "completion": c} for p, c in rows))
    report = ReadReport()
    assert texts(spec, seed=None, dedupe="prompt", report=report) == ["Say  hi", "Other"]
    assert report.left_out["as duplicates"] == 3
    assert texts(spec, seed=None, dedupe="conversation") == ["Say  hi", "say hi", "Other"]
    assert len(texts(spec, spec, seed=None, dedupe="conversation")) == 3, "sources share what has been seen"
    assert len(texts(spec, seed=None)) == 5
    with pytest.raises(ConfigError, match="--dedupe must be one of .*not .words"):
        DataConfig((spec,), dedupe="words")  # type: ignore[arg-type]


def test_a_prompt_and_its_like_are_on_the_same_side() -> None:
    def key(*turns: tuple[str, str]) -> int:
        return Conversation(tuple(Message(*turn) for turn in turns)).prompt_key()

    plain = key(("user", "Say hi"), ("assistant", "Hi"))
    assert plain == key(("system", "Be brief"), ("user", "say  HI"), ("assistant", "Ho"))
    assert plain != key(("user", "Say ho"))


def test_a_map_for_no_source_is_refused(tmp_path: Path) -> None:
    spec = write(tmp_path / "x.jsonl", {"q": "a", "r": "b"})
    assert texts(spec, map=(f"{spec}:prompt=q,completion=r",)) == ["a"]
    with pytest.raises(ConfigError, match=r"y.jsonl is not one of the sources"):
        DataConfig((spec,), map=("y.jsonl:prompt=q",))
    with pytest.raises(DataError, match=r"x.jsonl:1: no field `z`"):
        texts(spec, map=("prompt=z",))
    with pytest.raises(DataError, match=r"x.jsonl:1: the row's keys \(q, r\).*name the fields with --map"):
        texts(spec)


def test_rows_that_cannot_be_used_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"q": 1}\nnonsense\n\n{"text": "\xff"}\n{"text": "b\xc3\xa9"}\n')
    report = ReadReport()
    assert texts(str(path), seed=None, skip_bad=True, report=report) == ["a", "bé"]
    assert report.left_out["unusable"] == 3
    assert f"the first unusable row: {path}:2: the row's keys (q)" in str(report)
