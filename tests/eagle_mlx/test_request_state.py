"""Only a request's own methods change its progress."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
STATE = RequestState(Request([1], SamplingParams(), 0, 1, frozenset()))
FIELDS = frozenset([*vars(STATE), *vars(STATE.counts)]) - {"request"}
OTHERS = {"penalties", "portion", "progress", "report", "timings", "totals", "warmup"}
"""Names of other classes' objects with fields of the same names. Many have a `request`."""
CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}
"""Methods of lists that change them."""


def changed(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield attributes that the code assigns, deletes or changes in place, except those of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target: ast.expr = node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        else:
            continue
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
            yield target


def test_no_other_module_changes_the_state_of_a_request() -> None:
    files = [path for part in ("eagle_mlx", "serve", "data_pipelines", "train") for path in (ROOT / part).rglob("*.py")]
    faults = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in files
        if path.name != "request_state.py"
        for node in changed(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in FIELDS and ast.unparse(node.value).split(".")[-1] not in OTHERS
    ]
    assert faults == []
