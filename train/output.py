"""The folder of a run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from eagle_mlx.errors import OutputError
from eagle_mlx.folders import check_free, swap


@contextlib.contextmanager
def run_folder(output: str | Path, overwrite: bool, unless: str) -> Iterator[Path]:
    """The folder that a run writes to.

    It is `output` itself where that is free. Where `output` is to be overwritten it is a folder beside it, which takes
    its place when the block ends well. A run that fails leaves no folder, unless that holds `unless` (a checkpoint).
    """
    path = check_free(output, overwrite)
    replaces = path.exists() and any(path.iterdir())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.new.", dir=path.parent)) if replaces else path
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    except OSError as e:
        raise OutputError(f"{path} cannot be made: {e.strerror or e}") from e
    try:
        yield folder
        if replaces:
            swap(folder, path)
    except BaseException as e:
        if not (folder / unless).exists():
            shutil.rmtree(folder, ignore_errors=True)
        elif replaces:
            tqdm.write(f"what the unfinished run has made is in {folder}; {path} is as it was")
        if isinstance(e, OSError):
            raise OutputError(f"{path} could not be written: {e.strerror or e}") from e
        raise
