"""The figures of a benchmark, and their output: tables, JSON, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.errors import OutputError
from eagle_mlx.files import write_output


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
class Run:
    """The figures of one mode, over the prompts that do not loop."""

    mode: str
    batch: int
    depth: int
    nodes: int
    """Tokens of a draft tree; 0 for chains."""
    policy: str
    """How many of `depth` tokens are drafted: `fixed` for all."""
    temperature: float
    tokens_per_second: float
    """Generated tokens over wall time, prefill included; median of the repeats."""
    decode_tokens_per_second: float
    """The same without the first token and the time to it."""
    ratio_to_mlx_lm: float | None
    """The ratio of tokens_per_second, as the median of the repeats' ratios. None if mlx-lm was not measured."""
    ratio_to_mlx_lm_batch: float | None
    """The ratio to mlx-lm's batches of this size."""
    ratio_to_plain: float | None
    """The ratio to the engine's own plain decoding at this batch size."""
    acceptance_length: float
    acceptance_by_position: list[float]
    identical: bool | None
    """Whether rounding excuses all differences from the reference. None for mlx-lm's own sampling and batches."""
    identical_count: int | None
    excused: int | None
    prompts: int
    """The number of prompts in the figures. Identity covers left-out prompts as well."""
    left_out_looping: int
    tokens: int
    seconds: float
    """Seconds of one repeat; median."""
    by_category: tuple[Category, ...] = ()
    """The figures by category, if the prompts have categories."""
    model: str = ""
    """The model that decoded, and the library that loaded it if that is not EAGLE-MLX."""
    dtype: str = ""
    reference: str = ""
    """The reference of the comparison: mode, model and type."""
    prompt_tokens_per_second: float = 0.0
    """Prompt tokens over the time to the first new token; median of the repeats."""
    acceptance_rate: float | None = None
    """The share of draft tokens that were accepted. None if none were drafted, or for mlx-lm's drafts."""
    peak_bytes: int = 0
    """The most memory that MLX used while this mode decoded, for all models of the benchmark together."""


_RUN = ("mode", "batch", "depth", "policy", "temp")
_SPEEDS = ("type", "tokens/s", "decode", "prompt", "x mlx-lm", "x batched", "x plain")
_FIGURES = (*_SPEEDS, "tau", "accepted", "peak MB", "by position", "identical")
_BY_CATEGORY = ("turns", "looping", "tokens/s", "x mlx-lm", "x plain", "tau")


def table(runs: Sequence[Run]) -> str:
    """Return the runs as aligned text, one line each."""
    return _aligned([(*_RUN, *_FIGURES), *map(_cells, runs)], first=1)


def by_category(runs: Sequence[Run]) -> str:
    """Return the runs by category as aligned text and an empty line; empty if there are no categories."""
    if not any(run.by_category for run in runs):
        return ""
    rows: list[tuple[str, ...]] = [("category", *_RUN, *_BY_CATEGORY)]
    for name in dict.fromkeys(each.name for run in runs for each in run.by_category):
        for run, one in ((its, each) for its in runs for each in its.by_category if each.name == name):
            speed = "-" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}"
            figures = (speed, *map(_ratio, (one.ratio_to_mlx_lm, one.ratio_to_plain, one.acceptance_length)))
            rows.append((name, *_which(run), str(one.prompts), str(one.left_out_looping), *figures))
    return _aligned(rows, first=2) + "\n\n"


def _which(run: Run) -> tuple[str, ...]:
    size = f"{run.depth}/{run.nodes}" if run.nodes else str(run.depth or "-")
    return (run.mode, str(run.batch), size, run.policy if run.depth else "-", f"{run.temperature:g}")


def footnote(runs: Sequence[Run], max_tokens: int, tolerance: float) -> str:
    """Describe what the table covers."""
    taken = {run.temperature: run for run in runs}
    excused = sum(run.excused or 0 for run in runs)
    lines = [
        *(
            f"temperature {temperature:g}: {run.prompts} prompts of up to {max_tokens} new tokens; "
            f"{run.left_out_looping} more left out because their continuations loop."
            for temperature, run in taken.items()
        ),
        "tokens/s: generated tokens per second, including the time to read the prompt; decode: without the first token "
        "and the time to it; prompt: prompt tokens per second until then.",
        "x mlx-lm, x batched, x plain: tokens/s relative to mlx-lm's stream_generate, to its batch_generate at this "
        "batch size, and to the engine without drafts at this batch size.",
        "tau: tokens per target forward, including the bonus token; accepted: the share of draft tokens.",
        "peak MB: the most memory that MLX used while the mode decoded, for all models of this run together.",
        *_models(runs),
    ]
    if excused:
        lines.append(
            f"~n: n texts first differ at a near-tie: the target's best logits are within {tolerance:g}, so rounding "
            "decides. They count as identical."
        )
    return "\n".join(lines)


def _models(runs: Sequence[Run]) -> list[str]:
    """Return lines on each mode's model, its type, and the reference of its texts."""
    lines = []
    for model in dict.fromkeys(f"{run.model} in {run.dtype}" for run in runs if run.model):
        modes = dict.fromkeys(run.mode for run in runs if f"{run.model} in {run.dtype}" == model)
        lines.append(f"model: {', '.join(modes)} {'decodes' if len(modes) == 1 else 'decode'} {model}.")
    compared = dict.fromkeys(run.reference for run in runs if run.reference)
    return [*lines, *(f"identical: every token equals that of {reference}." for reference in compared)]


def write_json(content: object, path: Path) -> None:
    """Write a JSON file atomically. Raises OutputError."""
    write_output(path, json.dumps(content, indent=2) + "\n")


def _cells(run: Run) -> tuple[str, ...]:
    return (
        *_which(run),
        run.dtype or "-",
        f"{run.tokens_per_second:.1f}",
        f"{run.decode_tokens_per_second:.1f}",
        f"{run.prompt_tokens_per_second:.1f}",
        *map(_ratio, (run.ratio_to_mlx_lm, run.ratio_to_mlx_lm_batch, run.ratio_to_plain)),
        f"{run.acceptance_length:.2f}",
        _ratio(run.acceptance_rate),
        f"{run.peak_bytes / 1e6:,.0f}",
        " ".join(f"{share:.2f}" for share in run.acceptance_by_position) or "-",
        _identity(run),
    )


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _identity(run: Run) -> str:
    if run.identical is None or run.identical_count is None:
        return "-"
    count = f"{run.identical_count}/{run.prompts + run.left_out_looping}"
    excused = f" ~{run.excused}" if run.excused else ""
    return f"{'yes' if run.identical else 'NO'} {count}{excused}"


def _aligned(rows: Sequence[Sequence[str]], first: int) -> str:
    """Return aligned lines of cells, with a rule under the headings. Columns `first` to 14 are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        aligned = [c.rjust(w) if first <= at <= 14 else c.ljust(w) for at, (c, w) in enumerate(cells)]
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw bars of tokens per second, with τ. Raises OutputError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.3 * len(runs)), 4.0), layout="constrained")
    bars = axes.bar(
        ["\n".join(map(" ".join, zip(_RUN, _which(run), strict=True))) for run in runs],
        [run.tokens_per_second for run in runs],
        color=["#999999" if run.mode.startswith("mlx-lm") else "#009e73" for run in runs],
    )
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
    finally:
        pyplot.close(figure)
