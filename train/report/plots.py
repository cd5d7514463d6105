"""Plot a run's metrics."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.extras import require

if TYPE_CHECKING:  # matplotlib takes half a second to import, and is needed only at the end
    from matplotlib.axes import Axes

Row = dict[str, Any]
"""A line of metrics: its `kind` (train or eval), the `step` after which it was recorded, and the values."""


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plot a run as PNG files in `folder`: all of PICTURES for which the rows have data; none without matplotlib."""
    try:
        require("plotting", "plots")
    except ConfigError as e:
        print(f"note: {e}", file=sys.stderr)
        return []
    from matplotlib.figure import Figure

    written = []
    for name, (kind, key, draw) in _PLOTS.items():
        data = [row for row in rows if row["kind"] == kind and key in row]
        if data:
            figure = Figure(figsize=(7.2, 4.4), layout="constrained")
            axes = _styled(figure.add_subplot())
            draw(axes, data)
            figure.savefig(folder / name, dpi=140)
            written.append(folder / name)
    return written


def write_comparison(runs: Mapping[str, Sequence[Row]], file: Path) -> None:
    """Plot τ and loss of several runs against tokens, into one PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    length, loss = map(_styled, figure.subplots(1, 2))
    for axes in (length, loss):
        _count_tokens(axes)
    for (name, rows), color in zip(runs.items(), _colors(len(runs)), strict=True):
        evals = [row for row in rows if row["kind"] == "eval" and {"tokens", "acceptance_length"} <= row.keys()]
        train = [row for row in rows if row["kind"] == "train" and {"tokens", "loss"} <= row.keys()]
        _taus(length, evals, color=color, label=name)
        loss.plot([row["tokens"] for row in train], smooth([row["loss"] for row in train]), color=color, label=name)
    length.set(title="Acceptance length, with 95 % intervals", xlabel="tokens", ylabel="tokens per target forward")
    loss.set(title="Training loss", xlabel="tokens", ylabel="weighted mean over the draft steps")
    length.legend(frameon=False)
    figure.savefig(file, dpi=140)


def _styled(axes: Axes) -> Axes:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _count_tokens(axes: Axes) -> None:
    """Write the tokens of the horizontal axis as 10 M, not as 1 and 1e7 at its end."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter())


def _taus(axes: Axes, rows: Sequence[Row], **style: Any) -> None:
    """Plot τ against tokens, with its 95 % intervals; a run of an earlier version has none."""
    taus, errors = ([row.get(key, 0.0) for row in rows] for key in ("acceptance_length", "interval"))
    axes.errorbar([row["tokens"] for row in rows], taus, errors, marker="o", capsize=3, **style)


def _curves(axes: Axes, rows: Sequence[Row], curves: Mapping[str, Sequence[float]], noisy: bool = False) -> None:
    """Plot curves against tokens, with a legend if there are several. Noisy ones are gray, with their average."""
    tokens = [row["tokens"] for row in rows]
    for (name, values), color in zip(curves.items(), _colors(len(curves)), strict=True):
        if noisy:
            axes.plot(tokens, values, color="#bbbbbb", linewidth=0.8)
        axes.plot(tokens, smooth(values) if noisy else values, color=color, label=name)
    axes.set(xlabel="tokens")
    _count_tokens(axes)
    if len(curves) > 1:
        _legend(axes, len(curves))


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"loss": [row["loss"] for row in rows]}, noisy=True)
    axes.set(title="Training loss", ylabel="weighted mean over the draft steps")


def _accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    steps = zip(*(row["accuracy_by_step"] for row in rows), strict=True)
    _curves(axes, rows, {f"draft step {step}": smooth(values) for step, values in enumerate(steps, 1)})
    axes.set(title="Accuracy by draft step", ylabel="head's best token is the target's", ylim=(0, 1))


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
    _count_tokens(axes)
    title = f"Acceptance length and 95 % interval, greedy, depth {len(rows[0]['acceptance_by_position'])}"
    axes.set(title=title, xlabel="tokens", ylabel="tokens per target forward")
    axes.set_ylim(bottom=0.9)


def _learning_rate(axes: Axes, rows: Sequence[Row]) -> None:
    keys = {"AdamW": "learning_rate", "Muon": "muon_learning_rate"}
    _curves(axes, rows, {name: [row[key] or math.nan for row in rows] for name, key in keys.items() if key in rows[0]})
    axes.set(title="Learning rate", yscale="log")


def _speed(axes: Axes, rows: Sequence[Row]) -> None:
    _curves(axes, rows, {"speed": interval_speeds(rows)}, noisy=True)
    axes.set(title="Training speed, without evaluations", ylabel="tokens/s")
    axes.set_ylim(bottom=0)


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    keys = {"process, peak": "process_peak", "MLX, peak": "peak", "MLX, between steps": "active"}
    _curves(axes, rows, {name: [row["memory_gb"][key] for row in rows] for name, key in keys.items()})
    axes.set(title="Memory", ylabel="GB")
    axes.set_ylim(bottom=0)


def interval_speeds(rows: Sequence[Row]) -> list[float]:
    """Return the training speed between consecutive rows, in tokens per second."""
    places = [(0, 0.0), *((row["tokens"], row["train_seconds"]) for row in rows)]
    return [(now[0] - old[0]) / max(now[1] - old[1], 1e-9) for old, now in itertools.pairwise(places)]


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


_PLOTS: dict[str, tuple[str, str, Callable[[Axes, Sequence[Row]], None]]] = {
    "loss.png": ("train", "loss", _loss),
    "accuracy.png": ("train", "accuracy_by_step", _accuracy),
    "acceptance_by_position.png": ("eval", "acceptance_by_position", _by_position),
    "acceptance_length.png": ("eval", "acceptance_length", _length),
    "learning_rate.png": ("train", "learning_rate", _learning_rate),
    "speed.png": ("train", "train_seconds", _speed),
    "memory.png": ("train", "memory_gb", _memory),
}
"""For each plot: the kind of rows, the required value, and the function that draws it."""

PICTURES = tuple(_PLOTS)
OF_THE_HEAD = ("acceptance_by_position.png", "acceptance_length.png", "accuracy.png", "loss.png")
"""Plots about the head, not the machine."""
