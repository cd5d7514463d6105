"""How much a folder of the disk tier holds, of all models, and what goes first where that is too much."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.engine.disk.index import start_of
from eagle_mlx.files import PART

_FOLDER = re.compile(r".+-[0-9a-f]{32}")
_SCAN_SECONDS = 60.0
"""After so long the folder is looked at again: another server may write there too."""
_DOWN_TO = 0.95
"""Share of the limit that is left when something must go, so that not every write looks for what may."""
_UNFINISHED_SECONDS = 3600.0
"""A file that is being written for so long was left by a process that has died."""


@dataclass(frozen=True)
class _File:
    used: int
    """Nanoseconds: when it was last of use."""
    start: int
    path: Path
    nbytes: int


def folder_of(root: Path, model: str, digest: str) -> Path:
    """The folder for what has this digest of 32 hexadecimal digits, by whatever name the model went before."""
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", Path(model).name).strip("-.")[:40].strip("-.") or "model"
    return next(iter(sorted(root.glob(f"*-{digest}"))), root / f"{readable}-{digest}")


class Room:
    """Bounds the bytes of all files of the disk tier below a folder. Other files there are left alone."""

    def __init__(self, root: Path, limit: int, clock: Callable[[], float] = time.monotonic):
        self.root, self.limit, self._clock = root, limit, clock
        self.used = 0
        self._scanned = -_SCAN_SECONDS

    def make(self, nbytes: int) -> list[Path]:
        """Have room for so many more bytes, where they fit at all: what was deleted for it, longest unused first."""
        self.used += nbytes
        if self.used <= self.limit and self._clock() < self._scanned + _SCAN_SECONDS:
            return []
        files = sorted(self._files(), key=lambda file: (file.used, -file.start))
        self._scanned = self._clock()
        self.used = nbytes + sum(file.nbytes for file in files)
        gone = list[Path]()
        wanted = self.limit if self.used <= self.limit else int(_DOWN_TO * self.limit)
        for file in files:
            if self.used <= wanted:
                break
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
                gone.append(file.path)
                self.used -= file.nbytes
        return gone

    def _files(self) -> Iterator[_File]:
        """Those of all models; what was left half written is deleted on the way."""
        for folder in self.root.iterdir():
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir():
                continue
            for path in folder.iterdir():
                with suppress(OSError):  # another server has deleted it
                    stat, start = path.stat(), start_of(path.name)
                    if start is not None:
                        yield _File(stat.st_mtime_ns, start, path, stat.st_size)
                    elif path.name.endswith(PART) and stat.st_mtime < time.time() - _UNFINISHED_SECONDS:
                        path.unlink(missing_ok=True)
