"""`--data self`: train a head from a target alone, with conversations that it generates first."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.data_pipelines import MakeConfig
from eagle_mlx.data_pipelines.jsonl import PartialFile, partial_path
from eagle_mlx.train.cli import flags_parser, main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.data import storage
from eagle_mlx.train.job import new_run
from eagle_mlx.train.run import loop
from tests.fakes import interrupt_after, talking_target_folder, tiny_target_folder
from tests.train.empty_pictures import leave_empty_pictures

TOKENS = 200
SMALL = [
    *("--self-tokens", str(TOKENS), "--head", "eagle", "--length", "64", "--max-length", "64", "--rows", "2"),
    *("--max-steps", "2", "--eval-prompts", "1", "--eval-tokens", "4", "--eval-depth", "2"),
]


@pytest.fixture(scope="module", autouse=True)
def _short_turns() -> Iterator[None]:
    """Shorten turns, because random models loop to the end of a greedy turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "MakeConfig", partial(MakeConfig, user_tokens=30, max_tokens=12))
        patch.setattr(loop, "write_plots", leave_empty_pictures)
        yield


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_target_folder(tmp_path_factory.mktemp("talker") / "tiny", seed=2)


@pytest.fixture(scope="module")
def whole(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the output folder and the printed text of an uninterrupted run."""
    out, printed = tmp_path_factory.mktemp("whole") / "out", io.StringIO()
    with contextlib.redirect_stderr(printed):
        ended = main(command(talker, out))
    assert ended == 0, printed.getvalue()
    return out, printed.getvalue()


def copied(run: Path, out: Path) -> Path:
    """Copy one run's file for another, with its sources."""
    for end in (".self.jsonl", ".self.jsonl.from.json"):
        shutil.copy(f"{run}{end}", f"{out}{end}")
    return Path(f"{out}.self.jsonl")


def command(target: Path, output: Path, *more: str) -> list[str]:
    return ["--target", str(target), "--output", str(output), *SMALL, *more]


def test_a_head_is_trained_from_the_target_alone(talker: Path, whole: tuple[Path, str]) -> None:
    out, printed = whole
    assert f"no --data is given, so {talker} writes conversations first (--data self)" in printed
    assert f"{out}.self.jsonl: " in printed
    assert " tries, " in printed
    rows = Path(f"{out}.self.jsonl").read_text().splitlines()
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 2
    assert report["config"]["data"] == ["self"]
    assert 0 < report["data"]["conversations"] < len(rows), "the head does not learn from held-out conversations"


def config_of(target: Path, output: Path) -> TrainConfig:
    """Return the settings of `command`."""
    return new_run(None, None, vars(flags_parser().parse_args(command(target, output))))[0]


def test_interrupted_data_generation_continues(
    talker: Path, whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_after(7, Stopped, patch)
        assert main(command(talker, out)) == 130
    assert "the same command continues" in capsys.readouterr().err
    begun = partial_path(f"{out}.self.jsonl").read_bytes().splitlines()
    assert len(begun) == 1 + 7
    assert not out.exists()
    continued: list[int] = []
    with monkeypatch.context() as patch:
        add = PartialFile.add
        patch.setattr(PartialFile, "add", lambda self, *args: continued.append(args[0]) or add(self, *args))
        assert main(command(talker, out)) == 0
    assert not {json.loads(line.split(b"\t")[0])[0] for line in begun[1:]} & set(continued), "no try is made twice"
    assert Path(f"{out}.self.jsonl").read_bytes() == Path(f"{whole[0]}.self.jsonl").read_bytes()
    losses = [json.loads((run / "report.json").read_text())["loss"] for run in (out, whole[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # states in another batch differ by rounding


def test_a_resumed_run_makes_deleted_data_again(
    talker: Path, whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looked = tmp_path / "out", 0
    file = copied(whole[0], out)

    def check(self: Stop) -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Stop, "check", check)
        assert main(command(talker, out)) == 130
    made, began = file.read_bytes(), (out / "run.json").read_bytes()
    file.unlink()
    assert main(["--resume", str(out)]) == 0
    assert file.read_bytes() == made
    assert (out / "run.json").read_bytes() == began


def no_making(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be made")

    patch.setattr("eagle_mlx.data_pipelines.synthesis.file.make_to_file", refuse)


def test_only_runs_with_the_same_settings_reuse_the_data(
    talker: Path, whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    no_making(monkeypatch)
    out = tmp_path / "out"
    file = copied(whole[0], out)
    made = file.read_bytes()
    assert main(command(talker, out, "--limit", "3")) == 0
    assert "used as it is" in capsys.readouterr().err
    assert json.loads((out / "report.json").read_text())["data"]["conversations"] == 3
    for more, why in (
        (("--seed", "1"), "was made with seed 0, not 1"),
        (("--self-tokens", str(TOKENS + 1)), f"was made with tokens {TOKENS}, not {TOKENS + 1}"),
        (("--target", str(tiny_target_folder(tmp_path / "other", seed=1))), "was made with target"),
    ):
        assert main(command(talker, out, "--overwrite", *more)) == 2
        printed = capsys.readouterr().err
        assert why in printed
        assert f"--data {file}" in printed
    Path(f"{file}.from.json").unlink()
    assert main(command(talker, out, "--overwrite")) == 2
    assert "its settings are not recorded" in capsys.readouterr().err
    assert file.read_bytes() == made


def test_a_plan_counts_the_data_to_make(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    line = ["--target", str(talker), "--output", str(out), "--head", "eagle", "--dry-run", "--length", "32"]
    for more, tokens in (((), "500,000"), (("--self-tokens", "7000"), "7,000"), (("--limit", "3"), "3,000")):
        assert main([*line, *more]) == 0
        plan = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
        assert plan["data"] == "self"
        assert plan["tokens"].startswith(f"{tokens}: conversations that the target writes first, in {out}.self.jsonl")
        assert "after the target has written the conversations" in plan["time"]
    assert list(tmp_path.iterdir()) == []


def test_a_recipes_data_is_used_unless_self_is_given() -> None:
    flags = {"target": "mlx-community/Qwen3-8B-4bit"}
    config, recipe = new_run("", None, flags)
    assert recipe is not None
    assert config.data.sources == tuple(recipe.settings["data"])
    assert new_run("", None, {**flags, "data": ["self"]})[0].data.is_self


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--data", "self", "chats.jsonl"), "make a file first (eagle-data make"),
        (("--data", "self=0.5"), "self cannot be mixed with other sources"),
        (("--data", "self", "--shards", "states"), "leave out --data self"),
        (("--data", "chats.jsonl"), "--self-tokens applies only to --data self"),
        (("--self-tokens", "0"), "--self-tokens must be at least 1"),
        (("--keep-turns", "x"), "--keep-turns x"),
        (("--eval-data", "none.jsonl"), "none.jsonl"),
    ],
)
def test_invalid_settings_are_refused_before_data_is_made(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, more: tuple[str, ...], why: str
) -> None:
    no_making(monkeypatch)
    assert main(command(talker, tmp_path / "out", *more)) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_self_elsewhere_is_no_data_set_of_the_hub(talker: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    line = command(talker, tmp_path / "out", "--data", str(chats), "--eval-data", "self")
    line.remove("--self-tokens")
    line.remove(str(TOKENS))
    assert main(line) == 2
    assert "make a file with `eagle-data make`" in capsys.readouterr().err


def test_a_target_that_cannot_write_data_is_named(tmp_path: Path, capsys: Any) -> None:
    base = tiny_target_folder(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    for more in ((), ("--dry-run",)):
        assert main(command(base, tmp_path / "out", *more)) == 2
        printed = capsys.readouterr().err
        assert f"{base} has no chat template, so it cannot make up conversations" in printed
        assert "FILE.jsonl" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
