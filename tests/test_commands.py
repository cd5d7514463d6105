"""What all commands share: help, version, names of flags, limits of numbers, and outputs that are checked first."""

from __future__ import annotations

import contextlib
import importlib
import io
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.data_pipelines.cli import main as data
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.doctor.cli import main as doctor
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.heads import main as heads
from eagle_mlx.serve.terminal_chat import main as chat
from eagle_mlx.train.cli import main as train
from eagle_mlx.train.convert.cli import main as convert
from eagle_mlx.train.publish.cli import main as publish

Main = Callable[[list[str]], int]
ROOT = Path(__file__).parent.parent
COMMANDS: dict[str, Main] = {
    "eagle-bench": bench,
    "eagle-chat": chat,
    "eagle-convert": convert,
    "eagle-convert mtp": convert,
    "eagle-data collect": data,
    "eagle-data inspect": data,
    "eagle-data make": data,
    "eagle-data presets": data,
    "eagle-data regenerate": data,
    "eagle-doctor": doctor,
    "eagle-generate": generate,
    "eagle-heads find": heads,
    "eagle-heads list": heads,
    "eagle-heads pull": heads,
    "eagle-publish": publish,
    "eagle-serve": serve,
    "eagle-serve launch": serve,
    "eagle-train": train,
    "eagle-train report": train,
}


def run(command: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command; return its status and what it writes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = COMMANDS[command]([*command.split()[1:], *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def refused(command: str, *arguments: str) -> str:
    """Run a command that is refused before it loads anything, and return its only line."""
    status, out, err = run(command, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


def test_every_command_is_here() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {command.split()[0] for command in COMMANDS} == set(project["scripts"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_its_version(command: str) -> None:
    assert run(command, "--version") == (0, f"{command} {em.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_one_line_with_the_command_for_help(command: str) -> None:
    said = refused(command, "--no-such-flag", "1")
    assert said.startswith("there is no flag --no-such-flag")
    assert said.endswith(f"(help: {command} --help)")


@pytest.mark.parametrize(
    ("command", "short", "flag"),
    [
        ("eagle-generate", "--max-token", "--max-tokens"),
        ("eagle-chat", "--tempera", "--temperature"),
        ("eagle-serve", "--max-bat", "--max-batch"),
        ("eagle-bench", "--repeat", "--repeats"),
        ("eagle-train", "--max-step", "--max-steps"),
        ("eagle-data make", "--row", "--rows"),
        ("eagle-convert mtp", "--hid", "--hidden"),
    ],
)
def test_flags_cannot_be_abbreviated(command: str, short: str, flag: str) -> None:
    assert f"there is no flag {short}; did you mean {flag}?" in refused(command, short, "1")


FOLDER, FILE = ("taken", "taken/new"), (".", "taken/new.x")


@pytest.mark.parametrize(
    ("command", "given", "places"),
    [
        ("eagle-bench", "--json", FILE),
        ("eagle-bench", "--plot", FILE),
        ("eagle-convert", "missing --to eagle3 --output", FOLDER),
        ("eagle-convert mtp", "--source missing --output", FOLDER),
        ("eagle-data collect", "--target missing --data missing.jsonl --output", FOLDER),
        ("eagle-data make", "--target missing --rows 1 --output", FILE),
        ("eagle-data make", "--target missing --rows 1 --output new.jsonl --capture", FOLDER),
        ("eagle-data regenerate", "--target missing --data missing.jsonl --output", FILE),
        ("eagle-doctor", "--target missing --json", FILE),
        ("eagle-generate", "--target missing --file missing.jsonl --output", FILE),
        ("eagle-serve", "--target missing --prefix-cache-dir", FOLDER),
        ("eagle-train", "--target missing --output", FOLDER),
        ("eagle-train", "--target missing --cache-dir", FOLDER),
        ("eagle-train report", "missing --output", ("taken/new.md",)),
        ("eagle-train report", "missing --plot", ("taken/new.png",)),
    ],
)
def test_outputs_are_checked_before_anything_is_loaded_or_computed(
    command: str, given: str, places: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file, not a folder")
    for place in places:
        status, _, err = run(command, *given.split(), place)
        assert status == 2
        assert "is a folder; name a file" in err if place == "." else "taken is a file" in err
        assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("command", ["eagle-bench", "eagle-chat", "eagle-generate", "eagle-serve"])
def test_without_a_clone_the_commands_say_how_to_name_a_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagle_mlx.catalog.__file__", str(tmp_path / "site-packages" / "eagle_mlx" / "catalog" / "x.py"))
    status, _, err = run(command, *(["def f():"] if command == "eagle-generate" else []))
    assert status == 2
    assert err.splitlines()[-1] == (
        "error: name the model with --target: a folder or a hub id, such as --target Qwen3-4B-4bit; only a clone of "
        "the project includes a target"
    )
