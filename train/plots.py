"""Pictures of a run, made from its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
_SMOOTH = 0.02
"""Share of a run over which its noisy curves are averaged."""


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw loss, accuracy by draft step, acceptance by position and τ over the run as PNG files in `folder`."""
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    written = []
    for name, draw, data in (
        ("loss.png", _loss, train),
        ("accuracy.png", _accuracy, train),
        ("acceptance_by_position.png", _by_position, evals),
        ("acceptance_length.png", _length, evals),
    ):
        if data:
            figure = Figure(figsize=(7.2, 4.4), layout="constrained")
            axes = figure.add_subplot()
            draw(axes, data)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / name, dpi=140)
            written.append(folder / name)
    return written


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    tokens = [row["tokens"] for row in rows]
    values = [row["loss"] for row in rows]
    axes.plot(tokens, values, color="#bbbbbb", linewidth=0.8)
    axes.plot(tokens, smooth(values), color="#1f4e79")
    axes.set(title="Training loss", xlabel="tokens", ylabel="weighted mean over the draft steps")


def _accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    tokens = [row["tokens"] for row in rows]
    steps = len(rows[0]["accuracy_by_step"])
    for step, color in enumerate(_colors(steps)):
        values = [row["accuracy_by_step"][step] for row in rows]
        axes.plot(tokens, smooth(values), color=color, label=f"draft step {step + 1}")
    axes.set(title="Accuracy by draft step", xlabel="tokens", ylabel="head's best token is the target's", ylim=(0, 1))
    axes.legend(frameon=False)


def _by_position(axes: Axes, rows: Sequence[Row]) -> None:
    for row, color in zip(rows, _colors(len(rows)), strict=True):
        values = row["acceptance_by_position"]
        ends = row is rows[0] or row is rows[-1]
        label = f"after {row['tokens']:,} tokens, τ {row['acceptance_length']:.2f}" if ends else None
        axes.plot(range(1, len(values) + 1), values, color=color, marker="o", label=label)
    axes.set(title="Acceptance by draft position", xlabel="position", ylabel="share of rounds accepted", ylim=(0, 1))
    axes.set_xticks(range(1, len(rows[0]["acceptance_by_position"]) + 1))
    axes.legend(frameon=False)


def _length(axes: Axes, rows: Sequence[Row]) -> None:
    axes.plot([row["tokens"] for row in rows], [row["acceptance_length"] for row in rows], color="#1f4e79", marker="o")
    depth = len(rows[0]["acceptance_by_position"])
    axes.set(title=f"Acceptance length, greedy, depth {depth}", xlabel="tokens", ylabel="tokens per target forward")
    axes.set_ylim(bottom=0.9)


def smooth(values: Sequence[float]) -> list[float]:
    """A running average that weighs the first values rightly."""
    keep = 1 - 1 / max(1.0, _SMOOTH * len(values))
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def _colors(count: int) -> list[Any]:
    scale = matplotlib.colormaps["viridis"]
    return [scale(0.9 * i / max(count - 1, 1)) for i in range(count)]
