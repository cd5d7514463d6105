"""An interrupted run continues as if it had not been interrupted."""

from __future__ import annotations

import ast
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import CheckpointError
from eagle_mlx.heads import load_head
from eagle_mlx.progress import counted
from eagle_mlx.target import load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import flag
from eagle_mlx.train.hours.phases import Hours
from eagle_mlx.train.kinds import KINDS
from eagle_mlx.train.run import Run, state
from tests.eagle_mlx.heads import eagle3
from tests.forks import Fork
from tests.full import FULL, in_full

SMALL = [
    *("--length", "64", "--max-length", "64", "--rows", "2", "--unroll", "2", "--draft-vocab", "256"),
    *("--eval-prompts", "2", "--eval-tokens", "6", "--eval-depth", "2", "--log-steps", "2", "--lr", "1e-3"),
]
STEPS = 6


def flags(target: Path, chats: Path, output: Path, *more: str) -> list[str]:
    return ["--target", str(target), "--data", str(chats), "--output", str(output), *SMALL, *more]


def stop_at(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Make the n-th check for a signal find one. A run checks before each step and before each measurement."""
    looked = 0

    def check(self: Stop) -> None:
        nonlocal looked
        looked += 1
        if looked == calls:
            raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(Stop, "check", check)


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the metrics without values that depend on the clock or machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = {"kind", "step", "epoch", "tokens", "loss", "loss_by_step", "accuracy_by_step", "grad_norm", "rounds"}
    return [{key: value for key, value in row.items() if key in told} for row in rows]


def weights(run: Path) -> dict[str, Any]:
    arrays: Any = mx.load(str(run / "last" / "model.safetensors"))
    return {name: array.astype(mx.float32).tolist() for name, array in arrays.items()}


def published(target: Path, folder: Path, seed: int = 0) -> Path:
    head = eagle3(load_target(str(target)), seed, draft_vocab=256)
    KINDS["eagle3"].save(head, folder, "tiny", {})
    return folder


CHOSEN = ("rows", "length", "epochs", "lr", "eval_prompts")


@pytest.mark.parametrize(
    "kind",
    in_full(
        ["eagle3", "eagle", "mtp", "dflash2", "peagle", "adapted", "continued", "open"],
        ["eagle3", "dflash2", "adapted", "continued", "open"],
    ),
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    kind: str, target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        "eagle3": ("--head", "eagle3", "--optimizer", "muon"),
        "eagle": ("--head", "eagle", "--draft-vocab", "0"),
        "mtp": ("--head", "mtp", "--draft-vocab", "0"),
        "dflash2": ("--head", "dflash2", "--draft-vocab", "0"),
        "peagle": ("--head", "peagle"),
        "adapted": ("--init-from", str(published(target, tmp_path / "head")), "--lora-rank", "2"),
        "continued": ("--init-from", str(published(target, tmp_path / "head")), "--draft-vocab", "300"),
        "open": ("--head", "mtp", "--draft-vocab", "0", *(part for name in CHOSEN for part in (flag(name), "0"))),
    }[kind]
    more = (*own, "--max-steps", str(STEPS), "--eval-steps", "4", "--checkpoints", "1")
    arrays: list[state.Arrays] = []
    remove = state.remove
    monkeypatch.setattr(state, "remove", lambda run: arrays.append(final(run)) or remove(run))

    def final(run: Path) -> state.Arrays:
        saved = state.newest(run, print)
        assert saved is not None
        return saved.head | saved.stepper

    with monkeypatch.context() as patch:
        save_at_the_end(patch)
        assert main(flags(target, chats, tmp_path / "whole", *more)) == 0
        looks = 2 + STEPS  # before the first measurement, the steps, and the measurement after four
        stops = in_full(range(3, looks + 2), (4, 9)) if kind == "eagle3" else in_full((5, 8), (5,))
        for at in stops:
            out = tmp_path / f"stopped-{at}"
            with monkeypatch.context() as inner:
                stop_at(inner, at)
                assert main(flags(target, chats, out, *more)) == 143
            assert not (out / "report.json").exists()
            assert all(json.loads((out / "run.json").read_text())["config"][name] for name in CHOSEN)
            assert main(["--resume", str(out)]) == 0
            assert lines(out) == lines(tmp_path / "whole")
            assert weights(out) == weights(tmp_path / "whole")
    first, *others = arrays
    assert len(others) == len(stops)
    for other in others:
        assert other.keys() == first.keys()
        assert all(mx.array_equal(other[name], first[name]) for name in first)


def save_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Save the state once more before a run is finished, so that tests can read it."""
    finish = Run.finish
    patch.setattr(Run, "finish", lambda self, *args: self.save_state() or finish(self, *args))


@pytest.mark.parametrize("made", [Run, Hours])
def test_a_run_is_complete_when_it_is_built(made: type) -> None:
    """Each attribute is set while it is built: none appears later, and none is only declared."""
    [body] = ast.parse(inspect.getsource(made)).body
    assert isinstance(body, ast.ClassDef)
    assert not [node for node in body.body if isinstance(node, ast.AnnAssign)]
    methods = {node.name: node for node in body.body if isinstance(node, ast.FunctionDef)}

    def assigned(node: ast.AST) -> set[str]:
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
        return {part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == "self"}

    assert set().union(*map(assigned, methods.values())) == assigned(methods["__init__"])


def test_an_adapted_head_must_not_change(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved states hold only what is added to it."""
    head, out = published(target, tmp_path / "head"), tmp_path / "out"
    adapts = ("--init-from", str(head), "--lora-rank", "2", "--max-steps", "2")
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert main(flags(target, chats, out, *adapts)) == 143
    assert re.search(r"head, [\d,]+ parameters, of which [\d,]+ are trained", capsys.readouterr().err)
    assert json.loads((out / "run.json").read_text())["config"]["lora_rank"] == 2
    assert weights(out).keys() == {str(name) for name in mx.load(str(head / "model.safetensors"))}
    published(target, head, seed=1)
    assert main(["--resume", str(out)]) == 2
    assert "is not the head that the run in" in capsys.readouterr().err


def test_settings_that_a_resume_may_change(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert main(flags(target, chats, out, "--max-steps", "4")) == 143
    assert f"continue with: eagle-train --resume {out}" in capsys.readouterr().out
    assert load_head(out / "last") is not None
    assert main(["--resume", str(out), "--lr", "1e-2"]) == 2
    assert "began with 0.001; leave --lr out" in capsys.readouterr().err
    assert main(["--resume", str(out), "--output", str(tmp_path / "elsewhere")]) == 2
    assert "leave --output out" in capsys.readouterr().err
    assert main(["--resume", str(tmp_path / "nothing")]) == 2
    assert "has no run" in capsys.readouterr().err
    assert main(["--resume", str(out), "-c", "some.yaml"]) == 2
    assert "leave out -c" in capsys.readouterr().err
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(about | {"processes": 2}))
    assert main(["--resume", str(out)]) == 2
    assert "began with 2 processes, not 1" in capsys.readouterr().err
    (out / "run.json").write_text(json.dumps(about))
    before = chats.read_text()
    chats.write_text(before.replace("def", "DEF"))
    assert main(["--resume", str(out)]) == 2
    assert "has changed since the run" in capsys.readouterr().err
    chats.write_text(before)
    assert main(["--resume", str(out), "--log-steps", "1"]) == 0
    assert not (out / "checkpoints").exists(), "a finished run is not resumed"
    assert main(["--resume", str(out)]) == 2
    assert f"--init-from {out}/best" in capsys.readouterr().err


def test_a_resumed_run_may_write_lines_more_often(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert main(flags(target, chats, out, "--max-steps", "6", "--log-steps", "4", "--checkpoints", "1")) == 143
    stopped = int(next((out / "checkpoints").iterdir()).name.split("-")[1])
    assert 1 < stopped < 4, "more steps wait for a line than a line has from now on"
    assert main(["--resume", str(out), "--log-steps", "1"]) == 0
    logged = [line["step"] for line in lines(out) if line["kind"] == "train"]
    assert logged == list(range(stopped + 1, 7))


def test_an_overwriting_run_takes_its_place_when_it_is_complete(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert main(flags(target, chats, out, "--max-steps", "1")) == 0
    before = (out / "report.json").read_text()
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert main(flags(target, chats, out, "--max-steps", "3", "--overwrite")) == 143
    assert (out / "report.json").read_text() == before
    [unfinished] = [path for path in tmp_path.iterdir() if path != out]
    assert main(["--resume", str(unfinished)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((out / "report.json").read_text())["steps"] == 3


def test_the_newest_intact_state_is_used(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    more = ("--max-steps", "6", "--eval-steps", "1", "--checkpoints", "3")
    with monkeypatch.context() as patch:
        stop_at(patch, 10)
        assert main(flags(target, chats, out, *more)) == 143
    folders = sorted((out / "checkpoints").iterdir())
    assert len(folders) == 3, "the newest are kept"
    data = (folders[-1] / "optimizer.safetensors").read_bytes()
    (folders[-1] / "optimizer.safetensors").write_bytes(data[:-3] + bytes(3))
    (folders[-2] / "state.json").write_text("{")
    (out / "checkpoints" / ".step-99.abc").mkdir()
    with pytest.raises(CheckpointError, match="optimizer.safetensors is damaged"):
        state.load(folders[-1])
    lost = shutil.copytree(out, tmp_path / "lost")
    (lost / "checkpoints" / folders[0].name / "head.safetensors").unlink()
    assert main(["--resume", str(lost)]) == 2
    remedy = f"train further from a head in {lost} with --init-from, or remove {lost}/checkpoints to begin again"
    assert capsys.readouterr().err.endswith(f"{lost}/checkpoints has no intact state; {remedy}\n")
    assert weights(lost) == weights(out), "the heads are kept"
    assert main(["--resume", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.safetensors is damaged" in shown
    assert f"resuming after step {int(folders[0].name.split('-')[1])}" in shown
    assert [line["step"] for line in lines(out) if line["kind"] == "eval"] == list(range(7))


def test_a_disk_that_fills_while_a_state_is_written_keeps_the_previous_state(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on file sizes stands for the full disk: the system refuses writes in the same way."""
    out, make, limits = tmp_path / "out", state.new_folder, resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_and_fill(folder: Path, overwrite: bool) -> Any:
        if state.exists(out):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        return make(folder, overwrite=overwrite)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(state, "new_folder", make_and_fill)
            assert main(flags(target, chats, out, "--max-steps", "3", "--eval-steps", "1")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step-00000002 could not be written: File too large; no part of it was kept" in error
    assert f"the results so far are kept: free some space, then continue with eagle-train --resume {out}" in error
    assert main(["--resume", str(out)]) == 0


class Process:
    """eagle-train in its own process."""

    def __init__(self, *args: str):
        self.process = Fork("eagle_mlx.train.cli", *args, merged=True)

    def wait_for(self, there: Any, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not there():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self, seconds: float = 10) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out


BUSY = """
import time
from eagle_mlx.command import Stop
stop = Stop()
with stop.listening(), stop.deferred():
    print("busy", flush=True)
    time.sleep(60)
"""
ENDLESS = ("--max-steps", "100000", "--eval-steps", "3", "--checkpoint-minutes", "0.001")


def check_stop(process: Process, number: signal.Signals, out: Path) -> None:
    process.process.send_signal(number)
    code, shown = process.end()
    assert code == 128 + number, shown
    assert "continue with" in shown
    saved = state.newest(out, print)
    assert saved is not None
    assert f"stopped after {counted(saved.state.progress.step, 'step')}" in shown, "what was saved is where it stopped"


@pytest.mark.skipif(not FULL, reason="the next test sends the other signal to a run that was resumed")
def test_a_signal_saves_and_stops(target: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = Process(*flags(target, chats, out, *ENDLESS))
    process.wait_for(lambda: state.exists(out))
    check_stop(process, signal.SIGINT, out)


def test_a_second_signal_stops_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # it continues to the next safe point
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM


def test_a_run_killed_at_random_moments_resumes_until_a_signal_saves_and_stops_it(
    target: Path, chats: Path, tmp_path: Path
) -> None:
    out, rng = tmp_path / "out", random.Random(0)
    kills = int(os.environ.get("KILLS", in_full("3", "1")))
    process, last = Process(*flags(target, chats, out, *ENDLESS)), 0
    for _ in range(kills):
        at = last
        process.wait_for(lambda at=at: newest_step(out) > at)
        time.sleep(rng.uniform(0, 0.3))
        process.process.kill()
        process.end()
        saved = state.newest(out, print)
        assert saved is not None
        assert saved.state.progress.step > last
        last = saved.state.progress.step
        process = Process("--resume", str(out))
    process.wait_for(lambda: newest_step(out) > last)
    check_stop(process, signal.SIGTERM, out)


def newest_step(run: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("step-*")), default=0)
