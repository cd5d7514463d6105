"""The folder of one model: its files, and the index of what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np

from eagle_mlx.engine.disk import file
from eagle_mlx.engine.disk.file import DamagedError, Header, NoFileError, Tensor
from eagle_mlx.engine.disk.index import Entry, Index, Match, blocks_of, start_of
from eagle_mlx.engine.prefix_piece import keys_of, tokens_of
from eagle_mlx.engine.prefix_tree import Keys

_NAMED = 3
"""Damaged files that one line names; the others are counted."""
_ANOTHER = "what it says of itself does not go with its name"


class PassedOverError(Exception):
    """A file was of no use; it is no longer in the index, and what is left may do."""


class Store:
    """Files by what they hold. Any thread may call it."""

    def __init__(self, folder: Path, positional: bool, say: Callable[[str], None]):
        """Read what every file says of itself; no tensor is read."""
        self.folder, self.positional, self._say = folder, positional, say
        self.passed_over = 0
        self.nbytes = 0
        """Of the files in the index."""
        self._index, self._lock = Index(positional), Lock()
        self._scan()

    def __len__(self) -> int:
        return len(self._index)

    def _scan(self) -> None:
        damaged, odd = list[str](), list[str]()
        for name in self._names():
            try:
                self._add(_entry_of(name, file.read_header(self.folder / name)))
            except DamagedError as e:
                damaged.append(f"{name}: {e}")
                self._delete(name)
            except NoFileError:
                odd.append(name)
            except OSError:
                continue  # another server has deleted it, or it cannot be read now
        self.passed_over += len(damaged)
        if damaged:
            more = f", and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
            self._say(
                f"{len(damaged)} damaged files of the prefix cache in {self.folder} are passed over and deleted "
                f"({'; '.join(damaged[:_NAMED])}{more}); their texts are read anew. "
                "If this happens often, check the disk"
            )

        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            self._say(
                f"{odd[0]}{more} in the prefix cache {self.folder} are no regular files, though they have names of its "
                "files; they are skipped: delete them"
            )

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir() if start_of(path.name) is not None)
        except OSError:
            return []

    def find(self, keys: Keys, namespace: str = "") -> Match | None:
        with self._lock:
            return self._index.find(keys, namespace)

    def lacks(self, text: Iterable[Entry]) -> tuple[list[Entry], list[str]]:
        """Of the files of a text those that are not here, and the names of those that are."""
        missing, here = list[Entry](), list[str]()
        with self._lock:
            for entry in text:
                name = entry.name if entry.name in self._index else None
                if name is None and entry.kind == "block":
                    name = self._index.covers(entry.parent, entry.keys)
                if name is None:
                    missing.append(entry)
                else:
                    here.append(name)
        return missing, here

    def read(self, entry: Entry) -> tuple[dict[str, str], dict[str, Tensor]]:
        """What a file holds. Raises PassedOverError where that is of no use."""
        path = self.folder / entry.name
        try:
            about, tensors = file.read(path)
            if not np.array_equal(_entry_of(entry.name, about=about).keys, entry.keys):
                raise DamagedError("it is of another text")
            return about, tensors
        except FileNotFoundError as e:
            self._forget_missing()
            raise PassedOverError(str(e)) from e
        except DamagedError as e:
            self._delete(entry.name)
            self._pass_over(entry, "passed over and deleted", e)
            raise PassedOverError(str(e)) from e
        except OSError as e:
            self._pass_over(entry, "passed over", e)
            raise PassedOverError(str(e)) from e

    def _pass_over(self, entry: Entry, what: str, why: Exception) -> None:
        """Forget a file that is of no use, and name it."""
        self.passed_over += 1
        self.forget([entry.name])
        self._say(
            f"{self.folder / entry.name} of the prefix cache is {what}: {why}; its text is read anew. If this happens "
            "often, check the disk"
        )

    def write(self, entry: Entry, about: str, tensors: Mapping[str, Tensor]) -> int:
        """Write a file; its bytes, 0 if a folder has its name. Raises OSError."""
        if (self.folder / entry.name).is_dir():
            return 0
        nbytes = file.write(self.folder / entry.name, _words(entry, about), tensors)
        for shorter in self._add(replace(entry, nbytes=nbytes)):
            self._delete(shorter.name)
        return nbytes

    def size(self, entry: Entry, about: str, tensors: Mapping[str, Tensor]) -> int:
        """Return how many bytes `write` takes."""
        return file.size_of(_words(entry, about), tensors)

    def forget(self, names: Iterable[str]) -> None:
        """These files are gone."""
        with self._lock:
            for name in names:
                entry = self._index.remove(name)
                self.nbytes -= entry.nbytes if entry is not None else 0

    def touch(self, names: Iterable[str], now: int) -> None:
        """These files have been of use, now in nanoseconds; together, so that of a text the end goes first."""
        for name in names:
            try:
                os.utime(self.folder / name, ns=(now, now))
            except FileNotFoundError:
                self.forget([name])
            except OSError:  # the folder is read-only
                continue

    def _forget_missing(self) -> None:
        """Forget all files that another server has deleted: it rarely deletes one alone, and they are written again."""
        with suppress(OSError):
            with self._lock:
                names = self._index.names  # before the folder: what is written meanwhile is in both, or in the folder
            there = {path.name for path in self.folder.iterdir()}
            self.forget(name for name in names if name not in there)

    def _add(self, entry: Entry) -> list[Entry]:
        with self._lock:
            before = self._index.remove(entry.name)
            shorter = self._index.add(entry)
            self.nbytes += entry.nbytes - sum(x.nbytes for x in [*shorter, *([before] if before else [])])
            return shorter

    def _delete(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)


def files_of(keys: Keys, positional: bool, shortest: int, namespace: str = "") -> list[Entry]:
    """The files that a text is made of: its blocks, and its end where blocks are not all."""
    entries, end = list[Entry](), None
    for parent, start, own in blocks_of(keys, namespace):
        entries.append(Entry("block", parent, start, own))
        end = entries[-1]
    if not positional and end is not None:
        entries.append(end.place(shortest))
    return entries


def _words(entry: Entry, about: str) -> dict[str, str]:
    """Return what a file says of itself."""
    return {
        "kind": entry.kind,
        "parent": entry.parent,
        "start": str(entry.start),
        "shortest": str(entry.shortest),
        "tokens": " ".join(map(str, tokens_of(entry.keys))),
        "about": about,
    }


def _entry_of(name: str, header: Header | None = None, about: Mapping[str, str] | None = None) -> Entry:
    """What a file says that it holds. Raises DamagedError where that does not go with its name."""
    words = header.about if header is not None else about or {}
    try:
        tokens = [int(token) for token in words["tokens"].split()]
        keys = keys_of(tokens) if tokens else np.empty(0, np.int64)
        nbytes = header.nbytes if header is not None else 0
        entry = Entry(words["kind"], words["parent"], int(words["start"]), keys, nbytes, int(words["shortest"]))
        is_its_own = entry.name == name
    except (KeyError, ValueError, OverflowError) as e:
        raise DamagedError(_ANOTHER) from e
    if not is_its_own:
        raise DamagedError(_ANOTHER)
    return entry
