"""The folder of a run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from eagle_mlx.errors import OutputError
from eagle_mlx.files import check_free, locked, swap

from . import state

MADE = "made"
"""The folder of what the target makes up, within that of a run of so many hours."""


@contextlib.contextmanager
def run_folder(
    output: str | Path, overwrite: bool, resume: Path | None = None, claimed: Path | None = None
) -> Iterator[Path]:
    """The folder that a run writes to: the one that is `claimed` already, or what `claim` gives.

    Raises OutputError if it cannot be written, with what is kept in it and how the run continues.
    """
    folder = claimed
    try:
        with contextlib.nullcontext(claimed) if claimed else claim(output, overwrite, resume) as folder:
            yield folder
    except OSError as e:
        kept = folder is not None and worth_keeping(folder)
        how = f"; what is done is kept: make room, then continue with eagle-train --resume {folder}" if kept else ""
        raise OutputError(f"{output} could not be written: {e.strerror or e}{how}") from e


@contextlib.contextmanager
def claim(output: str | Path, overwrite: bool, resume: Path | None = None) -> Iterator[Path]:
    """Make and lock the folder of a run, so that no second run can write there.

    It is `output` itself where that is free, and `resume` where a run continues. Where `output` is to be overwritten it
    is a folder beside it, which takes its place when the block ends well, now or after it was resumed. A new run that
    fails leaves no folder, unless that is worth keeping. Raises OutputError, before anything is done, if the folder is
    taken, cannot be made, or another process writes there.
    """
    path = Path(output) if resume else check_free(output, overwrite)
    with contextlib.ExitStack() as locks:
        exists = path.exists()
        replaces = _replaces(resume, path) if resume else exists and any(path.iterdir())
        if exists and (replaces or not resume):
            locks.enter_context(locked(path))
        folder = resume or _new(path, beside=replaces)
        if resume or replaces or not exists:
            locks.enter_context(locked(folder))
        if not (resume or overwrite):
            check_free(output)  # another run may have ended meanwhile
        try:
            yield folder
            if replaces:
                swap(folder, path)
        except BaseException:
            if not resume and not worth_keeping(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif replaces and folder.exists():
                tqdm.write(f"what the unfinished run has made is in {folder}; {path} is as it was")
            raise


def worth_keeping(run: Path) -> bool:
    """Return whether a run's folder holds a state to resume from, or data that were made or are in the making."""
    return state.exists(run) or any((run / MADE).glob("*"))


def _new(path: Path, beside: bool) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_beside(path), dir=path.parent)) if beside else path
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    except OSError as e:
        raise OutputError(f"{path} cannot be made: {e.strerror or e}") from e
    return folder


def _replaces(resume: Path, output: Path) -> bool:
    """Whether a folder was made to take the place of `output`."""
    return resume.resolve().parent == output.resolve().parent and resume.name.startswith(_beside(output))


def _beside(path: Path) -> str:
    return f".{path.name}.new."
