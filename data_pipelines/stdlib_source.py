"""The built-in source `builtin:python`: the running Python's own standard library as training text."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 25
"""One file in this many is held out, chosen by the hash of its path."""

_GENERATED = ("encodings/", "pydoc_data/", "ensurepip/_bundled/", "lib2to3/tests/data/", "site-packages/")


@dataclass(frozen=True)
class SourceFile:
    path: str
    """Relative to the standard library, with forward slashes."""
    text: str


def stdlib_root() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def split_of(path: str) -> Split:
    """The split of a file, a function of its relative path alone, so every Python version agrees."""
    digest = hashlib.blake2s(path.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0 else "train"


def iter_files(split: Split, root: Path | None = None) -> Iterator[SourceFile]:
    """Yield the Python files of a split in sorted order; generated tables and unreadable files are left out."""
    root = root or stdlib_root()
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if any(part in path for part in _GENERATED) or split_of(path) != split:
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
    """Dedented, the `def` line (or lines) with its colon."""
    docstring: str
    """Cleaned; empty where there is none."""
    code: str
    """Dedented: the signature and the body without the docstring."""

    @property
    def prompt(self) -> str:
        return f'{self.signature}\n    """{self.docstring}"""' if self.docstring else self.signature

    def messages(self) -> list[dict[str, str]]:
        """The function as a conversation: signature and docstring in, code out."""
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.code}]


def functions_of(file: SourceFile, max_doc_chars: int = 400) -> Iterator[Function]:
    """Yield every function and method of a file that has a body beside its docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = _function(file.path, lines, node, max_doc_chars)
            if function is not None:
                yield function


def _function(
    path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, max_doc_chars: int
) -> Function | None:
    first, end = node.body[0], node.end_lineno
    if end is None or first.lineno == node.lineno:
        return None
    doc = ast.get_docstring(node, clean=False) or ""
    body_start = first.lineno
    if doc:
        if len(node.body) == 1 or first.end_lineno is None:
            return None
        body_start = first.end_lineno + 1
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : first.lineno - 1])).rstrip()
    code = textwrap.dedent("\n".join(lines[node.lineno - 1 : first.lineno - 1] + lines[body_start - 1 : end])).rstrip()
    paragraph = inspect.cleandoc(doc).split("\n\n")[0][:max_doc_chars].rstrip()
    return Function(path, node.name, signature, paragraph, code) if signature.endswith(":") else None


def iter_functions(split: Split, root: Path | None = None) -> Iterator[Function]:
    """Yield every function of a split, file by file."""
    for file in iter_files(split, root):
        yield from functions_of(file)
