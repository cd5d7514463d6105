"""Random mutants: change one comparison, operator, constant or `min` of the code, and see whether its tests notice.

    make test PYTEST_ARGS="-p tests.lines"
    python -m tests.mutants --seed 8 --count 300 --output out/mutants.jsonl

Run both in a clean clone of their own: the second writes each mutant into the file, and restores the file afterwards.
The first records which test runs which line (`out/lines`), and takes half as long again as the tests alone. A mutant is
killed by the tests that run its line, in at most `CPU_SECONDS`. Look at each survivor: it needs a test, or it changes
nothing that matters.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from coverage import CoverageData

from tests.lines import FOLDER, ROOT

FOLDERS = (
    *(f"eagle_mlx/{name}" for name in ("decoding", "cache", "engine", "policy", "proposers", "heads", "formats")),
    *("train/step", "train/kinds", "data_pipelines/rendering.py", "serve/chat/parser.py"),
)
CPU_SECONDS = 90
"""What the tests of one mutant may take."""
NEAREST = 40
"""Tests of a line that come first, because they run the fewest other lines. The rest come in random order: thousands
run the lines of an engine, and the smallest of them all test the same."""

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_CALLS = {"min": "max", "minimum": "maximum", "any": "all"}
_CALLS |= {other: name for name, other in _CALLS.items()}


class Mutant(NamedTuple):
    """A file with one change."""

    path: Path
    lines: range
    before: str
    after: str
    source: str


class _Change(ast.NodeTransformer):
    """Counts the places that can be changed, and changes the one of a number."""

    def __init__(self, number: int = -1, rng: Random | None = None):
        self.number, self.rng = number, rng or Random(0)
        self.count = 0
        self.lines = range(0)
        self.before = ""
        self.after = ""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return node  # texts, and what cannot fail
        if isinstance(node, ast.AnnAssign):  # types are not looked at
            node.value = node.value and cast(ast.expr, self.visit(node.value))
            return node
        if isinstance(node, ast.arg):
            return node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # decorators freeze classes and bound caches
            node.body = [cast(ast.stmt, self.visit(statement)) for statement in node.body]
            if isinstance(node, ast.FunctionDef):
                node.args = cast(ast.arguments, self.visit(node.args))
            return node
        if self._can_change(node):
            if self.count == self.number:
                return self._change(node)
            self.count += 1
        return self.generic_visit(node)

    def _change(self, node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.expr)
        self.count += 1
        self.lines, self.before = range(node.lineno, (node.end_lineno or node.lineno) + 1), ast.unparse(node)
        node = self._other(node)
        self.after = ast.unparse(node)
        return node

    def _can_change(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return len(node.ops) == 1
        if isinstance(node, ast.BinOp):
            return type(node.op) in _OTHER
        if isinstance(node, ast.Constant):
            return type(node.value) in (int, float, bool)
        if isinstance(node, ast.Call):
            return _name(node.func) in _CALLS
        return isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))

    def _other(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Compare):
            node.ops = [_OTHER[type(node.ops[0])]()]  # type: ignore[list-item]
        elif isinstance(node, ast.BinOp | ast.BoolOp):
            node.op = _OTHER[type(node.op)]()  # type: ignore[assignment]
        elif isinstance(node, ast.UnaryOp):
            return ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
        elif isinstance(node, ast.Constant):
            node.value = self._other_value(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            node.func.id = _CALLS[node.func.id]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func.attr = _CALLS[node.func.attr]
        return node

    def _other_value(self, value: object) -> bool | int | float:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + self.rng.choice((1, -1))
        assert isinstance(value, float)
        return value * self.rng.choice((0.8, 1.25)) if value else 1.0


def _name(func: ast.expr) -> str:
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def places(path: Path) -> int:
    """Return the number of mutants of a file."""
    change = _Change()
    change.visit(ast.parse(path.read_text(encoding="utf-8")))
    return change.count


def mutant(path: Path, number: int, rng: Random) -> Mutant:
    change = _Change(number, rng)
    tree = change.visit(ast.parse(path.read_text(encoding="utf-8")))
    return Mutant(path, change.lines, change.before, change.after, ast.unparse(ast.fix_missing_locations(tree)))


def sample(seed: int, count: int) -> Iterator[Mutant]:
    """Yield random mutants of the files in `FOLDERS`, any place being as likely as any other."""
    rng = Random(seed)
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split() if name.endswith(".py")]
    every = [(path, number) for path in paths for number in range(places(path))]
    print(f"{len(every)} places in {len(paths)} files")
    for path, number in rng.sample(every, count):
        yield mutant(path, number, rng)


class Lines:
    """Which tests run a line, as `tests/lines.py` recorded it."""

    def __init__(self) -> None:
        if not (files := sorted(FOLDER.glob("*.coverage"))):
            raise SystemExit(f"{FOLDER} has no records. First run `make test PYTEST_ARGS='-p tests.lines'` here.")
        self._data = CoverageData(no_disk=True)
        for file in files:
            data = CoverageData(str(file))
            data.read()
            self._data.update(data)
        self._number = Counter[str]()
        """How many lines a test runs."""
        for path in self._data.measured_files():
            for tests in self._data.contexts_by_lineno(path).values():
                self._number.update(tests)

    def tests_of(self, change: Mutant) -> list[str]:
        """Return the tests that run a mutant's line, or any line of its file if only an import runs it."""
        by_line = self._data.contexts_by_lineno(change.path.relative_to(ROOT).as_posix())
        tests = set[str]().union(*(by_line.get(line, ()) for line in change.lines)) - {""}
        tests = tests or set[str]().union(*by_line.values()) - {""}
        nearest = sorted(tests, key=lambda test: (self._number[test], test))
        return [*nearest[:NEAREST], *Random(0).sample(nearest[NEAREST:], max(0, len(nearest) - NEAREST))]


