"""Texts for others: without the paths of this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ALWAYS_PATHS = ("output", "shards", "adapter_path")
"""Settings that hold a path and nothing else."""
_DATA_FILES = (".jsonl", ".json", ".parquet")
_BEGINS_AS_PATH = re.compile(r"(~[\w.-]*|\.{1,2})?[/\\]|[A-Za-z]:[/\\]")
_WORD = re.compile(r"[^\s'\"(),;=\[\]]+")


def public(value: Any, key: str = "") -> Any:
    """A JSON value in which every path of this machine is down to its last name; `key` is the field that holds it."""
    if isinstance(value, Mapping):
        return {name: public(item, name) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [public(item, key) for item in value]
    return _text(value, key) if isinstance(value, str) else value


def _text(text: str, key: str) -> str:
    if "\n" not in text and (key in _ALWAYS_PATHS or _is_path(text)):
        return last_name(text)
    return _WORD.sub(lambda found: last_name(found[0]) if _is_path(found[0]) else found[0], text)


def _is_path(text: str) -> bool:
    """Whether this can only be a path: by how it begins or ends, or because it is one. A hub id may look like one."""
    if "://" in text:
        return False
    if _BEGINS_AS_PATH.match(text) or text.endswith(_DATA_FILES) or (text.count("/") > 1 and " " not in text):
        return True
    try:
        return "/" in text and Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a character that none has
        return False


def last_name(path: str) -> str:
    """A path's last name, whatever the system it is of."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path


def public_command(command: str, instead: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """A command line as others would give it.

    `instead` are the flags whose values are replaced, or that are added where they are not given; flags of `without`
    are left out with their value. Of every other path the last name stays.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    shown = [last_name(words[0])] if words else []
    for flag, value in instead.items():
        shown += [flag, value]
    skip = False
    for word in words[1:]:
        flag, _, value = word.partition("=")
        if word.startswith("--"):
            skip = flag in instead or flag in without
            shown += [] if skip else [f"{flag}={public(value)}" if value else flag]
        elif not skip:
            shown.append(public(word))
    return shlex.join(shown)
