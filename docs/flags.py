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
    ("eagle-serve", "launch"),
    ("eagle-generate",),
    ("eagle-chat",),
    ("eagle-bench",),
    ("eagle-train",),
    ("eagle-train", "report"),
    ("eagle-data", "make"),
    ("eagle-data", "inspect"),
    ("eagle-data", "regenerate"),
    ("eagle-data", "collect"),
    ("eagle-heads", "find"),
    ("eagle-heads", "pull"),
    ("eagle-heads", "compare"),
    ("eagle-heads", "certify"),
    ("eagle-doctor",),
    ("eagle-convert",),
    ("eagle-convert", "mtp"),
    ("eagle-publish",),
)
INTRODUCTION = """# Flags

`python docs/flags.py` writes this page from `--help`, which also has examples. `--no-`, as in `--no-ngram`,
turns a switch off.
"""
Row = tuple[str, str, str]
"""Flag, default, and what it does."""


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


def rows_of(text: str) -> Iterator[Row]:
    """Yield the flags and arguments in a help text."""
    for title, body in re.findall(r"^(\S[^\n]*):\n((?:(?:  [^\n]*)?\n)+)", text, re.MULTILINE):
        rows: list[tuple[str, str]] = []
        for line in body.splitlines():
            if re.match(r"  \S", line):
                flag, _, meaning = line.strip().partition("  ")
                rows.append((names(flag), meaning.strip()))
            elif rows and line.startswith(" " * 20):
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
        for flag, meaning in rows:
            if (
                meaning
                and flag not in ("-h, --help", "--version")
                and (flag.startswith("-") or title == "positional arguments")
            ):
                yield flag, *default_and_meaning(meaning)


def names(flag: str) -> str:
    """Return a flag's names and its value once, whichever way this version of Python prints them."""
    found = re.findall(r"(?:^|, )(-{1,2}[\w-]+)", flag)
    value = re.sub(r" \[.* \.\.\.\]$", " ...", flag.rpartition(found[-1])[2] if found else f" {flag}")
    return (", ".join(name for name in found if f"--{name.removeprefix('--no-')}" not in found[:-1]) + value).strip()


def default_and_meaning(meaning: str) -> tuple[str, str]:
    """Split a help text into the default and what the flag does."""
    default = re.search(r" ?\(default: (.*?)\)(?=$|;)", meaning)
    return (default[1], meaning.replace(default[0], "")) if default else ("", meaning)


def page() -> str:
    """Return the text of docs/flags.md."""
    users: dict[Row, list[str]] = {}
    for command in COMMANDS:
        for row in rows_of(help_of(command)):
            users.setdefault(row, []).append(" ".join(command))
    sections: dict[tuple[str, ...], list[Row]] = {(" ".join(command),): [] for command in COMMANDS}
    for row, commands in users.items():
        sections.setdefault(tuple(commands), []).append(row)
    return "\n".join([INTRODUCTION, *(table(title(commands), rows) for commands, rows in sections.items())])


def title(commands: tuple[str, ...]) -> str:
    """Return the names of commands, and subcommands of the same command without its name."""
    names = [command.partition(" ") for command in commands]
    befores: list[tuple[str, str, str]] = [("", "", ""), *names]
    same = [name[0] == before[0] and before[2] for name, before in zip(names, befores, strict=False)]
    return ", ".join(name[2] if short else "".join(name) for name, short in zip(names, same, strict=True))


def table(title: str, rows: list[Row]) -> str:
    """Return a section of the page."""
    cells = [f"|`{flag}`|{default}|{text}|" for flag, default, text in rows]
    return "\n".join([f"## {title}\n", "|flag|default|meaning|", "|---|---|---|", *cells, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
