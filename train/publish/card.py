"""Write the model card: metadata for the hub, and a text for people from the template `card.md.jinja`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, Template

from eagle_mlx.catalog.base_model import by_mlx_community
from eagle_mlx.heads.precision import described, quantization_of
from eagle_mlx.progress import tokens_per_second

from .bundle import PLOTS, public
from .figures import Figures, data_sets, depth_of, machine_line, train_command, training_data
from .source import Source

DEPTH = 4
"""Draft tokens per round without measurements: the default of eagle-serve."""
_PLOT_TITLES = {
    "acceptance_by_position": "Acceptance by draft position",
    "acceptance_length": "Acceptance length over the training",
    "accuracy": "Accuracy by draft step over the training",
    "loss": "Training loss",
}


def make_card(
    source: Source,
    repo: str,
    base: str,
    license: tuple[str, str | None, str | None],
    figures: Sequence[Figures],
    portable: str | None = None,
    quantized: str | None = None,
) -> ModelCard:
    """Return the card of a head published as `repo` for the model `base`.

    license: the hub's name for it, and a title and a link if that name is `other`. portable: for a quantized head, the
    repository of the original, which other servers load. quantized: for an original, the repository of its quantized
    version.
    """
    how = quantization_of(source.head)
    bits = [f"{how['bits']}-bit"] if how is not None else []
    data = ModelCardData(
        base_model=portable or base,
        base_model_relation="quantized" if portable else None,
        datasets=data_sets(source) or None,
        library_name="mlx",
        license=license[0],
        license_name=license[1],
        license_link=license[2],
        pipeline_tag="text-generation",
        tags=[source.kind.name, "speculative-decoding", "mlx", *source.servers, *bits],
    )
    target = source.trained_on or base
    text = _template().render(
        source=source,
        repo=repo,
        base=base,
        target=target,
        figures=figures,
        portable=portable,
        quantized=quantized,
        described=described(source.head) if how is not None else "",
        by_mlx_community=by_mlx_community(base),
        depth=next((found.depth for found in reversed(figures) if found.depth), DEPTH),
        data=training_data(source),
        command=train_command((source.report or {}).get("config") or {}, target),
    )
    return ModelCard(f"---\n{data}\n---\n\n{text.strip()}\n")


def _template() -> Template:
    made = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    made.filters.update(public=lambda value: public(value or ""), number=_number, two_digits=_two_digits)
    made.globals.update(
        row=_row,
        link=lambda repo: f"[{repo}](https://huggingface.co/{repo})",
        depth_of=depth_of,
        tokens_per_second=tokens_per_second,
        machine_line=machine_line,
        plots=PLOTS,
        titles=_PLOT_TITLES,
    )
    return made.get_template("card.md.jinja")


def _row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    texts = (str(cell).replace("|", "\\|").split() for cell in cells)
    return f"| {' | '.join(' '.join(words) or ' ' for words in texts)} |"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _two_digits(values: Sequence[object]) -> str:
    """Format numbers; None and undefined values are left out."""
    return " ".join(f"{value:.2f}" for value in values if isinstance(value, int | float))
