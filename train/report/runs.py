"""Read finished and unfinished training runs, and compare them side by side (`eagle-train report`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from eagle_mlx.command import exit_code, read, shown
from eagle_mlx.errors import DataError, OutputError
from eagle_mlx.extras import require
from eagle_mlx.files import check_file, name_of, write_output, write_whole
from eagle_mlx.setting import REQUIRED, Group, Limit, setting

from ..config import flag
from .plots import Row, write_comparison

METRICS = "metrics.jsonl"
_REPORT, _ABOUT, _STATES = "report.json", "run.json", "checkpoints"
_IN_EVALUATIONS = ("step", "tokens", "train_seconds", "acceptance_length", "acceptance_by_position")
_NO_SETTINGS = frozenset(
    {"target", "head", "output", "overwrite", "wandb", "wandb_project", "init_from", "data", "shards"}
)
"""Settings that are shown separately or do not affect the head."""


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run's facts as in `report --json`, with None for unknown values.

    Raises DataError if the folder has no run, or if its files are damaged.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    metrics = folder / METRICS
    remedy = f"move it away to see the values in {METRICS}"
    report, about = read_object(folder / _REPORT, remedy), read_object(folder / _ABOUT, remedy)
    if report is None and not metrics.exists():
        raise DataError(
            f"{folder} is not a training run: it has neither {_REPORT} nor {METRICS}; give an --output of eagle-train"
        )
    rows = read_rows(metrics)
    whole: Mapping[str, Any] = report or {}
    settings = dict((report or about or {}).get("config") or {})
    losses = [row.get("loss") for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval" and "acceptance_length" in row]
    best = max(evals, key=lambda row: (float(row["acceptance_length"]), row["step"] > 0), default={})
    now, first, last = (rows or [{}])[-1], (evals or [{}])[0], (evals or [{}])[-1]
    untrained = first["acceptance_length"] if first.get("step") == 0 else None
    unfinished = "unfinished" if now else "unfinished, nothing measured"
    if any((folder / _STATES).glob("step-*")):
        unfinished = "unfinished, --resume continues it"
    seconds = float(whole.get("train_seconds", now.get("train_seconds", 0)))
    tokens = int(whole.get("tokens", now.get("tokens", 0)))
    return {
        "folder": str(folder),
        "state": "complete" if report else unfinished,
        "target": whole.get("target") or settings.get("target") or None,
        "kind": whole.get("kind") or settings.get("head"),
        "started_from": whole.get("started_from") or settings.get("init_from") or None,
        "data": _data(settings),
        "steps": int(whole.get("steps", now.get("step", 0))),
        "tokens": tokens,
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "loss": whole.get("loss", losses[-1] if losses else None),
        "depth": best.get("depth") or settings.get("eval_depth"),
        "untrained": whole.get("untrained_acceptance_length", untrained),
        "best": whole.get("acceptance_length", best.get("acceptance_length")),
        "interval": best.get("interval") or None,
        "best_step": whole.get("best_step", best.get("step")),
        "last": ((whole.get("acceptance") or {}).get("last") or last).get("acceptance_length"),
        "by_position": list(whole.get("acceptance_by_position") or best.get("acceptance_by_position") or []),
        "memory_gb": max((row["memory_gb"]["process_peak"] for row in rows if "memory_gb" in row), default=None),
        "settings": settings,
        "evaluations": [{key: row[key] for key in _IN_EVALUATIONS if key in row} for row in evals],
    }


def _data(settings: Mapping[str, Any]) -> str | None:
    """Return what a run learns from. With shards, the setting `data` is not used."""
    shards = ", ".join(map(str, settings.get("shards") or ()))
    return f"shards {shards}" if shards else ", ".join(settings.get("data") or ()) or None


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that differ between runs, ignoring unknown values."""
    every = [run["settings"] for run in runs]
    names = dict.fromkeys(name for settings in every for name in settings if name not in _NO_SETTINGS)
    return [name for name in names if len({repr(settings[name]) for settings in every if name in settings}) > 1]


def read_object(file: Path, remedy: str) -> dict[str, Any] | None:
    """Return the object in a JSON file, None without a file. Raises DataError, with the remedy, if it is damaged."""
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return values
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise DataError(f"{file} cannot be read: {e}; {remedy}") from e


def read_rows(file: Path) -> list[Row]:
    """Return all lines of a run, without an incomplete last one. A missing file counts as empty.

    Raises DataError with the line number if another line is invalid.
    """
    if not file.exists():
        return []
    *lines, rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    if None in rows:
        raise DataError(f"{file}:{rows.index(None) + 1} is not a line of metrics; remove the line")
    return [row for row in (*rows, _row(rest)) if row is not None]


def truncate(file: Path, step: int) -> list[Row]:
    """Remove later steps and an incomplete line from the file atomically; return the rest. Raises DataError."""
    rows = [row for row in read_rows(file) if row["step"] <= step]
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)
    return row if whole else None


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
    "data": ("data", "{}"),
    "steps": ("steps", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "time of training": ("train_seconds", "{}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "peak memory": ("memory_gb", "{:.2f} GB"),
    "loss": ("loss", "{:.3f}"),
    "τ, best": ("best", "{:.3f}"),
    "τ, best, 95 % interval": ("interval", "± {:.3f}"),
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
    if options.plot:
        require("eagle-train report --plot", "plots")
    for file in filter(None, (options.output, options.plot)):
        check_file(file)
        if file.exists() and not options.overwrite:
            raise OutputError(f"{file} exists already; name another file, or overwrite it with --overwrite")
    runs = [read_run(folder) for folder in options.runs]
    names = list(map(name_of, options.runs))
    if len(set(names)) < len(names):
        names = list(map(str, options.runs))
    table = comparison(runs, names)
    if options.plot:
        rows = (read_rows(folder / METRICS) for folder in options.runs)
        try:
            options.plot.parent.mkdir(parents=True, exist_ok=True)
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
        rows.append([title])
        for value in (run[key] for run in runs):
            if key == "train_seconds":
                value = timedelta(seconds=round(value))
            values = value if isinstance(value, list) else [value]
            rows[-1].append("-" if value is None else " ".join(map(form.format, values)))
    for name in differing_settings(runs):
        values = [run["settings"].get(name, "-") for run in runs]
        rows.append([flag(name), *(shown(tuple(value) if isinstance(value, list) else value) for value in values)])
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
