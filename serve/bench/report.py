"""The figures of a benchmark, and their output: tables, JSON, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.errors import OutputError
from eagle_mlx.files import name_of, write_output


@dataclass(frozen=True)
class TextComparison:
    """A comparison of one mode's continuations with the reference's, counted by prompt."""

    identical: int = 0
    excused: int = 0
    """Continuations whose first difference is a near-tie: both tokens are within the tolerance of the target's best."""
    different: int = 0


@dataclass(frozen=True)
class Category:
    """The figures of one mode over the prompts of one category; None if all of them loop."""

    name: str
    prompts: int
    left_out_looping: int
    tokens_per_second: float | None
    ratio_to_mlx_lm: float | None
    acceptance_length: float | None
    ratio_to_plain: float | None = None


@dataclass(frozen=True)
class BenchRun:
    """The figures of one mode, over the prompts that do not loop. Speeds and seconds are medians of the repeats."""

    mode: str
    batch: int
    depth: int
    nodes: int  # tokens of a draft tree; 0 for chains
    policy: str  # how many of `depth` tokens are drafted: `fixed` for all
    temperature: float
    tokens_per_second: float  # generated tokens over wall time, prefill included
    decode_tokens_per_second: float | None  # the same without the first token and the time to it
    ratio_to_mlx_lm: float | None
    """The ratio of tokens_per_second, as the median of the repeats' ratios. None if mlx-lm was not measured."""
    ratio_to_mlx_lm_batch: float | None
    ratio_to_plain: float | None
    """The ratios to mlx-lm's batches, and to the engine's plain decoding, of this batch size."""
    acceptance_length: float
    acceptance_by_position: list[float]
    identical: bool | None
    """Whether rounding excuses all differences from the reference. None for mlx-lm's own sampling and batches."""
    identical_count: int | None
    excused: int | None
    prompts: int  # The number of prompts in the figures. Identity covers left-out prompts as well.
    left_out_looping: int
    tokens: int
    seconds: float  # seconds of one repeat
    by_category: tuple[Category, ...] = ()
    reference: str = ""  # the mode whose texts are the reference
    prompt_tokens_per_second: float = 0.0  # prompt tokens over the time to the first new token
    acceptance_rate: float | None = None
    """The share of draft tokens, or of the levels of trees, that were accepted. None if nothing was drafted, or for
    mlx-lm's drafts."""
    peak_bytes: int = 0
    """The most memory that MLX used while this mode decoded, without models and caches of other modes."""


_SETTINGS = ("batch", "depth", "policy", "temp")
_SPEEDS = ("tokens/s", "decode", "prompt", "x mlx-lm", "x batched", "x plain", "tau", "identical")
_DRAFTS = ("accepted", "by position", "peak MB")
_BY_CATEGORY = ("turns", "looping", "tokens/s", "x mlx-lm", "x plain", "tau")
_TEXTS = ("category", "mode", "policy", "by position", "identical")  # columns that are aligned on the left
Cells = dict[str, str]


def table(runs: Sequence[BenchRun]) -> str:
    """Return what all runs share, a table of speeds, and a table of drafts and memory, as aligned text."""
    shared, names = _settings(runs)
    rows = [_cells(run) for run in runs]
    return "\n\n".join(filter(None, (shared, *(_aligned(rows, names, part) for part in (_SPEEDS, _DRAFTS)))))


def by_category(runs: Sequence[BenchRun]) -> str:
    """Return the runs by category as aligned text and an empty line; empty if there are no categories."""
    rows = []
    for name in dict.fromkeys(category.name for run in runs for category in run.by_category):
        for run, part in ((own, part) for own in runs for part in own.by_category if part.name == name):
            ratios = map(_ratio, (part.ratio_to_mlx_lm, part.ratio_to_plain, part.acceptance_length))
            figures = (str(part.prompts), str(part.left_out_looping), _speed(part.tokens_per_second), *ratios)
            rows.append({"category": name, **_which(run), **dict(zip(_BY_CATEGORY, figures, strict=True))})
    return _aligned(rows, ["category", *_settings(runs)[1]], _BY_CATEGORY) + "\n\n" if rows else ""


def _which(run: BenchRun) -> Cells:
    size = f"{run.depth}/{run.nodes}" if run.nodes else str(run.depth or "-")
    values = (str(run.batch), size, run.policy if run.depth else "-", f"{run.temperature:g}")
    return {"mode": run.mode, **dict(zip(_SETTINGS, values, strict=True))}


