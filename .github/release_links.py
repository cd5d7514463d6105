"""Before a release is built: give the project its address, and the README links that work outside of the repository.

    python .github/release_links.py https://github.com/OWNER/eagle-mlx v0.1.0

The release workflow knows the address; until a release, files need none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")


def absolute(text: str, address: str, tag: str) -> str:
    """Return Markdown with absolute links instead of relative ones."""

    def link(match: re.Match[str]) -> str:
        image, title, path = match.groups()
        return f"{image}{title}({address}/{'raw' if image else 'blob'}/{tag}/{path})"

    return LINK.sub(link, text)


def with_urls(project: str, address: str, tag: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    urls = {"Repository": address, "Documentation": f"{address}/tree/{tag}/docs", "Issues": f"{address}/issues"}
    urls["Changelog"] = f"{address}/blob/{tag}/CHANGELOG.md"
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n")


if __name__ == "__main__":
    for name, change in (("README.md", absolute), ("pyproject.toml", with_urls)):
        file = ROOT / name
        file.write_text(change(file.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")
