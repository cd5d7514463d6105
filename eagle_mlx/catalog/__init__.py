"""Which heads there are for a target: included, made or fetched here, published, or in the model itself.

The embedded target, head and prompts are found beside the code in a checkout.
"""

from __future__ import annotations

from pathlib import Path

from eagle_mlx.errors import ConfigError


def embedded(name: str) -> Path:
    """`checkpoints/<name>` of the checkout that this code, or the working directory, is part of.

    Raises ConfigError where there is none.
    """
    roots = _roots()
    for root in roots:
        found = root / "checkpoints" / name
        if (found / "config.json").is_file() or (found.suffix == ".jsonl" and found.is_file()):
            return found
    flag = "--prompts" if name.endswith(".jsonl") else f"--{name}"
    raise ConfigError(f"the embedded checkpoints/{name} is not in {roots[0]}: run from a checkout, or give {flag}")


def is_embedded_target(name: str | Path) -> bool:
    """Whether a target's name is the folder of the embedded one."""
    place = Path(name).expanduser().resolve()
    return any(place == (root / "checkpoints" / "target").resolve() for root in _roots())


def _roots() -> tuple[Path, Path]:
    return Path(__file__).resolve().parents[2], Path.cwd()
