from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import DataError
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.evaluation import FILE, Generation
from eagle_mlx.train.report import METRICS, read_rows, truncate
from eagle_mlx.train.run.tracker import Tracker


def a_run(folder: Path, steps: range, resume_step: int | None = None) -> list[int]:
    """Log a line per step and an evaluation every third step. Return the steps that the tracker has."""
    with Tracker(folder, TrainConfig(), resume_step) as tracker:
        for step in steps:
            tracker.log("train", step, {"tokens": 10 * step, "loss": 1 / step})
            if step % 3 == 0:
                tracker.log("eval", step, {"acceptance_length": 1.5})
        return [row["step"] for row in tracker.rows if row["kind"] == "train"]


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    with Tracker(tmp_path, TrainConfig()) as tracker:
        tracker.log("train", 1, {"loss": 2.0, "accuracy_by_step": [0.5, 0.25]})
        (row,) = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
        assert [row] == tracker.rows
    memory = row.pop("memory_gb")
    assert row == {"kind": "train", "step": 1, "loss": 2.0, "accuracy_by_step": [0.5, 0.25]}
    assert 0 <= memory["active"] <= memory["peak"]
    assert 0.01 < memory["process_peak"] < 1000, "gigabytes"


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"lr": 1e-3}, {"learning_rate": 5e-4}),
        ({"lr": 1e-3, "optimizer": "muon"}, {"learning_rate": 5e-4}),
        ({"lr": 1e-3, "optimizer": "muon", "muon_lr": 0.02}, {"learning_rate": 5e-4, "muon_learning_rate": 0.01}),
    ],
)
def test_the_learning_rate_itself_is_written(tmp_path: Path, settings: dict[str, Any], rates: dict[str, float]) -> None:
    with Tracker(tmp_path, TrainConfig.of(**settings)) as tracker:
        tracker.log("train", 1, {"learning_rate_factor": 0.5})
    (row,) = tracker.rows
    assert {name: value for name, value in row.items() if name.endswith("learning_rate")} == pytest.approx(rates)


def test_sample_texts_are_written(tmp_path: Path) -> None:
    def texts(rounds: int) -> list[Generation]:
        return [
            {"prompt": "def add(", "text": "a, b):", "tokens": 6, "rounds": rounds},
            {"prompt": "```x", "text": "y", "tokens": 6, "rounds": 6},
        ]

    with Tracker(tmp_path, TrainConfig()) as tracker:
        tracker.log("eval", 0, {"tokens": 0, "generations": texts(6)})
        assert "| 0 | 0 | 1.00 |" in (tmp_path / FILE).read_text()
        tracker.log("train", 5, {"tokens": 9000})
        tracker.log("eval", 9, {"tokens": 12000, "generations": texts(2)})
    shown = (tmp_path / FILE).read_text()
    assert "| 0 | 0 | 1.00 |\n| 9 | 12,000 | 3.00 |" in shown
    assert "\n\n    def add(\n\n" in shown
    assert "\n\n    ```x\n\n" in shown, "nothing in a text ends its block"


@pytest.mark.parametrize("half", ["", '{"kind": "train", "st', '{"kind": "train", "step": 9, "loss": 1.0}', "\0" * 40])
def test_a_resumed_run_logs_each_step_once(tmp_path: Path, half: str) -> None:
    a_run(tmp_path, range(1, 9))
    file = tmp_path / METRICS
    file.write_text(file.read_text() + half)
    assert a_run(tmp_path, range(6, 11), resume_step=6) == list(range(1, 11)), "step 6 was logged twice"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == read_rows(file)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 11))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6, 9]
    assert [p.name for p in tmp_path.iterdir()] == [METRICS]


def test_a_file_that_ends_anywhere_can_be_continued(tmp_path: Path) -> None:
    a_run(tmp_path, range(1, 5))
    file = tmp_path / METRICS
    whole, rows = file.read_bytes(), read_rows(file)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:size])
        complete = sum(end <= size for end in ends) + (size + 1 in ends)  # a line that lacks only its end counts
        assert truncate(file, 3) == [row for row in rows[:complete] if row["step"] <= 3]
        assert truncate(file, 3) == read_rows(file), "once more changes nothing"


def test_a_run_resumes_without_its_metrics(tmp_path: Path) -> None:
    assert a_run(tmp_path, range(4, 6), resume_step=3) == [4, 5]


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    a_run(tmp_path, range(1, 9))
    assert a_run(tmp_path, range(1, 3)) == [1, 2]
    assert {row["step"] for row in read_rows(tmp_path / METRICS)} == {1, 2}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    a_run(tmp_path, range(1, 4))
    file = tmp_path / METRICS
    before = "\n".join(["{", *file.read_text().splitlines()]) + "\n"
    file.write_text(before)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is not a line of metrics"):
        Tracker(tmp_path, TrainConfig(), resume_step=2)
    assert file.read_text() == before
