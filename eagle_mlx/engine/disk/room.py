"""How much a folder of the disk tier holds, of all models, and what goes first where that is too much."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from eagle_mlx.engine.disk.index import start_of
from eagle_mlx.files import PART

_FOLDER = re.compile(r".+-[0-9a-f]{32}")
_SCAN_SECONDS = 60.0
"""After so long the folder is looked at again: people may have copied or deleted files."""
COUNT = ".bytes"
"""The file of the shared count."""
_COUNT_BYTES = 24
"""Of its text: a number and the end of the line. A file of another length was cut off."""
_HOLD_SECONDS, _LOOK_SECONDS = 5.0, 0.01
"""How long to wait for another server that holds the count, which writes one file meanwhile, and between two looks."""
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


class NoRoomError(OSError):
    """The files take more than their limit, and those that should go cannot be deleted."""


class Room:
    """Bounds the bytes of all files of the disk tier below a folder. Other files there are left alone.

    Servers that share the folder share the count too: it is in a file of the folder, which one of them holds at a time.
    """

    def __init__(self, root: Path, limit: int, clock: Callable[[], float] = time.monotonic):
        self.root, self.limit, self._clock = root, limit, clock
        self.used = 0
        """Bytes of all files, as far as this server knows."""
        self._scanned = -_SCAN_SECONDS

    def make(self, nbytes: int) -> list[Path]:
        """Have room for so many more bytes, and return what was deleted for it. Raises as `writing` does."""
        with self.writing(nbytes) as gone:
            return gone

    @contextmanager
    def writing(self, nbytes: int, path: Path | None = None) -> Iterator[list[Path]]:
        """Have room for a file that is written in the block, and yield what was deleted for it: longest unused first.

        `path`: the file, which may be there already and is replaced then. Other servers wait until the block ends.
        Raises NoRoomError if files cannot be deleted, OSError if the folder cannot be read.
        """
        with _counted(self.root) as count:
            gone = self._make(nbytes, path, count)
            try:
                yield gone
            except BaseException:
                self.used, self._scanned = 0, -_SCAN_SECONDS
                count.forget()  # the next one looks what there is
                raise

    def _make(self, nbytes: int, path: Path | None, count: _Count) -> list[Path]:
        known = count.read()
        if known is not None and self._clock() < self._scanned + _SCAN_SECONDS:
            self.used = known + nbytes - _size_of(path)
            if self.used <= self.limit:
                count.write(self.used)
                return []
        files = [file for file in self._files() if file.path != path]
        self._scanned = self._clock()
        self.used = nbytes + sum(file.nbytes for file in files)
        wanted = self.limit if self.used <= self.limit else int(_DOWN_TO * self.limit)
        gone, failed = list[Path](), None
        for file in sorted(files, key=lambda file: (file.used, -file.start)):
            if self.used <= wanted:
                break
            try:
                file.path.unlink(missing_ok=True)  # another server may have deleted it
            except OSError as e:
                failed = e
                continue
            gone.append(file.path)
            self.used -= file.nbytes
        if failed is not None and self.used > self.limit:
            self.used -= nbytes
            count.write(self.used)
            raise NoRoomError(failed.errno, failed.strerror)
        count.write(self.used)
        return gone

    def _files(self) -> Iterator[_File]:
        """Yield those of all models; what was left half written is deleted on the way."""
        for folder in self.root.iterdir():
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir():
                continue
            with suppress(OSError):  # another server has deleted the folder, or it cannot be read
                for path in folder.iterdir():
                    with suppress(OSError):  # the same of a file
                        yield from _file(path)


def _file(path: Path) -> Iterator[_File]:
    """Yield a file of the tier, or delete what a dead process has left; a FIFO or a folder is neither."""
    stat, start = path.stat(), start_of(path.name)
    if not S_ISREG(stat.st_mode):
        return
    if start is not None:
        yield _File(stat.st_mtime_ns, start, path, stat.st_size)
    elif path.name.endswith(PART) and stat.st_mtime < time.time() - _UNFINISHED_SECONDS:
        path.unlink(missing_ok=True)


def _size_of(path: Path | None) -> int:
    """Return the bytes of a file that is there, else 0."""
    with suppress(OSError):
        if path is not None and path.is_file():
            return path.stat().st_size
    return 0


class _Count:
    """The bytes of all files as servers have counted them, in a file that this one holds; None where there is none."""

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor

    def read(self) -> int | None:
        if self._descriptor is None:
            return None
        with suppress(OSError, ValueError):
            text = os.pread(self._descriptor, _COUNT_BYTES + 1, 0).decode("ascii")
            if len(text) == _COUNT_BYTES and text.endswith("\n"):
                return int(text)
        return None

    def write(self, used: int) -> None:
        self._put(f"{used:>{_COUNT_BYTES - 1}}\n".encode())

    def forget(self) -> None:
        self._put(b"")

    def _put(self, text: bytes) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # a full disk: the next one looks what there is
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, text, 0)


@contextmanager
def _counted(root: Path) -> Iterator[_Count]:
    """Hold the shared count of a folder, which a process lets go however it ends.

    Where there can be none, as in a folder that cannot be written, each server looks for itself.
    """
    try:
        descriptor = os.open(root / COUNT, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        yield _Count(None)
        return
    try:
        held = S_ISREG(os.fstat(descriptor).st_mode) and _hold(descriptor)
        yield _Count(descriptor if held else None)
    finally:
        os.close(descriptor)


def _hold(descriptor: int) -> bool:
    """Lock a file within some seconds; whether that was possible. A file system may have no locks."""
    end = time.monotonic() + _HOLD_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
