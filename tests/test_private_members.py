"""No test uses a private member of the project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("eagle_mlx", "train", "serve", "data_pipelines", "checkpoints", "benchmarks")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Return a file's private names: functions, classes, constants, fields and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the names that a file uses from others, with line numbers: imported, read, or replaced by monkeypatch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, word.rpartition(".")[2]) for word in words)


def trespasses(source: str, private: set[str]) -> list[str]:
    """Return a test's uses of the project's private names, except names that the test defines itself."""
    if private.isdisjoint(re.findall(r"\b_\w+", source)):
        return []
    tree = ast.parse(source)
    own = set(defined(tree))
    return [f"line {line}: {name}" for line, name in used(tree) if name in private and name not in own]


def private_names() -> set[str]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in defined(ast.parse(path.read_text("utf-8"))) if is_private(name)}


def test_no_test_uses_a_private_member() -> None:
    private = private_names()
    by_file = {
        str(path.relative_to(ROOT)): uses
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (uses := trespasses(path.read_text("utf-8"), private))
    }
    assert by_file == {}


def test_a_use_is_noticed() -> None:
    private = {"_groups", "_pick"}
    assert trespasses("engine._groups.batches", private)
    assert trespasses("from eagle_mlx.engine.groups import _pick", private)
    assert trespasses("monkeypatch.setattr('eagle_mlx.engine.groups._pick', None)", private)
    assert trespasses("monkeypatch.setattr(groups, '_pick', None)", private)
    assert not trespasses("class Mine:\n    def __init__(self):\n        self._groups = []\n", private)
