"""Real Weights & Biases, offline: what a run sends is read back from its files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from eagle_mlx.errors import ConfigError
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.report import METRICS, read_rows, write_plots
from eagle_mlx.train.run.tracker import Tracker, check_wandb, end_service
from tests.train.test_plots import a_run

CONFIG = TrainConfig.of(target="some-target", wandb=True, lr=1e-3)
TEXTS = [{"prompt": "def add(", "text": "a, b):\n    return a + b", "tokens": 12, "rounds": 4}]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Use no account and no network. Settings are read again."""
    end_service(30)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield monkeypatch
    end_service(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def log_all(tracker: Tracker, first: int = 0) -> None:
    for step, row in enumerate(a_run()[first:], first):
        values = {k: v for k, v in row.items() if k not in ("kind", "learning_rate", "memory_gb")}
        extra = {"generations": TEXTS} if row["kind"] == "eval" else {"learning_rate_factor": 0.5}
        tracker.log(row["kind"], step, {**values, **extra})


def test_a_run_sends_its_metrics(folder: Path) -> None:
    with Tracker(folder, CONFIG) as tracker:
        log_all(tracker)
        write_plots(tracker.rows, folder)
        tracker.summarize({"acceptance_length": 2.5})
    (run,) = folder.glob("wandb/offline-run-*")
    sent = next(run.glob("*.wandb")).read_bytes()
    for name in (
        *("train/loss", "train/accuracy_by_step/1", "train/learning_rate", "train/memory_gb/process_peak"),
        *("eval/acceptance_length", "eval/acceptance_by_position/1", "final/acceptance_length", "some-target"),
        *("plots/loss", "plots/acceptance_length", "generations"),
    ):
        assert name.encode() in sent, name
    assert len(list(run.glob("files/media/images/plots/*.png"))) == 4
    tables = [json.loads(file.read_text()) for file in run.glob("files/media/table/generations*.table.json")]
    assert tables[0]["data"] == [["def add(", "a, b):\n    return a + b", 12, 4, 3.0]]
    assert read_rows(folder / METRICS) == tracker.rows


def test_a_resumed_run_keeps_its_id(folder: Path) -> None:
    with Tracker(folder, CONFIG) as tracker:
        log_all(tracker)
    with Tracker(folder, CONFIG, resume_step=4) as tracker:
        log_all(tracker, first=3)
    assert [row["step"] for row in read_rows(folder / METRICS)] == list(range(10))
    runs = {file.name for file in folder.glob("wandb/offline-run-*/*.wandb")}
    assert len(runs) == 1, "one id"
    with Tracker(folder, CONFIG):
        pass
    assert len({file.name for file in folder.glob("wandb/offline-run-*/*.wandb")}) == 2, "a new run has another"


def test_a_service_that_does_not_end_is_ended(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service = Path(shutil.copy("/bin/sleep", tmp_path / "wandb-core"))
    with subprocess.Popen([service, "600"]) as stubborn, offline.context() as patch:
        patch.setattr(wandb, "teardown", stubborn.wait)
        end_service(0.2)
        assert stubborn.poll() is not None


@pytest.mark.parametrize(
    ("key", "message"), [(None, "No API key"), ("k" * 40, "Failed to .*authenticat.*|error occurred while verifying")]
)
def test_without_login_or_network_it_is_refused_before_the_training(
    offline: pytest.MonkeyPatch, key: str | None, message: str
) -> None:
    offline.setenv("WANDB_MODE", "online")
    if key:
        offline.setenv("WANDB_API_KEY", key)
        offline.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        offline.setenv("WANDB_HTTP_TIMEOUT", "1")
    wandb.teardown()
    with pytest.raises(ConfigError, match=f"Weights & Biases cannot be used: ({message}).*WANDB_MODE=offline"):
        check_wandb()


def test_the_command_asks_before_it_loads_anything(offline: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    offline.setenv("WANDB_MODE", "online")
    wandb.teardown()
    out = tmp_path / "out"
    assert main(["--target", "no/such/target", "--data", "x.jsonl", "--wandb", "--output", str(out)]) == 2
    assert "error: Weights & Biases cannot be used: No API key" in capsys.readouterr().err
    assert not out.exists()


def test_offline_and_disabled_need_no_login(offline: pytest.MonkeyPatch, capsys: Any) -> None:
    check_wandb()
    offline.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    check_wandb()
    assert capsys.readouterr().err == ""


def test_a_failed_start_says_what_to_do(folder: Path) -> None:
    config = TrainConfig.of(wandb=True, wandb_project="no/such:name?")
    with pytest.raises(ConfigError, match="leave --wandb out"):
        Tracker(folder, config)


def test_a_later_failure_is_reported_once_and_the_run_continues(folder: Path, capsys: Any) -> None:
    with Tracker(folder, CONFIG) as tracker:
        tracker.log("train", 1, {"loss": 3.0})
        assert wandb.run is not None
        wandb.run.finish()  # as if the process had died
        for step in (2, 3):
            tracker.log("train", step, {"loss": 2.0})
        tracker.summarize({"loss": 2.0})
    assert capsys.readouterr().err.count("warning: Weights & Biases failed") == 1
    assert [row["step"] for row in read_rows(folder / METRICS)] == [1, 2, 3]
