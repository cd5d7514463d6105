"""The order of the trainer's folders in docs/structure.md follows their imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train"


def listed() -> list[str]:
    """Return the files and folders of train/ in the document."""
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    tree = page.split("## The order of `train/`")[1].split("```")[1]
    return re.findall(r"^train/(\w+)(?:\.py|/)$", tree, re.MULTILINE)


def imported(file: Path) -> Iterator[str]:
    """Return the other files and folders of train/ that a file imports."""
    package = file.relative_to(TRAIN).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            yield from base[:1] or (alias.name for alias in node.names)


def test_every_file_and_folder_is_listed() -> None:
    there = {path.stem for path in TRAIN.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(listed()) == sorted(there - {"__init__", "__pycache__"})


def test_each_folder_imports_only_what_stands_above_it() -> None:
    order = [name for name in listed() if name != "cli"]
    below = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in TRAIN.rglob("*.py")
        if (own := file.relative_to(TRAIN).with_suffix("").parts[0]) not in ("cli", "__init__")
        for name in imported(file)
        if order.index(name) > order.index(own)
    ]
    assert below == []
