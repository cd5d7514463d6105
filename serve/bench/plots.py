"""What a bench draws: bars of a few ways to decode, or curves over the sizes of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_mlx.errors import OutputError

from .figures import Run
from .report import size

# Colours that stay apart for colour-blind readers.
_COLOURS = {
    "mlx-lm": "#999999",
    "mlx-lm-batch": "#bbbbbb",
    "mlx-lm-draft": "#777777",
    "mlx-lm-stock": "#555555",
    "plain": "#56b4e9",
    "ngram": "#e69f00",
    "draft": "#cc79a7",
    "eagle": "#009e73",
    "hybrid": "#0072b2",
}
_CURVES = 3
"""Sizes of trees from which on they are drawn as curves."""
_SHOWN = 3
"""Ways to draft whose acceptance by depth is drawn: the smallest, a middle and the largest of the deepest."""


def plot(runs: Sequence[Run], path: Path) -> None:
    """Bars of tokens per second, with the ratio to mlx-lm and τ written on them. Where fixed trees of several sizes
    were measured, curves instead: τ and speed over the draft tokens of a round, and acceptance by depth.

    Raises OutputError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sized = [run for run in runs if run.depth and run.policy == "fixed"]
    curves = len({run.nodes for run in sized if run.nodes}) >= _CURVES
    figure = _curves(pyplot, sized) if curves else _bars(pyplot, runs)
    try:
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise OutputError(f"{path} cannot be written ({e.strerror}); name another place") from e
    finally:
        pyplot.close(figure)


def _bars(pyplot: Any, runs: Sequence[Run]) -> Any:
    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.3 * len(runs)), 4.0), layout="constrained")
    bars = axes.bar(
        [_label(run) for run in runs],
        [run.tokens_per_second for run in runs],
        color=[_COLOURS[run.mode] for run in runs],
    )
    axes.bar_label(bars, [_caption(run) for run in runs], padding=2, fontsize=9)
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label(run: Run) -> str:
    parts = [run.mode]
    if run.depth:
        parts.append(f"depth {size(run)}")
    if run.policy != "fixed":
        parts.append(run.policy)
    if run.batch > 1:
        parts.append(f"batch {run.batch}")
    if run.temperature:
        parts.append(f"T {run.temperature:g}")
    return "\n".join(parts)


def _caption(run: Run) -> str:
    speed = f"{run.tokens_per_second:.0f}"
    if run.ratio_to_mlx_lm is not None and run.mode != "mlx-lm":
        speed += f" (x{run.ratio_to_mlx_lm:.2f})"
    return f"{speed}\n\u03c4 {run.acceptance_length:.2f}" if run.depth else speed


def _curves(pyplot: Any, runs: Sequence[Run]) -> Any:
    """A row for each way to draft, batch and temperature."""
    settings = sorted({(run.mode, run.batch, run.temperature) for run in runs})
    figure, grid = pyplot.subplots(
        len(settings), 3, figsize=(13.0, 3.6 * len(settings)), layout="constrained", squeeze=False
    )
    for row, (mode, batch, temperature) in zip(grid, settings, strict=True):
        drawn = [run for run in runs if (run.mode, run.batch, run.temperature) == (mode, batch, temperature)]
        for axes in row:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{mode}, batch {batch}, " + (f"temperature {temperature:g}" if temperature else "greedy"))
        _over_sizes(row[0], drawn, "tokens a round", [run.acceptance_length for run in drawn])
        _over_sizes(row[1], drawn, "tokens per second", [run.tokens_per_second for run in drawn])
        _by_depth(row[2], drawn)
        row[0].legend(fontsize=8)
    return figure


def _over_sizes(axes: Any, runs: Sequence[Run], what: str, values: Sequence[float]) -> None:
    """Chains as one curve, trees as one for each depth."""
    points: dict[int, list[tuple[int, float]]] = {}
    for run, value in zip(runs, values, strict=True):
        points.setdefault(run.depth if run.nodes else 0, []).append((run.nodes or run.depth, value))
    for depth, curve in sorted(points.items()):
        style: dict[str, Any] = {"color": "black", "linestyle": "--"} if not depth else {}
        name = f"tree, up to {depth} deep" if depth else "chain"
        axes.plot(*zip(*sorted(curve), strict=True), marker="o", markersize=4, label=name, **style)
    sizes = sorted({size for curve in points.values() for size, _ in curve})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("draft tokens a round")
    axes.set_ylabel(what)


def _by_depth(axes: Any, runs: Sequence[Run]) -> None:
    """The share of rounds that get so far, of the deepest drafts."""
    deepest = sorted((run for run in runs if run.depth == max(each.depth for each in runs)), key=lambda run: run.nodes)
    shown = deepest if len(deepest) <= _SHOWN else [deepest[0], deepest[len(deepest) // 2], deepest[-1]]
    for run in shown:
        shares = run.acceptance_by_position
        name = f"tree of {run.nodes}" if run.nodes else f"chain of {run.depth}"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth")
    axes.set_ylabel("share of rounds")
    axes.legend(fontsize=8)
