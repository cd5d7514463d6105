"""The disk tier: finds prefixes that are not in memory, and has texts written after their answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.disk import snapshot_file
from eagle_mlx.engine.disk.snapshot_file import CHECKSUM, Content, Entry, Match, blocks_of, identity, state_at
from eagle_mlx.engine.disk.store import Store
from eagle_mlx.engine.prefix_tree import Keys, Past, PrefixPiece
from eagle_mlx.errors import ConfigError, check
from eagle_mlx.files import disk_bytes, free_disk
from eagle_mlx.memory import gb
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target

log = logging.getLogger("eagle_mlx.prefixes")
STEP_BYTES = 128 << 20
"""Bytes read in one step of the engine, while other requests decode: 0.1 s if disk and checksum take 1.3 GB/s."""
_TEXTS_AHEAD = 4
"""Maximum texts that are partly read; prompts take turns, so a few are enough. The oldest is dropped."""
WAITING_BYTES = 1 << 30  # bytes that may wait in memory to be written, not counting the last text: a second at 1 GB/s
_PAUSE_SECONDS = 60.0  # how long to write nothing after a failed write: a full disk rarely has space again at once
_Job = tuple[Sequence[Entry], Sequence[tuple[Entry, Content]]]


class PassedOverError(Exception):
    """Raised if a file could not be used. It will not be found again; other files may be."""


class DiskTier:
    """Saves the entries of an engine's prefix cache in files, for later engines.

    A file is named after its text, so that two servers that read the same text write the same file. Its folder is named
    after everything that the content depends on (`identity`), so that nothing else is ever read. Call it from the
    engine's thread only, which finds and reads files; another thread writes them.
    """

    def __init__(
        self,
        root: Path,
        limit: int,
        target: Target,
        proposer: Proposer | None = None,
        kv_bits: int | None = None,
        say: Callable[[str], None] = log.warning,
    ):
        """`root`: the folder for all models. `limit`: total bytes of all files in it. `say`: receives each problem.
        Binds the proposer. Raises ConfigError if `root` is a file, or if the proposer's cache cannot be saved."""
        check(root.is_dir() or not root.exists(), f"--prefix-cache-dir {root} is a file; name a folder")
        if proposer is not None:
            if proposer.aux_layers and proposer.head is None:
                raise ConfigError(
                    f"the state of the proposer {proposer.name!r} cannot be saved to disk; omit --prefix-cache-dir, or "
                    "draft with a head, a draft model or n-grams"
                )
            proposer.bind(target)
        self._target, self._kv_bits = target, kv_bits
        self._say, self.limit = say, limit
        self._positional = RaggedCache.of(target.model, 1, kv_bits).is_positional
        self._store = Store(root, limit)
        self._reported, self._paused_until = False, 0.0
        self._model = identity(target, proposer, kv_bits)
        self.folder = root / self._model
        self.hits = self.tokens = 0  # prompts that continued from files, and positions read for them
        self.bytes_read = 0
        self.left_out = self.passed_over = 0  # texts not written because too much was waiting; files not usable
        self.ahead: dict[str, dict[str, PrefixPiece]] = {}
        """For each state, the blocks that have been read, until all of them are there."""
        self.bytes_written = self.bytes_waiting = 0  # bytes_waiting: that unwritten texts keep in memory
        self._unwritten: set[str] = set()  # paths of files that are still to be written
        self._lock = threading.Lock()
        self._write((), ())  # a smaller limit applies from now on
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="prefix-writer", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._store.nbytes(self._model)

    def find(self, keys: Keys, namespace: str = "") -> Match | None:
        """Return the longest prefix of a text that the files have in a namespace (`Request.namespace`)."""
        blocks = list[Entry]()
        for block in blocks_of(keys, self._model, namespace):
            if (size := self._store.size(block.path)) is None:
                break
            blocks.append(replace(block, nbytes=size))
        if self._positional:
            return Match(blocks[-1].end, blocks, None) if blocks else None
        most = min(len(keys), snapshot_file.BLOCK * (len(blocks) + 1) - 1)
        for end in sorted(self._store.states(self._model) & set(range(1, most + 1)), reverse=True):
            state = state_at(end, keys, self._model, namespace, blocks)
            if (size := self._store.size(state.path)) is not None:
                return Match(end, blocks[: state.start // snapshot_file.BLOCK], replace(state, nbytes=size))
        return None

    def advance(self, match: Match, length: int) -> Match | None:
        """Read some more of a match of which the first `length` positions are in memory; at most STEP_BYTES. Returns
        what can be used now, or None if nothing can yet. Raises PassedOverError."""
        needed = [entry for entry in match.blocks if entry.end > length]
        if match.state is None:
            sizes = accumulate(entry.nbytes for entry in needed)
            later = len(needed) - max(1, sum(size <= STEP_BYTES for size in sizes))
            blocks = match.blocks[: len(match.blocks) - later]
            return Match(blocks[-1].end, blocks, None)
        bytes_read, ahead = 0, self.ahead.setdefault(match.state.path, {})
        for entry in needed:
            if entry.path not in ahead:
                if bytes_read and bytes_read + entry.nbytes > STEP_BYTES:
                    while len(self.ahead) > _TEXTS_AHEAD:
                        del self.ahead[next(iter(self.ahead))]
                    return None
                ahead[entry.path] = snapshot_file.piece_from(*self._read(entry))
                bytes_read += entry.nbytes
        return match

    def outline(self, match: Match) -> RaggedCache:
        """Return the boundary state at the end of a match. Raises PassedOverError."""
        about, arrays = {"length": match.length, "displaced": []}, dict[str, mx.array]()
        if match.state is not None:
            about, arrays = self._read(match.state)
            ahead = self.ahead.setdefault(match.state.path, {})
            ahead[match.state.path] = snapshot_file.piece_from(about, arrays)
        return snapshot_file.state_from(self._target.model, self._kv_bits, about, arrays)

    def piece(self, match: Match, start: int, end: int) -> PrefixPiece:
        """Return positions `start` to `end`, the last of the match. Raises PassedOverError."""
        ahead = self.ahead.get(match.state.path, {}) if match.state is not None else {}
        pieces = list[PrefixPiece]()
        for entry in match.entries:
            if entry.end > start:
                piece = ahead.pop(entry.path, None) or snapshot_file.piece_from(*self._read(entry))
                pieces.append(piece.split(start - entry.start)[1] if entry.start < start else piece)
        piece = snapshot_file.joined(pieces)
        mx.eval(piece.arrays)
        return piece

    def _read(self, entry: Entry) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """Return a file's verified content. Raises PassedOverError."""
        path, damaged = self.folder / entry.path.rpartition("/")[2], False
        try:
            content = path.read_bytes()
            if content[-CHECKSUM:] == entry.checksum(memoryview(content)[:-CHECKSUM]):
                self.bytes_read += len(content)
                return snapshot_file.decode(content[:-CHECKSUM])
            why, damaged = "its checksum does not match", True
        except OSError as e:
            why = e.strerror or str(e)
        except Exception as e:
            why, damaged = f"it cannot be decoded ({e})", True
        try:
            self._store.drop(entry.path, damaged)
        except OSError as e:
            self._report(e)
        if damaged or path.exists():
            self.passed_over += 1
            self._say(
                f"{path} in the prefix cache was skipped{' and deleted' if damaged else ''}: {why}. Its text is "
                "computed again. If this happens often, check the disk"
            )
        raise PassedOverError(why)

    def took(self, match: Match, positions: int, complete: bool) -> None:
        """Record that `positions` of a match were moved to memory, 0 if it has no room; `complete`: the prompt can
        continue from it. Drops the state that was read for it."""
        if match.state is not None:
            self.ahead.pop(match.state.path, None)
        if positions:
            self.hits += complete
            self.tokens += positions
            self._submit(match.entries)

    def offer(self, keys: Keys, past: Past, outline: RaggedCache) -> None:
        """Write the whole blocks of a text that the files lack, and `outline`, the boundary state at its end."""
        entries = list(blocks_of(keys, self._model, past.namespace))
        if not self._positional:
            entries.append(state_at(len(keys), keys, self._model, past.namespace, entries))
        here = [entry for entry in entries if self._store.size(entry.path) is not None]
        there = self._unwritten | {entry.path for entry in here}
        missing = [entry for entry in entries if entry.path not in there]
        if missing and self.bytes_waiting > WAITING_BYTES:
            self.left_out += 1
            return
        files = list[tuple[Entry, Content]]()
        if blocks := [entry for entry in missing if entry.kind == "block"]:
            start = blocks[0].start
            content = snapshot_file.content_of(past.piece(start, blocks[-1].end))
            files += [(entry, snapshot_file.cut(content, entry.start - start, entry.end - start)) for entry in blocks]
        if missing and (state := missing[-1]).kind == "state":
            files.append((state, snapshot_file.content_of(past.piece(state.start, state.end), outline)))
        self._submit(here, files)

    def close(self, seconds: float) -> bool:
        """Wait at most `seconds` for writing to finish; return whether it did."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _submit(self, used: Sequence[Entry], missing: Sequence[tuple[Entry, Content]] = ()) -> None:
        """Have files marked as used, and the missing ones written."""
        with self._lock:
            self._unwritten |= {entry.path for entry, _ in missing}
            self.bytes_waiting += sum(content.nbytes for _, content in missing)
        self._jobs.put((used, missing))

    def _write_all(self) -> None:
        """Write texts while the engine runs, in the order in which they are submitted. Runs in a thread of its own."""
        while (job := self._jobs.get()) is not None:
            used, missing = job
            try:
                self._write(used, missing)
            except Exception:
                log.exception("the prefix cache could not write a text")
            finally:
                with self._lock:
                    self._unwritten -= {entry.path for entry, _ in missing}
                    self.bytes_waiting -= sum(content.nbytes for _, content in missing)
                del job, missing  # while we wait for the next job, its memory is free

    def _write(self, used: Sequence[Entry], missing: Sequence[tuple[Entry, Content]]) -> None:
        """Change the files, unless that failed shortly before."""
        if monotonic() < self._paused_until:
            return
        new = [(entry.path, partial(_encoded, entry, content)) for entry, content in missing]
        try:
            self.bytes_written += self._store.keep([entry.path for entry in used], new)
            self._reported = False
        except OSError as e:
            self._paused_until = monotonic() + _PAUSE_SECONDS
            self._report(e)

    def _report(self, e: OSError) -> None:
        """Report that nothing can be written, once until something is."""
        if not self._reported:
            self._reported = True
            self._say(
                f"the prefix cache cannot write to or delete files in {self._store.root} ({e.strerror or e}). It has "
                f"{gb(self._store.nbytes())} of {gb(self.limit)}, which the server still reads. It tries to write "
                "again every minute. Check the folder's permissions and free space, or choose another "
                "--prefix-cache-dir"
            )


def _encoded(entry: Entry, content: Content) -> bytes:
    encoded = content.encode()
    return encoded + entry.checksum(encoded)


def default_bytes(root: Path) -> int:
    """Return a tenth of the disk, at most half of its free space. Raises ConfigError if it cannot be queried."""
    try:
        own = sum(path.stat().st_size for path in root.glob("*/*.prefix"))
        return min(disk_bytes(root) // 10, (free_disk(root) + own) // 2)
    except OSError as e:
        raise ConfigError(f"--prefix-cache-dir {root} cannot be used: {e.strerror or e}; name another") from e
