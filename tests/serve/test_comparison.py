"""`eagle-heads compare`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.heads import main as heads
from tests.fakes import target_with_two_heads

COUNT = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random target, two heads, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    target_with_two_heads(folder)
    rows = [json.dumps({"prompt": f"def number_{at}(x):"}) for at in range(COUNT)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def arguments(models: Path, *more: str) -> list[str]:
    named = ("--target", str(models / "target"), "--prompts", str(models / "prompts.jsonl"))
    return [*named, "--temperature", "2", "--max-tokens", "12", "--quiet", *more]


def test_the_figures_are_those_of_eagle_bench_to_the_last_digit(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At this temperature, the noise that random heads share with the target lets it accept some of their drafts."""
    pair = [str(models / "head0"), str(models / "head1")]
    assert heads(["compare", *pair, *arguments(models, "--json", str(tmp_path / "both.json"))]) == 0
    shown, written = capsys.readouterr().out, json.loads((tmp_path / "both.json").read_text())
    for name, head in zip(("first", "second"), pair, strict=True):
        file = tmp_path / f"{name}.json"
        own = ("--head", head, "--modes", "eagle", "--depth", "4", "--repeats", "1", "--json", str(file))
        assert bench(arguments(models, *own)) == 0
        [run] = json.loads(file.read_text())["runs"]
        assert written[name]["acceptance_length"] == run["acceptance_length"] > 1.05
        assert f"{run['acceptance_length']:.3f}" in shown
    assert written["acceptance"]["conversations"] == COUNT
    assert written["verdict"] in ("better", "worse", "not told apart")
    assert f"B is {written['verdict']}" in shown
    assert [head["name"] for head in written["heads"]] == pair
    assert len({head["sha256"] for head in written["heads"]}) == 2


def test_what_cannot_be_compared_is_one_line(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(["compare", "nowhere/here/at/all", str(models / "head1"), *arguments(models)]) == 2
    assert (
        heads(["compare", str(models / "head0"), str(models / "head1"), "--target", str(models), "--limit", "0"]) == 2
    )
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "nowhere/here/at/all" in errors[0]
    assert errors[1].startswith("error: --limit must be")
