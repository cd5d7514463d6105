"""The command `eagle-train report`: compare runs side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from eagle_mlx.command import exit_code, read, shown
from eagle_mlx.errors import OutputError
from eagle_mlx.files import write_output
from eagle_mlx.setting import REQUIRED, Group, Limit, setting

from ..config import flag
from .plots import write_comparison
from .runs import METRICS, differing_settings, read_rows, read_run

_HELP = """\
Compare training runs: their results, their costs, and the settings in which they differ.

examples:
  eagle-train report out/head
  eagle-train report out/adamw out/muon --output runs.md --plot runs.png

An interrupted or unfinished run is shown as recorded in its metrics.jsonl. τ is tokens per target forward, including
the bonus token, in greedy decoding at the depth shown; compare it only for the same target and prompts.
"""
_LINES = {
    "state": ("state", "{}"),
    "target": ("target", "{}"),
    "kind": ("kind", "{}"),
    "started from": ("started_from", "{}"),
    "steps": ("steps", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "time of training": ("train_seconds", "{}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "peak memory": ("memory_gb", "{:.2f} GB"),
    "loss": ("loss", "{:.3f}"),
    "τ, best": ("best", "{:.3f}"),
    "τ, best, at step": ("best_step", "{:,}"),
    "τ, last": ("last", "{:.3f}"),
    "τ, untrained": ("untrained", "{:.3f}"),
    "τ, at depth": ("depth", "{}"),
    "acceptance by position": ("by_position", "{:.2f}"),
}
"""For each line of the table: the key in a run's facts, and the format."""


@dataclass(frozen=True)
class ReportOptions(Group):
    """The runs to compare, and where to write the comparison."""

    runs: tuple[Path, ...] = setting(
        REQUIRED, "output folder of a run; several are compared", metavar="DIR", positional=True
    )
    output: Path | None = setting(
        None,
        "also write the comparison as Markdown",
        Limit(lambda file: file.suffix == ".md", "must end in .md, not {}"),
        metavar="FILE.md",
    )
    plot: Path | None = setting(
        None,
        "plot τ and loss against tokens",
        Limit(lambda file: file.suffix == ".png", "must end in .png, not {}"),
        metavar="FILE.png",
    )
    json: bool = setting(False, "print JSON instead of the table")
    overwrite: bool = setting(False, "replace an existing output")


def main(argv: Sequence[str]) -> int:
    """Print the comparison and return the exit code."""
    return exit_code(lambda: run(read(ReportOptions, argv, "eagle-train report", _HELP)))


def run(options: ReportOptions) -> None:
    """Read all runs, then write the comparison."""
    for file in filter(None, (options.output, options.plot)):
        if file.exists() and not options.overwrite:
            raise OutputError(f"{file} exists already; name another file, or overwrite it with --overwrite")
    runs = [read_run(folder) for folder in options.runs]
    names = [folder.resolve().name for folder in options.runs]
    if len(set(names)) < len(names):
        names = list(map(str, options.runs))
    table = comparison(runs, names)
    if options.plot:
        rows = (read_rows(folder / METRICS) for folder in options.runs)
        try:
            write_comparison(dict(zip(names, rows, strict=True)), options.plot)
        except OSError as e:
            raise OutputError(f"{options.plot} could not be written: {e.strerror or e}") from e
    if options.output:
        link = os.path.relpath(options.plot, options.output.parent) if options.plot else ""
        picture = f"\n![τ and loss against tokens]({link})\n" if link else ""
        write_output(options.output, f"# Training runs\n\n{table}\n{picture}")
    print(json.dumps(runs, indent=2) if options.json else table)


def comparison(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a Markdown table with a column for each run; settings that differ come last."""
    rows = [["", *names]]
    for title, (key, form) in _LINES.items():
        values = [timedelta(seconds=round(run[key])) if key == "train_seconds" else run[key] for run in runs]
        rows.append([title, *(_cell(value, form) for value in values)])
    for name in differing_settings(runs):
        values = [run["settings"].get(name, "-") for run in runs]
        rows.append([flag(name), *(shown(tuple(value) if isinstance(value, list) else value) for value in values)])
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any, form: str) -> str:
    if isinstance(value, list):
        return " ".join(map(form.format, value))
    return "-" if value is None else form.format(value)
