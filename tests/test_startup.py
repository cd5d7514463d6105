"""Commands that load no model import little, and the modules that commands name for later exist."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

import eagle_mlx as em
from eagle_mlx.catalog.head_search import PREFERRED
from eagle_mlx.heads import KINDS
from eagle_mlx.train.kind_settings import KIND_SETTINGS, LAYOUTS

ROOT = Path(__file__).parent.parent
LIGHT = {"yaml", "_yaml"}
"""What `--help` may import besides the standard library: PyYAML, and what Cython adds to it."""
COMMANDS = {
    "eagle-data": ("", "make", "inspect", "regenerate", "collect", "presets"),
    "eagle-heads": ("", "list", "find", "pull", "compare", "certify", "show"),
    "eagle-convert": ("", "mtp"),
    "eagle-serve": ("", "launch"),
    "eagle-train": ("", "report"),
}
"""Subcommands by command."""
WITHOUT_MODEL = {
    "eagle-data": ["presets"],
    "eagle-heads": ["show checkpoints/head", "find Qwen3-8B-4bit", "find checkpoints/target", "list"],
}
"""Subcommands that load no model: they may import MLX, but neither mlx-lm nor transformers."""
PROGRAM = """
import sys
from pkgutil import resolve_name

before, (entry, *lines) = set(sys.modules), sys.argv[1:]
for line in lines:
    sys.argv = line.split()
    try:
        resolve_name(entry)()
    except SystemExit as end:
        assert not end.code, line
    names = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
    print("imported", *names, file=sys.stderr)
"""


def scripts() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["scripts"])


@pytest.mark.parametrize("command", scripts())
def test_help_and_version_import_no_package_but_yaml(command: str) -> None:
    parts = COMMANDS.get(command, ("",))
    lines = [f"{command} {part} {flag}" for part in parts for flag in ("--help", "--version")]
    working = [f"{command} {part}" for part in WITHOUT_MODEL.get(command, ())]
    line = [sys.executable, "-c", PROGRAM, scripts()[command], *lines, *working]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("usage: ") == len(parts)
    assert ended.stdout.count(f" {em.__version__}\n") == len(parts)
    imported = [{*line.split()[1:]} for line in ended.stderr.splitlines() if line.startswith("imported")]
    assert {name for name in imported[len(lines) - 1] if "cython" not in name} - LIGHT == {"eagle_mlx"}
    assert not imported[-1] & {"mlx_lm", "transformers"}


def test_every_function_that_is_imported_late_exists() -> None:
    count = 0
    for folder in ("eagle_mlx", "serve", "train", "data_pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name in ("extras.py", "late.py"):  # the entry points, which the test above runs
                continue
            package = ".".join((*(() if folder == "eagle_mlx" else ("eagle_mlx",)), *path.relative_to(ROOT).parts[:-1]))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "late":
                    name = eval(compile(ast.Expression(node.args[0]), path.name, "eval"), {"__package__": package})
                    assert callable(resolve_name(name)), f"{path}: {name}"
                    count += 1
    assert count > 10


def test_the_kinds_and_layouts_in_the_help_are_those_of_the_library() -> None:
    assert KINDS.keys() == KIND_SETTINGS.keys()
    assert {kind.name: kind.title for kind in KINDS.values()} == PREFERRED
    assert {kind.name for kind in KINDS.values() if kind.mode == "mtp"} == {"mtp"}
    lines = []
    for name in sorted({layout.name for kind in KINDS.values() for layout in kind.formats}):
        pairs = [(kind.title, layout) for kind in KINDS.values() for layout in kind.formats if layout.name == name]
        readers = dict.fromkeys(reader for _, layout in pairs for reader in layout.readers)
        lines.append(f"  {name:<12} {', '.join(title for title, _ in pairs)}: {', '.join(readers) or 'EAGLE-MLX'}\n")
    assert "".join(lines) == LAYOUTS
