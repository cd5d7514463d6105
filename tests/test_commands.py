"""What all commands share: help, version, names of flags, limits of numbers, and outputs that are checked first."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

import eagle_mlx as em
from eagle_mlx.command import Parser, add_flags
from eagle_mlx.data_pipelines.cli import main as data
from eagle_mlx.data_pipelines.options import CollectOptions, InspectOptions, MakeOptions, RegenerateOptions
from eagle_mlx.errors import ConfigError
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.api.options import ServeOptions
from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.bench.options import BenchOptions
from eagle_mlx.serve.doctor.cli import main as doctor
from eagle_mlx.serve.doctor.options import DoctorOptions
from eagle_mlx.serve.generate import GenerateOptions
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.heads import main as heads
from eagle_mlx.serve.terminal_chat import ChatOptions
from eagle_mlx.serve.terminal_chat import main as chat
from eagle_mlx.setting import REQUIRED, Group, Setting, flag, settings_of
from eagle_mlx.train.cli import main as train
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.convert import Conversion, Extraction
from eagle_mlx.train.convert.cli import main as convert
from eagle_mlx.train.publish import PublishOptions
from eagle_mlx.train.publish.cli import main as publish

Main = Callable[[list[str]], int]
ROOT = Path(__file__).parent.parent
HEAD = ROOT / "checkpoints" / "head"
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
    "eagle-heads certify": heads,
    "eagle-heads compare": heads,
    "eagle-heads find": heads,
    "eagle-heads list": heads,
    "eagle-heads pull": heads,
    "eagle-heads show": heads,
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
    message = refused(command, "--no-such-flag", "1")
    assert message.startswith("there is no flag --no-such-flag")
    assert message.endswith(f"(help: {command} --help)")


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


OPTIONS: dict[str, type[Group]] = {
    "eagle-bench": BenchOptions,
    "eagle-chat": ChatOptions,
    "eagle-convert": Conversion,
    "eagle-convert mtp": Extraction,
    "eagle-data collect": CollectOptions,
    "eagle-data inspect": InspectOptions,
    "eagle-data make": MakeOptions,
    "eagle-data regenerate": RegenerateOptions,
    "eagle-doctor": DoctorOptions,
    "eagle-generate": GenerateOptions,
    "eagle-publish": PublishOptions,
    "eagle-serve": ServeOptions,
    "eagle-train": TrainConfig,
}


def parse(options: type[Group], *arguments: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    add_flags(parser, options)
    return vars(parser.parse_args(arguments))


@pytest.mark.parametrize("options", [group for group in OPTIONS.values() if "target" in settings_of(group)])
def test_other_names_of_the_target_are_taken_and_not_shown(options: type[Group]) -> None:
    required = []
    for name, declared in settings_of(options).items():
        if declared.default is REQUIRED and name != "target":
            required += ["1"] if declared.positional else [flag(name), "1"]
    wanted = parse(options, *required, "--target", "you/model")
    for given in (["--model", "you/model"], ["--model=you/model"], ["--target-model", "you/model"]):
        assert parse(options, *required, *given) == wanted
    parser = Parser(prog="test")
    add_flags(parser, options)
    assert not re.search(r"--(model|target-model|train-data|speculative-decoding)\b", parser.format_help())


def test_training_data_may_be_called_so() -> None:
    given = parse(TrainConfig, "--train-data", "a.jsonl", "b.jsonl", "--target-model", "you/model")
    assert given == parse(TrainConfig, "--data", "a.jsonl", "b.jsonl", "--target", "you/model")


def numbers(options: type[Group]) -> dict[str, Setting]:
    """Return the settings that are numbers or lists of numbers."""
    every = settings_of(options).items()
    return {name: declared for name, declared in every if {declared.type, *get_args(declared.type)[:1]} & {int, float}}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_number_has_a_range_and_is_refused_outside_it_by_its_flags_name(command: str) -> None:
    options = OPTIONS[command]
    required = {name: "1" for name, declared in settings_of(options).items() if declared.default is REQUIRED}
    for name, declared in numbers(options).items():
        assert declared.limit is not None, name
        is_float = float in (declared.type, *get_args(declared.type))
        for wrong in ("x", "-1e99", "nan", "inf", "-inf") if is_float else ("x", str(-(2**70)), "1.5"):
            with pytest.raises(ConfigError, match=f"^{flag(name)} (must|counts)"):
                options.of(**{**required, name: wrong})


@pytest.mark.parametrize("number", ["1", "2,3"])
def test_layer_numbers_are_checked_before_loading(number: str) -> None:
    given = ("--target", "missing", "--data", "x.jsonl", "--output", "new", "--aux-layers", f"{number},x")
    assert refused("eagle-data collect", *given) == (
        f"--aux-layers must be layer numbers with commas, such as 1,6,10, not {number},x"
    )


DECODING = [
    ("--num-speculative-tokens 21", "--num-speculative-tokens must be between 0 and 20, not 21"),
    ("--draft-tree-nodes 65", "--draft-tree-nodes must be between 0 and 64, not 65"),
    ("--ngram-max 0", "--ngram-max must be at least 1, not 0"),
    ("--ngram-min 4 --ngram-max 3", "--ngram-min 4 is more than --ngram-max 3"),
    ("--ngram-min 17", "--ngram-min must be between 1 and 16, not 17"),
    ("--acceptance-rate-threshold 1.5", "--acceptance-rate-threshold must be between 0 and 1, not 1.5"),
    ("--acceptance-rate-ema-alpha 0", "--acceptance-rate-ema-alpha must be above 0 and at most 1, not 0.0"),
    ("--kv-gb 999999", "--kv-gb must be above 0 and at most this machine's memory, not 999999.0 GB"),
]


@pytest.mark.parametrize(
    ("command", "given", "reason"),
    [
        *(("eagle-serve", given, reason) for given, reason in DECODING),
        *(("eagle-generate", f"prompt {given}", reason) for given, reason in DECODING),
        ("eagle-serve", "--port 65536", "--port must be between 0 and 65,535, not 65536"),
        ("eagle-serve", "--prefix-cache-gb 0.2 --kv-gb 0.1", "--prefix-cache-gb 0.2 is a part of --kv-gb, which is"),
        ("eagle-serve", "--prefix-cache-gb 999999", "--prefix-cache-gb must be at least 0 and at most this machine's"),
        ("eagle-chat", "--top-p 2", "--top-p must be a number above 0 and at most 1 (1 keeps all); got 2.0"),
        ("eagle-bench", "--depth 2 21", "--depth must be between 1 and 20, not 21"),
        ("eagle-data make", "--target x --output y --user-top-p 0", "--user-top-p must be a number above 0"),
        ("eagle-train", "--target x --eval-depth 0", "--eval-depth must be between 1 and 20, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(command: str, given: str, reason: str) -> None:
    assert refused(command, *given.split()).startswith(reason)


FOLDER, FILE = ("taken", "taken/new"), (".", "taken/new.x")


@pytest.mark.parametrize(
    ("command", "given", "places"),
    [
        ("eagle-bench", "--json", FILE),
        ("eagle-bench", "--plot", ("taken/new.png",)),
        ("eagle-convert", "missing --to eagle3 --output", FOLDER),
        ("eagle-convert mtp", "--source missing --output", FOLDER),
        ("eagle-data collect", "--target missing --data missing.jsonl --output", FOLDER),
        ("eagle-data make", "--target missing --rows 1 --output", FILE),
        ("eagle-data regenerate", "--target missing --data missing.jsonl --output", FILE),
        ("eagle-doctor", "--target missing --json", FILE),
        ("eagle-generate", "--target missing --file missing.jsonl --output", FILE),
        ("eagle-serve", "--target missing --prefix-cache-dir", FOLDER),
        ("eagle-train", "--target missing --output", FOLDER),
        ("eagle-train", "--target missing --cache-dir", FOLDER),
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


@pytest.mark.parametrize("flag", ["eagle-bench --json", "eagle-doctor --json", "eagle-generate --file x --output"])
def test_an_output_does_not_replace_a_device(flag: str, tmp_path: Path) -> None:
    os.mkfifo(device := tmp_path / "null")
    command, *given = flag.split()
    assert f"error: {device} is a device; name a file" in run(command, *given, str(device))[2]
    assert device.is_fifo()


@pytest.mark.parametrize("command", ["eagle-bench", "eagle-chat", "eagle-generate", "eagle-serve"])
def test_without_a_clone_the_commands_say_how_to_name_a_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eagle_mlx.catalog.__file__", str(tmp_path / "eagle_mlx" / "catalog" / "__init__.py"))

    status, _, err = run(command, *(["def f():"] if command == "eagle-generate" else []))
    assert status == 2
    assert err == (  # before four seconds of measuring the BLAS
        "error: name the model with --target: a folder or a hub id, such as --target Qwen3-4B-4bit; only a clone of "
        "the project includes a target\n"
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("eagle-bench", "--target T --prompts"),
        ("eagle-generate", "hi --target T --chat-template"),
        ("eagle-heads compare", "A B --target T --prompts"),
        ("eagle-publish", f"{HEAD} --repo a/b --license mit --base-model a/b --dry-run --figures"),
        ("eagle-train", "--target T --output O -c"),
    ],
)
@pytest.mark.parametrize("place", [ROOT, Path("no-such-file")])
def test_a_file_that_cannot_be_read_is_an_error_without_its_number(
    command: str, flags: str, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(command, *flags.split(), str(place))
    assert status == 2
    assert "error: " in err
    assert str(place) in err
    assert "Errno" not in err
