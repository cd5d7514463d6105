"""Texts that a memory begins with: conversations, or a folder of source code (`--memory`)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.request import encode

MOST_BYTES = 1 << 20  # larger files of a folder are left out: they are data rather than something that people write


def remember(paths: Sequence[str], engine: em.Engine, say: Callable[[str], None]) -> None:
    """Read files and folders into an engine's memory, for all namespaces; `say` reports each. Raises ConfigError."""
    target, memory = engine.target, engine.proposer.memory if engine.proposer is not None else None
    if paths and memory is None:
        raise ConfigError("--memory: n-grams draft with texts, and they are off; leave --memory out")
    for path in paths:
        assert memory is not None
        count, tokens = 0, 0
        for text in _texts(Path(path).expanduser(), target):
            memory.add(text, None)
            count, tokens = count + 1, tokens + len(text)
        say(f"memory: {count:,} texts, {tokens:,} tokens of {path}")


def _texts(path: Path, target: em.Target) -> Iterator[list[int]]:
    if path.suffix == ".jsonl":
        yield from _rows(path, target)
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and file.stat().st_size <= MOST_BYTES:
                text = file.read_bytes()
                if b"\0" not in text:  # not text
                    yield encode(target, text.decode("utf-8", "replace"))
    else:
        yield encode(target, _read(path))


def _rows(path: Path, target: em.Target) -> Iterator[list[int]]:
    for number, line in enumerate(io.StringIO(_read(path)), 1):  # texts may contain other line breaks
        try:
            row: dict[str, Any] = json.loads(line)
            yield encode(target, row["messages"] if "messages" in row else row["text"])
        except (ValueError, TypeError, KeyError, EagleError) as e:
            forms = 'a line is an object with a list of "messages", or with a "text"'
            raise ConfigError(f"--memory {path}:{number}: {type(e).__name__}: {e}; {forms}") from e


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--memory {path}: {e}; give a file of text, a .jsonl file or a folder") from e
