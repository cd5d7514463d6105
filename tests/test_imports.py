"""Import rules between modules, checked in the source; and that the check finds violations."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
APPLICATIONS = ("data_pipelines", "serve", "train")
ALLOWED_BETWEEN = {("train", "data_pipelines"), ("serve", "train")}
"""The only imports between applications, and only of names in the other's `__init__`."""
MODEL_MODULES = ("eagle_mlx.target", "eagle_mlx.cache", "eagle_mlx.heads")
"""The only modules that use mlx_lm.models."""
COMMAND_LINES = ("eagle_mlx.serve.generate", "eagle_mlx.serve.heads", "eagle_mlx.serve.terminal_chat")
"""Commands in modules not called `cli`."""
SEAM = ("eagle_mlx.proposers", "eagle_mlx.proposers.base")
"""The only modules of proposers that the engine imports: no concrete proposer."""
HOOKS = "eagle_mlx.hooks"
"""The only module that changes the class of modules."""


def module_name(path: Path) -> str:
    """Return the name under which a file is imported: eagle_mlx.train.x for train/x.py."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "eagle_mlx" else ("eagle_mlx", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path, source: str) -> list[tuple[str, str, bool]]:
    """Return every import of a file: the module, the imported name ("" for the module), whether it is relative."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    imports: list[tuple[str, str, bool]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [(alias.name, "", False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            imports += [(module, alias.name, node.level > 0) for alias in node.names]
    return imports


