"""Plain text files: one file, or all text files under a folder, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from eagle_mlx.errors import DataError

from ..conversation import Conversation

PIECE_CHARS = 1500
"""Characters of a piece, about 400 tokens."""
_HEAD = 8000
"""A file with a zero byte in its first 8,000 bytes is binary, as for git."""


def pieces(text: str, origin: str) -> Iterator[Conversation]:
    """Yield pieces of about `PIECE_CHARS`, cut at line ends if lines are not longer."""
    piece, first = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        for start in range(0, len(line), PIECE_CHARS):
            part = line[start : start + PIECE_CHARS]
            if piece and len(piece) + len(part) > PIECE_CHARS:
                if piece.strip():
                    yield Conversation(text=piece, origin=f"{origin}:{first}")
                piece, first = "", number
            piece += part
    if piece.strip():
        yield Conversation(text=piece, origin=f"{origin}:{first}")


def text_files(place: Path) -> list[Callable[[], Iterator[Conversation]]]:
    """Return a function for each file that yields its pieces: of one file, or of all files under a folder.

    In a folder, hidden files and folders are ignored, and files that are not text in UTF-8 are skipped. Raises
    DataError, now or while reading, if something cannot be read, if there is nothing, or if a file alone is not text.
    """
    if not place.exists():
        raise DataError(f"there is no file or folder {place}")
    if not place.is_dir():
        return [partial(_pieces_of, place, alone=True)]
    found: list[Path] = []
    for folder, inner, files in os.walk(place, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    if not found:
        raise DataError(f"{place} has no files; name a folder with text files")
    return [partial(_pieces_of, file) for file in sorted(found)]


def _pieces_of(file: Path, alone: bool = False) -> Iterator[Conversation]:
    try:
        with file.open("rb") as opened:
            held = opened.read(_HEAD)
            text = "" if b"\0" in held else (held + opened.read()).decode()
    except OSError as e:
        _unreadable(e)
    except UnicodeDecodeError:
        text = ""
    if alone and not text.strip():
        raise DataError(f"{file} is empty, or not text in UTF-8; convert it, or name another file")
    yield from pieces(text, str(file))


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or name a folder without it"
    ) from error
