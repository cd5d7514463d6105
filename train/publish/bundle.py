"""The folder that is published: a head in a portable layout, with its card, report and certificate."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import ModelCard

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import BASE_MODEL, by_mlx_community
from eagle_mlx.errors import CheckpointError, ConfigError, OutputError, in_one_line
from eagle_mlx.formats.tensors import HeadFolder, weights_of
from eagle_mlx.heads import HeadKind, layout_of, load_head
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.precision import quantization_of

from ..convert.conversion import verifier_of
from ..report import PICTURES, read_object
from ..run import BEST, LAST, REPORT

CONFIG = "config.json"
CARD = "README.md"
PLOTS = "plots"
LICENSES = ("LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class HeadFiles:
    folder: Path
    config: Mapping[str, Any]
    kind: HeadKind
    written_as: str
    servers: tuple[str, ...]
    """Other servers that load the files unchanged."""
    head: DraftHead
    report: Mapping[str, Any]
    """Report of the training run that made the head; empty if there is none."""
    which: str
    """`best` or `last`, if there is a report."""
    plots: tuple[Path, ...]

    @property
    def noted(self) -> Mapping[str, Any]:
        """Fields that this project's writers stored in the config."""
        return self.config.get("eagle_mlx") or {}

    @property
    def target_names(self) -> list[str]:
        """The target's names in the config, which need not be hub ids."""
        names = (self.noted.get("target"), verifier_of(self.config).get("name_or_path"))
        return [name for name in names if isinstance(name, str) and name]

    @property
    def base_model(self) -> str | None:
        """Hub id of the model that other servers load, or else of the target."""
        return _hub_id(self.noted.get(BASE_MODEL), verifier_of(self.config).get("name_or_path"), *self.target_names)

    @property
    def trained_on(self) -> str | None:
        """Hub id of the target; None if the config does not name it or names a folder."""
        return _hub_id(*self.target_names)

    @property
    def adapter(self) -> str:
        return str(self.noted.get("adapter") or "")

    @property
    def parameters(self) -> int | None:
        weights = weights_of(cast(nn.Module, self.head)).values()
        return None if any(value.dtype == mx.uint32 for value in weights) else sum(value.size for value in weights)


def _hub_id(*names: object) -> str | None:
    return next((name for name in names if isinstance(name, str) and hub.full_id(name)), None)


def read_source(folder: str | Path) -> HeadFiles:
    """Read a head's folder, or the best head of a run. Raises ConfigError if it is neither, and CheckpointError."""
    given = Path(folder).expanduser()
    if not given.is_dir():
        raise ConfigError(f"there is no folder {given}; give the head's folder or the output folder of eagle-train")
    run, which = _run_of(given)
    place = given if (given / CONFIG).is_file() else given / BEST
    if not (place / CONFIG).is_file():
        advice = f"of a run without {given / BEST}, name {given / LAST}"
        raise ConfigError(f"{given} has neither a head ({CONFIG} and weights) nor the best head of a run; {advice}")
    if not any(place.glob(hub.WEIGHTS)):
        raise CheckpointError(
            f"{place} has no .safetensors files; convert the head first, since PyTorch files can contain code"
        )
    head = load_head(place)
    files = HeadFolder.read(place)
    kind, layout = layout_of(files)
    written_as, servers = layout.about, layout.servers(head)
    if quantization_of(head) is not None:
        written_as, servers = f"{written_as}, quantized by MLX", ()
    report = read_object(run / REPORT, "move it away to publish without it") if run is not None else None
    plots = tuple(run / name for name in PICTURES if (run / name).is_file()) if run is not None else ()
    return HeadFiles(place, files.config, kind, written_as, servers, head, report or {}, which, plots)


def _run_of(given: Path) -> tuple[Path | None, str]:
    """Return the training run that `given` is or belongs to, or None; and which of its heads."""
    name, run = BEST, given
    if (given / CONFIG).is_file():
        name, run = given.resolve().name, given.resolve().parent
    return (run, name) if name in (BEST, LAST) and (run / REPORT).is_file() else (None, BEST)


def write_bundle(folder: Path, source: HeadFiles, card: ModelCard, base: str) -> None:
    """Make a folder with links to the weights, config, card, plots and report. Raises OutputError if that fails."""
    try:
        (folder / PLOTS).mkdir(parents=True)
        for pattern in (hub.WEIGHTS, f"{hub.WEIGHTS}.index.json", *LICENSES):
            for file in source.folder.glob(pattern):
                (folder / file.name).symlink_to(file.resolve())
        _write_config(folder, source, base)
        (folder / CARD).write_text(str(card), encoding="utf-8")
        if source.report:
            _write_json(folder / REPORT, source.report)
        if (certificate := _certificate(source)) is not None:
            shutil.copyfile(certificate, folder / certificate.name)
        for plot in source.plots:
            shutil.copyfile(plot, folder / PLOTS / plot.name)
    except (OSError, UnicodeError) as e:
        raise OutputError(f"the files to upload cannot be prepared: {in_one_line(e)}") from e


def _certificate(source: HeadFiles) -> Path | None:
    """Return the head's certificate; None, with a note, if it is of other weights."""
    file = source.folder / hub.CERTIFICATE
    written = read_object(file, "move it away to publish without it")
    if written is None or written.get("head_sha256") == hub.weights_digest(source.folder):
        return None if written is None else file
    print(f"note: {file} is of other weights and is not uploaded; certify the head again", file=sys.stderr)
    return None


def _write_config(folder: Path, source: HeadFiles, base: str) -> None:
    """Write the config without local paths, and with `base` as the base model."""
    config = copy.deepcopy(dict(source.config))
    if not hub.full_id(str(config.get("_name_or_path", ""))):
        config.pop("_name_or_path", None)
    if noted := config.get("eagle_mlx"):
        if source.trained_on is None:
            noted["target"] = base
        if BASE_MODEL in noted:
            noted[BASE_MODEL] = base
    if verifier := verifier_of(config):
        verifier["name_or_path"] = None if by_mlx_community(base) else base
    _write_json(folder / CONFIG, config)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def listing(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    rows = [*sorted(sizes.items(), key=lambda row: -row[1]), ("total", sum(sizes.values()))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {size:>14,} bytes" for name, size in rows)
