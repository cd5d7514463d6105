"""Write shards of conversations that a target makes up, with the hidden states from generating them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle_mlx.errors import OutputError
from eagle_mlx.files import PART
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import MANIFEST, ShardMeta, ShardReader, ShardWriter
from eagle_mlx.shards.format import SUFFIX, decode, encode

TOKENS_PER_SHARD = 4096
"""The same as for a capture of existing conversations."""


@dataclass(frozen=True)
class ShardPlace:
    """The folder and metadata of the shards. `open_shards` raises OutputError if they cannot be written there."""

    folder: Path
    meta: ShardMeta
    overwrite: bool = False


class ShardPlan:
    """Assigns training conversations to shards, in order of their numbers."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        """Numbers of the conversations in each full shard."""
        self.dropped: set[int] = set()
        """Numbers of the tries that are not wanted."""
        self._open: list[int] = []
        self._tokens = 0

    def choose(self, number: int, tokens: int) -> None:
        """Add the next training conversation, with its number of tokens."""
        self._open.append(number)
        self._tokens += tokens
        if self._tokens >= TOKENS_PER_SHARD:
            self.finish()

    def drop(self, number: int) -> None:
        """Exclude a try from training."""
        self.dropped.add(number)

    def finish(self) -> None:
        """Close the current shard."""
        if self._open:
            self.groups.append(self._open)
            self.write(len(self.groups) - 1)
        self._open, self._tokens = [], 0

    def write(self, index: int) -> None:
        """Write a full shard; does nothing here."""


class MadeShards(ShardPlan):
    """Writes examples to shards. Each waits in its own file until its shard is full, so it survives an interruption."""

    def __init__(self, place: ShardPlace, waiting: Path, shards: ShardWriter | None):
        """Create the writer. `shards` is None if they are complete and only the file of conversations is not."""
        super().__init__()
        self._waiting, self._shards = waiting, shards
        self._meta = replace(place.meta, bits=16)

    @property
    def whole(self) -> int:
        """Number of complete shards, counted from the first."""
        shards = self._shards
        return sys.maxsize if shards is None else next(index for index in count() if index not in shards.files)

    def holds(self, number: int) -> bool:
        """Return whether a try's sample waits undamaged."""
        try:
            with safe_open(str(self._file(number)), "numpy"):
                return True
        except (OSError, SafetensorError):
            return False

    def keep(self, number: int, sample: Example) -> None:
        """Keep a sample until its shard is full or it is dropped. Raises OutputError if writing fails."""
        path = self._file(number)
        part = path.with_name(path.name + PART)
        try:
            part.write_bytes(encode([sample], self._meta))  # no fsync: a lost sample is made again
            part.replace(path)
        except OSError as e:
            part.unlink(missing_ok=True)
            raise OutputError(
                f"{path} could not be written: {e.strerror or e}; finished rows are kept, so make room and run "
                "the same command again"
            ) from e

    def drop(self, number: int) -> None:
        super().drop(number)
        self._file(number).unlink(missing_ok=True)

    def write(self, index: int) -> None:
        if self._shards is not None and index not in self._shards.files:
            self._shards.write(index, [self._read(number) for number in self.groups[index]])
        for number in self.groups[index]:
            self._file(number).unlink(missing_ok=True)

    def _read(self, number: int) -> Example:
        return decode(self._file(number), slice(None), self._meta)

    def _file(self, number: int) -> Path:
        return self._waiting / f"{number}{SUFFIX}"


@contextmanager
def open_shards(place: ShardPlace, settings: Mapping[str, Any], wanted: Mapping[str, int]) -> Iterator[MadeShards]:
    """Yield the shards; they appear in their folder once the block succeeds. Raises OutputError as ShardWriter does."""
    layers = ", ".join(map(str, place.meta.aux_layers))
    found = {**settings, "wanted": wanted, "layers": layers, "bits": place.meta.bits}
    made_from = {name: str(value) for name, value in found.items()}
    waiting = place.folder.absolute().with_name(place.folder.name + ".waiting")
    if (place.folder / MANIFEST).exists() and ShardReader(place.folder).manifest.made_from == made_from:
        yield MadeShards(place, waiting, None)
    else:
        with ShardWriter(place.folder, place.meta, made_from, overwrite=place.overwrite) as shards:
            waiting.mkdir(exist_ok=True)
            made = MadeShards(place, waiting, shards)
            yield made
            made.finish()
    shutil.rmtree(waiting, ignore_errors=True)
