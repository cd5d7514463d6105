"""The folder that goes up, put together beside the head."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from eagle_mlx.catalog.base_model import BASE_MODEL, by_mlx_community
from eagle_mlx.errors import OutputError

from ..run import REPORT
from .public import public
from .source import CONFIG, Source, fields_of

CARD = "README.md"
_PLOTS = "plots"
LICENCES = ("LICENSE*", "NOTICE*")
_TAKEN = ("*.safetensors", "*.safetensors.index.json", *LICENCES)
"""Files of a head's folder that go up as they are."""


def pictures(source: Source) -> list[str]:
    """Where the plots will be in the repository."""
    return [f"{_PLOTS}/{plot.name}" for plot in source.plots]


@contextlib.contextmanager
def bundle(source: Source, card: ModelCard, base: str) -> Iterator[Path]:
    """A temporary folder with weights, config, card, plots and report, without paths of this machine.

    Weights are links to the head's own files. Raises OutputError where it cannot be made.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="eagle-publish-") as name:
            folder = Path(name)
            _fill(folder, source, card, base)
            yield folder
    except OSError as e:
        raise OutputError(f"what is to go up cannot be put together: {e}") from e


def _fill(folder: Path, source: Source, card: ModelCard, base: str) -> None:
    for pattern in _TAKEN:
        for file in source.folder.glob(pattern):
            (folder / file.name).symlink_to(file.resolve())
    _write_config(folder, source, base)
    (folder / CARD).write_text(str(card), encoding="utf-8")
    if source.report is not None:
        _write_json(folder / REPORT, public(source.report))
    for plot, place in zip(source.plots, pictures(source), strict=True):
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(plot, folder / place)


def _write_config(folder: Path, source: Source, base: str) -> None:
    """The config as it is, byte for byte, unless it names another model than `base` for others, or paths."""
    config = public(source.config)
    noted = config.get("eagle_mlx")
    if isinstance(noted, dict):
        if source.trained_on is None:
            noted["target"] = base
        if BASE_MODEL in noted:
            noted[BASE_MODEL] = base
    verifier = fields_of(fields_of(config, "speculators_config"), "verifier")
    if isinstance(verifier, dict):
        verifier["name_or_path"] = None if by_mlx_community(base) else base
    if config == source.config:
        shutil.copyfile(source.folder / CONFIG, folder / CONFIG)
    else:
        _write_json(folder / CONFIG, config)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def listing(folder: Path) -> str:
    """The files of a folder with their sizes, largest first."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    rows = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {size:>14,} bytes" for name, size in rows]
    return "\n".join([*lines, f"  {'in all':{width}}  {sum(size for _, size in rows):>14,} bytes"])
