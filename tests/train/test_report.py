from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import DataError
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.report import differing_settings, read_run
from eagle_mlx.train.run.tracker import Tracker

TAUS = {0: 1.0, 10: 1.8, 20: 1.6}


def make_run(folder: Path, finished: bool, steps: int = 20, **settings: Any) -> Path:
    """Write a run as the trainer leaves it; τ is best at step 10."""
    folder.mkdir(parents=True)
    config = TrainConfig.of(**{"target": "some/target", "data": ("a.jsonl",), **settings})
    config_values = json.loads(json.dumps(config.flat()))
    with Tracker(folder, config) as tracker:
        for step in range(0, steps + 1, 5):
            place = {"tokens": 100 * step, "train_seconds": 4.0 * step, "epoch": 0}
            if step:
                tracker.log("train", step, {**place, "loss": 10 / step, "accuracy_by_step": [0.5, 0.25]})
            if step in TAUS:
                figures = {
                    "acceptance_length": TAUS[step],
                    "acceptance_by_position": [0.5, 0.25],
                    "depth": 2,
                    "interval": 0.04,
                }
                tracker.log("eval", step, {**place, **figures})
    (folder / "run.json").write_text(json.dumps({"config": config_values, "target": "ab", "data": "cd"}))
    if finished:
        (folder / "report.json").write_text("{}")
    return folder


def test_an_unfinished_run_shows_the_same_as_a_finished_one(tmp_path: Path) -> None:
    whole, cut = (read_run(make_run(tmp_path / name, finished=name == "whole")) for name in ("whole", "cut"))
    assert (whole["state"], cut["state"]) == ("complete", "unfinished")
    for name in ("target", "kind", "steps", "tokens", "train_seconds", "loss", "depth", "untrained", "best"):
        assert whole[name] == cut[name], name
    for run in (whole, cut):
        assert (run["untrained"], run["best"], run["best_step"], run["last"]) == (1.0, 1.8, 10, 1.6)
        assert run["by_position"] == [0.5, 0.25]
        assert run["tokens_per_second"] == pytest.approx(25)
        assert run["memory_gb"] is not None
        assert [row["step"] for row in run["evaluations"]] == [0, 10, 20]


def test_runs_are_compared_with_the_settings_that_differ(tmp_path: Path, capsys: Any) -> None:
    a = make_run(tmp_path / "a", True, lr=1e-3, output="out/a")
    b = make_run(tmp_path / "b", False, lr=2e-3, output="out/b", optimizer="muon", steps=10)
    assert differing_settings([read_run(a), read_run(b)]) == ["optimizer", "lr"]
    assert main(["report", str(a), str(b)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "", "nothing but the table"
    lines = [line.replace("|", " ").split() for line in shown.out.splitlines()]
    for expected in (
        "a b",
        "state complete unfinished",
        "target some/target some/target",
        "kind eagle3 eagle3",
        "tokens 2,000 1,000",
        "time of training 0:01:20 0:00:40",
        "τ, best 1.800 1.800",
        "τ, best, 95 % interval ± 0.040 ± 0.040",
        "τ, last 1.600 1.800",
        "τ, untrained 1.000 1.000",
        "--optimizer adamw muon",
        "--lr 0.001 0.002",
    ):
        assert expected.split() in lines
    assert "output" not in shown.out


def test_the_table_says_what_a_run_learned_from(tmp_path: Path, capsys: Any) -> None:
    """A run from shards does not use `--data`, which has a default."""
    a = make_run(tmp_path / "a", True)
    b = make_run(tmp_path / "b", True, shards=("out/shards",))
    assert main(["report", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.replace("|", " ").splitlines() if "jsonl" in line] == [
        ["data", "a.jsonl", "shards", "out/shards"]
    ]


def test_the_best_head_of_an_adapting_run_is_the_one_that_the_judge_kept(tmp_path: Path) -> None:
    adapts = {"adapt": "some/head", "prompts": ("mine.jsonl",), "data": ("builtin:python",)}
    unfinished, kept, taken = (make_run(tmp_path / name, False, **adapts) for name in ("unfinished", "kept", "taken"))
    (kept / "report.json").write_text('{"best_step": 0}')
    (taken / "report.json").write_text('{"best_step": 20}')
    shown = [(run["best"], run["best_step"]) for run in map(read_run, (unfinished, kept, taken))]
    assert shown == [(1.0, 0), (1.0, 0), (1.6, 20)]


def test_a_resumable_run_shows_the_command(tmp_path: Path, capsys: Any) -> None:
    folder = make_run(tmp_path / "a", False)
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert main(["report", str(folder)]) == 0
    assert "unfinished, --resume continues it" in capsys.readouterr().out


def test_the_comparison_as_a_plot(tmp_path: Path, capsys: Any) -> None:
    runs = [str(make_run(tmp_path / name, True, seed=seed)) for seed, name in enumerate(("x/one", "y/one"))]
    plot = tmp_path / "runs.png"
    assert main(["report", *runs, "--plot", str(plot)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["|", "|", runs[0], "|", runs[1], "|"] in lines, "two folders of one name go by their paths"
    assert ["|", "τ,", "best", "|", "1.800", "|", "1.800", "|"] in lines
    assert ["|", "--seed", "|", "0", "|", "1", "|"] in lines
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"x", "y", "runs.png"}
    assert main(["report", *runs, "--plot", str(plot)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["report", *runs, "--plot", str(plot), "--overwrite"]) == 0
    assert main(["report", *runs, "--plot", str(tmp_path / "runs.pdf")]) == 2
    assert "must end in .png" in capsys.readouterr().err


def test_the_comparison_as_json(tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(make_run(tmp_path / "a", True)), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["best"] == 1.8
    assert run["settings"]["data"] == ["a.jsonl"]
    assert [e["acceptance_length"] for e in run["evaluations"]] == [1.0, 1.8, 1.6]
    assert "rows" not in run


def test_other_folders_are_refused(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "a", True)
    assert main(["report", str(run), str(tmp_path / "none")]) == 2
    assert f"error: there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is not a training run: it has no metrics\.jsonl"):
        read_run(tmp_path / "empty")
    for damage in ("{", "[]"):
        (run / "run.json").write_text(damage)
        with pytest.raises(DataError, match=r"run\.json .*move it away"):
            read_run(run)


def test_a_run_without_a_measurement_is_shown(tmp_path: Path, capsys: Any) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").write_text("")
    plot = tmp_path / "p.png"
    assert main(["report", str(begun), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "unfinished, nothing measured" in shown
    assert plot.exists()


def test_the_help_of_training_names_it(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "eagle-train report compares runs" in capsys.readouterr().out
