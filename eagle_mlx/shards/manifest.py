"""The manifest of a folder of shards: what they are of, what they were made from, and the checksum of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle_mlx.errors import ShardError
from eagle_mlx.files import write_whole
from eagle_mlx.shards.format import Sample, ShardFile, ShardMeta, encode, shard_name

MANIFEST = "manifest.json"
FORMAT = "eagle-mlx-shards"
VERSION = 2
"""Version 1 had 16 bits alone and did not say what it was made from; it is still read."""


@dataclass(frozen=True)
class Manifest:
    meta: ShardMeta
    files: tuple[ShardFile, ...] = ()
    made_from: Mapping[str, str] = field(default_factory=dict)
    """A fingerprint in words: what has to be the same for a shard to come out the same. Empty where nobody said."""
    command: tuple[str, ...] = ()
    """The arguments with which the folder was made; a repair repeats them."""


def to_json(manifest: Manifest) -> bytes:
    """The manifest's file, with the SHA-256 of its own content."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return (json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode()


def from_json(data: bytes, path: Path) -> Manifest:
    """Raises ShardError, naming `path`, for content that is damaged or of another format."""
    try:
        found = json.loads(data)
        content = {k: v for k, v in found.items() if k != "sha256"}
        if content["format"] != FORMAT or content["version"] not in (1, VERSION):
            raise ShardError(
                f"{path} is of format {content['format']} version {content['version']}, not {FORMAT} 1 or {VERSION}; "
                "read it with the version of EAGLE-MLX that wrote it"
            )
        if found["sha256"] != _digest(content):
            raise ShardError(f"{path} is damaged: its SHA-256 does not fit its content; {_remedy(path)}")
        meta = {**content["meta"], "aux_layers": tuple(content["meta"]["aux_layers"])}
        if content["version"] == 1:
            del meta["dtype"]
        files = tuple(ShardFile(**f) for f in content["files"])
        return Manifest(ShardMeta(**meta), files, content.get("made_from", {}), tuple(content.get("command", ())))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ShardError(f"{path} is damaged and cannot be read ({e}); {_remedy(path)}") from e


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What two fingerprints do not agree on, in words; empty where they are the same."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    return "; ".join(f"{n}: {found.get(n, 'not said')} there, {wanted.get(n, 'not said')} now" for n in names)


def _remedy(path: Path) -> str:
    return f"copy {path.parent} again, or remove it and capture again with `eagle-data collect`"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    """Return what is wrong with a file, in words that follow its name; None if it is as the manifest says."""
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