class _Enough:
    """Ends a process in which no test failed within the time."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if time.process_time() > CPU_SECONDS and not report.failed:
            os._exit(0)


def is_killed(tests: list[str], log: Path) -> bool:
    """Run tests in a fork, which has imported what they need but the project, and return whether one failed."""
    pid = os.fork()
    if not pid:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (2 * CPU_SECONDS, 2 * CPU_SECONDS + 5))  # a loop without end
        for name in [name for name in sys.modules if name.split(".")[0] == "eagle_mlx" or name.startswith("tests.")]:
            del sys.modules[name]
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], [_Enough()])))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 1, 2) or code < 0 or "ERROR collecting" in log.read_text(encoding="utf-8"):
        return code != 0
    raise RuntimeError(f"pytest exited with {code}; see {log}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    told = "a line for each mutant; a run goes on after them"
    parser.add_argument("--output", type=Path, default=ROOT / "out/mutants.jsonl", help=told)
    arguments = parser.parse_args()
    os.environ.update(OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", MLX_DISABLE_COMPILE="1")
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    import eagle_mlx  # noqa: F401, I001  # first: it brings the fast BLAS before MLX
    import hypothesis, mlx_lm.utils, mlx_lm.models.qwen3, pytest, transformers  # noqa: E401, F401

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    counts, lines = Counter[str](), Lines()
    done = len(arguments.output.read_text(encoding="utf-8").splitlines()) if arguments.output.exists() else 0
    for change in islice(sample(arguments.seed, arguments.count), done, None):
        original = change.path.read_bytes()
        change.path.write_text(change.source, encoding="utf-8")
        try:
            verdict = "killed" if is_killed(lines.tests_of(change), ROOT / "out/mutant.log") else "survived"
        finally:
            change.path.write_bytes(original)
        counts[verdict] += 1
        place = f"{change.path.relative_to(ROOT)}:{change.lines[0]}"
        line = {"place": place, "verdict": verdict, "before": change.before, "after": change.after}
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if verdict == "survived":
            print(f"{place}: {change.before} -> {change.after}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
