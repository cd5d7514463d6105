"""One class name has one owner, so that a name in a sentence or an error needs no module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("eagle_mlx", "train", "serve", "data_pipelines")
MOST = 5
"""Names that may have several owners."""


def owners(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the files that define each class."""
    files_by_class = defaultdict(list)
    for file in files:
        for name in re.findall(r"^ *class (\w+)\b.*:", file.read_text(encoding="utf-8"), re.MULTILINE):
            files_by_class[name].append(str(file))
    return files_by_class


def test_few_class_names_have_several_owners(tmp_path: Path) -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    shared = {name: where for name, where in owners(files).items() if len(where) > 1}
    assert len(shared) <= MOST, shared
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"class Same: ...\nclass Own{name}: ...")
    assert {name: len(where) for name, where in owners(tmp_path.glob("*.py")).items()} == {
        "Same": 2,
        "Owna": 1,
        "Ownb": 1,
    }
