from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import OutputError
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.output import run_folder
from eagle_mlx.train.plots import smooth, write_plots
from eagle_mlx.train.tracker import METRICS, Tracker, flatten


def worth_keeping(folder: Path) -> bool:
    return (folder / "last").exists()


def fail(output: Path, error: BaseException, checkpoint: bool, overwrite: bool = False) -> None:
    with run_folder(output, overwrite, worth_keeping) as folder:
        (folder / "metrics").write_text("")
        if checkpoint:
            (folder / "last").mkdir()
        raise error


def test_a_run_that_fails_leaves_only_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "out", KeyboardInterrupt(), checkpoint=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="No space left"):
        fail(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"), checkpoint=True)
    assert (tmp_path / "out" / "last").exists()


def test_an_output_that_exists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    with pytest.raises(OutputError, match="exists already"), run_folder(out, False, worth_keeping):
        pass
    with pytest.raises(ValueError, match="boom"):
        fail(out, ValueError("boom"), checkpoint=False, overwrite=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]
    with run_folder(out, True, worth_keeping) as folder:
        (folder / "new").write_text("")
        assert (out / "old").exists()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    with Tracker(tmp_path, TrainConfig()) as tracker:
        tracker.log("train", 1, {"loss": 2.0, "accuracy_by_step": [0.5, 0.25]})
        lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
        assert lines == tracker.rows == [{"kind": "train", "step": 1, "loss": 2.0, "accuracy_by_step": [0.5, 0.25]}]


def test_lists_are_taken_apart_for_wandb() -> None:
    assert flatten("a", {"b": [1, 2], "c": {"d": 3}}) == {"a/b/0": 1, "a/b/1": 2, "a/c/d": 3}


def test_plots_are_pictures(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(1, 6):
        rows.append({"kind": "train", "tokens": 100 * i, "loss": 5.0 / i, "accuracy_by_step": [0.1 * i, 0.05 * i]})
        rows.append(
            {"kind": "eval", "tokens": 100 * i, "acceptance_length": 1 + i, "acceptance_by_position": [0.2, 0.1]}
        )
    written = write_plots(rows, tmp_path)
    assert [p.name for p in written] == [
        "loss.png",
        "accuracy.png",
        "acceptance_by_position.png",
        "acceptance_length.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
    assert write_plots([], tmp_path) == []


def test_smoothing_weighs_the_first_values_rightly() -> None:
    assert smooth([3.0] * 200) == pytest.approx([3.0] * 200)
    assert smooth([1.0, 2.0]) == [1.0, 2.0]
    assert len(smooth([])) == 0
