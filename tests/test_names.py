"""Names and docstrings say what a thing is, so that a reader can begin in the middle of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("eagle_mlx", "train", "serve", "data_pipelines")
GRAMMAR = {"found", "each", "one", "known", "how", "said", "asked"}
"""Words that name no thing."""
NAMED = re.compile(
    rf"(?:^ *|\bfor |\blambda |[(,] ?)\(?(?:{'|'.join(sorted(GRAMMAR))})(?:(?:, \w+)*\)* (?:[|+]?=|:=|in) |: )", re.M
)
"""A value that gets such a name in an assignment, a loop or a signature; quicker than parsing all tests."""
MOST_IN_TESTS = 88
"""Values in tests with such names. The number may only fall."""
JUDGED = (ast.Name, ast.arg, ast.Assign, ast.Call, ast.Expr)
CLAUSE = re.compile(r"(What|Who|Whose|Whoever|Where|Which|How|That|Of|As|Kept)\b")


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """Return the nodes of the packages' files that a rule may forbid, each with the file's name."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return tuple(
        (str(file.relative_to(ROOT)), node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, JUDGED)
    )


def places(rule: Callable[[ast.AST], object]) -> list[str]:
    """Return the places of all nodes of the packages that a rule forbids."""
    return [f"{name}:{getattr(node, 'lineno', 1)}" for name, node in nodes() if rule(node)]


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
    assert places(names_of_grammar) == []


def test_fewer_and_fewer_values_of_tests_have_such_names() -> None:
    count = sum(len(NAMED.findall(file.read_text(encoding="utf-8"))) for file in (ROOT / "tests").rglob("*.py"))
    assert count == MOST_IN_TESTS, f"{count} values in tests have such names; rename them, or lower the constant"


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
