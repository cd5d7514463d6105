"""Write shards atomically; their folder gets its name only when all of them are complete."""

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
    check_example,
    encode,
    read_manifest,
    shard_name,
    unfinished_folder,
)


class ShardWriter:
    """Writes shards into a folder, which gets its name only when it is complete.

    Use it in a `with` statement. Until the block ends, the shards are in `unfinished_folder(folder)`, with a manifest
    of the complete ones. `made_from` names everything that determines the shards' content. If the block raises or the
    process is killed, the shards are kept, and the next writer with equal `made_from` has them in `files`.

    With `resume`, an existing folder is repaired in place: `files` has its good shards, `faults` describes the others,
    which are renamed to `*.damaged`. A rewritten shard is part of the folder at once.

    Raises OutputError if the folder exists and neither `overwrite` nor `resume` is set, if an unfinished capture of
    something else is there (`overwrite` deletes it), if another process is writing, or if the disk fails; ShardError if
    the folder to repair has a different `made_from` or none.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: ShardMeta,
        made_from: Mapping[str, str],
        command: Sequence[str] = (),
        overwrite: bool = False,
        resume: bool = False,
    ):
        self.folder = Path(folder)
        self.files: dict[int, ShardFile] = {}
        """The complete shards, by number."""
        self.faults: list[str] = []
        """One line for each damaged or missing shard of a folder to repair."""
        self._overwrite = overwrite
        self._repairs = resume and (self.folder / MANIFEST).exists()
        self.part = self.folder if self._repairs else unfinished_folder(folder)
        """The folder that holds the shards for now."""
        self._manifest = Manifest(meta, made_from=dict(made_from), command=tuple(command))
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        if self._repairs:
            self._check_origin()
        else:
            check_free(self.folder, self._overwrite)
        try:
            with ExitStack() as stack:
                self.part.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.part))
                if self._repairs:
                    self._set_damaged_aside()
                else:
                    self._begin()
                self._lock = stack.pop_all()
        except OSError as e:
            raise OutputError(f"{self.folder} cannot be created: {e.strerror or e}") from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._repairs:
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
        for example in examples:
            check_example(example, self._manifest.meta)
        data = encode(examples, self._manifest.meta)
        entry = ShardFile.of(index, data, examples)
        try:
            write_whole(self.part / entry.name, data)
            self.files[index] = entry
            self._write_manifest(MANIFEST if self._repairs else UNFINISHED)
        except OSError as e:
            raise self._refused(e) from e

    def _check_origin(self) -> None:
        """Load the manifest of a folder to repair. Raises ShardError if its `made_from` differs."""
        found = read_manifest(self.folder)
        if wrong := found.differences(self._manifest.made_from):
            raise ShardError(
                f"{self.folder} was made from something else ({wrong}); use the original options and data, "
                "or capture everything with --overwrite"
            )
        self._manifest = found

    def _set_damaged_aside(self) -> None:
        for part in self.folder.glob(f"*{PART}"):
            part.unlink()
        for index, entry in enumerate(self._manifest.files):
            path, wrong = self.folder / entry.name, entry.fault(self.folder)
            if wrong is None:
                self.files[index] = entry
                continue
            self.faults.append(f"{path} {wrong}")
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))

    def _begin(self) -> None:
        """Keep the complete shards of an unfinished capture, and remove its other files."""
        known = (UNFINISHED, MANIFEST)
        strange = [p.name for p in self.part.iterdir() if p.name not in known and not p.name.endswith((PART, SUFFIX))]
        if strange:
            raise OutputError(f"{self.part} is not an unfinished capture, since it has {strange[0]}; move it away")
        try:
            self.files = self._kept()
        except OutputError:
            if not self._overwrite:
                raise
        self._write_manifest(UNFINISHED)
        whole = {UNFINISHED, *(entry.name for entry in self.files.values())}
        for path in self.part.iterdir():
            if path.name not in whole:
                path.unlink()

    def _kept(self) -> dict[int, ShardFile]:
        """Return the complete shards of an unfinished capture. Raises OutputError if it is of something else."""
        path = next((path for name in (UNFINISHED, MANIFEST) if (path := self.part / name).is_file()), None)
        if path is None:
            return {}
        try:
            found = Manifest.read(path)
        except ShardError as e:
            raise OutputError(f"{path} is damaged, so the capture cannot continue; remove {self.part}") from e
        if wrong := found.differences(self._manifest.made_from):
            raise OutputError(
                f"{self.part} has an unfinished capture of something else ({wrong}); use the original options to "
                "continue it, or replace it with --overwrite"
            )
        return {entry.index: entry for entry in found.files if entry.fault(self.part) is None}

    def _write_manifest(self, name: str) -> None:
        """List the complete shards; in a folder to repair, keep the other entries."""
        listed = {**(dict(enumerate(self._manifest.files)) if self._repairs else {}), **self.files}
        found = replace(self._manifest, files=tuple(listed[index] for index in sorted(listed)))
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
        if self._repairs:
            kept = "make room, and repair it again"
        elif self.files:
            kept = f"{len(self.files):,} shards are kept in {self.part}: make room, and the same command continues"
        return OutputError(f"{self.folder} could not be written: {error.strerror or error}; {kept}")
