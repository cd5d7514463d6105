"""The demo from end to end on a tiny target, as `make demo` runs it on the real one."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.train.run import loop
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.full import FULL
from tests.train.empty_pictures import leave_empty_pictures

SCRIPT = Path(__file__).parent.parent / "checkpoints" / "scripts" / "demo.py"
RECIPE = """
data: [builtin:python]
limit: 30
max_length: 48
length: 48
rows: 2
unroll: 2
max_steps: 3
draft_vocab: 256
eval_prompts: 2
eval_tokens: 8
log_steps: 1
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    target = tiny_target_folder(tmp_path / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=256), tmp_path / "head", target_name="tiny")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    flags = {
        "--target": target,
        "--head": tmp_path / "head",
        "--config": tmp_path / "recipe.yaml",
        "--output": tmp_path / "demo",
        "--limit": 4,
        "--max-tokens": 10,
    }
    return [str(word) for pair in flags.items() for word in pair]


@pytest.fixture
def demo(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Run the script in this process. Unless in full, the pictures of the training itself are empty files."""
    if not FULL:
        monkeypatch.setattr(loop, "write_plots", leave_empty_pictures)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    return lambda: int(runpy.run_path(str(SCRIPT))["main"]())


def test_demo_trains_measures_and_reports(
    demo: Callable[[], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo() == 0, capfd.readouterr().err
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    for key in ("plain_tokens_per_s", "eagle_tokens_per_s", "speedup", "train_seconds"):
        assert report[key] > 0, key
    for key in ("acceptance_length", "demo_acceptance_length", "untrained_acceptance_length"):
        assert 1 <= report[key] <= 5, key
    assert report["identical"] is True
    assert (tmp_path / "demo" / "summary.png").stat().st_size > 1000
    assert list((tmp_path / "demo" / "head").glob("*.png"))
    shown = capfd.readouterr()
    table = shown.out.partition("what was gained")[2]
    start = re.search(r"^step 0: τ (\d\.\d\d)", shown.out, re.MULTILINE)
    assert start is not None
    assert re.search(rf"^tau, untrained head.* {start[1]}$", table, re.MULTILINE), "the log and the table agree"
    assert not re.search(r"<\|\w+\|>", shown.out), "the sample has no special tokens"
    assert ".demo" not in shown.out + shown.err, "no temporary folder"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_demo_keeps_what_it_did_not_make(
    demo: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.txt").write_text("years of work")
    assert demo() == 2
    assert "holds no demo" in capsys.readouterr().err
    assert (tmp_path / "demo" / "thesis.txt").read_text() == "years of work"


def test_failed_training_keeps_the_earlier_demo(
    demo: Callable[[], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "report.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("rowz: 3\n")
    assert demo() == 2
    shown = capfd.readouterr().err
    assert "did you mean 'rows'" in shown
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["report.json"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
