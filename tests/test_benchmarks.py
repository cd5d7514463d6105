"""The scripts of benchmarks/ run on a small shape or a tiny model."""

from __future__ import annotations

import gzip
import inspect
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.heads import kind_of
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.mtp import save_mtp
from tests.eagle_mlx import heads
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.vision_targets import picture, vision_target

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts import their neighbors, as when they are run."""
    monkeypatch.syspath_prepend(FOLDER)


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / name))


def test_gpu_benchmark_measures_every_part(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    few = "--shape tiny --positions 3 --contexts 16 --rows 1 --depths 2 --nodes 4 --repeats 2"
    script("gpu.py")["main"]([*few.split(), "--json", str(file)])
    report = json.loads(file.read_text())
    assert list(report["steps"][0]["verify_ms"]) == ["1", "2"]
    assert [(timing["depth"], timing["nodes"]) for timing in report["rounds"]] == [(0, 0), (2, 0), (3, 4)] * 3
    assert all(timing["ms"] > 0 for timing in report["rounds"])


def test_the_parts_of_a_round_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in (("LAYERS", 2), ("HEADS", 2), ("HEAD_DIM", 16)):
        monkeypatch.setattr(f"step_costs.{name}", few)
    tiny_target_folder(tmp_path / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), tmp_path / "head", target_name="tiny")
    models = ("--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"))
    flags = ("--depth", "1", "3", "--context", "40", "--repeats", "4", "--json", str(tmp_path / "parts.json"))
    script("round_parts.py")["main"]([*models, *flags])
    written = json.loads((tmp_path / "parts.json").read_text())
    assert set(written["costs"]["verify_ms"]) == {"1", "3"}
    assert all(written["costs"][key] > 0 for key in ("target_ms", "draft_ms", "draft_to_target"))
    assert written["rollback"]["ratio"] > 0
    assert [(timing["context"], timing["depth"]) for timing in written["rounds"]] == [(40, 0), (40, 3)]
    shown = capsys.readouterr().out
    assert "of a target step" in shown
    assert "rollback: " in shown


def test_other_engines_are_compared_with_the_same_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here without the other engines, which the table then says."""
    tiny_target_folder(tmp_path / "target")
    head = heads.dspark(tiny_target(tokenizer=True))
    kind_of(head).formats[0].save(head, tmp_path / "head", target_name="tiny")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "import os"}\n')
    models = [f"--{name}={tmp_path / place}" for name, place in
              (("target", "target"), ("head", "head"), ("prompts", "prompts.jsonl"))]  # fmt: skip
    few = ("--limit=2", "--max-tokens=8", "--rows", "1", "2", "--turn=2", "--repeats=1")
    assert script("peers.py")["main"]([*models, f"--python={sys.executable}", *few]) == 0
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    table = {(line[0].split()[0], line[1].strip(), line[2].strip()): line[3:] for line in lines}
    ways = [("eagle-mlx", "default"), ("eagle-mlx", "2"), ("mlx-lm", "none")]
    for rows in ("1", "2"):
        assert [table[engine, rows, drafts][-1].strip() for engine, drafts in ways] == ["2 of 2"] * 3
        assert "PackageNotFoundError" in table["mlx-dspark", rows, "2"][0]


def test_another_version_decodes_with_its_own_code(tmp_path: Path) -> None:
    """Although the package imports its names on their first use."""
    shutil.copytree(FOLDER.parent / "eagle_mlx", tmp_path / "eagle_mlx", ignore=shutil.ignore_patterns("__pycache__"))
    other = script("older.py")["Older"](tmp_path).package()
    assert other.Engine is not em.Engine
    for package, folder in ((other, tmp_path), (em, FOLDER.parent)):
        for function in (package.Engine.step, package.HeadProposer.bind, package.load_target):
            assert Path(inspect.getfile(function)).is_relative_to(folder)


def test_a_verify_can_be_timed_without_a_head() -> None:
    costs = script("step_costs.py")["measure_costs"](tiny_target(), None, [2], context=8, repeats=2)
    assert costs.draft_ms is costs.draft_to_target is None
    assert costs.verify_ms[2] > 0
    assert "draft step" not in str(costs)


def test_acceptance_after_images_is_reported_for_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_vlm")
    target = vision_target(tmp_path / "target", "qwen3_5")
    save_mtp(heads.mtp(target), tmp_path / "mtp", target_name="tiny")
    (tmp_path / "shot.png").write_bytes(picture(1, 48, 64))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n' * 3)
    files = ["--head", f"{tmp_path}/mtp", "--images", f"{tmp_path}/shot.png", "--prompts", f"{tmp_path}/prompts.jsonl"]
    script("images.py")["main"](["--target", f"{tmp_path}/target", *files, "--max-tokens", "8", "--depth", "2"])
    ngrams, head = capsys.readouterr().out.splitlines()[-2:]
    assert ngrams.startswith("| n-grams | ")
    assert head.startswith("| MTP ")
    assert ngrams.count(" of 3 answers)") == head.count(" of 3 answers)") == 2


