"""Draft heads for a target: included, made or fetched on this machine, published, or in the model's files."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx.errors import ConfigError


def embedded(name: str) -> Path:
    """Return `checkpoints/<name>` in the checkout of this code or in the working directory.

    Raises ConfigError if there is none.
    """
    roots = _roots()
    for root in roots:
        found = root / "checkpoints" / name
        if (found / "config.json").is_file() or (found.suffix == ".jsonl" and found.is_file()):
            return found
    flag = "--prompts" if name.endswith(".jsonl") else f"--{name}"
    raise ConfigError(f"the embedded checkpoints/{name} is not in {roots[0]}: run from a checkout, or give {flag}")


def is_embedded_target(name: str | Path) -> bool:
    place = Path(name).expanduser().resolve()
    return any(place == (root / "checkpoints" / "target").resolve() for root in _roots())


def _roots() -> tuple[Path, Path]:
    return Path(__file__).resolve().parents[2], Path.cwd()
