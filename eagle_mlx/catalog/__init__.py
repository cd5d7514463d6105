"""Draft heads for a target: included, made or fetched on this machine, published, or in the model's files."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx.errors import ConfigError


def embedded(name: str) -> Path:
    """Return `checkpoints/<name>` in the checkout of this code or in the working directory.

    Raises ConfigError if there is none.
    """
    for root in _roots():
        place = root / "checkpoints" / name
        if (place / "config.json").is_file() or (place.suffix == ".jsonl" and place.is_file()):
            return place
    named = {"target": "the model with --target: a folder or a hub id, such as --target Qwen3-4B-4bit"}
    named |= {"prompts.jsonl": "a file of prompts with --prompts"}
    raise ConfigError(f"name {named.get(name, f'it with --{name}')}; only a clone of the project includes a {name}")


def is_embedded_target(name: str | Path) -> bool:
    place = Path(name).expanduser().resolve()
    return any(place == (root / "checkpoints" / "target").resolve() for root in _roots())


def _roots() -> tuple[Path, Path]:
    return Path(__file__).resolve().parents[2], Path.cwd()
