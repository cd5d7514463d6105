"""Write the table of files in docs/structure.md, from the first line of each module's docstring.

    python docs/structure.py

A test compares the table with what this script would write.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
PACKAGES = ("eagle_mlx", "data_pipelines", "train", "serve")
BLOCK = re.compile(r"(<!-- generated: docs/structure.py -->\n\n).*?(<!-- end -->)", re.DOTALL)


def purpose(module: Path) -> str:
    """Return the first paragraph of a module's docstring on one line."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring; describe its purpose in one line")
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def tree(package: str) -> str:
    """Return a package's table: its folders in bold, each before its files."""
    modules = (ROOT / package).rglob("*.py")
    lines = ["| | |", "| --- | --- |"]
    for module in sorted(modules, key=lambda path: (path.parent, path.name != "__init__.py", path)):
        path = module.relative_to(ROOT)
        name = f"**`{path.parent}/`**" if path.name == "__init__.py" else f"`{path.relative_to(package)}`"
        lines.append(f"| {name} | {purpose(module)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with a table for each package."""
    tables = "\n\n".join(map(tree, PACKAGES))
    return BLOCK.sub(lambda block: f"{block[1]}{tables}\n\n{block[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