def _settings(runs: Sequence[BenchRun]) -> tuple[str, list[str]]:
    """Return the settings that all runs share, as text, and the names of the others, the mode first.

    Runs that draft nothing have no depth and policy, so these are shared by the rest.
    """
    values = {name: dict.fromkeys(_which(run)[name] for run in runs) for name in _SETTINGS}
    used = {name: [value for value in cells if value != "-"] for name, cells in values.items()}
    shared = ", ".join(f"{name} {cells[0]}" for name, cells in used.items() if len(cells) == 1)
    return shared, ["mode", *(name for name, cells in used.items() if len(cells) > 1)]


def footnote(runs: Sequence[BenchRun], max_tokens: int, tolerance: float) -> str:
    taken = {run.temperature: run for run in runs}
    excused = sum(run.excused or 0 for run in runs)
    compared = dict.fromkeys(run.reference for run in runs if run.reference)
    lines = [
        f"temperature {temperature:g}: {run.prompts} prompts of up to {max_tokens} new tokens; "
        f"{run.left_out_looping} more left out because their continuations loop."
        for temperature, run in taken.items()
    ]
    lines += [
        "tokens/s: generated tokens per second, including the time to read the prompt; decode: without the first token "
        "and the time to it; prompt: prompt tokens per second until then.",
        "x mlx-lm, x batched, x plain: tokens/s relative to mlx-lm's stream_generate, to its batch_generate at this "
        "batch size, and to the engine without drafts at this batch size.",
        "tau: tokens per target forward, including the bonus token; accepted: the share of draft tokens, or of the "
        "levels of trees.",
        "peak MB: the most memory that MLX used while the mode decoded, for the models and caches of that mode.",
        *(f"identical: every token equals that of {name}." for name in compared),
    ]
    if excused:
        lines.append(
            f"~n: n texts first differ at a near-tie: the target's best logits are within {tolerance:g}, so rounding "
            "decides. They count as identical."
        )
    return "\n".join(lines)


def write_json(content: object, path: Path) -> None:
    """Write a JSON file atomically. Raises OutputError."""
    write_output(path, json.dumps(content, indent=2) + "\n")


def _cells(run: BenchRun) -> Cells:
    speeds = (run.tokens_per_second, run.decode_tokens_per_second, run.prompt_tokens_per_second)
    ratios = (run.ratio_to_mlx_lm, run.ratio_to_mlx_lm_batch, run.ratio_to_plain, run.acceptance_length)
    by_position = " ".join(f"{share:.2f}" for share in run.acceptance_by_position) or "-"
    drafts = (_ratio(run.acceptance_rate), by_position, f"{run.peak_bytes / 1e6:,.0f}")
    figures = (*map(_speed, speeds), *map(_ratio, ratios), _identity(run), *drafts)
    return _which(run) | dict(zip((*_SPEEDS, *_DRAFTS), figures, strict=True))


def _speed(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.1f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _identity(run: BenchRun) -> str:
    if run.identical is None or run.identical_count is None:
        return "-"
    count = f"{run.identical_count}/{run.prompts + run.left_out_looping}"
    excused = f" ~{run.excused}" if run.excused else ""
    return f"{'yes' if run.identical else 'NO'} {count}{excused}"


def _aligned(rows: Sequence[Cells], names: Sequence[str], figures: Sequence[str]) -> str:
    """Return aligned lines under headings: the columns `names`, and the `figures` that at least one row has."""
    names = [*names, *(name for name in figures if any(row[name] != "-" for row in rows))]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}

    def line(row: Cells) -> str:
        cells = [row[name].ljust(w) if name in _TEXTS else row[name].rjust(w) for name, w in widths.items()]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths.values())
    return "\n".join([line({name: name for name in names}), rule, *map(line, rows)])


def plot(runs: Sequence[BenchRun], target: str, path: Path) -> None:
    """Draw bars of tokens per second, with τ. Raises OutputError."""
    from matplotlib.figure import Figure  # not at the top, because it needs an extra

    shared, names = _settings(runs)
    figure = Figure(figsize=(max(6.0, 1.3 * len(runs)), 4.0), layout="constrained")
    axes = figure.subplots()
    colors = ["#999999" if run.mode.startswith("mlx-lm") else "#009e73" for run in runs]
    bars = axes.bar(range(len(runs)), [run.tokens_per_second for run in runs], color=colors)
    cells = [[(name, _which(run)[name]) for name in names] for run in runs]
    ticks = [[value if name == "mode" else f"{name} {value}" for name, value in row if value != "-"] for row in cells]
    axes.set_xticks(range(len(runs)), ["\n".join(tick) for tick in ticks])
    axes.set_title(f"Decoding with {name_of(target)}, {runs[0].prompts} prompts\n{shared}", fontsize=10)
    labels = [f"{run.tokens_per_second:.0f}\n\u03c4 {run.acceptance_length:.2f}" for run in runs]
    axes.bar_label(bars, labels, padding=2, fontsize=9)
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.18)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as e:
        raise OutputError(f"{path} cannot be written ({e.strerror}); choose another path") from e
