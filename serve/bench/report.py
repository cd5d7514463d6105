"""What a bench writes: a table and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from eagle_mlx.errors import OutputError
from eagle_mlx.files import write_output
from eagle_mlx.machine import Machine

from .figures import Category, Run

_HEADINGS = (
    "mode",
    "batch",
    "depth",
    "policy",
    "temp",
    "type",
    "tokens/s",
    "decode",
    "x mlx-lm",
    "x batched",
    "x plain",
    "tau",
    "by position",
    "identical",
)


def table(runs: Sequence[Run]) -> str:
    """The runs as aligned text, one line each."""
    rows = [_HEADINGS, *(_cells(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(_align(cell, widths, column) for column, cell in enumerate(row)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def by_category(runs: Sequence[Run]) -> str:
    """The runs category by category as aligned text with an empty line behind; nothing where there are none."""
    if not any(run.by_category for run in runs):
        return ""
    heads = ("category", "mode", "batch", "depth", "policy", "temp", "turns", "looping", "tokens/s", "x mlx-lm", "tau")
    names = dict.fromkeys(each.name for run in runs for each in run.by_category)
    found = [(run, each) for name in names for run in runs for each in run.by_category if each.name == name]
    rows = [heads, *((each.name, *_which(run), *_category_cells(each)) for run, each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ["  ".join(_align(cell, widths, column, 2) for column, cell in enumerate(row)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n\n"


def _category_cells(one: Category) -> tuple[str, ...]:
    speed = "-" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}"
    figures = (speed, _ratio(one.ratio_to_mlx_lm), _ratio(one.acceptance_length))
    return (str(one.prompts), str(one.left_out_looping), *figures)


def _which(run: Run) -> tuple[str, ...]:
    return (run.mode, str(run.batch), size(run), run.policy if run.depth else "-", f"{run.temperature:g}")


def footnote(runs: Sequence[Run], max_tokens: int, tolerance: float) -> str:
    """What the table is taken over, in words."""
    taken = {run.temperature: run for run in runs}
    excused = sum(run.excused or 0 for run in runs)
    lines = [
        *(
            f"temperature {temperature:g}: {run.prompts} prompts of up to {max_tokens} new tokens; "
            f"{run.left_out_looping} more left out because their continuation loops."
            for temperature, run in taken.items()
        ),
        "tokens/s: generated tokens over wall time, reading the prompt included; decode: without the time to the first "
        "token.",
        "x mlx-lm, x batched, x plain: tokens/s over those of mlx-lm's stream_generate, of its batch_generate at this "
        "batch, of the engine without drafts at this batch.",
        "tau: tokens emitted per target forward, bonus token included.",
        *_models(runs),
    ]
    if excused:
        lines.append(
            f"~n: n first differences where the target's two best tokens are closer than {tolerance:g}, which rounding "
            "decides; they count as identical."
        )
    return "\n".join(lines)


def _models(runs: Sequence[Run]) -> list[str]:
    """Which model each mode decoded, in which type, and with what its texts were compared."""
    by_model: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.model:
            by_model.setdefault(f"{run.model} in {run.dtype}", {})[run.mode] = None
    compared = dict.fromkeys(run.reference for run in runs if run.reference)
    return [
        *(
            f"model: {', '.join(modes)} {'decodes' if len(modes) == 1 else 'decode'} {model}."
            for model, modes in by_model.items()
        ),
        *(f"identical: token for token the text of {reference}." for reference in compared),
    ]


def document(
    target: str, head: str | None, machine: Machine, runs: Sequence[Run], **extra: object
) -> dict[str, object]:
    """The figures as `--json` writes them."""
    return {
        "target": target,
        "head": head,
        "machine": machine.to_json(),
        **extra,
        "runs": [run.to_json() for run in runs],
    }


def write_json(content: object, path: Path) -> None:
    """Write a JSON file whole or not at all. Raises OutputError."""
    write_output(path, json.dumps(content, indent=2) + "\n")


def check_writable(path: Path) -> None:
    """Raise OutputError now, rather than after the measurement, where a file could not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(f"{path} cannot be written: its folder must exist and be writable")


def _cells(run: Run) -> tuple[str, ...]:
    return (
        *_which(run),
        run.dtype or "-",
        f"{run.tokens_per_second:.1f}",
        f"{run.decode_tokens_per_second:.1f}",
        *map(_ratio, (run.ratio_to_mlx_lm, run.ratio_to_mlx_lm_batch, run.ratio_to_plain)),
        f"{run.acceptance_length:.2f}",
        " ".join(f"{share:.2f}" for share in run.acceptance_by_position) or "-",
        _identity(run),
    )


def size(run: Run) -> str:
    """The depth of a chain, depth/tokens of a tree."""
    return f"{run.depth}/{run.nodes}" if run.nodes else str(run.depth) if run.depth else "-"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _identity(run: Run) -> str:
    if run.identical is None or run.identical_count is None:
        return "-"
    count = f"{run.identical_count}/{run.prompts + run.left_out_looping}"
    excused = f" ~{run.excused}" if run.excused else ""
    return f"{'yes' if run.identical else 'NO'} {count}{excused}"


def _align(cell: str, widths: Sequence[int], column: int, first: int = 1) -> str:
    """To the right from column `first` on, as far as there are figures."""
    return cell.rjust(widths[column]) if first <= column <= 11 else cell.ljust(widths[column])
