from __future__ import annotations

import errno
from pathlib import Path

import pytest

from eagle_mlx.errors import OutputError
from eagle_mlx.train.run.output import run_folder


def worth_keeping(folder: Path) -> bool:
    return (folder / "last").exists()


def fail(output: Path, error: BaseException, checkpoint: bool, overwrite: bool = False) -> None:
    with run_folder(output, overwrite, worth_keeping) as folder:
        (folder / "metrics").write_text("")
        if checkpoint:
            (folder / "last").mkdir()
        raise error


def test_a_run_that_fails_leaves_only_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "out", KeyboardInterrupt(), checkpoint=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="No space left"):
        fail(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"), checkpoint=True)
    assert (tmp_path / "out" / "last").exists()


def test_an_output_that_exists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    with pytest.raises(OutputError, match="exists already"), run_folder(out, False, worth_keeping):
        pass
    with pytest.raises(ValueError, match="boom"):
        fail(out, ValueError("boom"), checkpoint=False, overwrite=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]
    with run_folder(out, True, worth_keeping) as folder:
        (folder / "new").write_text("")
        assert (out / "old").exists()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]
