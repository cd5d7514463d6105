"""The built-in source as conversations: standard library functions to write, and pieces of plain files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal, get_args

from eagle_mlx.errors import DataError

from .conversation import Conversation, Message
from .stdlib_source import Function, SourceFile, Split, functions_of, iter_files

Side = Literal["train", "heldout", "all"]
Reader = Callable[[SourceFile], Iterator[Conversation]]

SHARES = {"docstrings": 0.3, "bare": 0.5, "files": 0.2}
"""Of `builtin:python`: functions with a docstring, functions without, pieces of plain files; until one runs out."""
MAX_ANSWER_CHARS = 1200
PIECE_CHARS = 1500
_BUFFER = 1024
"""Conversations of each kind held at once to be shuffled, so that a few are had without reading every file."""

_NAMES = {
    "python": ("docstrings", "bare", "files"),
    "python-chat": ("docstrings", "bare"),
    "python-docstrings": ("docstrings",),
    "python-files": ("files",),
}


def iter_conversations(spec: str, split: Side, seed: int | None) -> Iterator[Conversation]:
    """Yield a split of `builtin:…`, no answer twice, in an order fixed by the seed; None keeps the order of the files.

    Raises DataError for a name that there is not.
    """
    kinds = _NAMES.get(spec.removeprefix("builtin:"))
    if kinds is None:
        raise DataError(f"{spec}: the built-in sources are {', '.join(f'builtin:{n}' for n in _NAMES)}")
    files = [file for part in get_args(Split) if split in (part, "all") for file in iter_files(part)]
    if seed is None:
        return _unique(chain.from_iterable(_READ[kind](file) for file in files for kind in kinds))
    streams = {kind: _shuffled(files, _READ[kind], random.Random(f"{seed}/{kind}")) for kind in kinds}
    return _unique(_mix(streams, random.Random(seed)))


def _mix(streams: dict[str, Iterator[Conversation]], rng: random.Random) -> Iterator[Conversation]:
    while streams:
        [kind] = rng.choices(list(streams), [SHARES[kind] for kind in streams])
        conversation = next(streams[kind], None)
        if conversation is None:
            del streams[kind]
        else:
            yield conversation


def _shuffled(files: list[SourceFile], read: Reader, rng: random.Random) -> Iterator[Conversation]:
    """What `read` finds in the files, taken in random order from a buffer that is kept full."""
    buffer: list[Conversation] = []
    for conversation in chain.from_iterable(map(read, rng.sample(files, len(files)))):
        buffer.append(conversation)
        if len(buffer) > _BUFFER:
            at = rng.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


def _documented(file: SourceFile) -> Iterator[Conversation]:
    return (_chat(function) for function in _short(file) if function.docstring)


def _bare(file: SourceFile) -> Iterator[Conversation]:
    return (_chat(function) for function in _short(file) if not function.docstring)


def _short(file: SourceFile) -> Iterator[Function]:
    return (function for function in functions_of(file) if len(function.code) <= MAX_ANSWER_CHARS)


def _chat(function: Function) -> Conversation:
    messages = tuple(Message(m["role"], m["content"]) for m in function.messages())
    return Conversation(messages, origin=f"builtin:python:{function.path}:{function.name}")


def _pieces(file: SourceFile) -> Iterator[Conversation]:
    """The file cut at line ends into pieces of about `PIECE_CHARS`."""
    piece, first = "", 1
    for number, line in enumerate(file.text.splitlines(keepends=True), 1):
        if piece and len(piece) + len(line) > PIECE_CHARS:
            yield Conversation(text=piece, origin=f"builtin:python:{file.path}:{first}")
            piece, first = "", number
        piece += line
    if piece.strip():
        yield Conversation(text=piece, origin=f"builtin:python:{file.path}:{first}")


def _unique(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    seen: set[str] = set()
    for conversation in conversations:
        said = conversation.messages[-1].content if conversation.messages else conversation.text or ""
        if said not in seen:
            seen.add(said)
            yield conversation


_READ: dict[str, Reader] = {"docstrings": _documented, "bare": _bare, "files": _pieces}
