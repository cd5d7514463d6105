"""Training runs: their metrics as plots, and comparisons side by side (`eagle-train report`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_mlx.command import exit_code, read, shown
from eagle_mlx.errors import ConfigError, DataError, OutputError, in_one_line
from eagle_mlx.extras import require
from eagle_mlx.files import check_file, name_of, write_whole
from eagle_mlx.setting import REQUIRED, Group, Limit, setting

from .config import flag

if TYPE_CHECKING:  # matplotlib takes half a second to import, and is needed only at the end
    from matplotlib.axes import Axes

METRICS = "metrics.jsonl"
_REPORT, _ABOUT, _STATES = "report.json", "run.json", "checkpoints"
_IN_EVALUATIONS = ("step", "tokens", "train_seconds", "acceptance_length", "acceptance_by_position")
_NO_SETTINGS = frozenset(
    {"target", "head", "output", "overwrite", "wandb", "wandb_project", "init_from", "data", "shards"}
)
"""Settings that are shown separately or do not affect the head."""
Row = dict[str, Any]  # a line of metrics: its `kind` (train or eval), the `step` after which it was taken, the values


def write_plots(rows: Sequence[Row], folder: Path) -> None:
    """Plot a run as PNG files in `folder`: all PICTURES for which there are rows; none without matplotlib."""
    try:
        require("plotting", "plots")
    except ConfigError as e:
        print(f"note: {e}", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    for name, (kind, draw) in _PLOTS.items():
        if data := [row for row in rows if row["kind"] == kind]:
            figure = Figure(figsize=(7.2, 4.4), layout="constrained")
            draw(_styled(figure.add_subplot()), data)
            figure.savefig(folder / name, dpi=140)


def write_comparison(runs: Mapping[str, Sequence[Row]], file: Path) -> None:
    """Plot τ and loss of several runs against tokens, into one PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    length, loss = map(_styled, figure.subplots(1, 2))
    for (name, rows), color in zip(runs.items(), _colors(len(runs)), strict=True):
        train, evals = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
        _taus(length, evals, color=color, label=name)
        loss.plot([row["tokens"] for row in train], smooth([row["loss"] for row in train]), color=color, label=name)
    length.set(title="Acceptance length, with 95 % intervals", xlabel="tokens", ylabel="tokens per target forward")
    loss.set(title="Training loss", xlabel="tokens", ylabel="weighted mean over the draft steps")
    length.legend(frameon=False)
    figure.savefig(file, dpi=140)


def _styled(axes: Axes) -> Axes:
    from matplotlib.ticker import EngFormatter

    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(EngFormatter())  # tokens as 10 M, not as 1 and 1e7 at the axis's end
    return axes


def _taus(axes: Axes, rows: Sequence[Row], **style: Any) -> None:
    tokens, taus, errors = ([row[key] for row in rows] for key in ("tokens", "acceptance_length", "interval"))
    axes.errorbar(tokens, taus, errors, marker="o", capsize=3, **style)


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    tokens, losses = ([row[key] for row in rows] for key in ("tokens", "loss"))
    axes.plot(tokens, losses, color="#bbbbbb", linewidth=0.8)
    axes.plot(tokens, smooth(losses), color=_colors(1)[0])
    axes.set(title="Training loss", xlabel="tokens", ylabel="weighted mean over the draft steps")


def _accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    tokens, steps = [row["tokens"] for row in rows], [*zip(*(row["accuracy_by_step"] for row in rows), strict=True)]
    for step, (values, color) in enumerate(zip(steps, _colors(len(steps)), strict=True), 1):
        axes.plot(tokens, smooth(values), color=color, label=f"draft step {step}")
    axes.set(title="Accuracy by draft step", xlabel="tokens", ylabel="head's best token is the target's", ylim=(0, 1))
    if len(steps) > 1:
        _legend(axes, len(steps))


def _by_position(axes: Axes, rows: Sequence[Row]) -> None:
    for row, color in zip(rows, _colors(len(rows)), strict=True):
        values = row["acceptance_by_position"]
        label = f"after {row['tokens']:,} tokens, τ {row['acceptance_length']:.2f}"
        axes.plot(range(1, len(values) + 1), values, color=color, marker="o", label=label)
    axes.set(title="Acceptance by draft position", xlabel="position", ylabel="share of rounds accepted", ylim=(0, 1))
    axes.set_xticks(range(1, len(rows[0]["acceptance_by_position"]) + 1))
    _legend(axes, len(rows))


