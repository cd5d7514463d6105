"""What a run learns from: sources with weights, maps and filters, and held-out prompts of the same reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import heldout_prompts, training_data
from tests.fakes import tiny_target

TARGET = tiny_target(vocab=4096, tokenizer=True)


def chats(folder: Path, name: str, count: int, question: str = "prompt", answer: str = "completion") -> str:
    rows = [{question: f"{name}: what is {i} + {i}?", answer: f"It is {2 * i}."} for i in range(count)]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def config(*data: str, **settings: Any) -> TrainConfig:
    return TrainConfig(target="tiny", data=data, draft_vocab=0, eval_tokens=8, cache_gb=0.0, **settings)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    a, b = chats(tmp_path, "a", 100), chats(tmp_path, "b", 100)
    data = training_data(TARGET, config(f"{a}=0.75", f"{b}=0.25", limit=80))
    assert data.report["conversations"] == 80
    assert TARGET.tokenizer is not None
    texts = [TARGET.tokenizer.decode(data.samples[i].tokens.tolist()) for i in range(80)]
    assert sum("a: what" in text for text in texts) == 60


def test_maps_and_filters_reach_training_and_held_out_prompts(tmp_path: Path) -> None:
    odd, usual = chats(tmp_path, "odd", 100, "q", "a"), chats(tmp_path, "usual", 100)
    mapped = config(odd, usual, map=(f"{odd}:prompt=q,completion=a",), dedupe="prompt", keep_tokens=":40")
    report = training_data(TARGET, mapped).report
    assert report["conversations"] > 180
    assert report["left_out"] == 0
    assert 0 < len(heldout_prompts(TARGET, mapped)) < 20  # of the first source, one in 25
    assert len(heldout_prompts(TARGET, config(usual, eval_data=odd, map=("prompt=q,completion=a",)))) == 100
    with pytest.raises(DataError, match="nothing to learn"):
        training_data(TARGET, config(usual, keep_tokens="500:"))


def test_a_prompt_is_never_learnt_and_measured(tmp_path: Path) -> None:
    source = chats(tmp_path, "all", 200)
    weighted = config(f"{source}=1")
    data = training_data(TARGET, weighted)
    learnt = [data.samples[i].tokens.tolist() for i in range(data.report["conversations"])]
    prompts = heldout_prompts(TARGET, weighted)
    assert len(learnt) + len(prompts) == 200
    assert not any(tokens[: len(prompt)] == prompt for prompt in prompts for tokens in learnt)


def test_rows_that_cannot_be_used_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    source = Path(chats(tmp_path, "some", 60))
    source.write_text(source.read_text() + '{"prompt": 7}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"some.jsonl:61"):
        training_data(TARGET, config(str(source)))
    assert training_data(TARGET, config(str(source), skip_bad=True)).report["left_out"] == 1


def test_flags_that_cannot_be_meant_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = chats(tmp_path, "a", 10)
    with pytest.raises(ConfigError, match="has no weight"):
        training_data(TARGET, config(f"{source}=1", source))
    flags = ["--target", "checkpoints/target", "--data", source, f"{source}=0.5", "--output", str(tmp_path / "out")]
    assert main(flags) == 2
    assert "has no weight" in capsys.readouterr().err
