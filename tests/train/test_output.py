from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle_mlx.data_pipelines.cli import main as data
from eagle_mlx.errors import OutputError
from eagle_mlx.files import FINDER, locked, new_folder
from eagle_mlx.shards import unfinished_folder
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.train.cli import main
from eagle_mlx.train.convert.cli import main as convert
from eagle_mlx.train.run.folder import claim, explained


def fail(
    output: Path, error: BaseException, checkpoint: bool, overwrite: bool = False, heads: Sequence[str] = ()
) -> None:
    with claim(output, overwrite) as folder, explained(str(output), folder):
        (folder / "metrics").write_text("")
        for name in heads:
            (folder / name).mkdir()
            (folder / name / "model.safetensors").write_text("")
        if checkpoint:
            (folder / "checkpoints" / "step-1").mkdir(parents=True)
        raise error


def test_a_run_that_fails_leaves_only_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "out", KeyboardInterrupt(), checkpoint=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="No space left"):
        fail(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"), checkpoint=True)
    assert (tmp_path / "out" / "checkpoints").exists()


def test_a_full_disk_names_what_is_kept_and_how_to_continue(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutputError, match=r"the results so far are kept: .*eagle-train --resume .*out$"):
        fail(tmp_path / "out", full, checkpoint=True)
    with pytest.raises(OutputError, match="No space left on device$"):
        fail(tmp_path / "other", full, checkpoint=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_finished_head_is_kept_if_no_state_could_be_saved(tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "run.json").touch()
    full = OSError(errno.ENOSPC, "No space left on device")
    message = "kept in .*, but no state to resume from: .* --init-from .*/last$"
    with pytest.raises(OutputError, match=message) as failure:
        fail(out, full, checkpoint=False, overwrite=overwrite, heads=("last", "best"))
    kept = Path(str(failure.value).rsplit("--init-from ", 1)[1]).parent
    assert {p.name for p in kept.iterdir()} == {"last", "best", "metrics"}
    assert (kept == out) == (not overwrite)
    assert (kept / "best" / "model.safetensors").is_file()


def test_a_folder_that_was_made_in_the_finder_is_free(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / FINDER).write_bytes(b"\0\0\0\1Bud1")
    with claim(out, False) as folder:
        assert folder == out
    with new_folder(out) as folder:
        (folder / "new").write_text("")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]


def test_an_output_that_exists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("")
    with pytest.raises(OutputError, match="exists already"), claim(out, False):
        pass
    with pytest.raises(ValueError, match="boom"):
        fail(out, ValueError("boom"), checkpoint=False, overwrite=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "run.json"]
    with claim(out, True) as folder:
        (folder / "new").write_text("")
        assert (out / "run.json").exists()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **more: object) -> None:
        raise AssertionError("the output must be checked before the target is loaded")

    monkeypatch.setattr(TargetOptions, "load", load)


def bad_places(tmp_path: Path) -> dict[str, Path]:
    """Return output paths that not even root can create."""
    (tmp_path / "afile").write_text("")
    return {"is a file, so": tmp_path / "afile" / "x", "cannot be written": Path("/proc/eagle/x")}


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("reason", ["is a file, so", "cannot be written"])
@pytest.mark.parametrize("command", ["train", "hours", "collect", "make", "regenerate", "convert", "mtp"])
def test_output_is_checked_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    where = str(bad_places(tmp_path)[reason])
    (tmp_path / "chats.jsonl").write_text("")
    chats = str(tmp_path / "chats.jsonl")
    run = {
        "train": lambda: main(["--target", "tiny", "--data", chats, "--output", where]),
        "hours": lambda: main(["--target", "tiny", "--hours", "1", "--output", where]),
        "collect": lambda: data(["collect", "--target", "tiny", "--data", chats, "--output", where]),
        "make": lambda: data(["make", "--target", "tiny", "--rows", "3", "--output", where]),
        "regenerate": lambda: data(["regenerate", "--target", "tiny", "--data", chats, "--output", where]),
        "convert": lambda: convert(["nobody/nothing", "--to", "eagle3", "--output", where]),
        "mtp": lambda: convert(["mtp", "--source", "nobody/nothing", "--output", where]),
    }
    assert run[command]() == 2
    assert reason in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["afile", "chats.jsonl"]


@pytest.mark.usefixtures("nothing_is_loaded")
def test_shards_are_looked_for_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--target", "tiny", "--shards", str(tmp_path), "--output", str(out)]) == 2
    assert f"{tmp_path} is not a folder of shards" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("command", "read"),
    [
        *[("train", "in"), ("train", "in/target"), ("train", "in/chats.jsonl"), ("train", "in/shards")],
        *[("collect", "in/target"), ("collect", "in/chats.jsonl"), ("regenerate", "in/chats.jsonl")],
        *[("convert", "in/target"), ("convert", "in"), ("convert", "in/best"), ("mtp", "in/target")],
    ],
)
def test_overwriting_never_deletes_what_the_command_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, read: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in", "in/target", "in/shards", "in/best"):
        Path(name).mkdir()
    Path("in/chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    Path("in/run.json").touch()
    over = ["--output", "in", "--overwrite"]
    flag = {"in/chats.jsonl": "--data", "in/shards": "--shards"}.get(read, "--target")
    source = [read] if read in ("in", "in/best") else ["nobody/nothing", "--target", read]
    run = {
        "train": lambda: main(["--target", "tiny", flag, read, *over]),
        "collect": lambda: data(["collect", "--target", "tiny", "--data", "chats.jsonl", flag, read, *over]),
        "regenerate": lambda: data(["regenerate", "--target", "tiny", flag, read, "--output", read, "--overwrite"]),
        "convert": lambda: convert([*source, "--to", "eagle3", *over]),
        "mtp": lambda: convert(["mtp", "--source", read, *over]),
    }
    assert run[command]() == 2
    assert f"would delete {read}, which is read" in capsys.readouterr().err
    assert sorted(path.name for path in Path("in").iterdir()) == ["best", "chats.jsonl", "run.json", "shards", "target"]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_the_second_run_in_a_folder_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """The first run has created the folder, which is still empty; the second run removes nothing."""
    out, line = tmp_path / "out", ["--target", "tiny", "--data", "x.jsonl", "--output", str(tmp_path / "out"), *more]
    with claim(out, False) as folder:
        assert main(line) == 2
        assert f"another process is writing to {out}" in capsys.readouterr().err
        (folder / "checkpoints" / "step-1").mkdir(parents=True)
        (folder / "run.json").touch()
        if more:
            assert main(line) == 2
            assert f"another process is writing to {out}" in capsys.readouterr().err
        assert (out / "checkpoints").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("nothing_is_loaded")
def test_the_second_capture_into_a_folder_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = unfinished_folder(tmp_path / "s")
    shards.mkdir()
    (tmp_path / "chats.jsonl").write_text("")
    with locked(shards):
        line = ["--target", "tiny", "--data", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "s")]
        assert data(["collect", *line]) == 2
    assert "another process is writing to" in capsys.readouterr().err
