"""The command `eagle-train report`: compare runs side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx.command import exit_code, read
from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.files import write_output
from eagle_mlx.setting import REQUIRED, Group, setting

from ..config import flag
from .plots import write_comparison
from .runs import PastRun, differing_settings, read_run

_HELP = """\
Compare training runs: their results, their costs, and the settings in which they differ.

examples:
  eagle-train report out/head
  eagle-train report out/adamw out/muon --output runs.md --plot runs.png

An interrupted or unfinished run is shown as recorded in its metrics.jsonl. τ is tokens per target forward, including
the bonus token, in greedy decoding at the depth shown; compare it only for the same target and prompts.
"""
_NONE = "-"

Line = tuple[str, list[str]]
"""A title, and the value for each run."""


@dataclass(frozen=True)
class ReportOptions(Group):
    """The runs to compare, and where to write the comparison."""

    runs: tuple[Path, ...] = setting(
        REQUIRED, "output folder of a run; several are compared", metavar="DIR", positional=True
    )
    output: Path | None = setting(None, "also write the comparison as Markdown", metavar="FILE.md")
    plot: Path | None = setting(None, "plot τ and loss against tokens", metavar="FILE.png")
    json: bool = setting(False, "print JSON instead of the table")
    overwrite: bool = setting(False, "replace existing files")


def main(argv: Sequence[str]) -> int:
    """Print the comparison and return the exit code."""
    return exit_code(lambda: run(read(ReportOptions, argv, "eagle-train report", _HELP)))


def run(options: ReportOptions) -> None:
    """Read all runs, then write the comparison."""
    _check_file(options.output, ".md", options.overwrite)
    _check_file(options.plot, ".png", options.overwrite)
    runs = [read_run(folder) for folder in options.runs]
    if options.plot:
        try:
            write_comparison({name: run.rows for name, run in zip(_names(runs), runs, strict=True)}, options.plot)
        except OSError as e:
            raise OutputError(f"{options.plot} could not be written: {e.strerror or e}") from e
    if options.output:
        picture = os.path.relpath(options.plot, options.output.parent) if options.plot else None
        write_output(options.output, markdown(runs, picture))
    if options.json:
        print(json.dumps([as_json(run) for run in runs], indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(text(runs, width))


def lines_of(runs: Sequence[PastRun]) -> list[Line]:
    """Return the facts about the runs, line by line, with differing settings at the end."""
    told: list[Line] = [
        ("state", [run.state.split(";")[0] for run in runs]),
        ("target", [run.target or _NONE for run in runs]),
        ("kind", [run.kind or _NONE for run in runs]),
        ("started from", [run.started_from or "nothing" for run in runs]),
        ("steps", [f"{run.steps:,}" for run in runs]),
        ("tokens", [f"{run.tokens:,}" for run in runs]),
        ("time of training", [_time(run.train_seconds) for run in runs]),
        ("tokens/s", [_number(run.tokens_per_second, ",.0f") for run in runs]),
        ("peak memory", [_number(run.memory_gb, ".2f", " GB") for run in runs]),
        ("loss", [_number(run.loss, ".3f") for run in runs]),
        ("τ, best", [_number(run.best, ".3f") for run in runs]),
        ("  at step", [_number(run.best_step, ",d") for run in runs]),
        ("τ, last", [_number(run.last, ".3f") for run in runs]),
        ("τ, untrained", [_number(run.untrained, ".3f") for run in runs]),
        ("  at depth", [_number(run.depth, "d") for run in runs]),
        ("acceptance by position", [" ".join(f"{a:.2f}" for a in run.by_position) or _NONE for run in runs]),
    ]
    for name in differing_settings(runs):
        told.append((flag(name), [_setting(run.settings.get(name)) for run in runs]))
    return told


def text(runs: Sequence[PastRun], width: int | None = None) -> str:
    """Return the comparison for a terminal, with a column per run, split into several tables if too wide."""
    names = _names(runs)
    rows = [("", names), *lines_of(runs)]
    first = max(len(title) for title, _ in rows)
    columns = [max(len(cells[i]) + 2 for _, cells in rows) for i in range(len(names))]
    parts: list[list[int]] = [[]]
    for i, column in enumerate(columns):
        if width and parts[-1] and first + sum(columns[j] for j in parts[-1]) + column > width:
            parts.append([])
        parts[-1].append(i)
    blocks = []
    for part in parts:
        lines = (title.ljust(first) + "".join(f"  {cells[i]:<{columns[i] - 2}}" for i in part) for title, cells in rows)
        blocks.append("\n".join(line.rstrip() for line in lines))
    hints = [f"{name}: {run.state}" for name, run in zip(names, runs, strict=True) if ";" in run.state]
    return "\n\n".join([*blocks, *(["\n".join(hints)] if hints else [])])


def markdown(runs: Sequence[PastRun], picture: str | None = None) -> str:
    """Return the comparison as Markdown, with τ over the course of each run."""
    table = [("", _names(runs)), *lines_of(runs)]
    out = ["# Training runs", "", *_table([[title.strip(), *cells] for title, cells in table])]
    if picture:
        out += ["", f"![τ and loss against tokens]({picture})"]
    for name, past in zip(_names(runs), runs, strict=True):
        rows = [
            [f"{row['step']:,}", f"{row.get('tokens', 0):,}", f"{row['acceptance_length']:.3f}"]
            for row in past.evaluations
        ]
        if rows:
            out += ["", f"## {name}", "", *_table([["step", "tokens", "τ"], *rows])]
    return "\n".join(out) + "\n"


def as_json(run: PastRun) -> dict[str, Any]:
    """Return a run as plain values, with evaluations as its only metrics."""
    values = dataclasses.asdict(dataclasses.replace(run, rows=()))
    del values["rows"]
    keys = ("step", "tokens", "train_seconds", "acceptance_length", "acceptance_by_position")
    return {**values, "evaluations": [{k: row[k] for k in keys if k in row} for row in run.evaluations]}


def _check_file(file: Path | None, suffix: str, overwrite: bool) -> None:
    if file is None:
        return
    if file.suffix != suffix:
        raise ConfigError(f"{file} must end in {suffix}")
    if file.exists() and not overwrite:
        raise OutputError(f"{file} exists already; name another file, or overwrite it with --overwrite")
    if not file.parent.is_dir():
        raise OutputError(f"there is no folder {file.parent} to write {file.name} into")


def _names(runs: Sequence[PastRun]) -> list[str]:
    """Return the folders' names if they are distinct, else the paths."""
    short = [Path(run.folder).resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [run.folder for run in runs]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") or " " for cell in row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return _NONE if value is None else f"{value:{form}}{unit}"


def _setting(value: Any) -> str:
    if value is None:
        return _NONE
    if isinstance(value, list):
        return " ".join(map(str, value)) or "default"
    return f"{value:g}" if isinstance(value, float) else str(value) or "default"
