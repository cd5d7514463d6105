"""eagle-train from the command line to its files, on a tiny target with the embedded tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.catalog.head_search import records, records_for
from eagle_mlx.data_pipelines import ShardCapture
from eagle_mlx.data_pipelines.cli import main as collect
from eagle_mlx.heads import load_head
from eagle_mlx.target import fingerprint, load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.publish.bundle import read_source
from eagle_mlx.train.publish.card import of_training
from eagle_mlx.train.report import PICTURES
from tests.fakes import tiny_target_folder

SMALL = [
    *("--length", "64", "--max-length", "64", "--rows", "2", "--unroll", "2", "--draft-vocab", "512"),
    *("--eval-prompts", "3", "--eval-tokens", "8", "--eval-depth", "2", "--log-steps", "2", "--lr", "1e-3"),
]


def run(target: Path, chats: Path, output: Path, *more: str) -> int:
    return main(["--target", str(target), "--data", str(chats), "--output", str(output), *SMALL, *more])


@pytest.mark.usefixtures("pictures")
def test_the_files_of_a_run(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A second run overwrites them, with a record for Weights & Biases, offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "out"
    assert run(target, chats, out, "--max-steps", "5", "--eval-steps", "2") == 0
    assert {p.name for p in out.iterdir()} == {
        *("best", "last", "metrics.jsonl", "report.json", "run.json"),
        *("generations.md", *PICTURES),
    }
    for name in ("best", "last"):
        head = load_head(out / name, load_target(str(target)))
        assert head.config.draft_vocab_size == 512
        assert str(target.parent) not in (out / name / "config.json").read_text(), "a path of this machine"
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 5
    assert report["acceptance"]["best"]["depth"] == 2
    assert 1.0 <= report["untrained_acceptance_length"] <= 3.0
    assert 1.0 <= report["acceptance_length"] <= 3.0
    assert report["config"]["unroll"] == 2
    assert report["train_seconds"] > 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 2, 4, 5]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 5]
    shown = capsys.readouterr()
    assert shown.err.startswith("blas: ")
    assert "the head is in" in shown.out

    assert run(target, chats, out, "--max-steps", "1") == 2
    assert "exists already" in capsys.readouterr().err
    assert json.loads((out / "report.json").read_text()) == report, "what was there is kept"
    assert run(target, chats, out, "--max-steps", "1", "--overwrite", "--wandb") == 0
    assert json.loads((out / "report.json").read_text())["steps"] == 1
    assert list(out.glob("wandb/offline-run-*"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("least", [2.9, 0.0])
def test_the_best_head_of_a_run_is_found_by_its_target(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, least: float
) -> None:
    """A run of two steps makes a useless head, and says that no command offers it."""
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("eagle_mlx.train.job.LEAST", least)
    assert run(target, chats, tmp_path / "out", "--max-steps", "2") == 0
    printed = capsys.readouterr().err
    assert (f"eagle-serve --target {target} finds it" in printed) == (not least)
    assert (f"no command offers it without --head {tmp_path}/out/best: its τ is below {least}" in printed) == bool(
        least
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for heads in (records(), records_for(("elsewhere",), fingerprint(load_target(str(target))))):
        [record] = heads
        assert (record.head, record.origin) == (str(tmp_path / "out" / "best"), "trained")
        assert record.acceptance_length == report["acceptance_length"]
        assert record.prompts == report["acceptance"]["best"]["prompts"]


def test_a_measurement_on_a_few_prompts_claims_no_interval(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, chats, tmp_path / "out", "--max-steps", "1") == 0
    shown = capsys.readouterr().out
    assert " at depth 2, by position" in shown
    assert "±" not in shown


def test_a_time_limit_and_states_captured_for_each_batch(target: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = tmp_path / "c.yaml"
    file.write_text("minutes: 0.01\ncache_gb: 0\noptimizer: muon\n")
    assert run(target, chats, out, "-c", str(file)) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] >= 1
    assert report["data"]["states"] == "captured for each batch"


def test_training_from_shards(target: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    model = load_target(str(target))
    ShardCapture(model, (0, 2), [(list(range(20)), [0] * 5 + [1] * 15)] * 6).write(tmp_path / "shards")
    more = ("--shards", str(tmp_path / "shards"), "--max-steps", "2")
    assert run(target, chats, tmp_path / "out", *more) == 0
    assert load_head(tmp_path / "out" / "last", model).config.aux_layers == (0, 2)
    assert run(target, chats, tmp_path / "other", *more, "--aux-layers", "1", "2") == 2
    assert "has the layers 0, 2, 3, but the head reads 1, 2" in capsys.readouterr().err
    smaller = tiny_target_folder(tmp_path / "smaller", hidden=16)
    assert run(smaller, chats, tmp_path / "other", *more) == 2
    assert "hidden size 32" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_rows_of_the_shards_are_not_measured(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shards, out = str(tmp_path / "shards"), tmp_path / "out"
    source = ["--data", str(chats), "--max-length", "64"]
    assert collect(["collect", "--target", str(target), *source, "--output", shards]) == 0
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    report = trained_on(target, out, "--shards", shards, "--eval-data", str(chats))
    learned, rows = report["data"]["conversations"], len(chats.read_text().splitlines())
    assert 0 < report["data"]["prompts_left_out"] <= learned < rows
    assert report["data"]["prompts_held_out"] is True
    assert report["acceptance"]["best"]["prompts"] <= rows - learned
    left_out = f"{report['data']['prompts_left_out']} conversations left out, because the head is trained on them"
    assert left_out in capsys.readouterr().err
    [record] = records()
    assert record.acceptance_length == report["acceptance_length"]


def test_shards_that_do_not_know_their_conversations_give_no_held_out_figure(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    texts = [(list(range(20)), [0] * 5 + [1] * 15)] * 6
    ShardCapture(load_target(str(target)), (0, 2), texts).write(tmp_path / "shards")
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    report = trained_on(target, tmp_path / "out", "--shards", f"{tmp_path}/shards", "--eval-data", str(chats))
    assert report["data"]["prompts_held_out"] is False
    assert "the data does not say which conversations it holds" in capsys.readouterr().err
    [record] = records()
    assert record.acceptance_length is None
    figures = of_training(read_source(tmp_path / "out"), "owner/tiny")
    assert figures is not None
    assert "held out" not in figures.data + figures.method
    assert "held-out" not in figures.method


def trained_on(target: Path, out: Path, *data: str) -> dict[str, Any]:
    assert main(["--target", str(target), *data, "--output", str(out), "--max-steps", "1", *SMALL]) == 0
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_the_same_seed_gives_the_same_head(target: Path, chats: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(target, chats, tmp_path / name, "--max-steps", "2", "--seed", "7") == 0
    a, b = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("a", "b"))
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--aux-layers", "1", "9"), "the target has layers 0 to 3"),
        (("--kv-heads", "3"), "not a multiple"),
        (("--rows", "-1"), "rows must be at least 0"),
        (("--data", "no/such.jsonl"), "no/such.jsonl"),
        (("--shards", "no/such/folder"), "not a folder of shards"),
        (("--target", "no/such/model/anywhere"), "there is no folder"),
        (("--target", ""), "name the model with --target"),
        (("--eval-data", "no-such.jsonl"), "no-such.jsonl"),
    ],
)
def test_bad_input_is_refused_with_a_reason(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    assert run(target, chats, tmp_path / "out", "--max-steps", "1", *more) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_names_the_step(target: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    wild = ("--max-steps", "40", "--lr", "1e30", "--warmup", "0")
    assert run(target, chats, tmp_path / "out", *wild, "--eval-steps", "40") == 2
    assert "at step" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "there was no good head yet"


def test_help_shows_every_setting(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--draft-vocab N" in shown
    assert "(default: 32,000)" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("flag", "row", "message"),
    [
        ("--data", "{", "bad.jsonl:2: not valid JSON"),
        ("--data", '{"prompt": "a"}', "bad.jsonl:2: no assistant turn"),
        ("--data", '{"prompt": "a", "completion": "c"}', "no held-out conversations to measure acceptance (all"),
        ("--eval-data", '{"x": 1}', "bad.jsonl:2: the row's keys (x) have no known shape"),
    ],
)
def test_errors_in_data_files_show_before_the_target_is_loaded(
    chats: Path, tmp_path: Path, capsys: Any, flag: str, row: str, message: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f'{{"prompt": "a", "completion": "b"}}\n{row}\n')
    data = [] if flag == "--data" else ["--data", str(chats)]
    argv = ["--target", "/nowhere/model", *data, "--output", str(tmp_path / "out")]
    assert main([*argv, flag, str(bad)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fifty_conversations_are_enough_to_train_and_measure(target: Path, tmp_path: Path, capsys: Any) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"prompt": "few {n}", "completion": "so {n}"}}\n' for n in range(50)))
    flags = ["--target", str(target), "--data", str(few), "--max-steps", "1", "--eval-tokens", "4", "--length", "64"]
    for name, more in (("a", []), ("b", ["--eval-data", str(few)])):
        assert main([*flags, *more, "--output", str(tmp_path / name)]) == 0, capsys.readouterr().err
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["acceptance"]["best"]["prompts"] == 5
        assert report["data"]["conversations"] == 45
