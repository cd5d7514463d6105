from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.errors import DataError
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.metrics import METRICS, read_rows
from eagle_mlx.train.tracker import Tracker


def a_run(folder: Path, steps: range, resume_step: int | None = None) -> list[int]:
    """Log a line for each step and an evaluation every third; returns the steps that the tracker knows of."""
    with Tracker(folder, TrainConfig(), resume_step) as tracker:
        for step in steps:
            tracker.log("train", step, {"tokens": 10 * step, "loss": 1 / step})
            if step % 3 == 0:
                tracker.log("eval", step, {"acceptance_length": 1.5})
        return [row["step"] for row in tracker.rows if row["kind"] == "train"]


@pytest.mark.parametrize("half", ["", '{"kind": "train", "st', '{"kind": "train", "step": 9, "loss": 1.0}', "\0" * 40])
def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path, half: str) -> None:
    a_run(tmp_path, range(1, 9))
    file = tmp_path / METRICS
    file.write_text(file.read_text() + half)
    assert a_run(tmp_path, range(6, 11), resume_step=6) == list(range(1, 11)), "step 6 was logged twice"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == read_rows(file)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 11))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6, 9]
    assert [p.name for p in tmp_path.iterdir()] == [METRICS]


def test_a_run_goes_on_without_its_metrics(tmp_path: Path) -> None:
    assert a_run(tmp_path, range(4, 6), resume_step=3) == [4, 5]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    a_run(tmp_path, range(1, 9))
    assert a_run(tmp_path, range(1, 3)) == [1, 2]
    assert {row["step"] for row in read_rows(tmp_path / METRICS)} == {1, 2}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    a_run(tmp_path, range(1, 4))
    file = tmp_path / METRICS
    before = "\n".join(["{", *file.read_text().splitlines()]) + "\n"
    file.write_text(before)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is no line of metrics"):
        Tracker(tmp_path, TrainConfig(), resume_step=2)
    assert file.read_text() == before
