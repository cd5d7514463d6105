"""Random mutants: change one comparison, operator, constant or `min` of the code, and see whether its tests notice.

    python -m tests.mutants --seed 8 --count 300 --output out/mutants.jsonl

Run it in a clean clone of its own: it writes each mutant into the file, and restores the file afterwards. A mutant is
killed by the tests that are named after its file, that import it, or that `MORE` names, in at most `CPU_SECONDS`. Look
at each survivor: it needs a test, or it changes nothing that matters.
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
from pathlib import Path
from random import Random
from typing import NamedTuple, cast

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *(f"eagle_mlx/{name}" for name in ("decoding", "cache", "engine", "policy", "proposers", "heads", "formats")),
    *("train/step", "train/kinds", "data_pipelines/rendering.py", "serve/chat/parser.py"),
)
MORE = {
    "eagle_mlx/cache": "cache cache_buffers prefix_cuts prefix_files kv_budget tree",
    "eagle_mlx/decoding": "verify sampling filters tree processors noise",
    "eagle_mlx/engine": "engine groups grouping schedule pauses kv_budget prefix failing_steps prompts_in_turns",
    "eagle_mlx/engine/disk": "prefix_disk prefix_files prefix_identity",
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
    if code > 1 and code != 2:  # an error of pytest's own, such as a missing file
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
        change.path.write_text(change.source, encoding="utf-8")
        try:
            verdict = "killed" if is_killed(tests_of(change.path), ROOT / "out/mutant.log") else "survived"
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
