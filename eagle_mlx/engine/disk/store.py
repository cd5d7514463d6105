"""The folder of the disk tier's files, for all models and all servers that share it, and the limit of their bytes.

A file is named after its text, so that no list of files is needed to find it. Its time of change is that of its last
use. Servers change the folder one at a time; they can read at any time.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from eagle_mlx.files import PART, locked, write_whole

_FOLDER = re.compile(r"[0-9a-f]{32}")  # a model's; others, such as a disk's lost+found, may not be readable
_NAME = re.compile(r"(block|state)-\d{8}-[0-9a-f]{32}\.prefix(\.part)?")


class Store:
    """The files in a folder. Any thread may call it."""

    def __init__(self, root: Path, limit: int):
        """`limit`: total bytes of all files."""
        self.root, self.limit = root, limit
        self._ignored: set[str] = set()  # files that could not be used
        self._latest = 0  # the time of the newest use that is known
        self._sizes: dict[str, int] = {}  # as of the last change by this process

    def nbytes(self, model: str = "") -> int:
        """Return the bytes of the files of all models, or of one."""
        return sum(size for path, size in tuple(self._sizes.items()) if path.startswith(model))

    def size(self, path: str) -> int | None:
        """Return a file's bytes; None if it does not exist or could not be used."""
        with suppress(OSError):
            status = (self.root / path).stat()
            return status.st_size if stat.S_ISREG(status.st_mode) and path not in self._ignored else None
        return None

    def states(self, model: str) -> set[int]:
        """Return the ends of all boundary states of a model."""
        with suppress(OSError):
            names = [entry.name for entry in os.scandir(self.root / model)]
            return {int(name[6:14]) for name in names if name.startswith("state-") and name[6:14].isdecimal()}
        return set()

    def drop(self, path: str, damaged: bool) -> None:
        """Stop using a file, and delete it if it is damaged. Raises OSError."""
        self._ignored.add(path)
        if damaged:
            (self.root / path).unlink(missing_ok=True)

    def keep(self, used: Iterable[str], new: Iterable[tuple[str, Callable[[], bytes]]]) -> int:
        """Mark files as used, and write those that are missing; the least recently used ones make room.

        Of the files of one call, those with the first positions are removed last. Returns the bytes written. Raises
        OSError. `new`: paths with functions that return the content.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.root, wait=True):
            files = self._files()
            now = self._latest = max(time.time_ns(), self._latest + 1)  # it orders uses, whatever the clock says
            for path in files.keys() & set(used):
                os.utime(self.root / path, ns=(now, now))
                files[path] = (now, *files[path][1:])
            self._sizes = {path: size for path, (_, _, size) in files.items()}
            oldest = sorted(files, key=lambda path: files[path], reverse=True)
            self._make_room(0, oldest)
            written = 0
            for path, encode in new:
                is_here = path in self._sizes and path not in self._ignored
                if not is_here and not (self.root / path).is_dir():
                    content = encode()
                    if not self._make_room(len(content), oldest):
                        break
                    self._write(path, content, now)
                    written += len(content)
            return written

    def _files(self) -> dict[str, tuple[int, int, int]]:
        """Return each file's last use, minus its last position, and its bytes. Files of killed processes go."""
        files = {}
        for folder in os.scandir(self.root):
            for entry in os.scandir(folder) if folder.is_dir() and _FOLDER.fullmatch(folder.name) else ():
                path, status = f"{folder.name}/{entry.name}", entry.stat(follow_symlinks=False)
                if not _NAME.fullmatch(entry.name) or not stat.S_ISREG(status.st_mode):
                    continue
                if path.endswith(PART):
                    Path(entry).unlink()
                    continue
                files[path] = status.st_mtime_ns, -int(entry.name.split("-")[1]), status.st_size
                self._latest = max(self._latest, status.st_mtime_ns)
        return files

    def _make_room(self, nbytes: int, oldest: list[str]) -> bool:
        """Remove files, the last of `oldest` first, until `nbytes` more fit. Return whether they do."""
        total = sum(self._sizes.values()) + nbytes
        while total > self.limit >= nbytes and oldest:
            path = oldest.pop()
            (self.root / path).unlink(missing_ok=True)
            total -= self._sizes.pop(path, 0)
        return total <= self.limit

    def _write(self, path: str, content: bytes, now: int) -> None:
        file = self.root / path
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(file, content, mode=0o600)
        os.utime(file, ns=(now, now))
        self._sizes[path] = len(content)
        self._ignored.discard(path)
