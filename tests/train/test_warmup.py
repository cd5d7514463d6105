"""Runs that learn from any text first, and from the target's own conversations last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import reading_share, tokens_to_read
from eagle_mlx.train.step import Cosine, with_warmup
from tests.full import in_full
from tests.train.test_resume import flags, lines, stop_at, weights


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for n in range(20):
        (folder / f"{n}.md").write_text(f"# Number {n}\n\n" + f"The number after {n} is {n + 1}.\n" * (3 + n))
    return folder


def epochs(run: Path) -> list[int]:
    return [line["epoch"] for line in lines(run) if line["kind"] == "train"]


@pytest.mark.parametrize("how", [("--max-steps", "8"), ("--epochs", "1", "--warmup-share", "0.3")])
def test_a_resumed_run_is_the_same_in_both_phases(
    how: tuple[str, ...], target: Path, chats: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--warmup-data", f"text:{texts}", "--eval-steps", "100", "--log-steps", "1", *how)
    assert main(flags(target, chats, tmp_path / "whole", *more)) == 0
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    steps, data = report["steps"], report["data"]
    learned = epochs(tmp_path / "whole")
    first, own = [epoch for epoch in learned if epoch < learned[-1]], [e for e in learned if e == learned[-1]]
    assert len(learned) == steps
    if how[0] == "--max-steps":
        assert len(first) == len(own) == 4, "half of the steps"
    else:
        assert len(first) == pytest.approx(3 / 7 * len(own), abs=0.5), "its share of all steps"
        assert data["learned_tokens"] == data["tokens"], "all of the run's own data"
    assert data["warmup_tokens"] > 0
    evaluated = [line["step"] for line in lines(tmp_path / "whole") if line["kind"] == "eval"]
    assert evaluated == [0, len(first), steps], "after each phase"
    # checks before the first measurement, the steps, and the measurements after the phases
    some = (2 + len(first), 3 + len(first)) if how[0] == "--max-steps" else (4, steps + 2)
    for at in in_full(range(3, steps + 5), some):
        out = tmp_path / f"stopped-{at}"
        with monkeypatch.context() as patch:
            stop_at(patch, at)
            assert main(flags(target, chats, out, *more)) == 143
        assert main(["--resume", str(out)]) == 0
        assert lines(out) == lines(tmp_path / "whole")
        assert weights(out) == weights(tmp_path / "whole")


def test_conversations_are_text_too_and_short_text_is_read_epochs_times(
    target: Path, chats: Path, texts: Path, tmp_path: Path
) -> None:
    sources = ("--warmup-data", f"text:{texts}=1", f"{chats}=2", "--warmup-tokens", "300", "--warmup-share", "0.9")
    assert main(flags(target, chats, tmp_path / "out", *sources, "--epochs", "1", "--log-steps", "1")) == 0
    learned = epochs(tmp_path / "out")
    assert set(learned) == {0, 2}, "one pass over the text, then the run's own data"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("text:{}/empty", "empty has no files; name a folder with text files"),
        ("text:{}/none", "there is no file or folder"),
        ("text:{}/a.bin", "a.bin is empty, or not text in UTF-8"),
        ("{}/bad.jsonl", "bad.jsonl:1: not valid JSON"),
        ("{}/other.txt", "other.txt is not a source of conversations; sources are"),
    ],
)
def test_text_that_cannot_be_read_is_reported_before_anything_is_made(
    source: str, said: str, target: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    (tmp_path / "bad.jsonl").write_text("nothing\n")
    line = ["--target", str(target), "--data", "self", "--output", str(tmp_path / "out"), "--length", "64"]
    assert main([*line, "--warmup-data", source.format(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.self.jsonl").exists()


def test_steps_and_tokens_of_a_warmup() -> None:
    config = TrainConfig.of(warmup_data=("builtin:python",), warmup_share=0.25, epochs=3, rows=2, length=100)
    first, whole = with_warmup(Cosine(steps=30), config, 100)
    assert (first.phase_steps, whole.steps) == (10, 40)
    assert first.is_over(10, 0)
    assert not whole.is_over(39, 0)
    assert first.factor(9, 0, 0.1, 0.0) == whole.factor(9, 0, 0.1, 0.0), "one schedule spans both"
    assert with_warmup(Cosine(steps=30), config, 2)[1].steps == 36, "at most --epochs passes over the text"
    assert with_warmup(Cosine(steps=40), config.changed(max_steps=40), 100)[0].phase_steps == 10
    first, whole = with_warmup(Cosine(seconds=80), config.changed(minutes=80 / 60), 100)
    assert first.is_over(5, 20)
    assert not whole.is_over(5, 79)
    assert tokens_to_read(config, 600, 50.0) == 600
    assert tokens_to_read(config.changed(max_steps=40), 600, 50.0) == 2000
    assert tokens_to_read(config.changed(minutes=4.0), 600, 50.0) == 3000


@settings(deadline=None, max_examples=50)
@given(st.floats(0.05, 0.95), st.floats(1, 1e5), st.floats(1, 1e5))
def test_the_slower_writing_is_the_more_time_goes_to_reading(most: float, reading: float, writing: float) -> None:
    share = reading_share(most, reading, writing)
    assert 0 <= share <= most
    assert share <= reading_share(most, 2 * reading, writing)
    assert reading_share(0.5, 1000, 1) == pytest.approx(0.5, abs=0.001)
    assert reading_share(0.5, 2, 1) == 0
