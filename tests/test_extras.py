"""An installation without extras works, and names the extra that a command needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.extras import EXTRAS

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HIDING = """
import sys

hidden, entry, sys.argv = sys.argv[1].split(","), sys.argv[2], sys.argv[3:]

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in hidden):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def command(entry):
    module, function = entry.split(":")
    return getattr(__import__(module, fromlist=[function]), function)()

sys.meta_path.insert(0, Hidden())
"""
ONE = "sys.exit(command(entry))"
ALL_HELP = """
commands, codes = sys.argv, []
for each, name in zip(entry.split(","), commands):
    for flag in ("--help", "--version"):
        sys.argv = [*name.split(), flag]
        try:
            codes.append(command(each))
        except SystemExit as end:
            codes.append(end.code)
sys.exit(any(codes))
"""
BASE_COMMANDS = ("eagle-bench", "eagle-chat", "eagle-convert", "eagle-doctor", "eagle-generate", "eagle-heads")
NEEDS = {"eagle-data": "train", "eagle-publish": "train", "eagle-serve": "serve", "eagle-train": "train"}
OF_EXTRAS = {module: name for extra in EXTRAS.values() for name, module in extra.items()}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def run_without(modules: list[str], command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(HIDING + ONE, ",".join(modules), PROJECT["scripts"][command], command, *arguments)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def imported(paths: list[Path]) -> set[str]:
    """Return the names of the distributions that files import directly."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                found.add(node.module)
    roots = {name.split(".")[0] for name in found if not any(f"{name}.".startswith(f"{m}.") for m in OF_EXTRAS)}
    known = packages_distributions()
    known["mlx"] = ["mlx"]  # several distributions share this folder
    return {known[root][0].lower().replace("_", "-") for root in roots - sys.stdlib_module_names - {"eagle_mlx"}}


def test_every_package_of_an_extra_is_looked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {extra: set(EXTRAS[extra]) for extra in EXTRAS} == {extra: names(extras[extra]) for extra in EXTRAS}
    assert extras["all"] == [f"eagle-mlx[{','.join(EXTRAS)}]"]
    assert "eagle-mlx[all]" in extras["dev"]


def test_the_base_is_what_the_library_and_its_commands_import() -> None:
    folders = ("eagle_mlx", "serve/bench", "train/convert")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths += (ROOT / "serve").glob("*.py")
    # mlx-lm brings jinja2 and regex in any case
    paths += [ROOT / "train" / "publish" / "card.py", ROOT / "serve" / "chat" / "call_parser.py"]
    assert imported(paths) == names(PROJECT["dependencies"])


def test_without_extras_every_command_shows_its_help_and_version() -> None:
    commands = [*sorted(PROJECT["scripts"]), "eagle-data make", "eagle-serve launch", "eagle-train report"]
    entries = ",".join(PROJECT["scripts"][command.split()[0]] for command in commands)
    hidden = OF_EXTRAS.keys() - {"h11"}  # huggingface_hub needs it, too
    ended = run(HIDING + ALL_HELP, ",".join(hidden), entries, *commands)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(f"usage: {command} " in ended.stdout for command in commands)
    assert all(f"{command} {version('eagle-mlx')}\n" in ended.stdout for command in commands)


@pytest.mark.parametrize("command", sorted(NEEDS))
def test_a_command_without_its_extra_says_what_to_type(command: str) -> None:
    extra = NEEDS[command]
    ended = run_without(list(EXTRAS[extra].values()), command, "--target", "missing")
    assert ended.stderr == (
        f"error: {command} needs packages that are not installed ({', '.join(EXTRAS[extra])}): "
        f"type: pip install 'eagle-mlx[{extra}]'\n"
    )
    assert (ended.returncode, ended.stdout) == (2, "")


def test_only_what_is_missing_is_named() -> None:
    ended = run_without(["datasets"], "eagle-train", "--target", "missing")
    assert ended.stderr == (
        "error: eagle-train needs packages that are not installed (datasets): type: pip install 'eagle-mlx[train]'\n"
    )


def test_a_bench_that_cannot_draw_measures_nothing(tmp_path: Path) -> None:
    ended = run_without(["matplotlib"], "eagle-bench", "--plot", str(tmp_path / "bench.png"))
    assert ended.stderr == (
        "error: eagle-bench --plot needs packages that are not installed (matplotlib): "
        "type: pip install 'eagle-mlx[train]'\n"
    )
    assert (ended.returncode, ended.stdout) == (2, "")


def test_every_command_is_one_of_the_two() -> None:
    assert {*BASE_COMMANDS, *NEEDS} == set(PROJECT["scripts"])


INTERRUPTED = """
import sys

where, sys.argv = sys.argv[1], ["/some/bin/eagle-train"]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from eagle_mlx.extras import train
sys.exit(train())
"""


@pytest.mark.parametrize("where", ["mlx", "mlx.core", "eagle_mlx.train.cli", "eagle_mlx.train.run"])
def test_a_command_that_is_interrupted_while_it_is_imported_says_so_in_one_line(where: str) -> None:
    ended = run(INTERRUPTED, where)
    assert ended.stderr == "interrupted\n"
    assert ended.returncode == 130


def test_a_program_that_imports_the_library_sees_the_interruption_itself() -> None:
    ended = run(INTERRUPTED.replace("eagle-train", "program.py"), "mlx")
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.returncode != 0
