"""Atomic writes of files and folders, locks for folders, and YAML that users write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from eagle_mlx.errors import ConfigError, OutputError, in_one_line

PART = ".part"  # the suffix of a file while it is being written
FINDER = ".DS_Store"  # a file of the Finder of macOS
_MARKS = {"config.json", "manifest.json", "report.json", "run.json", "comparison.json", "made"}  # in our outputs


def cache_folder() -> Path:
    """Return this project's cache folder: EAGLE_MLX_CACHE, or `eagle-mlx` in the user's cache folder.

    Without a home folder, as in some containers, it is a path that cannot be written.
    """
    if named := os.environ.get("EAGLE_MLX_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle-mlx"
    except RuntimeError:
        return Path(os.devnull)


def name_of(folder: str | Path) -> str:
    """Return a folder's name as the user typed it, even if that is a link."""
    return Path(os.path.abspath(Path(folder).expanduser())).name  # noqa: PTH100  (`resolve` would follow the link)


def write_whole(path: Path, data: bytes, part: Path | None = None, mode: int = 0o666) -> None:
    """Write a file atomically, safe even against a power failure. Raises OSError.

    `part`: the temporary file in the same folder; by default, the file's name and `PART`. `mode`: who may do what with
    a new file, within the process's umask.
    """
    part = part or path.with_name(path.name + PART)
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            sync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_output(path: Path, text: str) -> None:
    """Write a file at a path that the user chose, atomically, with a hidden temporary file. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), path.with_name(f".{path.name}.{os.getpid()}{PART}"))
    except OSError as e:
        raise OutputError(f"{path} cannot be written ({e.strerror}); choose another path") from e


def sync(descriptor: int) -> None:
    """Write an open file to the disk. On macOS, `fsync` leaves data in the disk's own cache (its manual page)."""
    os.fsync(descriptor)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # network file systems need not know it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries, or a file's contents, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock a folder against other writers within the block; the lock ends with the process at the latest.

    Raises OutputError if another process holds the lock, unless told to `wait`. File systems without locks are not
    protected.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise OutputError(f"another process is writing to {folder}; wait until it ends") from e
    try:
        yield
    finally:
        os.close(descriptor)


def check_idle(*places: Path) -> None:
    """Raise OutputError if another process holds the lock of one of these files or folders, if they exist."""
    for place in filter(Path.exists, places):
        with locked(place):
            pass


def check_free(folder: str | Path, overwrite: bool = False) -> Path:
    """Return the folder as a path.

    Raises OutputError if it is a file, if it cannot be written, or if it is not empty, unless `overwrite` is set and it
    is an output of this project.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; choose a folder that does not exist yet")
    if path.exists() and not is_empty(path):
        if not overwrite:
            raise OutputError(f"{path} exists already; choose another output folder, or overwrite it with --overwrite")
        if not any(place.name in _MARKS or place.suffix == ".safetensors" for place in path.iterdir()):
            raise OutputError(f"{path} holds no head, run or hidden states to overwrite; choose another output folder")
    for place in (path.parent, path) if path.exists() else (path.parent,):
        check_writable(place)
    return path


def check_apart(output: str | Path, *inputs: str | Path) -> None:
    """Raise OutputError if overwriting `output` would delete one of the inputs; others may be no paths."""
    whole = Path(output).resolve()
    for place in inputs:
        if Path(place).exists() and Path(place).resolve().is_relative_to(whole):
            raise OutputError(f"overwriting {output} would delete {place}, which is read; choose another output")


def is_empty(folder: Path) -> bool:
    """Return whether a folder has no files but the one that the Finder of macOS adds when it shows the folder."""
    return {path.name for path in folder.iterdir()} <= {FINDER}


def check_file(path: Path) -> None:
    """Raise OutputError unless a file can be written at this path, in a folder that may not exist yet."""
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is a {'folder' if path.is_dir() else 'device'}; name a file")
    check_writable(path.parent)


def disk_bytes(folder: Path) -> int:
    """Return the size of the disk that a folder is on or will be on."""
    return shutil.disk_usage(_existing(folder)).total


def free_disk(folder: str | Path) -> int:
    """Return the free bytes where a folder is or would be."""
    return shutil.disk_usage(_existing(Path(folder))).free


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    place = folder.absolute()
    return next(path for path in (place, *place.parents) if path.exists())


def check_writable(folder: Path) -> None:
    """Raise OutputError unless a folder can be written, or created in its nearest existing parent.

    It creates a temporary folder, because permissions alone are not enough: a file system may be read-only.
    """
    place = _existing(folder)
    if not place.is_dir():
        raise OutputError(f"{place} is a file, so it can hold no output; choose another folder")
    try:
        Path(tempfile.mkdtemp(prefix=".eagle-mlx.", dir=place)).rmdir()
    except OSError as e:
        raise OutputError(f"{place} cannot be written ({e.strerror or e}); choose another output") from e


@contextlib.contextmanager
def new_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when the block ends, or deleted if the block fails.

    Files are flushed to disk before the rename, and an old `folder` is deleted only after it. Raises OutputError if the
    folder exists and `overwrite` is not set, if the disk is full, or if permission is denied.
    """
    path = check_free(folder, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True) as name:
            part = Path(name)
            yield part
            for entry in (*part.rglob("*"), part):
                sync_folder(entry)
            part.chmod(0o755)
            check_free(path, overwrite)  # another process may have created it meanwhile
            swap(part, path)
    except OSError as e:
        raise OutputError(f"{path} could not be written: {e.strerror or e}; no part of it was kept") from e


def swap(part: Path, path: Path) -> None:
    """Rename `part` to `path`; an existing folder is deleted only after that."""
    if not path.exists():
        part.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(aside)
    try:
        part.rename(path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def read_yaml(file: Path, what: str) -> Any:
    """Return a YAML file's content. Raises ConfigError, naming `what` it is, if it is unreadable or has a key twice."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as e:
        raise ConfigError(f"there is no {what} {file}") from e
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read as YAML: {in_one_line(e)}") from e


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys: plain YAML silently keeps the last one."""


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Return 1:30 as text: by YAML 1.1 it is 90."""
    return node.value if ":" in node.value else yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Hashable] = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if isinstance(name, Hashable):
            if name in seen:
                message = f"{name!r} appears twice; give each name once"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)