def test_a_text_model_reads_questions_in_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_vlm")
    target, output = tiny_target_folder(tmp_path / "target", architecture="llama"), tmp_path / "reader"
    (tmp_path / "q.jsonl").write_text('{"prompt": "def f(x):"}\n{"turns": ["import os"]}\n')
    make = script("picture_reader.py")["main"]
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the only special tokens of this model
    make.__globals__["NAMES"].update(zip(make.__globals__["NAMES"], tokens, strict=True))
    make(["--target", str(target), "--output", str(output), "--questions", str(tmp_path / "q.jsonl")])
    made = re.search(
        r"2 of 2 questions in .*, with \d+ different tokens; (\d+) of (\d+) tokens", capsys.readouterr().out
    )
    assert made is not None
    assert made[1] == made[2]
    few = ["--pictures", f"{output}/questions.jsonl", "--max-tokens", "8", "--depth", "2"]
    script("images.py")["main"](["--target", f"{output}/model", "--draft-model", str(target), *few])
    rows = capsys.readouterr().out.splitlines()[-2:]
    for row, drafts in zip(rows, ("n-grams", "draft model .*"), strict=True):
        assert re.fullmatch(rf"\| {drafts} \| .* of 2 answers\) \| .* of 2 answers\) \|", row)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_round_is_broken_down_at_any_context(depth: int) -> None:
    target = tiny_target()
    measured = script("round_parts.py")["measure_breakdown"]
    parts = measured(target, tiny_head(target), depth, context=700, rounds=4)  # the model's own is 512
    assert (parts.context, parts.depth) == (700, depth)
    assert parts.round_ms > 0 < parts.forwards_ms
    assert set(parts.stages_ms) == {"propose", "verify", "accept", "roll back", "Python"}
    assert target.context_length == 512
    assert "700 tokens" in str(parts)


def test_replays_show_what_a_memory_gains_on_texts_that_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_target_folder(tmp_path / "target")
    row = {"kind": "json", "prompt": "Return it.", "answer": '{"name": "a", "price": 12, "is_new": true}' * 2}
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines([json.dumps(row) + "\n"] * 8)
    texts = str(tmp_path / "texts.jsonl.gz")
    monkeypatch.setattr(sys, "argv", ["agents.py", "--target", str(tmp_path / "target"), "--texts", texts])
    script("agents.py")["main"]()
    [kind, number, _, own, remembered, head, both] = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert (kind, number) == ("json", "8")
    assert float(remembered) > 1.2 * float(own) > 1
    assert float(both) > float(head) > 1


def test_a_session_of_the_same_name_is_the_same_task_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_target_folder(tmp_path / "target")
    calls = [{"function": {"name": "open", "arguments": '{"file": "a.py"}'}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "The sum is wrong."}]},
        {"role": "assistant", "content": "Let me look at the file first.", "tool_calls": calls},
        {"role": "user", "content": "def sum(a, b): return a - b"},
        {"role": "assistant", "content": "A minus has to become a plus.", "tool_calls": None},
    ]
    for folder in ("once", "twice"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sum.traj").write_text(json.dumps({"history": turns}))
    command = ["agents.py", "--target", str(tmp_path / "target"), "--sessions", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    script("agents.py")["main"]()
    first, again = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[-2:])
    assert (first[:3], again[:3]) == (
        ["sessions of different tasks", "2", first[2]],
        ["one task tried again", "2", first[2]],
    )
    assert float(again[4]) > 1.5 * max(float(again[3]), float(first[4])), "the memory has the first session's answers"


def test_learning_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_target_folder(tmp_path / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), tmp_path / "head", target_name="tiny")
    rows = [json.dumps({"prompt": f"def number_{at}(x):"}) for at in range(10)]
    (tmp_path / "traffic.jsonl").write_text("\n".join(rows) + "\n")
    named = {"--target": "target", "--head": "head", "--traffic": "traffic.jsonl", "--json": "learning.json"}
    paths = [part for flag, name in named.items() for part in (flag, str(tmp_path / name))]
    few = ["--folder", str(tmp_path / "learned"), "--requests", "8", "--every", "4", "--tokens", "4"]

    def rows_of(*more: str) -> list[dict[str, Any]]:
        script("learning.py")["main"]([*paths, *few, *more])
        rows: list[dict[str, Any]] = json.loads((tmp_path / "learning.json").read_text())["rows"]
        return rows

    measured = rows_of()
    assert [row["requests"] for row in measured] == [0, 4, 8]
    assert all(row["tau"] >= 1 for row in measured)
    assert "'version': 0" in capsys.readouterr().out
    assert [row["phase"] for row in rows_of("--adversarial")][1:3] == ["ordinary", "random tokens"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_mlx.serve.learning.learner.CYCLE_TOKENS", 1)
        patch.setattr("eagle_mlx.serve.learning.learner.LEAST_JUDGED", 1)
        assert [row["learns"] for row in rows_of("--load", "100")] == [True, False] * 3
        [row] = rows_of("--pairs", "2")
        assert (row["pairs"], row["low"] <= row["speed"] <= row["high"]) == (2, True)
    few[1] = str(tmp_path / "grown")
    assert [row["version"] for row in rows_of("--head", "none")] == [0, 0, 0]
