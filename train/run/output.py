"""The folder of a run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from eagle_mlx.errors import OutputError
from eagle_mlx.files import check_free, locked, swap


@contextlib.contextmanager
def run_folder(
    output: str | Path, overwrite: bool, worth_keeping: Callable[[Path], bool], resume: Path | None = None
) -> Iterator[Path]:
    """The folder that a run writes to; no second run can write there meanwhile.

    It is `output` itself where that is free, and `resume` where a run continues. Where `output` is to be overwritten it
    is a folder beside it, which takes its place when the block ends well, now or after it was resumed. A new run that
    fails leaves no folder, unless that is worth keeping.
    """
    path = Path(output) if resume else check_free(output, overwrite)
    replaces = _replaces(resume, path) if resume else path.exists() and any(path.iterdir())
    folder = resume or _new(path, beside=replaces)
    try:
        with locked(folder):
            yield folder
        if replaces:
            swap(folder, path)
    except BaseException as e:
        if not resume and not worth_keeping(folder):
            shutil.rmtree(folder, ignore_errors=True)
        elif replaces and folder.exists():
            tqdm.write(f"what the unfinished run has made is in {folder}; {path} is as it was")
        if isinstance(e, OSError):
            raise OutputError(f"{path} could not be written: {e.strerror or e}") from e
        raise


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
