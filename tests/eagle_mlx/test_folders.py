from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from eagle_mlx import files
from eagle_mlx.errors import OutputError
from eagle_mlx.files import check_free, new_folder


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "out") as part:
        (part / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "x"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        with new_folder(tmp_path / "out") as part:
            (part / "file").write_text("x")
            raise error

    with pytest.raises(ValueError, match="boom"):
        fail(ValueError("boom"))
    with pytest.raises(OutputError, match="No space left"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_or_replaced_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert check_free(out) == out, "an empty folder is free"
    (out / "run.json").write_text("old")
    with pytest.raises(OutputError, match="exists already.*--overwrite"):
        check_free(out)
    with new_folder(out, overwrite=True) as part:
        (part / "new").write_text("new")
        assert (out / "run.json").exists()
    assert [p.name for p in out.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "head").mkdir()
    (tmp_path / "head/model.safetensors").touch()
    with pytest.raises(OutputError, match="holds no head, run or hidden states to overwrite"):
        check_free(tmp_path, overwrite=True)
    assert check_free(tmp_path / "head", overwrite=True)


def test_the_old_folder_survives_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("old")
    with pytest.raises(RuntimeError), new_folder(out, overwrite=True):
        raise RuntimeError
    assert (out / "run.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_file_at_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        check_free(tmp_path / "file", overwrite=True)


def test_all_of_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, plain = list[int](), files.sync

    def noting(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        assert not (tmp_path / "state.json").exists() or len(synced) > 1
        plain(descriptor)

    monkeypatch.setattr(files, "sync", noting)
    files.write_whole(tmp_path / "state.json", b"12345")
    assert synced[0] == 5
