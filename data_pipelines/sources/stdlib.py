"""The built-in source `builtin:python`: the running Python's standard library as conversations."""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from eagle_mlx.errors import DataError

from ..conversation import HELDOUT_ONE_IN, Conversation, Message
from .tables import pieces

Split = Literal["train", "heldout"]
_GENERATED = ("encodings/", "pydoc_data/", "ensurepip/_bundled/", "lib2to3/tests/data/", "site-packages/")


@dataclass(frozen=True)
class SourceFile:
    path: str
    """Path relative to the standard library, with forward slashes."""
    text: str


def iter_files(split: Split) -> Iterator[SourceFile]:
    """Yield the readable, not generated Python files of a split in order. A file's split depends only on its path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        is_held_out = int.from_bytes(hashlib.blake2s(path.encode()).digest()[:4], "big") % HELDOUT_ONE_IN == 0
        if any(part in path for part in _GENERATED) or is_held_out != (split == "heldout"):
            continue
        try:
            yield SourceFile(path, file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue


@dataclass(frozen=True)
class SourceFunction:
    path: str
    name: str
    signature: str
    """The dedented `def` line (or lines) with the colon."""
    docstring: str
    """The cleaned docstring, or ""."""
    code: str
    """The dedented signature and body, without the docstring."""

    @property
    def prompt(self) -> str:
        """Signature and docstring: what the user says. The assistant answers with the code."""
        return f'{self.signature}\n    """{self.docstring}"""' if self.docstring else self.signature


def functions_of(file: SourceFile) -> Iterator[SourceFunction]:
    """Yield every function and method that has more than a docstring in its body."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = _function(file.path, lines, node)
            if function is not None:
                yield function


def _function(path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> SourceFunction | None:
    first, end = node.body[0], node.end_lineno
    if end is None or first.lineno == node.lineno:
        return None
    doc = ast.get_docstring(node, clean=False) or ""
    body_start = first.lineno
    if doc:
        if len(node.body) == 1 or first.end_lineno is None:
            return None
        body_start = first.end_lineno + 1
    head = lines[node.lineno - 1 : first.lineno - 1]
    signature = textwrap.dedent("\n".join(head)).rstrip()
    code = textwrap.dedent("\n".join(head + lines[body_start - 1 : end])).rstrip()
    paragraph = inspect.cleandoc(doc).split("\n\n")[0][:MAX_DOC_CHARS].rstrip()
    return SourceFunction(path, node.name, signature, paragraph, code) if signature.endswith(":") else None


Side = Literal["train", "heldout", "all"]
Reader = Callable[[SourceFile], Iterator[Conversation]]

MAX_DOC_CHARS = 400
MAX_ANSWER_CHARS = 1200
_BUFFER = 1024
"""Number of conversations per kind in the shuffle buffer, so that a few can be drawn without reading every file."""

_NAMES = {
    "python": ("docstrings", "bare", "files"),
    "python-chat": ("docstrings", "bare"),
    "python-docstrings": ("docstrings",),
    "python-files": ("files",),
}


def library_conversations(spec: str, split: Side, seed: int | None) -> Iterator[Conversation]:
    """Yield a split of `builtin:…` without repeated answers, in an order fixed by the seed; None keeps the file order.

    Raises DataError for an unknown name.
    """
    kinds = _NAMES.get(spec.removeprefix("builtin:"))
    if kinds is None:
        raise DataError(f"{spec}: the built-in sources are {', '.join(f'builtin:{n}' for n in _NAMES)}")
    files = [file for part in get_args(Split) if split in (part, "all") for file in iter_files(part)]
    if seed is None:
        return _unique(chain.from_iterable(_KINDS[kind][1](file) for file in files for kind in kinds))
    streams = {kind: _shuffled(files, _KINDS[kind][1], random.Random(f"{seed}/{kind}")) for kind in kinds}
    return _unique(_mix(streams, random.Random(seed)))


def _mix(streams: dict[str, Iterator[Conversation]], rng: random.Random) -> Iterator[Conversation]:
    while streams:
        [kind] = rng.choices(list(streams), [_KINDS[kind][0] for kind in streams])
        conversation = next(streams[kind], None)
        if conversation is None:
            del streams[kind]
        else:
            yield conversation


def _shuffled(files: list[SourceFile], read: Reader, rng: random.Random) -> Iterator[Conversation]:
    """Yield what `read` finds in the files, in random order from a buffer that is kept full."""
    buffer: list[Conversation] = []
    for conversation in chain.from_iterable(map(read, rng.sample(files, len(files)))):
        buffer.append(conversation)
        if len(buffer) > _BUFFER:
            at = rng.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


def _chats(documented: bool, file: SourceFile) -> Iterator[Conversation]:
    """Yield the file's short functions, either those with a docstring or those without."""
    for function in functions_of(file):
        if len(function.code) <= MAX_ANSWER_CHARS and bool(function.docstring) == documented:
            messages = (Message("user", function.prompt), Message("assistant", function.code))
            yield Conversation(messages, origin=f"builtin:python:{function.path}:{function.name}")


def _unique(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    seen: set[str] = set()
    for conversation in conversations:
        said = conversation.messages[-1].content if conversation.messages else conversation.text or ""
        if said not in seen:
            seen.add(said)
            yield conversation


_KINDS: dict[str, tuple[float, Reader]] = {
    "docstrings": (0.3, partial(_chats, True)),
    "bare": (0.5, partial(_chats, False)),
    "files": (0.2, lambda file: pieces(file.text, f"builtin:python:{file.path}")),
}
"""Shares and readers of functions with a docstring, functions without one, and pieces of files. A kind that is used up
drops out.
"""
