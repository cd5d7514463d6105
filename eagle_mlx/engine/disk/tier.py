"""The disk tier: where a text is looked for that is not in memory, and where it is written behind its answer."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.disk.file import on_host
from eagle_mlx.engine.disk.identity import digest_of, identity
from eagle_mlx.engine.disk.index import Entry, Match
from eagle_mlx.engine.disk.pieces import HostPiece, arrays_of, numbers_of, outline_from
from eagle_mlx.engine.disk.room import NoRoomError, Room, folder_of
from eagle_mlx.engine.disk.store import Store, files_of
from eagle_mlx.engine.disk.writer import Job, Place, Writer
from eagle_mlx.engine.prefix_piece import Past, PrefixPiece
from eagle_mlx.engine.prefix_tree import Keys
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import PART, write_whole
from eagle_mlx.memory import gb
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.proposers.hybrid import model_of
from eagle_mlx.target import Target

log = logging.getLogger("eagle_mlx.prefixes")
STEP_BYTES = 128 << 20
"""What one step of the engine reads, while others decode: a tenth of a second where disk and checksum take 1.3 GB/s.

On a loaded machine with two cores such a step took 0.65 s of the processor's time, most of it for new memory.
"""
_MATCHES_AHEAD = 4
"""Texts of which blocks have been read and not all: a few, for turns change meanwhile. The oldest is read anew."""
_WAITING_BYTES = 1 << 30
"""What may be kept in memory for files that are still to be written, but for one text.

