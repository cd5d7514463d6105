"""Names and docstrings say what a thing is, so that a reader can begin in the middle of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("eagle_mlx", "train", "serve", "data_pipelines")
GRAMMAR = {"found", "each", "one", "known", "how", "said", "asked"}
"""Words that name no thing."""
MAY_NAME = re.compile(rf"\b(?:{'|'.join(sorted(GRAMMAR))})(?: in\b|[,:)\]]| ?\W?=)")
"""Such a word where it may name a value. Only tests with one are parsed."""
JUDGED = (ast.Name, ast.arg, ast.Assign, ast.Call, ast.Expr)
CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Where|Which|How|That|Of|As|Kept)\b")


def nodes_of(folder: str, pattern: str | re.Pattern[str] = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes that a rule may forbid, each with its file's name, of a folder's files that have the pattern."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        if re.search(pattern, text := file.read_text(encoding="utf-8")):
            name = str(file.relative_to(ROOT))
            yield from ((name, node) for node in ast.walk(ast.parse(text)) if isinstance(node, JUDGED))


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """Return the nodes of the packages' files."""
    return tuple(pair for package in PACKAGES for pair in nodes_of(package))


def places(rule: Callable[[ast.AST], object], more: Iterable[tuple[str, ast.AST]] = ()) -> list[str]:
    """Return the places of all nodes of the packages, and of more nodes, that a rule forbids."""
    return [f"{name}:{getattr(node, 'lineno', 1)}" for name, node in chain(nodes(), more) if rule(node)]


def parts(target: ast.expr) -> Iterator[ast.expr]:
    """Yield what one side of an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from parts(part)
    else:
        yield target


def names_of_grammar(node: ast.AST) -> set[str]:
    names = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set[str]()
    return GRAMMAR & (names | ({node.arg} if isinstance(node, ast.arg) else set()))


def attributes_set_by(node: ast.AST) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [part for target in targets for part in parts(target) if isinstance(part, ast.Attribute)]


def sets_by_text(node: ast.AST) -> bool:
    """Return whether a node sets an attribute whose name is a text."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"


def docstring_of(node: ast.AST) -> str:
    """Return a docstring, of an attribute too; else an empty text."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def test_values_are_named_for_what_they_are() -> None:
    """Values of tests too."""
    assert places(names_of_grammar, nodes_of("tests", MAY_NAME)) == []


def test_an_assignment_sets_at_most_two_attributes_and_none_by_a_text() -> None:
    assert places(lambda node: len(attributes_set_by(node)) > 2 or sets_by_text(node)) == []


def test_a_type_error_is_ignored_with_its_code_and_a_reason() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "type: ignore" in line]
    assert [line for line in lines if not re.search(r"# type: ignore\[[\w, -]+\]  # \w", line)] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert places(lambda node: CLAUSE.match(docstring_of(node))) == []


@pytest.mark.parametrize(
    "line",
    [
        "for each in x: ...",
        "(found, y) = x",
        "def f(how): ...",
        "[one for one in x]",
        "asked += 1",
        "with x as (y, [said]): ...",
        "a.b = a.c = a.d = 0",
        "(a.b, (a.c, a.d)) = x",
        "setattr(a, 'b', 1)",
        "'What it reads.'",
    ],
)
def test_the_rules_find_what_they_forbid(line: str) -> None:
    tree = list(ast.walk(ast.parse(line)))
    rules = (names_of_grammar, lambda node: len(attributes_set_by(node)) > 2, sets_by_text)
    assert any(rule(node) for rule in rules for node in tree) or any(CLAUSE.match(docstring_of(node)) for node in tree)
    assert MAY_NAME.search(line) or not any(map(names_of_grammar, tree))
