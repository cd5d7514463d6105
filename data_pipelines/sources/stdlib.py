"""The built-in source `builtin:python`: the running Python's standard library as conversations."""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from eagle_mlx.errors import DataError

from ..conversation import HELDOUT_ONE_IN, Conversation, Message
from .tables import pieces

Split = Literal["train", "heldout"]
MAX_DOC_CHARS = 400
MAX_ANSWER_CHARS = 1200
_BUFFER = 1024
"""Number of conversations per kind in the shuffle buffer, so that a few can be drawn without reading every file."""
_GENERATED = ("encodings/", "pydoc_data/", "ensurepip/_bundled/", "lib2to3/tests/data/", "site-packages/")
_SHARES = {"docstrings": 0.3, "bare": 0.5, "files": 0.2}
"""Shares of functions with a docstring, functions without, and pieces of files. A kind that is used up drops out."""
_NAMES = {
    "builtin:python": tuple(_SHARES),
    "builtin:python-chat": ("docstrings", "bare"),
    "builtin:python-docstrings": ("docstrings",),
    "builtin:python-files": ("files",),
}


class SourceFile(NamedTuple):
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


class SourceFunction(NamedTuple):
    path: str
    name: str
    prompt: str
    """The dedented `def` line (or lines) and the docstring: what the user says. The assistant answers with the code."""
    docstring: str
    """The first paragraph of the cleaned docstring, or ""."""
    code: str
    """The dedented signature and body, without the docstring."""


def functions_of(file: SourceFile) -> Iterator[SourceFunction]:
    """Yield every function and method that has more than a docstring in its body."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first, docstring = node.body[0], ast.get_docstring(node, clean=False) or ""
        if first.lineno == node.lineno or (docstring and len(node.body) == 1):
            continue
        head = lines[node.lineno - 1 : first.lineno - 1]
        body = lines[first.end_lineno if docstring else first.lineno - 1 : node.end_lineno]
        signature = textwrap.dedent("\n".join(head)).rstrip()
        if signature.endswith(":"):
            paragraph = inspect.cleandoc(docstring).split("\n\n")[0][:MAX_DOC_CHARS].rstrip()
            prompt = f'{signature}\n    """{paragraph}"""' if paragraph else signature
            code = textwrap.dedent("\n".join(head + body)).rstrip()
            yield SourceFunction(file.path, node.name, prompt, paragraph, code)


def library_conversations(
    spec: str, split: Literal["train", "heldout", "all"], seed: int | None
) -> Iterator[Conversation]:
    """Yield a split without repeated answers, in an order fixed by the seed (None: of the files). Raises DataError."""
    kinds = _NAMES.get(spec)
    if kinds is None:
        raise DataError(f"{spec}: the built-in sources are {', '.join(_NAMES)}")
    files = [file for part in get_args(Split) if split in (part, "all") for file in iter_files(part)]
    if seed is None:
        return _unique(chain.from_iterable(_conversations(kind, file) for file in files for kind in kinds))
    streams = {kind: _shuffled(files, kind, random.Random(f"{seed}/{kind}")) for kind in kinds}
    return _unique(_mix(streams, random.Random(seed)))


def _conversations(kind: str, file: SourceFile) -> Iterator[Conversation]:
    origin = f"builtin:python:{file.path}"
    if kind == "files":
        yield from pieces(file.text, origin)
        return
    for function in functions_of(file):
        if len(function.code) <= MAX_ANSWER_CHARS and bool(function.docstring) == (kind == "docstrings"):
            messages = (Message("user", function.prompt), Message("assistant", function.code))
            yield Conversation(messages, origin=f"{origin}:{function.name}")


def _mix(streams: dict[str, Iterator[Conversation]], rng: random.Random) -> Iterator[Conversation]:
    while streams:
        [kind] = rng.choices(list(streams), [_SHARES[kind] for kind in streams])
        conversation = next(streams[kind], None)
        if conversation is None:
            del streams[kind]
        else:
            yield conversation


def _shuffled(files: list[SourceFile], kind: str, rng: random.Random) -> Iterator[Conversation]:
    """Yield the files' conversations in random order, from a buffer that is kept full."""
    buffer: list[Conversation] = []
    order = rng.sample(files, len(files))
    for conversation in chain.from_iterable(map(partial(_conversations, kind), order)):
        buffer.append(conversation)
        if len(buffer) > _BUFFER:
            at = rng.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()
    rng.shuffle(buffer)
    yield from buffer


def _unique(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    seen: set[str] = set()
    for conversation in conversations:
        answer = conversation.messages[-1].content if conversation.messages else conversation.text or ""
        if answer not in seen:
            seen.add(answer)
            yield conversation
