"""Rows of well-known data sets, read through their presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_mlx.data_pipelines import DataConfig, ReadReport, cli, read_conversations
from eagle_mlx.data_pipelines.sources import PRESETS, parse
from eagle_mlx.errors import ConfigError, DataError

U, A, S = "user", "assistant", "system"

ROWS: dict[str, list[dict[str, Any]]] = {
    "sharegpt": [
        {
            "id": "QWJhYvA_0",
            "conversations": [
                {"from": "human", "value": "Summarize this"},
                {"from": "gpt", "value": "It is about"},
                {"from": "human", "value": "Shorter"},
                {"from": "gpt", "value": "So"},
            ],
        },
        {"id": "empty_1", "conversations": []},
        {"id": "n1GJ9kR_11", "conversations": [{"from": "system", "value": "s"}, {"from": "bing", "value": "Hello"}]},
    ],
    "ultrachat": [
        {
            "prompt": "How do I bake?",
            "prompt_id": "f0e3",
            "messages": [
                {"content": "How do I bake?", "role": "user"},
                {"content": "With heat.", "role": "assistant"},
                {"content": "How long?", "role": "user"},
                {"content": "An hour.", "role": "assistant"},
            ],
        }
    ],
    "openhermes": [
        {
            "custom_instruction": None,
            "topic": None,
            "model_name": None,
            "system_prompt": None,
            "category": "orca",
            "source": "airoboros2.2",
            "conversations": [
                {"from": "system", "value": "You are brief.", "weight": None},
                {"from": "human", "value": "Which is correct?", "weight": 0.0},
                {"from": "gpt", "value": "A", "weight": 1.0},
            ],
        }
    ],
    "magicoder": [
        {
            "lang": "python",
            "raw_index": 60320,
            "index": 17033,
            "seed": "x = 1",
            "openai_fingerprint": "fp_eeff13170a",
            "problem": "Write f.",
            "solution": "def f(): ...",
        }
    ],
    "magicoder-evol": [{"instruction": "Write g.", "response": "def g(): ..."}],
    "gsm8k": [{"question": "Natalia sold clips.", "answer": "48/2 = <<48/2=24>>24\n#### 24"}],
}

SAID = {
    "sharegpt": [[(U, "Summarize this"), (A, "It is about"), (U, "Shorter"), (A, "So")], [(S, "s"), (A, "Hello")]],
    "ultrachat": [[(U, "How do I bake?"), (A, "With heat."), (U, "How long?"), (A, "An hour.")]],
    "openhermes": [[(S, "You are brief."), (U, "Which is correct?"), (A, "A")]],
    "magicoder": [[(U, "Write f."), (A, "def f(): ...")]],
    "magicoder-evol": [[(U, "Write g."), (A, "def g(): ...")]],
    "gsm8k": [[(U, "Natalia sold clips."), (A, "48/2 = <<48/2=24>>24\n#### 24")]],
}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json"])
def test_every_preset_reads_rows_like_its_own(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS[name]), path)
    elif kind == "json":
        path.write_text(json.dumps(ROWS[name], indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    report = ReadReport()
    conversations = list(read_conversations(DataConfig((f"preset:{name}@{path}",), seed=None), "all", report=report))
    assert [[(m.role, m.content) for m in c.messages] for c in conversations] == SAID[name]
    assert report.left_out["unusable"] == len(ROWS[name]) - len(SAID[name])
    assert all(c.origin.startswith(f"preset:{name}@") for c in conversations)


def test_a_preset_knows_where_it_is() -> None:
    gsm8k = parse("preset:gsm8k=0.5")
    assert (gsm8k.kind, gsm8k.name, gsm8k.config, gsm8k.split, gsm8k.weight) == (
        "hub",
        "openai/gsm8k",
        "main",
        "train",
        0.5,
    )
    assert parse("preset:ultrachat@you/copy:test").split == "test"


def test_a_preset_that_is_not_here_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"openai/gsm8k \('train'\) cannot be loaded from the hub.*preset:gsm8k@PLACE"):
        next(read_conversations(DataConfig(("preset:gsm8k",))))


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ultrachat"):
        parse("preset:ultra-chat")


def test_a_row_that_is_not_the_sets_own_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: no field `answer`, which --map names as the completion"):
        next(read_conversations(DataConfig((f"preset:gsm8k@{path}",))))


def test_the_list_holds_ids_contents_and_licenses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    printed = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert all(text in printed for text in (f"{name}:", preset["id"], preset["holds"], preset["license"]))
