"""Write shards atomically; their folder has a temporary name until all of them are complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from eagle_mlx.errors import OutputError, ShardError
from eagle_mlx.files import PART, check_free, locked, swap, sync_folder, write_whole
from eagle_mlx.hidden_states import Example

from .format import (
    MANIFEST,
    SUFFIX,
    UNFINISHED,
    Manifest,
    ShardFile,
    ShardMeta,
    encode,
    read_manifest,
    shard_name,
    unfinished_folder,
)


class ShardWriter:
    """Writes shards into a folder, which has a temporary name until it is complete.

    Use it in a `with` statement. Until the block ends, the shards are in `unfinished_folder(folder)`, with a manifest
    of the complete ones. `made_from` names everything that determines the shards' content. If the block raises or the
    process is killed, the shards are kept, and the next writer with equal `made_from` has them in `files`.

    With `resume`, a finished folder with damaged shards becomes an unfinished capture again.

    Raises OutputError if the folder exists and neither `overwrite` nor `resume` is set, if the folder or an unfinished
    capture was made from something else (`overwrite` replaces both), if another process is writing, or if the disk
    fails.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: ShardMeta,
        made_from: Mapping[str, str],
        overwrite: bool = False,
        resume: bool = False,
    ):
        self.folder = Path(folder)
        self.files: dict[int, ShardFile] = {}  # the complete shards, by number
        self.part = unfinished_folder(folder)  # the folder that holds the shards for now
        self._overwrite, self._resume, self._whole = overwrite, resume, False
        self._manifest = Manifest(meta, made_from=dict(made_from))
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        try:
            if self._resume and (self.folder / MANIFEST).exists():
                self._reopen()
            else:
                check_free(self.folder, self._overwrite)
            if not self._whole:
                with ExitStack() as stack:
                    self.part.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(self.part))
                    self._begin()
                    self._lock = stack.pop_all()
        except OSError as e:
            raise OutputError(f"{self.folder} cannot be created: {e.strerror or e}") from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._whole:
                return
            try:
                if error is None:
                    self._finish()
            except OSError as e:
                raise self._refused(e) from e
            finally:
                if not self.files:
                    shutil.rmtree(self.part, ignore_errors=True)

    def write(self, index: int, examples: Sequence[Example]) -> None:
        """Write shard `index` and its entry in the manifest; both are on disk when this returns."""
        data = encode(examples, self._manifest.meta)
        entry = ShardFile.of(index, data, examples)
        try:
            write_whole(self.part / entry.name, data)
            self.files[index] = entry
            self._write_manifest(UNFINISHED)
        except OSError as e:
            raise self._refused(e) from e

    def _reopen(self) -> None:
        """List the shards of a finished folder; if some are damaged, turn it into an unfinished capture."""
        self.files = self._kept(self.folder)
        self._whole = len(self.files) == len(read_manifest(self.folder).files)
        if not self._whole:
            self.folder.rename(self.part)

    def _begin(self) -> None:
        """Keep the complete shards of an unfinished capture, and remove its other files."""
        known = (UNFINISHED, MANIFEST)
        strange = [p.name for p in self.part.iterdir() if p.name not in known and not p.name.endswith((PART, SUFFIX))]
        if strange:
            raise OutputError(
                f"{self.part} also contains {strange[0]}, which is not part of a capture; move the folder away"
            )
        try:
            self.files = self._kept(self.part)
        except OutputError:
            if not self._overwrite:
                raise
        self._write_manifest(UNFINISHED)
        whole = {UNFINISHED, *(entry.name for entry in self.files.values())}
        for path in self.part.iterdir():
            if path.name not in whole:
                path.unlink()

    def _kept(self, folder: Path) -> dict[int, ShardFile]:
        """Return the good shards of a capture. Raises OutputError if it is of something else."""
        path = next((path for name in (UNFINISHED, MANIFEST) if (path := folder / name).is_file()), None)
        if path is None:
            return {}
        try:
            found = Manifest.read(path)
        except ShardError as e:
            raise OutputError(f"{path} is damaged, so the capture cannot continue; remove {folder}") from e
        if wrong := found.differences(self._manifest.made_from):
            raise OutputError(
                f"{folder} has a capture of something else ({wrong}); use the original options and data, or replace it "
                "with --overwrite"
            )
        return {entry.index: entry for entry in found.files if entry.fault(folder) is None}

    def _write_manifest(self, name: str) -> None:
        found = replace(self._manifest, files=tuple(self.files[index] for index in sorted(self.files)))
        write_whole(self.part / name, found.to_json())

    def _finish(self) -> None:
        if missing := set(range(max(self.files, default=0))) - set(self.files):
            raise ValueError(f"{shard_name(min(missing))} was never written, so {self.folder} is incomplete")
        self._write_manifest(MANIFEST)
        (self.part / UNFINISHED).unlink()
        sync_folder(self.part)
        swap(self.part, self.folder.absolute())
        sync_folder(self.folder.absolute().parent)

    def _refused(self, error: OSError) -> OutputError:
        kept = "nothing was left behind"
        if self.files:
            kept = f"{len(self.files):,} shards are kept in {self.part}: make room, and the same command continues"
        return OutputError(f"{self.folder} could not be written: {error.strerror or error}; {kept}")