A disk that takes 1 GB/s is through with it in a second; a text that finds no place is offered again when it goes on.
"""


class DiskTier:
    """Keeps what an engine's prefix cache keeps in files too, for engines to come.

    Keys and values are in blocks of `BLOCK` positions, windows and states in files of their own. A file's name is made
    of the text that it belongs to, so that two servers which read the same write the same. Its folder's name is made of
    all that the numbers depend on (`identity`): nothing else is ever read from there.

    The engine's thread finds and reads; another one writes. It belongs to the engine's thread.
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
        """`root`: the folder for all models. `limit`: bytes of all files there. `say`: told once what goes wrong.

        Raises ConfigError where `root` is a file, or the proposer keeps what cannot be written.
        """
        if root.exists() and not root.is_dir():
            raise ConfigError(f"--prefix-cache-dir {root} is a file; name a folder")
        model = model_of(proposer)
        if model is not None and model.aux_layers and not isinstance(model, HeadProposer):
            raise ConfigError(
                f"what {model.name} keeps of a text cannot be written; leave --prefix-cache-dir out, or draft with "
                "a head, a draft model or n-grams"
            )
        self._target, self._kv_bits = target, kv_bits
        facts = identity(root, target, proposer, kv_bits)
        self.folder = folder_of(root, target.name, digest_of(facts))
        positional = RaggedCache.of(target.model, 1, kv_bits).is_positional
        self.store = Store(self.folder, positional, say)
        self.room = Room(root, limit)
        self.hits = self.tokens = self.bytes_read = self.left_out = 0
        """Prompts that went on from files, their positions that came from there, bytes, and texts that were not written
        because too much was waiting."""
        self._ahead: dict[str, dict[str, HostPiece]] = {}
        """Blocks that have been read for a place, until all of its are there."""
        self.writer = Writer(self.store, self.room, say, said=not self._prepare(facts, say))

    def _prepare(self, facts: dict[str, object], say: Callable[[str], None]) -> bool:
        """Make the folder, and delete what is too much from the start. Return whether it can be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.folder / "about.json"
            if not about.exists():
                part = about.with_name(f".{about.name}.{os.getpid()}{PART}")  # another server may write it too
                write_whole(about, json.dumps(facts, indent=1).encode(), part)
            gone = self.room.make(0)
            self.store.forget(path.name for path in gone if path.parent == self.folder)
        except NoRoomError as e:
            say(
                f"the files of the prefix cache in {self.room.root} take {gb(self.room.used)}, more than the limit of "
                f"{gb(self.room.limit)}, and cannot be deleted ({e.strerror}); they are read, but none is written: see "
                "to the folder's permissions, raise --prefix-disk-gb, or name another --prefix-cache-dir"
            )
        except OSError as e:
            say(
                f"the prefix cache cannot write to {self.folder} ({e.strerror or e}); the server goes on without: "
                "see to its permissions and to the space on its disk, or name another --prefix-cache-dir"
            )
        else:
            return True
        return False

    def find(self, keys: Keys, namespace: str = "") -> Match | None:
        """The longest beginning of a text that files have, of texts of a namespace (`Request.namespace`)."""
        return self.store.find(keys, namespace)

    def advance(self, match: Match, known: int) -> Match | None:
        """Read some more of what was found; what can be taken over now, None where it is nothing yet.

        `known`: positions that are not needed. Where every layer keeps every position any number of blocks can be taken
        over, else all at once. Raises PassedOverError.
        """
        needed = [entry for entry in match.blocks if entry.end > known]
        if match.place is None:
            sizes = accumulate(entry.nbytes for entry in needed)
            count = max(1, sum(size <= STEP_BYTES for size in sizes))
            blocks = match.blocks[: len(match.blocks) - len(needed) + count]
            return Match(min(match.length, blocks[-1].end), blocks, None)
        read, ahead = 0, self._ahead.setdefault(match.place.name, {})
        for entry in needed:
            if entry.name not in ahead:
                if read and read + entry.nbytes > STEP_BYTES:
                    while len(self._ahead) > _MATCHES_AHEAD:
                        del self._ahead[next(iter(self._ahead))]
                    return None
                ahead[entry.name] = self._read(entry)
                read += entry.nbytes
        return match

    def _read(self, entry: Entry) -> HostPiece:
        words, tensors = self.store.read(entry)
        self.bytes_read += entry.nbytes
        return HostPiece.read(words["about"], tensors)

    def outline(self, match: Match) -> RaggedCache:
        """What cannot be put together from pieces. Raises PassedOverError."""
        if match.place is None:
            return outline_from(self._target.model, self._kv_bits, {}, {"length": match.length, "displaced": []})
        words, tensors = self.store.read(match.place)
        self.bytes_read += match.place.nbytes
        arrays = {name: tensor.on_device() for name, tensor in tensors.items()}
        return outline_from(self._target.model, self._kv_bits, arrays, json.loads(words["about"]))

    def piece(self, match: Match, start: int, end: int) -> PrefixPiece:
        """The positions `start` to `end`. Raises PassedOverError."""
        ahead = self._ahead.pop(match.place.name, {}) if match.place is not None else {}
        ours = [entry for entry in match.blocks if entry.start < end and entry.end > start]
        pieces = [ahead[entry.name] if entry.name in ahead else self._read(entry) for entry in ours]
        piece = HostPiece.cut(pieces, start, end).on_device()
        mx.eval(piece.arrays)
        return piece

    def stop(self) -> None:
        """Forget the blocks that have been read for places of which not all are there."""
        self._ahead.clear()

    def took(self, match: Match, positions: int, complete: bool) -> None:
        """So many positions of what was found are in memory now that were not; `complete`: a prompt can go on."""
        self.hits += complete
        self.tokens += positions
        self.writer.submit(Job((), [entry.name for entry in match.entries]))

    def offer(self, keys: Keys, past: Past, outline: RaggedCache, new: tuple[int, PrefixPiece] | None) -> None:
        """Have a text written that the memory keeps, as far as it is not there.

        `outline`: at its end. `new`: of its last positions, from the first number on, a piece that has been computed.
        What else is missing is copied from `past`.
        """
        text = files_of(keys, self.store.positional, outline.shortest(0), past.namespace)
        missing, here = self.store.lacks(text)
        missing = [entry for entry in missing if not self.writer.is_waiting(entry)]
        if not missing:
            self.writer.submit(Job((), here))
            return
        blocks = [entry for entry in missing if entry.kind == "block"]
        start, end = blocks[0].start if blocks else len(keys), len(keys)
        first = new[0] if new is not None else end
        if self.writer.waiting_bytes > _WAITING_BYTES:
            self.left_out += 1
            return
        pieces = [HostPiece.of(start, first, past.piece(start, first))] if start < first else []
        if new is not None and blocks:
            pieces.append(HostPiece.of(first, end, new[1]))
        place, nbytes = None, sum(tensor.data.nbytes for piece in pieces for tensor in piece.tensors.values())
        if len(blocks) < len(missing):
            arrays = arrays_of(outline)
            tensors = on_host(list(arrays.values()))
            place = Place(json.dumps(numbers_of(outline)), dict(zip(arrays, tensors, strict=True)))
            nbytes += sum(x.nbytes for x in arrays.values())
        self.writer.submit(Job(missing, here, pieces, place, nbytes))

    def close(self, seconds: float) -> bool:
        """Finish writing, for so long at most; whether all is written."""
        return self.writer.close(seconds)


def default_bytes(root: Path) -> int:
    """What the files may take by default: a tenth of the disk, but no more than half of what is free on it.

    A share goes with the machine, where a number of gigabytes would be too much for one and too little for another.
    Raises ConfigError where the disk cannot be asked.
    """
    there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    own = 0
    with suppress(OSError):
        own = sum(path.stat().st_size for path in root.glob("*/*.safetensors"))
    try:
        usage = shutil.disk_usage(there)
    except OSError as e:
        raise ConfigError(f"--prefix-cache-dir {root} cannot be used: {e.strerror or e}; name another") from e
    return min(usage.total // 10, (usage.free + own) // 2)
