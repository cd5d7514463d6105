"""An installation without extras works, and names the extra that a command needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.extras import module_of, packages_of
from eagle_mlx.train.report import write_plots
from tests.full import in_turn

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {extra: packages_of(extra) for extra in ("train", "serve", "datasets", "wandb", "plots")}
HIDING = """
import sys

hidden, lines = sys.argv[1].split(","), sys.argv[2:]
sys.modules["wandb"] = None  # mlx-lm imports it if it can: a fifth of the start
sys.modules.update(dict.fromkeys(hidden))

def command(entry):
    module, function = entry.split(":")
    return getattr(__import__(module, fromlist=[function]), function)()

statuses = []
for line in lines:
    entry, *sys.argv = line.split("\\n")
    statuses.append(command(entry))
sys.exit(statuses[0] if len({*statuses}) == 1 else str(statuses))
"""
NEEDS = {"eagle-serve": "serve", "eagle-train": "train"}
"""The commands that always need an extra."""
MODULES = {module_of(name): name for names in EXTRAS.values() for name in names}
HIDDEN = [name for name in MODULES if name not in ("transformers", "h11")]  # mlx-lm and huggingface_hub bring these


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def run_without(modules: list[str], *commands: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run commands in turn in one process, without these modules. Its exit code is that of every command."""
    lines = ["\n".join([PROJECT["scripts"][words[0]], *words]) for words in commands]
    return run(HIDING, ",".join(modules), *lines)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", program, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@cache
def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, at the top or later."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules.add(node.module)
    return modules


distributions = cache(packages_distributions)


def imported(*places: str) -> set[str]:
    """Return the names of the distributions that files import directly."""
    paths = [
        path for place in places for path in ((ROOT / place).rglob("*.py") if "." not in place else [ROOT / place])
    ]
    modules = set[str]().union(*map(imports_of, paths))
    providers = {**distributions(), "mlx": ["mlx"]}  # several distributions share this folder
    data = {name for name in modules if f"{name}.".startswith("mlx.data.")}
    roots = {name.partition(".")[0] for name in modules - data} - sys.stdlib_module_names - {"eagle_mlx"}
    names = {providers[root][0].lower().replace("_", "-") for root in roots}
    return names | ({"mlx-data"} if data else set())


def test_every_package_of_an_extra_is_looked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {extra: set(EXTRAS[extra]) for extra in EXTRAS} == {extra: names(extras[extra]) for extra in EXTRAS}
    assert extras["all"] == [f"eagle-mlx[{','.join(EXTRAS)}]"]
    assert "eagle-mlx[all]" in extras["dev"]


def test_the_page_of_installation_lists_every_extra_for_users() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `eagle-mlx\[(\w+)\]`", page, re.MULTILINE)) == {
        *PROJECT["optional-dependencies"],
    } - {"dev", "docs"}


def test_every_import_is_declared_and_every_declaration_is_imported() -> None:
    declared = {name for packages in EXTRAS.values() for name in packages} | names(PROJECT["dependencies"])
    assert imported("eagle_mlx", "serve", "train", "data_pipelines") == declared


@pytest.mark.parametrize(
    ("places", "extras"),
    [
        (("eagle_mlx", "serve/doctor", "serve/generate.py", "train/convert", "train/publish/upload.py"), ()),
        (("serve/bench",), ("plots",)),
        (("data_pipelines",), ("datasets",)),
        (("train",), ("train", "wandb", "plots")),
        (("serve/api", "serve/chat"), ("serve",)),
    ],
    ids=str,
)
def test_a_part_imports_only_the_base_and_its_extras(places: tuple[str, ...], extras: tuple[str, ...]) -> None:
    allowed = {name for extra in extras for name in EXTRAS[extra]}
    assert imported(*places) - names(PROJECT["dependencies"]) == allowed


@pytest.mark.parametrize("command", sorted(NEEDS))
def test_a_command_without_its_extra_says_what_to_type(command: str) -> None:
    extra = NEEDS[command]
    ended = run_without([module_of(name) for name in EXTRAS[extra]], (command, "--target", "missing"))
    assert ended.stderr == (
        f"error: {command} needs packages that are not installed ({', '.join(EXTRAS[extra])}): "
        f"type: pip install 'eagle-mlx[{extra}]'\n"
    )
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(
    ("hidden", "commands"),
    [
        (["pydantic"], {"eagle-train --target missing": ("pydantic", "eagle-train")}),
        (
            ["wandb", "matplotlib", "datasets", "llguidance", "fastapi", "sse_starlette"],
            {
                "eagle-train --target missing --wandb": ("wandb", "--wandb"),
                "eagle-train report checkpoints/head --plot x.png": ("matplotlib", "eagle-train report --plot"),
                "eagle-bench --plot x.png": ("matplotlib", "eagle-bench --plot"),
                "eagle-data inspect owner/name": ("datasets", "owner/name"),
                "eagle-generate x --target missing --thinking-budget 5": ("llguidance", "--thinking-budget"),
            },
        ),
    ],
)
def test_only_what_is_used_is_asked_for(hidden: list[str], commands: dict[str, tuple[str, str]]) -> None:
    ended = run_without(hidden, *(command.split() for command in commands))
    assert [line for line in ended.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {what} needs packages that are not installed ({MODULES[module]}): "
        f"type: pip install 'eagle-mlx[{next(extra for extra in EXTRAS if MODULES[module] in EXTRAS[extra])}]'"
        for module, what in commands.values()
    ]
    assert ended.returncode == 2


def test_without_extras_data_are_read_and_heads_are_published(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"prompt": "add", "completion": "def add(x): ..."}\n')
    inspect = ("eagle-data", "inspect", str(data), "--limit", "1", "--histogram", "0")
    publish = ("eagle-publish", str(ROOT / "checkpoints" / "head"), "--repo", "a/b", "--license", "mit", "--dry-run")
    ended = run_without(HIDDEN, inspect, (*publish, "--base-model", "a/c"))
    assert ended.returncode == 0, ended.stderr
    assert "1 conversation" in ended.stdout
    assert "would go to a/b" in ended.stdout


def test_a_run_without_matplotlib_has_no_plots_and_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_plots([{"kind": "train", "step": 1, "loss": 1.0}], tmp_path)
    assert not any(tmp_path.iterdir())
    assert "note: plotting needs packages" in capsys.readouterr().err


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


@pytest.mark.parametrize("where", in_turn(["mlx", "mlx.core", "eagle_mlx.train.run", "eagle_mlx.train.cli"]))
def test_a_command_that_is_interrupted_while_it_is_imported_says_so_in_one_line(where: str) -> None:
    ended = run(INTERRUPTED, where)
    assert ended.stderr == "interrupted\n"
    assert ended.returncode == 130


def test_a_program_that_imports_the_library_sees_the_interruption_itself() -> None:
    ended = run(INTERRUPTED.split("from eagle_mlx")[0] + "import eagle_mlx\neagle_mlx.Engine\n", "mlx")
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.returncode != 0


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_command_reads_weights_though_its_standard_streams_are_closed(closed: str, tmp_path: Path) -> None:
    program = "import sys; from eagle_mlx.extras import convert; sys.exit(convert())"
    words = [sys.executable, "-c", program, str(ROOT / "checkpoints" / "head"), "--to", "eagle3", "--output", "copy"]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], cwd=tmp_path, timeout=120, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "copy" / "model.safetensors").exists()