def _legend(axes: Axes, curves: int) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    columns = -(-curves // 22)  # 22 names fit in a column
    figure.legend(frameon=False, fontsize=8, ncols=columns, loc="outside right upper")
    figure.set_figwidth(figure.get_figwidth() + 2.2 * (columns - 1))


def _length(axes: Axes, rows: Sequence[Row]) -> None:
    _taus(axes, rows, color=_colors(1)[0])
    title = f"Acceptance length and 95 % interval, greedy, depth {len(rows[0]['acceptance_by_position'])}"
    axes.set(title=title, xlabel="tokens", ylabel="tokens per target forward", ylim=(0.9, None))


def smooth(values: Sequence[float]) -> list[float]:
    """Return a running average over a fiftieth of the values, with correct weights at the beginning."""
    keep = 1 - 1 / max(1.0, 0.02 * len(values))
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    scale = colormaps["viridis"]
    return [scale(0.9 * i / max(count - 1, 1)) for i in range(count)]


_PLOTS: dict[str, tuple[str, Callable[[Axes, Sequence[Row]], None]]] = {
    "loss.png": ("train", _loss),
    "accuracy.png": ("train", _accuracy),
    "acceptance_by_position.png": ("eval", _by_position),
    "acceptance_length.png": ("eval", _length),
}  # for each plot: the kind of rows, and the function that draws it
PICTURES = tuple(_PLOTS)


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run's facts as in `report --json`; None is unknown. Raises DataError without a run, or if damaged."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if not (folder / METRICS).exists():
        raise DataError(f"{folder} is not a training run: it has no {METRICS}; give an --output of eagle-train")
    rows = read_rows(folder / METRICS)
    about = read_object(folder / _ABOUT, f"move it away to see the values in {METRICS}") or {}
    settings = about.get("config") or {}
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    written = read_object(folder / _REPORT, "move it away to see the values without it") or {}
    step = written.get("best_step", 0 if settings.get("adapt") else None)  # with `adapt`, the judge chooses
    measured = [row for row in evals if row["step"] == step] or evals
    best = max(measured, key=lambda row: (float(row["acceptance_length"]), row["step"] > 0), default={})
    now, first, last = (rows or [{}])[-1], (evals or [{}])[0], (evals or [{}])[-1]
    state = "unfinished" if now else "unfinished, nothing measured"
    if (folder / _REPORT).exists():
        state = "complete"
    elif any((folder / _STATES).glob("step-*")):
        state = "unfinished, --resume continues it"
    seconds, tokens = float(now.get("train_seconds", 0)), int(now.get("tokens", 0))
    return {
        "folder": str(folder),
        "state": state,
        "target": settings.get("target") or None,
        "kind": settings.get("head"),
        "started_from": settings.get("init_from") or None,
        "data": _data(settings),
        "steps": int(now.get("step", 0)),
        "tokens": tokens,
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "loss": losses[-1] if losses else None,
        "depth": best.get("depth") or settings.get("eval_depth"),
        "untrained": first["acceptance_length"] if first.get("step") == 0 else None,
        "best": best.get("acceptance_length"),
        "interval": best.get("interval") or None,
        "best_step": best.get("step"),
        "last": last.get("acceptance_length"),
        "by_position": list(best.get("acceptance_by_position") or []),
        "memory_gb": max((row["memory_gb"]["process_peak"] for row in rows), default=None),
        "settings": settings,
        "evaluations": [{key: row[key] for key in _IN_EVALUATIONS} for row in evals],
    }


def _data(settings: Mapping[str, Any]) -> str | None:
    """Return what a run learns from. With shards, the setting `data` is not used."""
    shards = ", ".join(map(str, settings.get("shards") or ()))
    return f"shards {shards}" if shards else ", ".join(settings.get("prompts") or settings.get("data") or ()) or None


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
        raise DataError(f"{file} cannot be read: {in_one_line(e)}; {remedy}") from e


def read_rows(file: Path) -> list[Row]:
    """Return a run's lines, if any, without an incomplete last one. Raises DataError with an invalid line's number."""
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
Compare training runs in Markdown: their results, their costs, and the settings in which they differ.

examples:
  eagle-train report out/head
  eagle-train report out/adamw out/muon --plot runs.png > runs.md

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
}  # for each line of the table: the key in a run's facts, and the format


_PNG = Limit(lambda file: file.suffix == ".png", "must end in .png, not {}")


@dataclass(frozen=True)
class ReportOptions(Group):
    """The runs to compare, and how to show them."""

    runs: tuple[Path, ...] = setting(
        REQUIRED, "output folder of a run; several are compared", metavar="DIR", positional=True
    )
    plot: Path | None = setting(None, "plot τ and loss against tokens", _PNG, metavar="FILE.png")
    json: bool = setting(False, "print JSON instead of the table")
    overwrite: bool = setting(False, "replace an existing plot")


def main(argv: Sequence[str]) -> int:
    return exit_code(lambda: run(read(ReportOptions, argv, "eagle-train report", _HELP)))


def run(options: ReportOptions) -> None:
    if options.plot:
        require("eagle-train report --plot", "plots")
        check_file(options.plot)
        if options.plot.exists() and not options.overwrite:
            raise OutputError(f"{options.plot} exists already; name another file, or overwrite it with --overwrite")
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