def application(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "eagle_mlx" and parts[1] in APPLICATIONS else None


def under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def breaches(path: Path, source: str) -> list[str]:
    """Return the imports of a file that break the rules; `path` is relative to the root."""
    me = module_name(path)
    problems = []
    for module, name, relative in imported(path, source):
        whole = f"{module}.{name}" if name else module
        mine, other = application(me), application(whole)
        if under(module, *APPLICATIONS):
            problems.append(f"{path}: {whole} is a second name of eagle_mlx.{whole}")
        if whole.endswith(".cli") or module.endswith(".cli") or under(whole, *COMMAND_LINES):
            problems.append(f"{path}: {whole} is a command line, which nobody imports")
        if under(whole, "mlx_lm.models") and not under(me, *MODEL_MODULES):
            problems.append(f"{path}: only {', '.join(MODEL_MODULES)} may touch {whole}")
        concrete = module not in SEAM or (ROOT / module.replace(".", "/") / f"{name}.py").exists()
        if under(me, "eagle_mlx.engine") and under(module, "eagle_mlx.proposers") and concrete and whole != SEAM[1]:
            problems.append(f"{path}: the engine knows no concrete proposer, such as {whole}")
        if other is None:
            continue
        if mine is None:
            problems.append(f"{path}: the library imports the application {whole}")
        elif mine == other:
            if not relative:
                problems.append(f"{path}: {whole} is a sibling, import it relatively")
        elif (mine, other) not in ALLOWED_BETWEEN:
            problems.append(f"{path}: {mine} imports the application {whole}")
        elif module != f"eagle_mlx.{other}" or not name or (ROOT / other / f"{name}.py").exists():
            problems.append(f"{path}: of {other}, {mine} may import only what its __init__ offers, not {whole}")
    return problems


def changed_classes(path: Path, source: str) -> list[str]:
    """Return where a file changes an object's class, which only hooks may do."""
    if module_name(path) == HOOKS or "__class__" not in source:
        return []
    attributes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    lines = [node.lineno for node in attributes if node.attr == "__class__" and isinstance(node.ctx, ast.Store)]
    return [f"{path}:{line}: only {HOOKS} may give a module another class" for line in lines]


def rooms(sources: Iterable[tuple[Path, str]]) -> dict[str, set[str]]:
    """Return the library's folders and top-level files, each with its imports."""
    imports: dict[str, set[str]] = {}
    for path, source in sources:
        me = room(module_name(path))
        for module, name, _ in imported(path, source):
            other = room(f"{module}.{name}" if module == "eagle_mlx" else module)
            if other not in (None, "", "__version__") and me is not None and other != me:
                imports.setdefault(me, set()).add(other)
    return imports


def room(module: str) -> str | None:
    """Return the part of the library, `cache` for eagle_mlx.cache.full; None for the package itself and others."""
    parts = module.split(".")
    return parts[1] if parts[0] == "eagle_mlx" and len(parts) > 1 and parts[1] not in APPLICATIONS else None


def modules(sources: Iterable[tuple[Path, str]]) -> dict[str, set[str]]:
    """Return all modules, each with its imports among them, those under TYPE_CHECKING too."""
    files = {module_name(path): (path, source) for path, source in sources}
    arrows = {}
    for me, (path, source) in files.items():
        names = ((module, f"{module}.{name}") for module, name, _ in imported(path, source))
        arrows[me] = {whole if whole in files else module for module, whole in names} & files.keys() - {me}
    return arrows


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Return names that import one another in a cycle; empty if there is none."""
    left = {name: set(others) for name, others in arrows.items()}
    while True:
        bottom = {name for name in left if not left[name] & left.keys()}
        if not bottom:
            return sorted(left)
        left = {name: others for name, others in left.items() if name not in bottom}


def sources(*folders: str) -> list[tuple[Path, str]]:
    """Return all files of folders, each with its path from the root and its text."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]


def table(arrows: dict[str, set[str]]) -> str:
    """Return the table in docs/structure.md: each part after its imports, without parts that import nothing."""
    listed = {name for others in arrows.values() for name in others} - arrows.keys()
    left = {name: others - listed for name, others in arrows.items()}
    rows = [", ".join(f"`{name}`" for name in sorted(listed)) + " import nothing of the library.", "", "| | imports |"]
    rows.append("|---|---|")
    while left:
        ready = sorted(name for name in left if left[name] <= listed)
        rows += [f"| `{name}` | {', '.join(f'`{other}`' for other in sorted(left.pop(name)))} |" for name in ready]
        listed |= set(ready)
    return "\n".join(rows)


def test_imports_keep_the_rules() -> None:
    files = sources("eagle_mlx", *APPLICATIONS)
    assert len(files) > 100
    assert [breach for path, source in files for breach in breaches(path, source)] == []
    assert [change for path, source in files for change in changed_classes(path, source)] == []


def test_the_rooms_of_the_library_import_one_another_in_one_direction() -> None:
    library = sources("eagle_mlx")
    assert circle(rooms(library)) == []
    backwards = (Path("eagle_mlx/cache/full.py"), "from eagle_mlx.proposers.base import Proposer")
    assert {"cache", "proposers"} <= set(circle(rooms([*library, backwards])))


def test_no_modules_import_one_another() -> None:
    files = sources("eagle_mlx", *APPLICATIONS)
    assert circle(modules(files)) == []
    hidden = "if TYPE_CHECKING:\n    from .loop import Run"
    assert {"eagle_mlx.train.run.loop", "eagle_mlx.train.run.x"} <= set(
        circle(modules([*files, (Path("train/run/x.py"), hidden), (Path("train/run/loop.py"), "from .x import X")]))
    )


def test_the_table_of_imports_in_the_documents_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    expected = table(rooms(sources("eagle_mlx")))
    assert expected in text, f"docs/structure.md needs this table:\n{expected}"
    assert table({"b": {"a"}, "c": {"a", "b"}}).endswith("| `b` |  |\n| `c` | `b` |")


def test_a_changed_class_is_noticed() -> None:
    source = "layer.__class__ = type('Other', (type(layer),), {})"
    assert changed_classes(Path("eagle_mlx/target.py"), source)
    assert not changed_classes(Path("eagle_mlx/hooks.py"), source)
    assert not changed_classes(Path("eagle_mlx/target.py"), "name = layer.__class__.__name__")


def test_scripts_import_no_command_line() -> None:
    for path in (ROOT / "checkpoints" / "scripts").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not [m for m, n, _ in imported(path.relative_to(ROOT), source) if f"{m}.{n}.".find(".cli.") >= 0], path


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("eagle_mlx/engine/engine.py", "from eagle_mlx.train import loop", "the library imports"),
        ("eagle_mlx/engine/engine.py", "import eagle_mlx.serve.bench", "the library imports"),
        ("eagle_mlx/engine/engine.py", "def f():\n    from eagle_mlx import data_pipelines", "the library imports"),
        ("eagle_mlx/engine/x.py", "from eagle_mlx.proposers.head import HeadPiece", "no concrete proposer"),
        ("eagle_mlx/engine/disk/x.py", "from eagle_mlx.proposers import ngram", "no concrete proposer"),
        ("eagle_mlx/formats/x.py", "from .. import serve", "the library imports"),
        ("serve/app.py", "from eagle_mlx.data_pipelines import render", "serve imports the application"),
        ("serve/bench/x.py", "from ...train import online", "only what its __init__ offers"),
        ("data_pipelines/rendering.py", "import eagle_mlx.train.loop", "data_pipelines imports the application"),
        ("train/cli.py", "import eagle_mlx.data_pipelines", "only what its __init__ offers"),
        ("train/cli.py", "from eagle_mlx.data_pipelines.rendering import examine", "only what its __init__ offers"),
        ("train/cli.py", "from eagle_mlx.data_pipelines import cli", "only what its __init__ offers"),
        ("train/loop.py", "from eagle_mlx.train.step import step", "import it relatively"),
        ("train/loop.py", "from train.step import step", "a second name"),
        ("train/loop.py", "from .cli import main", "a command line"),
        ("serve/bench/x.py", "from . import cli", "a command line"),
        ("serve/bench/x.py", "from ..generate import main", "a command line"),
        ("eagle_mlx/engine/engine.py", "from mlx_lm.models import cache", "may touch"),
        ("eagle_mlx/engine/engine.py", "from mlx_lm import models", "may touch"),
        ("train/step.py", "import mlx_lm.models.qwen3", "may touch"),
    ],
)
def test_a_breach_is_noticed(path: str, source: str, reason: str) -> None:
    assert any(reason in breach for breach in breaches(Path(path), source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("train/cli.py", "from eagle_mlx.data_pipelines import render"),
        ("train/loop.py", "from .step import step\nfrom eagle_mlx.engine.engine import Engine"),
        ("serve/bench/cli.py", "from . import report\nfrom ..bench.modes import Mode"),
        ("eagle_mlx/heads/eagle3.py", "from mlx_lm.models.base import scaled_dot_product_attention"),
        ("eagle_mlx/cache/kinds.py", "from mlx_lm.models import cache"),
        ("eagle_mlx/engine/engine.py", "from .sampling import sample\nimport mlx_lm"),
        ("eagle_mlx/engine/x.py", "from eagle_mlx.proposers.base import Proposer"),
    ],
)
def test_what_is_allowed_is_not_a_breach(path: str, source: str) -> None:
    assert breaches(Path(path), source) == []
