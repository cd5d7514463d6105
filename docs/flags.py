"""Write docs/flags.md: the flags of every command, read from its `--help`.

    python docs/flags.py

A test compares the file with what this script would write.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
COMMANDS = (
    ("eagle-serve",),
    ("eagle-generate",),
    ("eagle-bench",),
    ("eagle-train",),
    ("eagle-train", "report"),
    ("eagle-data", "make"),
    ("eagle-data", "inspect"),
    ("eagle-data", "regenerate"),
    ("eagle-data", "collect"),
    ("eagle-heads", "find"),
    ("eagle-heads", "pull"),
    ("eagle-convert",),
    ("eagle-convert", "mtp"),
    ("eagle-publish",),
)
INTRODUCTION = """# Flags

`python docs/flags.py` writes this page from `--help`; do not edit it. Every command has examples in its `--help`.
"""
Rows = list[tuple[str, str]]
"""Flag and meaning."""


def help_of(command: tuple[str, ...]) -> str:
    """Return what the command prints for `--help`, each flag on one line."""
    function = getattr(importlib.import_module("eagle_mlx.extras"), command[0].removeprefix("eagle-"))
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [*command, "--help"]),
        mock.patch.dict(os.environ, {"COLUMNS": "10000", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        function()
    return out.getvalue().replace(f"{ROOT}/", "")


def groups(text: str) -> Iterator[tuple[str, Rows]]:
    """Yield the titled groups of flags and arguments in a help text."""
    for title, body in re.findall(r"^(\S[^\n]*):\n((?:(?:  [^\n]*)?\n)+)", text, re.MULTILINE):
        rows: Rows = []
        for line in body.splitlines():
            if re.match(r"  \S", line):
                flag, _, meaning = line.strip().partition("  ")
                rows.append((names(flag), meaning.strip()))
            elif rows and line.startswith(" " * 20):
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
        rows = [(flag, meaning) for flag, meaning in rows if meaning and flag != "-h, --help"]
        if rows and (rows[0][0].startswith("-") or title == "positional arguments"):
            yield title, rows


def names(flag: str) -> str:
    """Return a flag's names and its one value, whichever way this version of Python prints them."""
    found = re.findall(r"(?:^|, )(-{1,2}[\w-]+)", flag)
    value = flag.rpartition(found[-1])[2] if found else f" {flag}"
    return (", ".join(found) + value).strip()


def page() -> str:
    """Return the text of docs/flags.md."""
    parts, seen = [INTRODUCTION], dict[tuple[str, str], str]()
    for command in COMMANDS:
        parts.append(f"## {' '.join(command)}\n")
        for title, rows in groups(help_of(command)):
            cells = [f"| `{flag}` | {meaning} |".replace("\\", "\\\\") for flag, meaning in rows]
            cells = [re.sub(r"(?<=\w)\|(?=\w)", r"\\|", cell) for cell in cells]
            table = "\n".join(["| flag | meaning |", "|---|---|", *cells, ""])
            if (title, table) in seen:
                parts.append(f"**{title}**: as for `{seen[title, table]}`.\n")
            else:
                seen[title, table] = " ".join(command)
                parts.append(f"**{title}**\n\n{table}")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
