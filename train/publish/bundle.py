"""Prepare the folder to upload."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from eagle_mlx.catalog.base_model import BASE_MODEL, by_mlx_community
from eagle_mlx.errors import OutputError

from ..convert.layouts import verifier_of
from ..run import REPORT
from .source import CONFIG, Source

CARD = "README.md"
PLOTS = "plots"
LICENSES = ("LICENSE*", "NOTICE*")
_TAKEN = ("*.safetensors", "*.safetensors.index.json", *LICENSES)
"""Files of a head's folder to upload unchanged."""


def write_bundle(folder: Path, source: Source, card: ModelCard, base: str) -> None:
    """Make a folder with weights, config, card, plots and report, without local paths.

    Weights are links to the head's own files. Raises OutputError if the folder cannot be made.
    """
    try:
        (folder / PLOTS).mkdir(parents=True)
        for pattern in _TAKEN:
            for file in source.folder.glob(pattern):
                (folder / file.name).symlink_to(file.resolve())
        _write_config(folder, source, base)
        (folder / CARD).write_text(str(card), encoding="utf-8")
        if source.report is not None:
            _write_json(folder / REPORT, public(source.report))
        for plot in source.plots:
            shutil.copyfile(plot, folder / PLOTS / plot.name)
    except OSError as e:
        raise OutputError(f"the files to upload cannot be prepared: {e}") from e


def _write_config(folder: Path, source: Source, base: str) -> None:
    """Write the config without local paths, and with `base` as the base model."""
    config = public(source.config)
    noted = config.get("eagle_mlx")
    if isinstance(noted, dict):
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
    """List the files of a folder and their sizes, largest first."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
    rows = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {size:>14,} bytes" for name, size in rows]
    return "\n".join([*lines, f"  {'total':{width}}  {sum(size for _, size in rows):>14,} bytes"])


_ALWAYS_PATHS = ("output", "shards", "adapter_path")
"""Settings that always hold a path."""
_DATA_FILES = (".jsonl", ".json", ".parquet")
_BEGINS_AS_PATH = re.compile(r"(~[\w.-]*|\.{1,2})?[/\\]|[A-Za-z]:[/\\]")
_WORD = re.compile(r"[^\s'\"(),;=\[\]]+")


def public(value: Any, key: str = "") -> Any:
    """Replace local paths in a JSON value by their last component; `key` is the field's name."""
    if isinstance(value, Mapping):
        return {name: public(item, name) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [public(item, key) for item in value]
    return _text(value, key) if isinstance(value, str) else value


def _text(text: str, key: str) -> str:
    if "\n" not in text and (key in _ALWAYS_PATHS or _is_path(text)):
        return last_name(text)
    return _WORD.sub(lambda found: last_name(found[0]) if _is_path(found[0]) else found[0], text)


def _is_path(text: str) -> bool:
    """Return whether a text can only be a path. Hub ids may look similar."""
    if "://" in text:
        return False
    if _BEGINS_AS_PATH.match(text) or text.endswith(_DATA_FILES) or (text.count("/") > 1 and " " not in text):
        return True
    try:
        return "/" in text and Path(text).exists()
    except (OSError, ValueError):  # too long, or invalid characters
        return False


def last_name(path: str) -> str:
    """Return a path's last component, for any operating system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path


def public_command(command: str, instead: Mapping[str, str], without: Sequence[str] = ()) -> str:
    """Return a command line for other people.

    `instead` sets flags; flags in `without` are removed with their values. Other paths are reduced to their last
    component.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    shown = [last_name(words[0])] if words else []
    for flag, value in instead.items():
        shown += [flag, value]
    skip = False
    for word in words[1:]:
        flag, _, value = word.partition("=")
        if word.startswith("--"):
            skip = flag in instead or flag in without
            shown += [] if skip else [f"{flag}={public(value)}" if value else flag]
        elif not skip:
            shown.append(public(word))
    return shlex.join(shown)
