"""The built-in source `builtin:python`: the running Python's standard library as conversations."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
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
class Function:
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


def functions_of(file: SourceFile) -> Iterator[Function]:
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


def _function(path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function | None:
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
    return Function(path, node.name, signature, paragraph, code) if signature.endswith(":") else None


MAX_DOC_CHARS = 400
MAX_ANSWER_CHARS = 1200

_NAMES = {
    "python": ("docstrings", "bare", "files"),
    "python-chat": ("docstrings", "bare"),
    "python-docstrings": ("docstrings",),
    "python-files": ("files",),
}
"""Parts of a file: functions with a docstring, functions without one, and pieces of its text."""


def library_files(spec: str, split: Literal["train", "heldout", "all"]) -> list[Callable[[], Iterator[Conversation]]]:
    """Return a function per file of `builtin:…` that yields conversations with new answers. Raises DataError."""
    parts = _NAMES.get(spec.removeprefix("builtin:"))
    if parts is None:
        raise DataError(f"{spec}: the built-in sources are {', '.join(f'builtin:{n}' for n in _NAMES)}")
    files = [file for each in get_args(Split) if split in (each, "all") for file in iter_files(each)]
    seen: set[str] = set()
    return [partial(_conversations, file, parts, seen) for file in files]


def _conversations(file: SourceFile, parts: Collection[str], seen: set[str]) -> Iterator[Conversation]:
    origin = f"builtin:python:{file.path}"
    for function in functions_of(file):
        part = "docstrings" if function.docstring else "bare"
        if part in parts and len(function.code) <= MAX_ANSWER_CHARS and function.code not in seen:
            seen.add(function.code)
            messages = (Message("user", function.prompt), Message("assistant", function.code))
            yield Conversation(messages, origin=f"{origin}:{function.name}")
    if "files" in parts:
        yield from pieces(file.text, origin)
