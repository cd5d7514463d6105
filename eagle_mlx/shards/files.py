"""Files of a folder of shards, and whether they are those of its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from eagle_mlx.files import write_whole

from .format import Sample, ShardFile, ShardMeta, encode, shard_name


def write_shard(folder: Path, index: int, samples: Sequence[Sample], meta: ShardMeta) -> ShardFile:
    """Write one shard and return its line of the manifest, when the file is on the disk."""
    data, name = encode(samples, meta), shard_name(index)
    write_whole(folder / name, data)
    return ShardFile(
        name,
        hashlib.sha256(data).hexdigest(),
        len(data),
        len(samples),
        sum(len(s.tokens) for s in samples),
        sum(int(s.loss_mask.sum()) for s in samples),
    )


def fault(path: Path, entry: ShardFile) -> str | None:
    """What is wrong with a file, in words that follow its name; None where it is the one of the manifest."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            what = "cut short" if size < entry.size else "longer than it was"
            return f"is {what}: {size:,} bytes in place of {entry.size:,}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing, but the manifest lists it"
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    return None if digest == entry.sha256 else "is damaged: its SHA-256 is not the one in the manifest"
