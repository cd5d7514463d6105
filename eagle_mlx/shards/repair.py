"""Repairing a finished folder: the shards that are damaged or missing are renamed and written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from eagle_mlx.errors import OutputError, ShardError
from eagle_mlx.files import locked, remove_parts, write_whole
from eagle_mlx.shards.manifest import MANIFEST, Manifest, differences, fault, to_json, write_shard

from .format import Sample, ShardFile, check_sample
from .reader import read_manifest


class ShardRepair:
    """Like ShardWriter for a folder that is complete but for some shards; the others are not touched.

    Use it in a `with` statement. `files` holds the shards that are whole, `faults` the faults of the others, which have
    been renamed to `*.damaged` where they exist. Each shard that is written is at once part of the folder. Raises
    ShardError for a folder without a readable manifest, and for one that was made from something else or does not say
    from what; OutputError where another process writes there, and where the disk refuses.
    """

    def __init__(self, folder: str | Path, made_from: Mapping[str, str]):
        self.folder = Path(folder)
        self._made_from = dict(made_from)
        self._manifest: Manifest
        self.files: dict[int, ShardFile] = {}
        self.faults: list[str] = []
        """One line for each shard that was damaged or missing."""
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        self._manifest = read_manifest(self.folder)
        self._check_origin()
        try:
            with ExitStack() as stack:
                stack.enter_context(locked(self.folder))
                remove_parts(self.folder)
                self._quarantine()
                self._lock = stack.pop_all()
        except OSError as e:
            raise OutputError(f"{self.folder} cannot be repaired: {e.strerror or e}") from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Write shard `index` and its line of the manifest, both on the disk when this returns."""
        for sample in samples:
            check_sample(sample, self._manifest.meta)
        try:
            entry = write_shard(self.folder, index, samples, self._manifest.meta)
            files = (*self._manifest.files[:index], entry, *self._manifest.files[index + 1 :])
            self._manifest = replace(self._manifest, files=files)
            write_whole(self.folder / MANIFEST, to_json(self._manifest))
        except OSError as e:
            raise OutputError(
                f"{self.folder} could not be written: {e.strerror or e}; make room, and repair it again"
            ) from e
        self.files[index] = entry

    def _check_origin(self) -> None:
        found = self._manifest.made_from
        if not found:
            raise ShardError(
                f"{self.folder} does not say what it was made from, so none of it can be captured again; capture all "
                "of it with --overwrite"
            )
        if wrong := differences(found, self._made_from):
            raise ShardError(
                f"{self.folder} was made from something else ({wrong}); give the options and the data of then, or "
                "capture all of it with --overwrite"
            )

    def _quarantine(self) -> None:
        for index, entry in enumerate(self._manifest.files):
            path = self.folder / entry.name
            wrong = fault(path, entry)
            if wrong is None:
                self.files[index] = entry
                continue
            self.faults.append(f"{path} {wrong}")
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))
