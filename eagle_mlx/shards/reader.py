"""Read shards: samples by index, with each shard's checksum verified before use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from eagle_mlx.errors import ShardError
from eagle_mlx.hidden_states import Example

from .format import MANIFEST, Manifest, decode

UNFINISHED = "unfinished.json"
"""The manifest of an unfinished folder: it lists the complete shards."""


def unfinished_folder(folder: str | Path) -> Path:
    """Return the folder of an unfinished capture: `out/shards.unfinished` for `out/shards`."""
    path = Path(folder).absolute()
    return path.with_name(path.name + ".unfinished")


class ShardReader:
    """Reads a folder of shards. `reader[i]` is one sample; iterate to get all of them in order.

    States are returned as float16 whatever their bits on disk. The manifest is checked at once, and each shard's
    SHA-256 on first use; `verify()` checks all shards. Raises ShardError if a file is missing, cut short or damaged,
    naming the file, and if a capture is not finished.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.meta, self.files = self.manifest.meta, list(self.manifest.files)
        self._ends = np.cumsum([f.samples for f in self.files])
        self._starts: dict[int, NDArray[np.int64]] = {}
        """For each shard that has been checked, the start of each sample, and finally the number of tokens."""

    def __len__(self) -> int:
        return sum(f.samples for f in self.files)

    @property
    def tokens(self) -> int:
        return sum(f.tokens for f in self.files)

    @property
    def loss_tokens(self) -> int:
        return sum(f.loss_tokens for f in self.files)

    def __getitem__(self, index: int) -> Example:
        shard, row = self._place(index)
        rows = slice(*map(int, self._check(shard)[row : row + 2]))
        path = self.folder / self.files[shard].name
        try:
            return decode(path, rows, self.meta)
        except (SafetensorError, OSError) as e:  # it was changed after its check
            raise ShardError(f"{path} can no longer be read: {e}; {self._remedy}") from e

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        """Return a sample's file and its row there, counted from 0, in words. Raises IndexError."""
        shard, row = self._place(index)
        return f"row {row} of {self.folder / self.files[shard].name}"

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its index in the shard."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def verify(self) -> None:
        """Check the SHA-256 of every shard. Raises ShardError."""
        for shard in range(len(self.files)):
            self._check(shard)

    def _check(self, shard: int) -> NDArray[np.int64]:
        if shard not in self._starts:
            entry = self.files[shard]
            path = self.folder / entry.name
            if (wrong := entry.fault(self.folder)) is not None:
                raise ShardError(f"{path} {wrong}; {self._remedy}")
            try:
                with safe_open(str(path), "numpy") as file:
                    lengths = file.get_tensor("lengths")
            except SafetensorError as e:
                raise ShardError(f"{path} is not a shard: {e}; {self._remedy}") from e
            self._starts[shard] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return self._starts[shard]

    @property
    def _remedy(self) -> str:
        if self.manifest.command:
            return f"`eagle-data collect --repair {self.folder}` captures it again and keeps the rest"
        return "copy the folder again, or remove it and capture its conversations again with `eagle-data collect`"


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest. Raises ShardError if it is missing or damaged, or if the capture is unfinished."""
    path = folder / MANIFEST
    try:
        return Manifest.read(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        places = (folder, unfinished_folder(folder))
        part = next((place for place in places if (place / UNFINISHED).is_file()), None)
        if part is None:
            raise ShardError(f"{folder} is not a folder of shards: it has no {MANIFEST}") from e
        raise ShardError(
            f"{folder} is not finished: its capture was interrupted or is still running, in {part}; "
            "run the same `eagle-data` command again to continue"
        ) from e
    except OSError as e:
        raise ShardError(f"{path} cannot be read: {e.strerror}") from e
