"""Writing shards: each whole and checked, all of them under their folder's name only when they are complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from eagle_mlx.errors import OutputError
from eagle_mlx.files import check_free, locked, swap, sync_folder, write_whole
from eagle_mlx.shards.manifest import MANIFEST, Manifest, to_json, write_shard

from .format import Sample, ShardFile, ShardMeta, check_sample, shard_name
from .unfinished import JOURNAL, append_to_journal, check_ours, read_kept, start_journal, unfinished_folder


class ShardWriter:
    """Writes samples into a new folder, which appears under its name only when it is complete.

    Use it in a `with` statement. Until the block ends well the shards stand in `unfinished_folder(folder)`. With
    `made_from`, which says in words all that decides what the shards hold, they stay there when the block raises or the
    process is killed, and the next writer made from the same finds those that are whole in `files`; without it nothing
    is left. Raises OutputError where the folder exists and `overwrite` is not set, where an unfinished capture of
    something else is in the way (which `overwrite` drops), where another process writes, and where the disk refuses.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: ShardMeta,
        tokens_per_shard: int = 4096,
        overwrite: bool = False,
        made_from: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ):
        self.folder, self.meta, self.tokens_per_shard = Path(folder), meta, tokens_per_shard
        self.files: dict[int, ShardFile] = {}
        """The shards that are whole, by number."""
        self.part = unfinished_folder(folder)
        self._overwrite = overwrite
        self._manifest = Manifest(meta, made_from=dict(made_from or {}), command=tuple(command))
        self._pending: list[Sample] = []
        self._added = 0
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        check_free(self.folder, self._overwrite)
        try:
            self.part.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locked(self.part))
            self._open()
        except OSError as e:
            self._lock.close()
            raise OutputError(f"{self.folder} cannot be made: {e.strerror or e}") from e
        except OutputError:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            try:
                if error is None:
                    self._finish()
            except OSError as e:
                raise self._refused(e) from e
            finally:
                if not self._resumable:
                    shutil.rmtree(self.part, ignore_errors=True)

    def add(self, sample: Sample) -> None:
        """Append a sample, from the first on; a shard is written whenever `tokens_per_shard` tokens have gathered."""
        check_sample(sample, self.meta)
        self._pending.append(sample)
        if sum(len(s.tokens) for s in self._pending) >= self.tokens_per_shard:
            self._flush()

    def write(self, index: int, samples: Sequence[Sample]) -> None:
        """Write shard `index`, which is on the disk when this returns."""
        for sample in samples:
            check_sample(sample, self.meta)
        try:
            entry = write_shard(self.part, index, samples, self.meta)
            append_to_journal(self.part, index, entry)
        except OSError as e:
            raise self._refused(e) from e
        self.files[index] = entry

    @property
    def _resumable(self) -> bool:
        return bool(self._manifest.made_from and self.files)

    def _open(self) -> None:
        check_ours(self.part)
        try:
            kept = read_kept(self.part, self._manifest)
        except OutputError:
            if not self._overwrite:
                raise
            kept = {}
        self.files = kept if self._manifest.made_from else {}
        whole = {JOURNAL, *(entry.name for entry in self.files.values())}
        for path in self.part.iterdir():
            if path.name not in whole:
                path.unlink()
        start_journal(self.part, self._manifest, self.files)

    def _flush(self) -> None:
        rows, self._pending = self._pending, []
        if rows:
            self.write(self._added, rows)
            self._added += 1

    def _finish(self) -> None:
        self._flush()
        if sorted(self.files) != list(range(len(self.files))):
            missing = shard_name(min(set(range(max(self.files))) - set(self.files)))
            raise ValueError(f"{missing} was never written, so {self.folder} is not complete")
        files = tuple(self.files[index] for index in sorted(self.files))
        manifest = Manifest(self.meta, files, self._manifest.made_from, self._manifest.command)
        write_whole(self.part / MANIFEST, to_json(manifest))
        (self.part / JOURNAL).unlink()
        sync_folder(self.part)
        swap(self.part, self.folder.absolute())
        sync_folder(self.folder.absolute().parent)

    def _refused(self, error: OSError) -> OutputError:
        kept = "nothing was left behind"
        if self._resumable:
            kept = f"{len(self.files):,} shards are kept in {self.part}: make room, and the same command continues"
        return OutputError(f"{self.folder} could not be written: {error.strerror or error}; {kept}")
