"""Random mutants: change one comparison, operator, constant or `min` of the code, and see whether its tests notice.

    coverage run -m pytest --junitxml out/tests.xml     # once: which tests execute a line, and how long they take
    python -m tests.mutants --seed 8 --count 300 --output out/mutants.jsonl

Run it in a clean clone of its own: it writes each mutant into the file, and restores the file afterwards. A mutant is
killed by the tests that execute its line, the shortest first, in at most `CPU_SECONDS`. If only fixtures execute it, it
is killed by the tests that are named after its file, that import it, or that `MORE` names. Look at each survivor: it
needs a test, or it changes nothing that matters.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple, cast
from xml.etree import ElementTree

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
COVERAGE, TIMES = ROOT / "out/coverage", ROOT / "out/tests.xml"
FOLDERS = (
    *(f"eagle_mlx/{name}" for name in ("decoding", "cache", "engine", "policy", "proposers", "heads", "formats")),
    *("train/step", "train/kinds", "data_pipelines/rendering.py", "serve/chat/parser.py"),
)
MORE = {
    "eagle_mlx/cache": "cache cache_buffers prefix_cuts prefix_files kv_budget tree",
    "eagle_mlx/decoding": "verify sampling filters tree processors noise",
    "eagle_mlx/engine": "engine groups grouping schedule pauses kv_budget prefix failing_steps prompts_in_turns",
    "eagle_mlx/engine/disk": "prefix_disk prefix_files prefix_identity prefix_database",
    "eagle_mlx/policy": "policy throughput_policy",
    "eagle_mlx/proposers": "proposers hostile_proposers draft_model growth heads blocks penalized_drafts",
    "eagle_mlx/heads": "heads heads_golden formats_kinds logits blocks blocks_golden peagle quantized_heads",
    "eagle_mlx/formats": "formats formats_kinds formats_loaders formats_damage blocks_formats formats_torch",
    "train/step": "step losses unroll block_kinds schedule guard",
    "train/kinds": "kinds block_kinds linear_start unroll last_layers start",
    "data_pipelines": "rendering rendering_tools rendering_shapes",
    "serve/chat": "parser call_formats",
}
"""The tests of a folder, besides those of its files."""
CPU_SECONDS = 120
"""A mutant that loops for ever is killed, too."""
MOST_SECONDS = 60.0
"""Seconds of the tests that try a mutant, as they took without it; the shortest are tried first."""

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
    line: int
    before: str
    after: str
    source: str


class _Change(ast.NodeTransformer):
    """Counts the places that can be changed, and changes the one of a number."""

    def __init__(self, number: int = -1, rng: Random | None = None):
        self.number, self.rng = number, rng or Random(0)
        self.count = 0
        self.line = 0
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
        self.line, self.before = node.lineno, ast.unparse(node)
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
    return Mutant(path, change.line, change.before, change.after, ast.unparse(ast.fix_missing_locations(tree)))


def sample(seed: int, count: int) -> Iterator[Mutant]:
    """Yield random mutants of the files in `FOLDERS`, any place being as likely as any other."""
    rng = Random(seed)
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split() if name.endswith(".py")]
    every = [(path, number) for path in paths for number in range(places(path))]
    print(f"{len(every)} places in {len(paths)} files")
    for path, number in rng.sample(every, count):
        yield mutant(path, number, rng)


def tests_of(path: Path) -> list[str]:
    """Return the test files of a module: those named after it, that import it, and those of its folder."""
    stem = path.stem if path.stem != "__init__" else path.parent.name
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    pattern = re.compile(rf"\b{re.escape(module)}\b")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [test for test in tests if test.stem.startswith(f"test_{stem}")]
    importing = [test for test in tests if pattern.search(test.read_text(encoding="utf-8"))]
    folder = path.parent
    while folder.relative_to(ROOT).as_posix() not in MORE:
        folder = folder.parent
    names = {f"test_{name}" for name in MORE[folder.relative_to(ROOT).as_posix()].split()}
    return list(dict.fromkeys(map(str, [*named, *importing, *(test for test in tests if test.stem in names)])))


@cache
def _seconds() -> dict[str, float]:
    """Return the seconds of each test function, all its parameters together."""
    seconds = Counter[str]()
    for case in ElementTree.parse(TIMES).iter("testcase"):
        name = f"{case.attrib['classname']}.{case.attrib['name'].split('[')[0]}"
        seconds[name] += float(case.attrib["time"])
    return dict(seconds)


@cache
def _contexts(path: Path) -> dict[int, list[str]]:
    data = CoverageData(str(COVERAGE))
    data.read()
    return data.contexts_by_lineno(str(path))


def _statement(path: Path, line: int) -> range:
    """Return the lines of the statement at a line, without the body of a compound one."""
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # outer statements come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None)
            lines = range(node.lineno, body[0].lineno if body else (node.end_lineno or line) + 1)
    return lines if line in lines else range(line, line + 1)


def tests_that_execute(path: Path, line: int) -> list[str]:
    """Return the tests that execute a line, the shortest first, of at most `MOST_SECONDS`."""
    names = {name for at in _statement(path, line) for name in _contexts(path).get(at, [])}
    times = sorted((seconds, name) for name, seconds in _seconds().items() if name in names)
    tests, total = [], 0.0
    for seconds, name in times:
        total += seconds
        if tests and total > MOST_SECONDS:
            break
        module, test = name.rsplit(".", 1)
        file = ROOT / f"{module.replace('.', '/')}.py"
        if file.exists() and f"def {test}(" in file.read_text(encoding="utf-8"):  # state machines have other names
            tests.append(f"{file}::{test}")
    return tests


def is_killed(tests: list[str], log: Path) -> bool:
    """Run tests in a fork, which has imported what they need but the project, and return whether one failed."""
    pid = os.fork()
    if not pid:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        for name in [name for name in sys.modules if name.split(".")[0] == "eagle_mlx" or name.startswith("tests.")]:
            del sys.modules[name]
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2, 4) and code > 0:  # 2, 4: a file of tests cannot be imported
        raise RuntimeError(f"pytest exited with {code}; see {log}")
    return code != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--output", type=Path, default=ROOT / "out/mutants.jsonl", help="a line for each mutant")
    arguments = parser.parse_args()
    os.environ.update(OPENBLAS_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", MLX_DISABLE_COMPILE="1")
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    import eagle_mlx  # noqa: F401, I001  # first: it brings the fast BLAS before MLX
    import hypothesis, mlx_lm.utils, mlx_lm.models.qwen3, pytest, transformers  # noqa: E401, F401

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    counts = Counter[str]()
    for change in sample(arguments.seed, arguments.count):
        original = change.path.read_bytes()
        tests = tests_that_execute(change.path, change.line) or tests_of(change.path)
        change.path.write_text(change.source, encoding="utf-8")
        try:
            verdict = "killed" if is_killed(tests, ROOT / "out/mutant.log") else "survived"
        finally:
            change.path.write_bytes(original)
        counts[verdict] += 1
        place = f"{change.path.relative_to(ROOT)}:{change.line}"
        line = {"place": place, "verdict": verdict, "before": change.before, "after": change.after}
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if verdict == "survived":
            print(f"{place}: {change.before} -> {change.after}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
