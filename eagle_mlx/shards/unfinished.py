"""The folder of a capture that has not ended: shards, and a journal with a line for each that is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from eagle_mlx.errors import OutputError, ShardError
from eagle_mlx.files import PART, sync, write_whole
from eagle_mlx.shards.manifest import MANIFEST, Manifest, differences, fault, from_json, to_json

from .format import SUFFIX, ShardFile, shard_name

JOURNAL = "unfinished.jsonl"


def unfinished_folder(folder: str | Path) -> Path:
    """Where the shards stand until they are complete: beside the folder, `out/shards.unfinished` for `out/shards`."""
    path = Path(folder).absolute()
    return path.with_name(path.name + ".unfinished")


def unfinished_at(folder: Path) -> Path | None:
    """The unfinished capture that a reader of `folder` has met, if it is one: the folder itself or the one beside."""
    return next((place for place in (folder, unfinished_folder(folder)) if (place / JOURNAL).is_file()), None)


def check_ours(part: Path) -> None:
    """Raises OutputError for a folder that holds what no capture has put there."""
    known = (JOURNAL, MANIFEST)
    strange = [p.name for p in part.iterdir() if p.name not in known and not p.name.endswith((PART, SUFFIX))]
    if strange:
        raise OutputError(f"{part} is in the way and is no unfinished capture: it holds {strange[0]}; move it away")


def start_journal(part: Path, manifest: Manifest, files: Mapping[int, ShardFile]) -> None:
    """Write a journal anew: one line of what the capture is, one for each shard that is whole."""
    head = json.dumps(json.loads(to_json(replace(manifest, files=()))))
    lines = [head, *(_line(index, files[index]) for index in sorted(files))]
    write_whole(part / JOURNAL, ("\n".join(lines) + "\n").encode())


def append_to_journal(part: Path, index: int, entry: ShardFile) -> None:
    with (part / JOURNAL).open("ab") as file:
        file.write((_line(index, entry) + "\n").encode())
        file.flush()
        sync(file.fileno())


def read_kept(part: Path, manifest: Manifest) -> dict[int, ShardFile]:
    """The shards of an unfinished capture that are whole, by number.

    Raises OutputError where the folder holds the capture of something else.
    """
    if (part / JOURNAL).is_file():
        head, *lines = (part / JOURNAL).read_bytes().split(b"\n")
        found = _head(head, part / JOURNAL)
        listed = dict(entry for line in lines if (entry := _entry(line)) is not None)
    elif (part / MANIFEST).is_file():  # complete, but for its name
        found = from_json((part / MANIFEST).read_bytes(), part / MANIFEST)
        listed = dict(enumerate(found.files))
    else:
        return {}
    wrong = differences(found.made_from, manifest.made_from)
    if wrong:
        raise OutputError(
            f"{part} holds the unfinished capture of something else ({wrong}); give the "
            "options of then to continue it, or remove the folder, or drop it with --overwrite"
        )
    return {index: entry for index, entry in listed.items() if fault(part / entry.name, entry) is None}


def _head(line: bytes, path: Path) -> Manifest:
    try:
        return from_json(line, path)
    except ShardError as e:
        raise OutputError(f"{path} is damaged, so nothing tells what was captured; remove {path.parent}") from e


def _line(index: int, entry: ShardFile) -> str:
    return json.dumps({"index": index, **asdict(entry)})


def _entry(line: bytes) -> tuple[int, ShardFile] | None:
    """A line of the journal; None for one that was cut short when the process ended."""
    try:
        found = json.loads(line)
        index = int(found.pop("index"))
        entry = ShardFile(**found)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (index, entry) if entry.name == shard_name(index) else None
